"""What went wrong in Paddle 3.3.1 (release and gloo backend), one test for each defect.

Letters and numbers would say nothing here: every test is named after what must hold instead.
"""

import inspect
import os
import time
import warnings
from datetime import timedelta

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from tiers import first_of

import hpcdist as dist
from hpcdist.errors import notes_of

pytestmark = pytest.mark.usefixtures("and_the_world_goes_on")
Op = dist.ReduceOp


def odd_ranks_leave_out(size):
    """Return the world ranks of a sub-group that leaves out at least one rank if it can."""
    return list(range(1, size)) or [0]


def total(size):
    return size * (size + 1) // 2


# ---- the interface


def test_scatter_object_list_of_a_subgroup_leaves_the_others_alone(rank, size):
    members = odd_ranks_leave_out(size)
    if rank not in members:
        return
    group = dist.new_group(members)
    out = ["old", "older"]
    given = [{"for": member} for member in members] if rank == members[-1] else None
    dist.scatter_object_list(out, given, members[-1], group)
    assert out == [{"for": rank}]
    dist.destroy_process_group(group)


def test_split_sizes_mean_the_same_in_both_forms(rank, size):
    given = np.repeat(np.arange(size), range(size)) + 10 * rank
    splits = {"in_split_sizes": list(range(size)), "out_split_sizes": [rank] * size}
    for function in (dist.alltoall_single, dist.stream.alltoall_single):
        out = np.empty(size * rank, int)
        function(out, given, **splits)
        assert out.tolist() == [10 * source + rank for source in range(size) for _ in range(rank)]


def test_all_gather_object_fills_or_replaces_and_never_appends(rank, size):
    for target in ([], ["old"] * size):
        dist.all_gather_object(target, "x" * rank)
        assert target == ["x" * each for each in range(size)]


def test_an_unknown_rank_is_named_together_with_the_ranks_of_the_group(size):
    group = dist.new_group(range(size))
    with pytest.raises(ValueError, match=rf"{size}.*_default_pg{group.id}.*\[0"):
        group.get_group_rank(size)
    with pytest.raises(ValueError, match="ranks 0 to"):
        group.get_global_rank(size)
    dist.destroy_process_group(group)


@pytest.mark.parametrize(
    "ranks", [[0, 0], [0, 99], [-1, 0], [], "01", [0.0], [True], 0, ["0"], b"\0"]
)
def test_nonsense_ranks_of_a_new_group_are_refused_at_once(ranks):
    with pytest.raises(ValueError, match="ranks"):
        dist.new_group(ranks)


def test_ranks_may_be_any_iterable_of_integers_in_any_order(rank, size):
    array = np.arange(size)
    as_0d = [array[rank : rank + 1].reshape(()) for rank in range(size)]
    for ranks in (range(size), set(range(size)), array[::-1], iter(range(size)), as_0d):
        group = dist.new_group(ranks)
        assert group.ranks == list(range(size))
        assert group.rank == rank
        dist.destroy_process_group(group)


def test_a_group_of_one_rank_works(rank):
    group = dist.new_group([rank])
    assert (group.rank, group.nranks, group.world_size) == (0, 1, 1)
    x, gathered = np.array([2.0]), []
    dist.all_reduce(x, group=group)
    dist.broadcast(x, rank, group)
    dist.all_gather(gathered, x, group)
    got = np.empty(1)
    work = dist.isend(x, rank, group)
    dist.recv(got, rank, group)
    work.wait()
    dist.barrier(group)
    assert x.tolist() == gathered[0].tolist() == got.tolist() == [2.0]
    dist.destroy_process_group(group)


def test_receiving_from_any_rank_is_the_default(rank, size):
    x = np.empty(1, int)
    receive = dist.irecv(x)
    dist.send(np.array([rank]), (rank + 1) % size)
    receive.wait()
    assert receive.source == x[0] == (rank - 1) % size


def test_destroying_a_group_frees_its_communicators_and_ends_its_use(size):
    group = dist.new_group(range(size))
    comm, plan = group.mpi_comm, dist.plan_all_reduce(np.ones(1), group=group)
    dist.destroy_process_group(group)
    assert comm == MPI.COMM_NULL
    for use in (
        lambda: dist.barrier(group),
        lambda: dist.all_reduce(np.ones(1), group=group),
        lambda: dist.isend(np.ones(1), 0, group),
        lambda: dist.all_gather_object([], 1, group),
        lambda: dist.destroy_process_group(group),
        plan.start,
    ):
        with pytest.raises(dist.UsageError):
            use()


def test_a_destroyed_group_is_refused_on_ranks_outside_it_too(rank):
    group = dist.new_group([0])
    dist.destroy_process_group(group)
    with pytest.raises(dist.UsageError, match="has been destroyed"):
        dist.all_reduce(np.ones(1), group=group)
    assert dist.get_rank(group) == (0 if rank == 0 else -1)


def test_a_forked_child_cannot_communicate_and_disturbs_nobody(rank):
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of threads
        child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(np.ones(1))
            told = "no error"
        except Exception as error:
            told = f"{type(error).__name__} on {dist.get_rank()}: {error}"
        os.write(write, told.encode())
        os._exit(0)
    os.waitpid(child, 0)
    told = os.read(read, 1000).decode()
    os.close(read)
    os.close(write)
    assert told.startswith(f"UsageError on {rank}: this process")
    assert f"forked from rank {rank} and is not a rank itself" in told


def test_local_rank_is_the_rank_on_the_node(rank, size):
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    env = dist.ParallelEnv()
    assert (env.rank, env.world_size, env.nranks) == (rank, size, size)
    assert (env.local_rank, env.local_size) == (node.rank, node.size)
    assert 0 <= env.node_rank < env.nnodes
    assert env.current_endpoint == env.trainer_endpoints[rank]
    assert len(set(env.trainer_endpoints)) == size
    node.Free()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, g: dist.all_reduce(x, group=g),
        lambda x, g: dist.reduce(x, 0, group=g),
        lambda x, g: dist.reduce_scatter(x, [x], group=g),
        lambda x, g: dist.scan(x, group=g),
        lambda x, g: dist.exscan(x, group=g),
        lambda x, g: dist.broadcast(x, 0, group=g),
        lambda x, g: dist.all_gather([], x, group=g),
        lambda x, g: dist.gather(x, [], group=g),
        lambda x, g: dist.scatter(x, [x], group=g),
        lambda x, g: dist.alltoall([], [x], group=g),
        lambda x, g: dist.alltoall_single(x, x.copy(), group=g),
        lambda x, g: dist.send(x, 0, group=g),
        lambda x, g: dist.recv(x, 0, group=g),
        lambda x, g: dist.isend(x, 0, group=g),
        lambda x, g: dist.irecv(x, 0, group=g),
        lambda x, g: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0, g)])[0],
        lambda x, g: dist.send_object_list([1], 0, group=g),
        lambda x, g: dist.recv_object_list([1], src_in_group=0, group=g),
        lambda x, g: dist.all_gather_object([], 1, group=g),
        lambda x, g: dist.broadcast_object_list([1], 0, group=g),
        lambda x, g: dist.scatter_object_list([1], [1], group=g),
        lambda x, g: dist.gather_object(1, [], group=g),
        lambda x, g: dist.all_to_all_object([], [1], group=g),
        lambda x, g: dist.barrier(group=g),
        lambda x, g: dist.plan_all_reduce(x, group=g).start(),
        lambda x, g: dist.stream.all_reduce(x, group=g),
    ],
)
def test_every_function_warns_a_non_member_and_touches_nothing(call, rank):
    group = dist.new_group([0])
    if rank:
        x = np.array([float(rank)])
        with pytest.warns(dist.NotInGroupWarning, match="not in group"):
            assert call(x, group).wait()
        assert x[0] == rank
        assert dist.get_rank(group) == dist.get_world_size(group) == group.rank == -1
        assert (group.nranks, group.is_member(), group.process_group) == (1, False, None)
        assert group.get_group_rank(0) == group.get_global_rank(0) == -1
        with pytest.raises(dist.UsageError, match="Invalid group"):
            dist.get_backend(group)
    dist.destroy_process_group(group)


def test_documented_arguments_of_init_exist():
    named = set(inspect.signature(dist.init_parallel_env).parameters)
    documented = {"nccl_config", "backend", "device", "timeout", "comm"}
    assert named == documented
    assert all(f"{name}:" in dist.init_parallel_env.__doc__ for name in documented)


def test_an_average_leaves_the_inputs_of_the_other_ranks_alone(rank, size):
    x = np.array([rank + 1.0])
    dist.reduce(x, size - 1, Op.AVG)
    assert x[0] == ((size + 1) / 2 if rank == size - 1 else rank + 1.0)
    with pytest.raises(dist.UsageError, match="AVG is not defined for int64"):
        dist.all_reduce(np.array([4]), Op.AVG)


# ---- dtypes and shapes


def test_half_precision_sums_and_extrema_are_right(rank, size):
    for dtype in (np.float16, ml_dtypes.bfloat16):
        for op, wanted in [(Op.SUM, -total(size)), (Op.MAX, -1), (Op.MIN, -size)]:
            x = np.full(5, -rank - 1, dtype)
            dist.all_reduce(x, op)
            assert (x == wanted).all(), op


@pytest.mark.parametrize("dtype", ["i2", "u2", "u4", "u8", "c8", "c16"])
def test_dtypes_that_killed_the_process_are_reduced(dtype, rank, size):
    x = np.full(3, rank + 1, dtype)
    dist.all_reduce(x)
    assert (x == total(size)).all()


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_moves_and_says_how_to_reduce_it(name, rank, size):
    x = np.full(3, rank + 1, getattr(ml_dtypes, name))
    dist.broadcast(x, size - 1)
    assert (x.astype(float) == size).all()
    with pytest.raises(dist.UsageError, match="astype"):
        dist.all_reduce(x)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "i8"])
@pytest.mark.parametrize("count", [1, 300])
def test_integers_wrap_in_every_reduction(dtype, count, size):
    big = np.full(count, np.iinfo(dtype).max, dtype)
    wanted = np.add.reduce(np.stack([big] * size), 0, dtype=dtype)
    x, y, z = big.copy(), big.copy(), big.copy()
    dist.all_reduce(x)
    dist.reduce_scatter(y, [big] * size)
    dist.reduce(z, 0)
    assert (x == wanted).all()
    assert (y == wanted).all()
    assert (z == (wanted if dist.get_rank() == 0 else big)).all()


@pytest.mark.parametrize("shape", [(0,), (0, 3), ()])
def test_empty_and_0d_arrays_go_through_every_operation(shape, rank, size):
    x = np.full(shape, 1.0)
    gathered, blocks, parts = [], [], [x.copy() for _ in range(size)]
    dist.all_reduce(x, Op.MAX)
    dist.reduce(x, 0, Op.MAX)
    dist.broadcast(x, 0)
    dist.scan(x, Op.MAX)
    dist.all_gather(gathered, x)
    dist.gather(x, blocks if rank == 0 else None)
    dist.scatter(x, parts if rank == 0 else None)
    dist.reduce_scatter(x, parts, Op.MAX)
    dist.alltoall([], parts)
    work = dist.isend(x.copy(), (rank + 1) % size)
    dist.recv(x, (rank - 1) % size)
    work.wait()
    assert x.shape == shape
    assert (x == 1).all()
    assert [each.shape for each in gathered] == [shape] * size


def test_views_are_written_through_and_their_surroundings_left_alone(rank, size):
    whole = np.zeros((6, 6))
    view = whole[1:5:2, ::3]
    view[...] = rank + 1
    dist.all_reduce(view)
    assert (view == total(size)).all()
    assert whole.sum() == 4 * total(size)


# ---- ranks that disagree

DISAGREEMENTS = {
    "element counts": lambda odd: dist.all_reduce(np.ones(6 if odd else 4)),
    "large element counts": lambda odd: dist.all_reduce(np.ones(150_000 if odd else 100_000)),
    "shapes of one size": lambda odd: dist.all_reduce(np.ones((2, 3) if odd else (3, 2))),
    "dtypes of one size": lambda odd: dist.all_reduce(np.ones(4, "i4" if odd else "f4")),
    "operators": lambda odd: dist.all_reduce(np.ones(4), Op.MAX if odd else Op.SUM),
    "a shorter receiver": lambda odd: dist.broadcast(np.ones(3 if odd else 4), 0),
    "a longer receiver": lambda odd: dist.broadcast(np.ones(5 if odd else 4), 0),
    "dtypes of a broadcast": lambda odd: dist.broadcast(np.ones(4, "i4" if odd else "f4"), 0),
    "roots": lambda odd: dist.broadcast(np.ones(4), 1 if odd else 0),
    "operations": lambda odd: dist.barrier() if odd else dist.all_reduce(np.ones(4)),
    "array or object": lambda odd: (
        dist.all_gather([], np.ones(4)) if odd else dist.all_gather_object([], 4)
    ),
    "gathered dtypes": lambda odd: dist.all_gather([], np.ones(4, "i4" if odd else "f4")),
    "gathered sizes": lambda odd: dist.all_gather(
        [np.empty(6 if odd else 4) for _ in range(dist.get_world_size())],
        np.ones(6 if odd else 4),
    ),
    "reduced sizes": lambda odd: dist.reduce(np.ones(6 if odd else 4), 0),
    "lengths of object lists": lambda odd: dist.broadcast_object_list([1] * (1 + odd), 0),
    "structured dtypes": lambda odd: dist.broadcast(
        np.zeros(2, [("a", "i4"), ("b", "f4")] if odd else [("a", "f4"), ("b", "i4")]), 0
    ),
    "blocks of an alltoall": lambda odd: dist.alltoall(
        [np.empty(3) for _ in range(dist.get_world_size())],
        [np.ones(4 if odd else 3) for _ in range(dist.get_world_size())],
    ),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
@pytest.mark.parametrize("sync", [True, False])
def test_a_disagreement_is_an_error_on_every_rank(what, sync, rank, size):
    if size == 1:
        return
    odd = rank == size - 1

    def disagree():
        DISAGREEMENTS[what](odd)
        dist.barrier()  # where the root of a small broadcast hears of it

    if sync:
        with pytest.raises(dist.MismatchError, match="disagree") as caught:
            disagree()
        assert str(size - 1) in str(caught.value)
    else:
        x = np.ones(4, "i4" if odd else "f4")
        work = dist.all_reduce(x, sync_op=False)
        with pytest.raises(dist.MismatchError, match="disagree"):
            work.wait()
        assert (x == 1).all()


def test_all_gather_into_arrays_of_another_dtype_is_refused(size):
    with pytest.raises(dist.UsageError, match="float64"):
        dist.all_gather([np.empty(2, "f8") for _ in range(size)], np.ones(2, "f4"))


# ---- messages


def test_the_documented_ring_of_batch_isend_irecv_ends(rank, size):
    for count in (1, 200_000):
        got = np.empty(count)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, np.full(count, float(rank)), (rank + 1) % size),
                dist.P2POp(dist.irecv, got, (rank - 1) % size),
            ]
        )
        for work in works:
            work.wait()
        assert (got == (rank - 1) % size).all()
    assert dist.batch_isend_irecv([]) == []


@pytest.mark.parametrize("order", ["isend first", "irecv first", "blocking sends"])
@pytest.mark.parametrize("count", [1, 200_000])
def test_neighbours_exchange_in_any_order(order, count, rank, size):
    peer = rank ^ 1 if rank ^ 1 < size else rank
    given, got = np.full(count, float(rank)), np.empty(count)
    if order == "isend first":
        works = [dist.isend(given, peer), dist.irecv(got, peer)]
    elif order == "irecv first":
        works = [dist.irecv(got, peer), dist.isend(given, peer)]
    else:
        works = [dist.send(given, peer), dist.recv(got, peer)]
    for work in works:
        work.wait()
    assert (got == peer).all()


def test_fan_out_fan_in_and_a_collective_of_all_after_it(rank, size):
    x = np.empty(1)
    if rank == 0:
        for peer in range(1, size):
            dist.send(np.array([float(peer)]), peer)
        for peer in reversed(range(1, size)):
            dist.recv(x, peer)
            assert x[0] == 2 * peer
    else:
        dist.recv(x, 0)
        dist.send(2 * x, 0)
    x[0] = rank
    dist.all_reduce(x)
    assert x[0] == total(size) - size


def test_a_pipeline_runs_through_all_ranks(rank, size):
    x = np.zeros(1000)
    for _ in range(5):
        if rank > 0:
            dist.recv(x, rank - 1)
        x += 1
        if rank + 1 < size:
            dist.send(x, rank + 1)
    assert (x == (5 if rank == 0 else x[0])).all()


def test_messages_of_some_ranks_do_not_disturb_the_collectives_of_all(rank, size):
    x, y = np.array([rank + 1.0]), np.empty(1)
    pending = dist.isend(np.array([7.0]), 0) if rank == size - 1 else None
    dist.all_reduce(x)
    dist.broadcast(y, size - 1) if rank != size - 1 else dist.broadcast(x.copy(), size - 1)
    if rank == 0:
        dist.recv(y, size - 1)
        assert y[0] == 7
    if pending is not None:
        pending.wait()
    assert x[0] == total(size)


def test_a_rank_sends_to_itself(rank):
    for count in (1, 200_000):
        x, got = np.full(count, float(rank)), np.empty(count)
        works = [dist.isend(x, rank), dist.irecv(got, rank)]
        for work in works:
            work.wait()
        assert (got == rank).all()


def test_a_send_does_not_wait_for_a_receiver_that_is_busy(rank, size):
    began = time.monotonic()
    work = dist.isend(np.ones(2), (rank + 1) % size)
    assert time.monotonic() - began < 10
    time.sleep(0.05 if rank == 0 else 0)
    dist.recv(np.empty(2), (rank - 1) % size)
    work.wait()


def test_a_message_of_another_size_or_dtype_is_refused_by_the_receiver(rank, size):
    work = dist.isend(np.arange(4.0), (rank + 1) % size)
    source = (rank - 1) % size
    for wrong in (np.full(3, 7.0), np.full(5, 7.0), np.full(4, 7), np.full(8, 7, "f4")):
        with pytest.raises(dist.MismatchError, match=f"rank {source} sent"):
            dist.recv(wrong, source)
        assert (wrong == 7).all()
    dist.recv(np.empty(4), source)
    work.wait()


# ---- time limits


def test_a_late_rank_is_waited_for(rank, size):
    time.sleep(0.5 if rank == size - 1 else 0)
    x = np.ones(1)
    dist.all_reduce(x)
    assert x[0] == size


@pytest.mark.parametrize("timeout", first_of([1, timedelta(seconds=1)]))
def test_the_time_limit_of_a_group_is_honoured_and_the_group_survives(timeout, rank, size):
    group = dist.new_group(range(size), timeout=timeout)
    late, word = rank == size - 1, np.zeros(1)
    dist.barrier()  # so that on a busy machine nobody else is late
    for other in range(rank if late else 0):
        dist.recv(word, other)
    if size > 1:
        with pytest.raises(dist.CollectiveTimeout, match="all_reduce") as caught:
            dist.all_reduce(np.ones(1), group=group)
        assert isinstance(caught.value, TimeoutError)
        if not late:
            dist.send(word, size - 1)
            assert caught.value.missing == (size - 1,)
            assert f"missing ranks: {size - 1}" in str(caught.value)
            assert "test_defects.py" in str(caught.value)
    dist.barrier()
    x = np.ones(1)
    dist.all_reduce(x, group=group)
    assert x[0] == size
    dist.destroy_process_group(group)


@pytest.mark.thorough
def test_a_rank_that_is_operations_behind_is_told_so(rank, size):
    if size == 1:
        return
    group, late = dist.new_group(range(size), timeout=1), rank == size - 1
    for _ in range(0 if late else 2):
        with pytest.raises(dist.CollectiveTimeout):
            dist.barrier(group)
    MPI.COMM_WORLD.Barrier()
    for words in (r"joined \d+\.\d s after", "has gone on to later operations") if late else ():
        with pytest.raises(dist.CollectiveTimeout, match=words):
            dist.barrier(group)
    dist.barrier(group)
    dist.destroy_process_group(group)


def test_a_receive_without_a_message_times_out_and_may_come_later(rank):
    group = dist.new_group([rank], timeout=0.2)
    x = np.zeros(1)
    with pytest.raises(dist.CollectiveTimeout, match="recv"):
        dist.recv(x, rank, group)
    receive = dist.irecv(x, rank, group)
    with pytest.raises(dist.CollectiveTimeout):
        receive.wait(0.05)
    dist.send(np.ones(1), rank, group)
    receive.wait()
    assert x[0] == 1
    dist.destroy_process_group(group)


@pytest.fixture
def impatient_world():
    """A world whose ranks wait for each other a second."""
    dist.barrier()
    dist.destroy_process_group()
    dist.init_parallel_env(timeout=1)
    yield
    MPI.COMM_WORLD.Barrier()
    dist.destroy_process_group()
    dist.init_parallel_env()


def test_a_group_whose_member_does_not_come_times_out_and_names_it(rank, size, impatient_world):
    if size == 1:
        return
    if rank < size - 1:
        with pytest.raises(dist.CollectiveTimeout, match="new_group") as caught:
            dist.new_group(range(size))
        assert size - 1 in caught.value.missing
    MPI.COMM_WORLD.Barrier()
    if rank == size - 1:
        with pytest.raises(dist.CollectiveTimeout, match="new_group"):
            dist.new_group(range(size))
    MPI.COMM_WORLD.Barrier()
    dist.barrier(dist.new_group(range(size)))


def test_groups_made_in_opposite_order_time_out_instead_of_hanging(rank, size, impatient_world):
    if size < 3:
        return
    part, whole = range(2), range(size)
    MPI.COMM_WORLD.Barrier()
    for ranks in (part, whole) if rank == 0 else (whole, part):
        if rank in ranks:
            with pytest.raises(dist.CollectiveTimeout, match="new_group"):
                dist.new_group(ranks)
        time.sleep(0.3 * (rank == 0))  # or it would be early enough for the other one
    MPI.COMM_WORLD.Barrier()
    dist.barrier(dist.new_group(whole))


@pytest.mark.thorough
def test_two_groups_in_opposite_order_time_out_instead_of_hanging(rank, size):
    if size == 1:
        return
    groups = [dist.new_group(range(size), timeout=0.5) for _ in range(2)]
    order = groups if rank == 0 else groups[::-1]

    def in_this_order():
        for group in order:
            dist.all_reduce(np.ones(1), group=group)

    with pytest.raises(dist.CollectiveTimeout):
        in_this_order()
    for group in groups:
        dist.destroy_process_group(group)


# ---- groups


def test_disjoint_groups_grids_and_many_groups_are_made_reliably(rank, size):
    for _ in range(3):
        pair = [rank - rank % 2 + each for each in range(2) if rank - rank % 2 + each < size]
        row = dist.new_group(pair)
        column = dist.new_group(range(rank % 2, size, 2))
        everyone = dist.new_group()
        for group in (everyone, column, row):
            x = np.array([rank])
            dist.all_reduce(x, group=group)
            assert x[0] == sum(group.ranks)
        for group in (row, column, everyone):
            dist.destroy_process_group(group)


def test_only_the_members_need_to_make_a_group(rank, size):
    groups = [dist.new_group([rank]) for _ in range(rank + 1)]  # another number on every rank
    together = dist.new_group()
    ids = []
    dist.all_gather_object(ids, together.id, together)
    assert len(set(ids)) == 1
    assert dist.get_group(together.id) is together
    for group in (*groups, together):
        dist.destroy_process_group(group)


def test_the_world_starts_again_after_destroy(rank, size):
    assert dist.init_parallel_env() is dist.init_parallel_env()
    old = dist.init_parallel_env()
    dist.destroy_process_group()
    assert not dist.is_initialized()
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    with pytest.raises(dist.UsageError, match="not initialized"):
        dist.barrier()
    with pytest.raises(dist.UsageError, match="destroyed"):
        dist.barrier(old)
    world = dist.init_parallel_env()
    assert dist.is_initialized()
    assert world is not old
    x = np.ones(1)
    dist.all_reduce(x)
    assert x[0] == size


def test_a_group_is_shut_down_and_starts_again(rank, size):
    group = dist.new_group(range(size))
    for restart in (True, False):
        dist.shutdown_process_group(group)
        dist.shutdown_process_group(group)
        if restart:
            dist.restart_process_group(group)
        x = np.ones(1)
        dist.all_reduce(x, group=group)  # starts the group again by itself
        assert x[0] == size
    dist.shutdown_process_group(group)
    comm = group.mpi_comm
    dist.destroy_process_group(group)
    assert comm == MPI.COMM_NULL


# ---- objects


class Unpicklable:
    def __reduce__(self):
        raise TypeError("this must stay at home")


class Unloadable:
    def __reduce__(self):
        return _explode, ()


def _explode():
    raise ZeroDivisionError("while it was unpickled")


@pytest.mark.parametrize("size_of_the_rest", [0, 100_000])
def test_an_object_that_cannot_be_pickled_is_an_error_on_every_rank(size_of_the_rest, rank, size):
    bad = rank == size - 1
    mine = [np.zeros(size_of_the_rest), Unpicklable() if bad else 1]
    expected = dist.UsageError if bad else dist.RemoteError
    for call in (
        lambda: dist.all_gather_object([], mine),
        lambda: dist.gather_object(mine, [] if rank == 0 else None),
        lambda: dist.all_to_all_object([], [mine] * size),
        lambda: dist.scatter_object_list([], [mine] * size if bad else None, size - 1),
        lambda: dist.broadcast_object_list([mine], size - 1),
        lambda: dist.all_gather_object([], mine, sync_op=False).wait(),
    ):
        with pytest.raises(expected, match=f"rank {size - 1}.*must stay at home") as caught:
            call()
        if not bad:
            assert caught.value.rank == size - 1
            assert "must stay at home" in caught.value.traceback
    with pytest.raises(dist.UsageError, match="must stay at home"):
        dist.send_object_list([Unpicklable()], rank)


def test_an_object_that_cannot_be_unpickled_is_an_error_of_its_receivers_only(rank, size):
    for size_of_the_rest in (0, 100_000):
        with pytest.raises(ZeroDivisionError) as caught:
            dist.all_gather_object([], [np.zeros(size_of_the_rest), Unloadable()])
        assert "while an object that a rank has sent was unpickled" in notes_of(caught.value)[0]
    shared = [Unloadable()] if rank == 0 else [None]
    if rank == 0:
        dist.broadcast_object_list(shared, 0)
    else:
        with pytest.raises(ZeroDivisionError):
            dist.broadcast_object_list(shared, 0)
        assert shared == [None]
    work = dist.send_object_list([Unloadable()], rank, sync_op=False)
    with pytest.raises(ZeroDivisionError):
        dist.recv_object_list([None], rank)
    work.wait()


def test_lists_of_objects_of_another_length_are_refused(rank, size):
    work = dist.send_object_list([1, 2], (rank + 1) % size, sync_op=False)
    with pytest.raises(dist.MismatchError, match="2 objects"):
        dist.recv_object_list([None] * 3, (rank - 1) % size)
    work.wait()
    with pytest.raises(ValueError, match="cannot be None or empty"):
        dist.broadcast_object_list([], 0)


def test_objects_of_very_different_sizes_are_gathered_without_padding(rank, size):
    gathered = []
    mine = [b"x" * (rank * 70_000), np.arange(rank * 40_000), None, {1, 2}, 10**50, "ä" * rank]
    dist.all_gather_object(gathered, mine)
    assert [len(each[0]) for each in gathered] == [each * 70_000 for each in range(size)]
    assert all(each[2:5] == [None, {1, 2}, 10**50] for each in gathered)


# ---- what was missing on CPUs


def test_the_stream_forms_work_on_host_memory(rank, size):
    x = np.ones(2)
    dist.stream.all_reduce(x, use_calc_stream=True)
    assert (x == size).all()
    dist.wait(x)
    dist.wait(x, use_calc_stream=False)
    with pytest.raises(RuntimeError, match="use_calc_stream can only be true in sync op"):
        dist.stream.all_reduce(x, sync_op=False, use_calc_stream=True)
    whole, part = np.empty((size, 2)), np.full(2, float(rank))
    dist.stream.all_gather(whole, part)
    dist.stream.scatter(part, whole if rank == 0 else None)
    assert (part == rank).all()
    dist.stream.reduce_scatter(part, whole)
    assert (part == rank * size).all()
    out = np.empty((size, 2))
    dist.stream.alltoall(out, np.full((size, 2), float(rank)))
    assert out[:, 0].tolist() == list(range(size))
    dist.stream.broadcast(part, 0)
    dist.stream.reduce(part)
    dist.stream.gather(part, [] if rank == 0 else None)
    dist.stream.send(part, (rank + 1) % size)
    dist.stream.recv(part, (rank - 1) % size)


def test_the_gloo_names_leave_alone_what_others_have_started(rank, size):
    x = np.ones(1)
    dist.init_parallel_env()
    dist.gloo_init_parallel_env(rank, size, "127.0.0.1:0")
    dist.gloo_release()
    dist.all_reduce(x)
    dist.destroy_process_group()
    dist.gloo_init_parallel_env(rank, size, "127.0.0.1:0")
    dist.init_parallel_env()
    dist.gloo_release()
    dist.all_reduce(x)
    assert x[0] == size * size


def test_the_gloo_names_work(rank, size):
    dist.destroy_process_group()
    dist.gloo_init_parallel_env(rank, size, "127.0.0.1:0")
    dist.gloo_barrier()
    dist.gloo_release()
    with pytest.raises(AssertionError, match="gloo context is not initialized"):
        dist.gloo_barrier()
    dist.gloo_release()
    dist.init_parallel_env()
