"""`hpcdist tune` and `hpcdist doctor` on ranks."""

import json
import tempfile
import time
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from mpi4py import MPI

import hpcdist as dist
from hpcdist.bench.tune.command import tune
from hpcdist.bench.tune.measure import Effort, Plan, forced, measure
from hpcdist.bench.tune.rules import Timing, tuned
from hpcdist.comm.session import require_session
from hpcdist.config import read_config
from hpcdist.diagnostics import network
from hpcdist.diagnostics.doctor import doctor, examine
from hpcdist.diagnostics.probe import look
from hpcdist.mesh import reshard
from hpcdist.mesh.layout import layout_of
from hpcdist.transport.base import LinkCost
from hpcdist.transport.shm.kernel import compiled
from hpcdist.transport.tuning import (
    DEFAULT,
    OPERATIONS,
    Algorithm,
    TuningRule,
    TuningTable,
    read_costs,
    read_rules,
)

pytestmark = pytest.mark.usefixtures("and_the_world_goes_on")

KiB, MiB = 1 << 10, 1 << 20
QUICK = Effort(2, 1e-4)


@pytest.fixture
def group():
    made = dist.new_group()
    yield made
    dist.destroy_process_group(made)


@pytest.fixture(params=["ordinary", "shared", "mixed"])
def make(request, group, rank):
    """Return what makes arrays of a kind; mixed: some ranks bring shared ones."""
    shared = {"ordinary": False, "shared": True, "mixed": rank % 2 == 0}[request.param]

    def filled(count, value):
        array = dist.empty(count, np.float64, group) if shared else np.empty(count)
        array[:] = value
        return array

    return filled


def check_everything(make, group, nbytes):
    """Run every operation that has a choice, and look at the results."""
    rank, size = group.rank, group.nranks
    count = nbytes // 8 // size * size
    parts, mine = np.repeat(np.arange(size), count // size), slice(None, count // size)
    total = size * (size + 1) / 2

    def one():
        return make(count, rank + 1.0)

    x = one()
    dist.all_reduce(x, group=group)
    assert (x == total).all()
    x = one()
    dist.reduce(x, size - 1, group=group)
    assert rank < size - 1 or (x == total).all()
    out = make(count // size, -1)
    dist.reduce_scatter(out, one(), group=group)
    assert (out == total).all()
    x = one()
    dist.broadcast(x, size - 1, group)
    assert (x == size).all()
    x = one()
    dist.scan(x, group=group)
    assert (x == (rank + 1) * (rank + 2) / 2).all()
    x = one()
    dist.exscan(x, group=group)
    assert rank == 0 or (x == rank * (rank + 1) / 2).all()
    out = make(count, -1)
    dist.all_gather(out, make(count // size, rank), group)
    assert (out == parts).all()
    out = make(count, -1) if rank == 0 else None
    dist.gather(make(count // size, rank), out, 0, group)
    assert rank > 0 or (out == parts).all()
    out = make(count // size, -1)
    dist.scatter(out, make(count, parts) if rank == 0 else None, 0, group)
    assert (out == rank).all()
    out = make(count, -1)
    dist.alltoall_single(out, make(count, parts + 10 * rank), group=group)
    assert (out[mine] == rank).all()
    assert (out == rank + 10 * parts).all()


@pytest.mark.parametrize("nbytes", [MiB, 4 * MiB])
@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_rules_that_force_any_way_anywhere_are_safe(make, group, algorithm, nbytes):
    rules = [
        TuningRule(operation, arrays, algorithm, nodes="any")
        for operation in OPERATIONS
        for arrays in ("ordinary", "shared")
    ]
    several = not group.transport.one_node
    for tuning_table in (
        TuningTable(rules, group.nranks, several_nodes=several),
        forced(algorithm, group.nranks, "several" if several else "one"),
    ):
        group.transport.use_rules(tuning_table)
        check_everything(make, group, nbytes)


PLAN = Plan(("all_reduce", "broadcast"), (64 * KiB, 256 * KiB), (), QUICK)


@pytest.mark.two_ranks
@pytest.mark.thorough
def test_every_way_is_measured_and_the_chosen_ones_can_be_used(world, group, make, size):
    notes, told = [], []
    plan = PLAN._replace(ranks=(size,))
    timings = measure(world, plan, notes, lambda done, total, text: told.append((done, total)))
    if size == 1:
        assert timings == []
        assert "nobody to talk to" in notes[0]
        return
    assert notes == []
    assert len(told) == told[0][1]
    algorithms = {(each.operation, each.arrays, each.algorithm.value) for each in timings}
    assert {("broadcast", "ordinary", "staged"), ("broadcast", "shared", "direct")} <= algorithms
    assert {each.nbytes for each in timings} == set(PLAN.sizes)
    assert {each.dtype for each in timings} == {"float32", "bfloat16", "float16"}
    assert all((each.ranks, each.nodes) == (size, "one") for each in timings)
    assert all(each.ratio == 1 for each in timings if each.algorithm is Algorithm.MPI)
    assert all(0 < each.min_s <= each.median_s for each in timings)
    assert all(timings == other for other in MPI.COMM_WORLD.allgather(timings))
    rules = tuned(timings)
    assert {rule.operation for rule in rules} == set(PLAN.operations)
    group.transport.use_rules(TuningTable([*rules, *DEFAULT], size, several_nodes=False))
    check_everything(make, group, 64 * KiB)


def test_fewer_ranks_measure_while_the_others_wait(world, size):
    counts = [count for count in (2, 3) if count <= size]
    timings = measure(world, PLAN._replace(operations=("scan",), ranks=counts), [])
    if world.rank == 0:
        assert {each.ranks for each in timings} == set(counts)
        assert all(isinstance(each, Timing) for each in timings)


@pytest.fixture
def folder():
    """A folder that all ranks see; pytest's own would be cleaned up by all at once."""
    comm = MPI.COMM_WORLD
    made = tempfile.TemporaryDirectory() if comm.rank == 0 else None
    yield comm.bcast(made.name if made else None)
    comm.Barrier()
    if made:
        made.cleanup()


def test_the_command_writes_what_is_read_back(rank, size, folder):
    path = f"{folder}/site.json"
    words = ["broadcast", "--sizes", "64K", "--quick", "--rounds", "2", "-o", path]
    done = CliRunner().invoke(tune, words)
    assert done.exit_code == (0 if size > 1 else 2), done.output
    MPI.COMM_WORLD.Barrier()
    if size > 1 and rank == 0:
        assert "broadcast" in done.output
        rules = read_rules(path)
        assert {rule.operation for rule in rules[: -len(DEFAULT)]} == {"broadcast"}
        assert rules[0].ranks == (size, size)
        costs = read_costs(path)
        assert costs.keys() == {"one"}
        assert costs["one"].alpha > 0
        with open(path) as file:
            assert json.load(file)["made"]["ranks"] == size
    MPI.COMM_WORLD.Barrier()


def test_all_ranks_plan_with_the_costs_of_the_first_one(world_with, rank, size):
    mesh = dist.ProcessMesh([*range(size)])
    src, dst = (layout_of(mesh, (64,), placements) for placements in ([dist.Shard(0)], []))
    for alpha in (1e-3, 1e-9):
        with tempfile.NamedTemporaryFile("w", suffix=".json") as tuning:
            cost = {"alpha": alpha + rank, "beta": 1e-10 * (rank + 1)}
            json.dump({"format": 1, "rules": [], "costs": {"one": cost}}, tuning)
            tuning.flush()
            world_with(tuning=tuning.name)
        assert require_session().world.transport.costs == {"one": LinkCost(alpha, 1e-10)}
        assert reshard.costs_here(mesh)[0][:2] == (alpha, 1e-10)
        steps = reshard.steps_of(src, dst, 8)
        assert steps == MPI.COMM_WORLD.bcast(steps)
        a = dist.shard_tensor(np.arange(9.0), mesh, [dist.Shard(0)])
        np.testing.assert_array_equal(dist.unshard_dtensor(a), np.arange(9.0))


# ---- doctor


def test_the_doctor_finds_what_is_there(world, rank, size):
    job = look(world, read_config())
    assert (job is None) == (rank > 0)
    if job is None:
        return
    assert job.ranks == size
    assert sum(load.ranks for load in job.loads) == size
    assert job.memory.shared is (True if size > 1 else None)
    assert job.memory.pipe is (size > 1 and compiled is not None)
    assert job.memory.limit == world.transport.context.heap.capacity
    assert job.differs == []
    assert len(job.machines) == size
    assert all(machine.cores for machine in job.machines)
    assert job.cuda.aware in (True, False, None)
    assert job.library.thread_level in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


def test_the_doctor_says_what_the_transport_does(world, rank, size):
    report = examine(["all_reduce", "scan"], [8, 64 * KiB])
    if rank > 0:
        assert report is None
        return
    assert report.code == 0
    stands_on = {"hpcdist", "Python", "NumPy", "mpi4py", "MPI library", "torch"}
    assert set(report.versions) == stands_on | {"processor", "system", "compiled parts"}
    algorithms = {
        (row.operation, row.arrays, row.nbytes): row.outcome.algorithm for row in report.algorithms
    }
    assert algorithms["all_reduce", "ordinary", 8] == ("eager" if size > 1 else "none")
    assert algorithms["scan", "ordinary", 64 * KiB] == ("staged" if size > 1 else "none")
    assert algorithms["all_reduce", "shared", 64 * KiB] == ("direct" if size > 1 else "none")


def test_every_pair_of_nodes_is_measured_once(world_with, rank, size):
    world_with(ranks_per_node=1)
    job = look(dist.get_group(), read_config())
    if rank > 0:
        assert job is None
        return
    pairs = [link.nodes for link in job.network.links]
    assert pairs == [(a, b) for a in range(size) for b in range(a + 1, size)]
    assert all(link.bytes_per_s > 0 for link in job.network.links)
    assert len(job.network.names) == len(job.network.skews) == size
    assert all(abs(skew) < 0.1 for skew in job.network.skews)  # it is one clock


def test_a_clock_that_is_ahead_is_noticed(world_with, monkeypatch, rank, size):
    ahead = SimpleNamespace(
        time=lambda: time.time() + 0.3 * (rank == 1), perf_counter=time.perf_counter
    )
    monkeypatch.setattr(network, "time", ahead)
    world_with(ranks_per_node=1)
    job = look(dist.get_group(), read_config())
    if rank == 0:
        assert [round(skew, 1) for skew in job.network.skews] == [0.0, 0.3, 0.0, 0.0][:size]


def test_what_a_rank_has_otherwise_is_named_with_its_rank(world_with, monkeypatch, rank, size):
    monkeypatch.setattr("hpcdist.diagnostics.installation.own_version", lambda: str(rank // 2))
    job = look(dist.get_group(), read_config())
    if rank == 0 and size > 2:
        assert [each.name for each in job.differs] == ["hpcdist"]
        assert job.differs[0].values == {"0": "0-1", "1": "2-3"[: 2 * size - 5]}
    elif rank == 0:
        assert job.differs == []


def test_rank_0_alone_speaks(rank):
    done = CliRunner().invoke(doctor, ["--json", "--op", "reduce", "--sizes", "1M"])
    assert done.exit_code == 0, done.output
    assert (done.output == "") == (rank > 0)
    if rank == 0:
        assert {row["nbytes"] for row in json.loads(done.output)["algorithms"]} == {MiB}
    done = CliRunner().invoke(doctor, ["--op", "barrier"])
    assert done.exit_code == 2
    assert ("no choice" in done.output) == (rank == 0)
