"""What `repr` says of every public object: short, telling, on one rank alone, at any time."""

import inspect
import pickle

import numpy as np
import pytest

import hpcdist as dist
from hpcdist import checkpoint, optim

LONGEST = 240


class Line:
    def __init__(self):
        self.w = dist.Parameter(np.zeros((3, 2)))

    def named_parameters(self):
        return [("w", self.w)]

    def __repr__(self):
        return f"Line({self.w!r})"


def received():
    """Return the work of a message from rank 0 to rank 1."""
    if dist.get_rank() == 0:
        return dist.send(np.ones(3), dst=1)
    return dist.recv(np.ones(3), src=0)


def remote_error():
    return dist.RemoteError("rank 0 failed", 0, "Traceback ...\n" * 1000)


def optimizer(name):
    return lambda: getattr(optim, name)(Line().named_parameters())


# A way to make one of each public class, and words that its repr has.
EXAMPLES = {
    "CheckpointError": (lambda: dist.CheckpointError("a full disk"), ["a full disk"]),
    "CheckpointWarning": (lambda: dist.CheckpointWarning("not loaded: w"), ["not loaded: w"]),
    "CollectiveTimeout": (lambda: dist.CollectiveTimeout("late", (2,)), ["late", "missing=(2,)"]),
    "CountFilterEntry": (lambda: dist.CountFilterEntry(3), ["CountFilterEntry(3)"]),
    "DataParallel": (lambda: dist.DataParallel(Line()), ["DataParallel", "Line", "2 ranks"]),
    "DatasetError": (lambda: dist.DatasetError("part-3:17: malformed"), ["part-3:17"]),
    "DatasetWarning": (lambda: dist.DatasetWarning("3 records"), ["3 records"]),
    "DistArray": (lambda: dist.shard_tensor(np.ones(4), dist.ProcessMesh([0, 1]), [dist.Shard(0)]),
                  ["(4,), float64, [Shard(0)] on ProcessMesh(d0=2)"]),
    "DistAttr": (lambda: dist.DistAttr(dist.ProcessMesh([0, 1], ["x"]), ["x", None]),
                 ["DistAttr(ProcessMesh(x=2), ['x', None])"]),
    "DistributedSampler": (lambda: dist.DistributedSampler(10), ["10 samples", "rank ", " of 2"]),
    "Event": (lambda: dist.Event("begin", "all_reduce", 0, 8, 1), ["begin", "all_reduce"]),
    "GradScaler": (lambda: dist.GradScaler(init_loss_scaling=8.0), ["GradScaler(8)"]),
    "Grid": (lambda: dist.get_group(0).grid([2]), ["dims=(2,)", "coords=("]),
    "Group": (lambda: dist.get_group(0), ["nranks: 2", "ranks: 0, 1", "name: _default_pg"]),
    "HpcdistError": (lambda: dist.HpcdistError("what happened"), ["what happened"]),
    "InMemoryDataset": (lambda: dist.InMemoryDataset(), ["0 files", "nothing loaded"]),
    "Memory": (lambda: dist.Memory(model={"w": np.zeros(3)}),
               ["'memory'", "model of 2 ranks", "0 bytes here of steps []"]),
    "MismatchError": (lambda: dist.MismatchError("they disagree"), ["they disagree"]),
    "NotInGroupWarning": (lambda: dist.NotInGroupWarning("nothing was done"), ["nothing"]),
    "P2POp": (lambda: dist.P2POp(dist.isend, np.zeros((9, 9)), 1, tag=7),
              ["isend to rank 1", "float64 of shape (9, 9)", "tag 7"]),
    "ParallelMode": (lambda: dist.ParallelMode.TENSOR_PARALLEL, ["ParallelMode.TENSOR_PARALLEL"]),
    "ParallelEnv": (dist.ParallelEnv, [" of 2", "local rank", "node 0 of 1", "cpu"]),
    "Parameter": (lambda: dist.Parameter(np.zeros(10**6)), ["Parameter([0., 0., 0., ..., "]),
    "Partial": (dist.Partial, ["Partial(kRedSum)"]),
    "Placement": (dist.Replicate, ["Replicate()"]),
    "Plan": (lambda: dist.plan_all_reduce(np.ones(3)), ["Plan: all_reduce", "ready"]),
    "ProbabilityEntry": (lambda: dist.ProbabilityEntry(0.5), ["ProbabilityEntry(0.5)"]),
    "PowerSGD": (lambda: dist.PowerSGD(rank=4), ["PowerSGD(rank=4)"]),
    "ProcessMesh": (lambda: dist.ProcessMesh(range(1000), ["x"]), ["ProcessMesh(x=1000)"]),
    "QueueDataset": (lambda: dist.QueueDataset(), ["QueueDataset", "0 files"]),
    "ReduceOp": (lambda: dist.ReduceOp.SUM, ["ReduceOp.SUM"]),
    "ReduceType": (lambda: dist.ReduceType.kRedMax, ["kRedMax"]),
    "RankFailure": (lambda: dist.RankFailure("rank 3 died", [3]), ["rank 3 died"]),
    "RemoteError": (remote_error, ["rank 0 failed", "rank=0"]),
    "Replicate": (dist.Replicate, ["Replicate()"]),
    "Shard": (lambda: dist.Shard(1, co_shard_order=0), ["Shard(1, co_shard_order=0)"]),
    "ShardedWeight": (lambda: dist.ShardedWeight("w", np.ones((2, 3)), (2, 3), (4, 9), (1, 5)),
                      ["'w'", "(2, 3) at (1, 5) of (4, 9)"]),
    "ShardedDataset": (lambda: dist.shard_dataset(np.ones(10)), ["10 samples", " of 2"]),
    "ShowClickEntry": (lambda: dist.ShowClickEntry("show", "click"), ["'show', 'click'"]),
    "TransportError": (lambda: dist.TransportError("MPI failed"), ["MPI failed"]),
    "UsageError": (lambda: dist.UsageError("dst is 7"), ["dst is 7"]),
    "Work": (received, ["Work: "]),
    "checkpoint.LocalSlice": (lambda: checkpoint.LocalSlice(np.ones((2, 3)), (4, 9), (1, 5)),
                              ["[1:3, 5:8]", "(4, 9)"]),
    "checkpoint.Shard": (lambda: checkpoint.Shard(np.ones(10**6), (2, 10**6), 3),
                         ["1000000 elements from 3 on", "(2, 1000000)"]),
    "checkpoint.Summary": (lambda: checkpoint.Summary._make(range(len(checkpoint.Summary._fields))),
                           ["Summary("]),
    **{f"optim.{name}": (optimizer(name), [name, "1 parameter, ", "learning_rate="])
       for name in ("SGD", "Momentum", "Adam", "AdamW", "LAMB", "LARS")},
    **{name: (lambda name=name: getattr(dist, name)(), [name])
       for name in ("ColWiseParallel", "RowWiseParallel", "ConvParallel", "ContextParallel",
                    "PrepareContextParallel", "SequenceParallelBegin", "SequenceParallelEnd",
                    "SequenceParallelEnable", "SequenceParallelDisable")},
    **{name: (lambda name=name: getattr(dist, name)(len), [name, "len"])
       for name in ("PrepareLayerInput", "PrepareLayerOutput")},
    "SplitPoint": (lambda: dist.SplitPoint.END, ["SplitPoint.END"]),
    **{name: (lambda name=name: getattr(dist, name)("dp", dist.ProcessMesh([0, 1], ["dp"])),
              [name, "'dp', ProcessMesh(dp=2)"])
       for name in ("ShardingStage1", "ShardingStage2", "ShardingStage3")},
    "ShardDataloader": (
        lambda: dist.shard_dataloader([], dist.ProcessMesh([0, 1], ["dp"]), shard_dims=0),
        ["cut along 'dp'", "ProcessMesh(dp=2)"]),
    "Strategy": (lambda: dist.Strategy({"amp": {"enable": True}}), ["{'amp': {'enable': True}}"]),
    "CommStats": (lambda: dist.DataParallel(Line()).comm_stats(), ["CommStats("]),
}  # fmt: skip
ABSTRACT = {"optim.Optimizer"}
OF_TORCH = {"DistModel", "LocalLayer"}  # they are made of modules: tests/mpi/test_torch_mesh.py


def public_classes():
    """Return the names of the classes that users reach by `dist.` and two modules in it."""
    for module in (dist, checkpoint, optim):
        prefix = "" if module is dist else f"{module.__name__.rpartition('.')[2]}."
        for name in {*dir(module)} - OF_TORCH:
            value = getattr(module, name)
            if inspect.isclass(value) and value.__module__.startswith("hpcdist") and name[0] != "_":
                yield prefix + name


def test_every_public_class_has_an_example_here():
    assert not {*public_classes()} - {*EXAMPLES} - ABSTRACT


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_repr_is_short_and_telling_and_needs_no_group(name):
    make, words = EXAMPLES[name]

    def look():
        one = make()
        before = repr(one)
        dist.barrier()
        dist.destroy_process_group()
        return before, repr(one)

    for told in (each for pair in dist.simulate(2, look) for each in pair):
        assert all(word in told for word in words), told
        assert len(told) < LONGEST, told
        assert " object at 0x" not in told


def test_a_repr_never_communicates():
    def look():
        line = Line()
        sgd = optim.SGD(line.named_parameters())
        model, optimizer, _ = dist.group_sharded_parallel(line, sgd, "p_g_os")
        if dist.get_rank() == 0:  # rank 1 would notice anything that this rank sends alone
            told = repr(line.w), repr(model), repr(optimizer), repr(dist.get_group(0))
        else:
            told = ()
        dist.barrier()
        return told

    parameter, model, optimizer, _ = dist.simulate(2, look)[0]
    assert parameter == "Parameter(sharded float64 of shape (3, 2), name='w')"
    assert "2 ranks" in model
    assert "SGD" in optimizer


def test_a_group_says_that_it_is_closed_and_names_few_of_many_ranks():
    def look():
        group = dist.new_group([0, 1])
        alive = repr(group)
        dist.shutdown_process_group(group)
        down = repr(group)
        dist.restart_process_group(group)
        dist.destroy_process_group(group)
        return alive, down, repr(group), repr(group.process_group)

    alive, down, gone, transport = dist.simulate(2, look)[0]
    assert down == f"{alive}; shut down"
    assert gone == f"{alive}; closed"
    assert transport == "<Transport CLOSED>"
    many = dist.simulate(40, lambda: repr(dist.get_group(0)))[0]
    assert "nranks: 40" in many
    assert "ranks: 0, 1, 2" in many
    assert "13, ..., 39;" in many


def test_works_tell_their_state():
    def look():
        rank, told = dist.get_rank(), []
        if rank == 1:
            work = dist.irecv(np.ones(3), src=0)
            told.append(repr(work))
        dist.barrier()
        if rank == 0:
            dist.send(np.ones(3), dst=1)
            dist.send(np.ones(4), dst=1)
            return told
        work.wait()
        told.append(repr(work))
        work = dist.irecv(np.ones(3), src=0)
        with pytest.raises(dist.MismatchError):
            work.wait()
        return [*told, repr(work)]

    begun, ended, failed = dist.simulate(2, look)[1]
    assert begun.startswith("<Work: recv(")
    assert begun.endswith("under way>")
    assert ended.endswith("ended, from rank 0>")
    assert failed.endswith("failed with MismatchError>")


def test_plans_tell_their_state():
    def look():
        plan = dist.plan_all_reduce(np.ones(3))
        told = [repr(plan)]
        plan.start().wait()
        told.append(repr(plan))
        plan.free()
        return [*told, repr(plan)]

    for ready, again, freed in dist.simulate(2, look):
        assert ready == again == "<Plan: all_reduce(shape (3,), float64, SUM), ready>"
        assert freed == ready.replace("ready", "freed")


def test_a_save_tells_its_folder_and_state(tmp_path):
    def look():
        work = checkpoint.save({"x": np.ones(3)}, tmp_path)
        return repr(work)

    (told,) = dist.simulate(1, look)
    assert str(tmp_path) in told
    assert told.endswith("ended>")


def test_what_joins_ranks_tells_the_group_and_who_leads():
    for rank, told in enumerate(dist.simulate(2, lambda: repr(dist.together()))):
        assert told.startswith(f"<Together: rank: {rank}, nranks: 2, ")
        assert told.endswith("; rank 0 leads>")
    assert repr(dist.together()) == "<Together: one process alone>"


def test_errors_keep_their_fields_when_they_travel():
    for error in (dist.CollectiveTimeout("late", (2, 3)), remote_error()):
        assert repr(pickle.loads(pickle.dumps(error))) == repr(error)
