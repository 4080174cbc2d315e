"""Wrong arguments: refused before anything is sent, with what was got and what to do.

An argument that is wrong on one rank only, such as the list of the root, is an error on every
rank. After each test the ranks are in step.
"""

from datetime import timedelta

import checks
import numpy as np
import pytest

import hpcdist as dist

pytestmark = pytest.mark.usefixtures("and_the_world_goes_on")
ones = np.ones


def frozen(count=3):
    x = np.ones(count)
    x.flags.writeable = False
    return x


def blocks(count=3):
    return [np.ones(count) for _ in range(dist.get_world_size())]


def halves():
    return ones(dist.get_world_size()), ones(dist.get_world_size())


# what is called, and the words that the message must have
WRONG_EVERYWHERE = [
    # arrays
    (lambda: dist.all_reduce([1.0, 2.0]), "list is not an array.*numpy.asarray"),
    (lambda: dist.all_reduce(3.0), r"float is not an array.*dist\.all_reduced\(x\)"),
    (lambda: dist.all_reduce({"x": ones(2)}), r"dict is not an array.*dist\.all_reduced\(x\)"),
    (lambda: dist.all_reduce(None), "None is not an array.*all_gather_object$"),
    (lambda: dist.all_reduce("text"), "str is not an array"),
    (lambda: dist.all_reduce(np.float64(3)), "read-only"),
    (lambda: dist.all_reduce(frozen()), r"read-only \(ndarray, shape \(3,\)\).*writable copy"),
    (lambda: dist.all_reduce(b"bytes"), "read-only"),
    (lambda: dist.all_reduce(np.broadcast_to(np.ones(1), (4,))), "read-only"),
    (lambda: dist.all_reduce(np.array([{}])), "all_gather_object"),
    (lambda: dist.all_reduce(np.ma.ones(3)), "masked.*filled"),
    (lambda: dist.all_reduce(np.array(["a"])), "SUM is not defined for"),
    (lambda: dist.all_reduce(np.array(["2000"], "M8[D]")), "SUM is not defined for.*view"),
    (lambda: dist.broadcast(np.array([None]), 0), "all_gather_object"),
    (lambda: dist.reduce_scatter(frozen(), blocks()), "read-only"),
    (lambda: dist.scatter(frozen(), blocks() if dist.get_rank() == 0 else None), "read-only"),
    (lambda: dist.recv(frozen(), 0), "read-only"),
    (lambda: dist.wait_all(None), "wait_all takes a list of works.*None"),
    (lambda: dist.wait_any([1]), "wait_any takes a list of works"),
    (lambda: dist.irecv(frozen(), 0), "read-only"),
    (lambda: dist.all_gather(frozen(3 * dist.get_world_size()), ones(3)), "read-only"),
    (lambda: dist.alltoall_single(frozen(dist.get_world_size()), ones(1)), "read-only"),
    # operators
    (lambda: dist.all_reduce(ones(3), 7), "Unknown reduce_op type for 7.*ReduceOp.SUM"),
    (lambda: dist.all_reduce(ones(3), "sum"), "Unknown reduce_op type for 'sum'"),
    (lambda: dist.all_reduce(ones(3), None), "Unknown reduce_op"),
    (lambda: dist.all_reduce(ones(3), -1), "Unknown reduce_op"),
    (lambda: dist.all_reduce(ones(3), True), "Unknown reduce_op"),
    (lambda: dist.reduce(ones(3), 0, 9), "Unknown reduce_op"),
    (lambda: dist.reduce_scatter(ones(3), blocks(), 9), "Unknown reduce_op"),
    (lambda: dist.scan(ones(3), 9), "Unknown reduce_op"),
    (lambda: dist.exscan(ones(3), 9), "Unknown reduce_op"),
    (lambda: dist.all_reduce(ones(3, int), dist.ReduceOp.AVG), "AVG is not.*int64.*astype"),
    (lambda: dist.all_reduce(ones(3, bool), dist.ReduceOp.AVG), "AVG is not.*bool.*astype"),
    (lambda: dist.all_reduce(ones(3, "c8"), dist.ReduceOp.MAX), "complex numbers have no order"),
    # roots and peers
    *[
        (
            lambda call=call, bad=bad: call(bad),
            "can not be found inside the group.*(world rank|as an integer)",
        )
        for bad in (99, -7, "0", 0.0, True)  # -1 is MPICH's PROC_NULL, and -2 is Open MPI's
        for call in (
            lambda bad: dist.broadcast(ones(3), bad),
            lambda bad: dist.reduce(ones(3), bad),
            lambda bad: dist.gather(ones(3), [], bad),
            lambda bad: dist.scatter(ones(3), None, bad),
            lambda bad: dist.broadcast_object_list([1], bad),
            lambda bad: dist.scatter_object_list([], None, bad),
            lambda bad: dist.gather_object(1, [], bad),
            lambda bad: dist.send(ones(3), bad),
            lambda bad: dist.isend(ones(3), bad),
            lambda bad: dist.recv(ones(3), bad),
            lambda bad: dist.irecv(ones(3), bad),
            lambda bad: dist.send_object_list([1], bad),
            lambda bad: dist.recv_object_list([1], bad),
            lambda bad: dist.P2POp(dist.isend, ones(3), bad),
            lambda bad: dist.plan_broadcast(ones(3), bad),
        )
    ],
    (lambda: dist.broadcast(ones(3), None), "src=None"),
    (lambda: dist.send(ones(3), None), "dst=None"),
    # lists
    (lambda: dist.all_gather(None, ones(3)), "tensor_list is None.*empty list"),
    (lambda: dist.all_gather((), ones(3)), "empty tuple.*empty list"),
    (lambda: dist.all_gather([*blocks(), ones(3)], ones(3)), r"tensor_list must be.*got \d entr"),
    (lambda: dist.all_gather(blocks(4), ones(3)), r"tensor_list\[\d\].*\(4,\).*\(3,\)"),
    (lambda: dist.all_gather(blocks(), ones(3, "f4")), "float64.*float32"),
    (lambda: dist.all_gather(ones(7), ones(3)), "times the elements"),
    (lambda: dist.reduce_scatter(ones(3), None), "should not be empty"),
    (lambda: dist.reduce_scatter(ones(3), []), "should not be empty"),
    (lambda: dist.reduce_scatter(ones(3), [*blocks(), ones(3)]), "must be a list of"),
    (lambda: dist.reduce_scatter(ones(3), ones(100)), "times the elements"),
    (lambda: dist.alltoall([], ones(3)), "both tensor or tensor list"),
    (lambda: dist.alltoall([], []), "in_tensor_list must be a list of"),
    (lambda: dist.alltoall((), blocks()), "empty tuple"),
    (lambda: dist.alltoall([*blocks(), ones(3)], blocks()), "out_tensor_list must be"),
    (lambda: dist.alltoall([x.astype("f4") for x in blocks()], blocks()), "float64.*float32"),
    # split sizes
    (lambda: dist.alltoall_single(np.array(1.0), np.array(1.0)), "cannot be cut"),
    (lambda: dist.alltoall_single(ones(3), ones(3, "f4")), "give both one dtype"),
    *[
        (lambda bad=bad: dist.alltoall_single(ones(12), ones(12), in_split_sizes=bad), "in_split")
        for bad in (3, "abc", ["a"], [1.5], [100], [-1], [None], [])
    ],
    (lambda: dist.alltoall_single(ones(12), ones(12), out_split_sizes=[5]), "out_split_sizes"),
    # other libraries' order of arguments
    *[
        (lambda given=given: dist.alltoall_single(*halves(), *given), "in_split_sizes=")
        for given in ((None, None), ([1], [1]), (None, [1]), ([1],), (None, ones(1)))
    ],
    *[
        (lambda call=call: call(*halves(), None, None, in_split_sizes=[1]), "in_split_sizes=")
        for call in (dist.alltoall_single, dist.stream.alltoall_single)
    ],
    *[
        (lambda call=call, bad=bad: call(bad), "sync_op must be True or False.*sync_op=")
        for bad in (None, 0, 1, "yes", 2.0)
        for call in (
            lambda bad: dist.all_reduce(ones(3), dist.ReduceOp.SUM, None, bad),
            lambda bad: dist.broadcast(ones(3), 0, None, bad),
            lambda bad: dist.reduce_scatter(ones(3), blocks(), dist.ReduceOp.SUM, None, bad),
            lambda bad: dist.scatter(ones(3), blocks(), dist.get_rank(), None, bad),
            lambda bad: dist.all_gather([], ones(3), None, bad),
            lambda bad: dist.stream.all_reduce(ones(3), sync_op=bad),
            lambda bad: dist.stream.all_reduce(ones(3), sync_op=bad, use_calc_stream=True),
            lambda bad: dist.barrier(None, bad),
            lambda bad: dist.send(ones(3), 0, None, bad),
            lambda bad: dist.recv(ones(3), 0, None, bad),
            lambda bad: dist.all_gather_object([], 1, sync_op=bad),
            lambda bad: dist.send_object_list([1], 0, sync_op=bad),
        )
    ],
    (lambda: dist.stream.all_reduce(ones(3), use_calc_stream=None), "use_calc_stream must be"),
    (
        lambda: dist.reduce_scatter(ones(3), blocks(), dist.get_group()),
        "other arguments by keyword.*group=",
    ),
    (lambda: dist.all_reduce(ones(3), dist.get_group()), "other arguments by keyword.*group="),
    (lambda: dist.broadcast(ones(3), dist.get_group()), "keyword.*group="),
    (lambda: dist.broadcast(ones(3), 0, True), "must be a Group.*sync_op="),
    (lambda: dist.all_gather([], ones(3), dist.ReduceOp.SUM), "must be a Group.*op="),
    # messages
    (lambda: dist.send(ones(3), 0, tag=-1), "tag must be an integer.*-1"),
    (lambda: dist.send(ones(3), 0, tag="x"), "tag must be an integer.*'x'"),
    (lambda: dist.isend(ones(3), 0, tag=1.0), "tag must be"),
    (lambda: dist.irecv(ones(3), 0, tag=None), "tag must be"),
    (lambda: dist.send(ones(3), 0, tag=1 << 40), "out of range"),
    (lambda: dist.send([1], 0), "list is not an array.*object collective"),
    (lambda: dist.P2POp(dist.send, ones(3), 0), "Invalid ``op`` function"),
    (lambda: dist.P2POp(dist.irecv, frozen(), 0), "read-only"),
    (lambda: dist.batch_isend_irecv([dist.isend]), "list of P2POp"),
    (lambda: dist.batch_isend_irecv(None), "list of P2POp"),
    # objects
    (lambda: dist.all_gather_object(None, 1), "object_list must be an empty list"),
    (lambda: dist.all_gather_object([0] * 99, 1), "got 99 entries"),
    (lambda: dist.all_gather_object((), 1), "object_list must be an empty list"),
    (lambda: dist.broadcast_object_list([], 0), r"cannot be None or empty.*such as \[None\]"),
    (lambda: dist.broadcast_object_list(None, 0), "cannot be None or empty"),
    (lambda: dist.scatter_object_list(None), "out_object_list must be a list"),
    (lambda: dist.all_to_all_object([], [0] * 99), "objects, one per rank.*got 99"),
    (lambda: dist.all_to_all_object([], None), "objects, one per rank"),
    (lambda: dist.send_object_list([], 0), "cannot be None or empty"),
    (lambda: dist.recv_object_list(None, 0), "cannot be None or empty"),
    (lambda: dist.send_object_list([1], 0, dst_in_group=0), "both dst and dst_in_group"),
    (lambda: dist.recv_object_list([1], 0, src_in_group=0), "both src and src_in_group"),
    (lambda: dist.send_object_list([1], dst_in_group=99), "has ranks 0 to"),
    (lambda: dist.send_object_list([lambda: 0], 0), "cannot be pickled"),
    # groups
    (lambda: dist.all_reduce(ones(3), group=[0]), "must be a Group"),
    (lambda: dist.barrier(0), "must be a Group"),
    (lambda: dist.get_rank("world"), "must be a Group"),
    (lambda: dist.new_group([0], timeout=-1), "timeout must be a positive"),
    (lambda: dist.new_group([0], timeout=0), "timeout must be a positive"),
    (lambda: dist.new_group([0], timeout="soon"), "timeout must be a positive"),
    (lambda: dist.new_group([0], timeout=timedelta(0)), "timeout must be a positive"),
    (lambda: dist.new_group([0], timeout=float("nan")), "timeout must be a positive"),
    (lambda: dist.new_group([0], "nccl"), "backend='nccl'.*'mpi'"),
    (lambda: dist.new_group([0], 3), "backend=3"),
    # memory, streams, simulation
    (lambda: dist.empty(3, object), "Python objects"),
    (lambda: dist.stream.send(ones(3), sync_op=False, use_calc_stream=True), "sync op behavior"),
    (lambda: dist.simulate(0, len), "at least one rank"),
]


@pytest.mark.two_ranks
@pytest.mark.parametrize(
    ("call", "words"), WRONG_EVERYWHERE, ids=lambda each: each if isinstance(each, str) else "call"
)
def test_what_is_wrong_on_every_rank_is_refused_on_every_rank(call, words):
    with pytest.raises(dist.UsageError, match=f"(?s){words}") as caught:
        call()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (TypeError, lambda: dist.new_group(0)),
        (TypeError, lambda: dist.DataParallel(checks.Vectors("w"), comm_buffer_size=-1)),
    ],
)
def test_what_programs_of_paddle_catch_by_another_name_is_caught_so(error, call):
    with pytest.raises(error) as caught:
        call()
    assert isinstance(caught.value, dist.UsageError)


@pytest.mark.parametrize("kind", [bool, np.bool_])
def test_a_bool_of_either_kind_says_whether_to_wait(kind, size):
    for form in (dist, dist.stream):
        x = ones(3)
        assert form.all_reduce(x, sync_op=kind(True)).is_completed()
        assert (x == size).all()
        form.all_reduce(x, sync_op=kind(False)).wait()
        assert (x == size**2).all()


WRONG_ON_THE_LAST_RANK = {
    "array to reduce read-only": lambda bad, last: dist.all_reduce(frozen() if bad else ones(3)),
    "no array to reduce": lambda bad, last: dist.all_reduce([1.0, 2.0] if bad else ones(3)),
    "no operator": lambda bad, last: dist.all_reduce(ones(3), "sum" if bad else dist.ReduceOp.SUM),
    "operator of a scan": lambda bad, last: dist.scan(
        ones(3, "c16" if bad else "f8"), dist.ReduceOp.MAX
    ),
    "array to reduce later": lambda bad, last: dist.all_reduce(
        frozen() if bad else ones(3), sync_op=False
    ).wait(),
    "array of a plan": lambda bad, last: dist.plan_all_reduce(frozen() if bad else ones(3)),
    "root no integer": lambda bad, last: dist.gather(ones(3), [], 1.5 if bad else last),
    "array to gather": lambda bad, last: dist.all_gather([], None if bad else ones(3)),
    "array to exchange": lambda bad, last: dist.alltoall_single(
        ones(12), "text" if bad else ones(12)
    ),
    "list to scatter too long": lambda bad, last: dist.scatter(
        np.empty(3), [*blocks(), ones(3)] if bad else None, last
    ),
    "nothing to scatter": lambda bad, last: dist.scatter(np.empty(3), None, last),
    "block to scatter of another shape": lambda bad, last: dist.scatter(
        np.empty(3), blocks(4) if bad else None, last
    ),
    "block to scatter of another dtype": lambda bad, last: dist.scatter(
        np.empty(3), [x.astype("f4") for x in blocks()] if bad else None, last
    ),
    "whole to scatter not divisible": lambda bad, last: dist.stream.scatter(
        np.empty(3), ones(100) if bad else None, last
    ),
    "no list to gather into": lambda bad, last: dist.gather(ones(3), None, last),
    "list to gather into too long": lambda bad, last: dist.gather(
        ones(3), [*blocks(), ones(3)] if bad else None, last
    ),
    "read-only list to gather into": lambda bad, last: dist.gather(
        ones(3), [frozen() for _ in blocks()] if bad else None, last
    ),
    "list for all_gather too long": lambda bad, last: dist.all_gather(
        [*blocks(), ones(3)] if bad else [], ones(3)
    ),
    "list for all_gather of another dtype": lambda bad, last: dist.all_gather(
        [x.astype("f4") for x in blocks()] if bad else blocks(), ones(3)
    ),
    "sync_op": lambda bad, last: dist.all_reduce(ones(3), sync_op="no" if bad else True),
    "sync_op of objects": lambda bad, last: dist.all_gather_object(
        [], 1, sync_op=None if bad else True
    ),
    "list for reduce_scatter": lambda bad, last: dist.reduce_scatter(
        np.empty(3), blocks(4) if bad else blocks()
    ),
    "list for alltoall": lambda bad, last: dist.alltoall([], blocks()[1:] if bad else blocks()),
    "mixed dtypes for alltoall": lambda bad, last: dist.alltoall(
        blocks(), [x.astype("f4") for x in blocks()] if bad else blocks()
    ),
    "split sizes": lambda bad, last: dist.alltoall_single(
        ones(12), ones(12), in_split_sizes=[99] if bad else None
    ),
    "result of reduce read-only": lambda bad, last: dist.reduce(frozen(), last),
    "object list": lambda bad, last: dist.all_gather_object([1] * 99 if bad else [], 1),
    "objects to scatter": lambda bad, last: dist.scatter_object_list(
        [], [1] * 99 if bad else None, last
    ),
    "no objects to scatter": lambda bad, last: dist.scatter_object_list([], None, last),
    "out list to scatter": lambda bad, last: dist.scatter_object_list(
        None if bad else [], [1] * (last + 1) if bad else None, last
    ),
    "objects to exchange": lambda bad, last: dist.all_to_all_object(
        [], [1] * (99 if bad else last + 1)
    ),
    "no list for objects": lambda bad, last: dist.gather_object(1, None, last),
    "no list to broadcast": lambda bad, last: dist.broadcast_object_list(
        None if bad else [1], last
    ),
    "unpicklable": lambda bad, last: dist.gather_object(
        (lambda: 0) if bad else 0, [] if bad else None, last
    ),
}


@pytest.mark.parametrize("what", WRONG_ON_THE_LAST_RANK)
def test_what_is_wrong_on_one_rank_is_an_error_on_every_rank(what, rank, size):
    bad = rank == size - 1
    expected = dist.UsageError if bad else dist.RemoteError
    if ("split" in what or what == "array to exchange") and 12 % size:
        return
    with pytest.raises(expected, match=f"rank {size - 1}"):
        WRONG_ON_THE_LAST_RANK[what](bad, size - 1)


def test_a_read_only_array_may_be_broadcast_from_but_not_into(rank, size):
    x = frozen() if rank == 0 else np.zeros(3)
    dist.broadcast(x, 0)
    assert (x == 1).all()

    def refuse():
        dist.broadcast(frozen(), 0)
        dist.barrier()  # where the root hears of it

    if size > 1:
        with pytest.raises(dist.RemoteError if rank == 0 else dist.UsageError, match="read-only"):
            refuse()


def test_read_only_arrays_may_be_sent_and_reduced_away_from(rank, size):
    x, out = frozen(), np.zeros(3)
    dist.reduce(x if rank else np.ones(3), 0)
    gathered = []
    dist.all_gather(gathered, x)
    dist.reduce_scatter(out, [frozen() for _ in range(size)])
    work = dist.isend(x, (rank + 1) % size)
    dist.recv(out, (rank - 1) % size)
    work.wait()
    assert len(gathered) == size
    assert (out == 1).all()


def test_a_batch_with_a_mistake_sends_nothing(rank):
    group = dist.new_group([rank], timeout=0.2)
    x = np.ones(1)
    with pytest.raises(dist.UsageError, match="can not be found"):
        dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, rank, group), dist.P2POp(dist.isend, x, 99, group)]
        )
    with pytest.raises(dist.CollectiveTimeout):
        dist.recv(np.empty(1), rank, group)
    dist.destroy_process_group(group)


def test_endless_time_limits_are_fine(size):
    group = dist.new_group(range(size), timeout=float("inf"))
    x = np.ones(1)
    dist.all_reduce(x, group=group, sync_op=False).wait(float("inf"))
    assert x[0] == size
    dist.destroy_process_group(group)


def test_an_unknown_group_is_warned_about():
    with pytest.warns(UserWarning, match="Group 999 is not initialized"):
        assert dist.get_group(999) is None


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "nccl"},
        {"backend": 7},
        {"device": "gpu:99"},
        {"timeout": 0},
        {"comm": 3},
        {"comm": None, "timeout": "x"},
    ],
)
def test_init_refuses_nonsense_and_starts_afterwards(options):
    dist.destroy_process_group()
    with pytest.raises(dist.UsageError, match=f"{list(options)[-1]}"):
        dist.init_parallel_env(**options)
    assert not dist.is_initialized()
    dist.init_parallel_env()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TIMEOUT_S", "soon"),
        ("TIMEOUT_S", "-1"),
        ("PIECE_MB", "0"),
        ("PIECE_MB", "inf"),
        ("RANKS_PER_NODE", "0.5"),
        ("RANKS_PER_NODE", "inf"),
        ("ALLOW_SINGLETON", "maybe"),
    ],
)
def test_unusable_environment_variables_are_named(variable, value, monkeypatch):
    dist.destroy_process_group()
    monkeypatch.setenv(f"HPCDIST_{variable}", value)
    with pytest.raises(dist.UsageError, match=f"HPCDIST_{variable}='{value}'"):
        dist.init_parallel_env()
    monkeypatch.undo()
    dist.init_parallel_env()


def test_the_world_may_have_an_endless_time_limit(world_with):
    world_with(timeout_s="inf")
    dist.barrier()
    assert dist.ParallelEnv().pg_timeout > 1800 * 1000


def test_functions_before_init_say_so():
    dist.destroy_process_group()
    for call in (
        dist.barrier,
        lambda: dist.all_reduce(ones(3)),
        dist.new_group,
        dist.get_group,
        dist.get_backend,
        lambda: dist.wait(ones(1)),
        lambda: dist.empty(3),
        dist.destroy_process_group,
        dist.shutdown_process_group,
        lambda: dist.plan_all_reduce(ones(3)),
        lambda: dist.all_gather_object([], 1),
        lambda: dist.P2POp(dist.isend, ones(1), 0),
    ):
        with pytest.raises(dist.UsageError, match=r"not initialized; call hpcdist\.init_parallel"):
            call()
    dist.init_parallel_env()
