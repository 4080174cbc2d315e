"""Backend "hpcdist" of torch.distributed: every collective does what torch says, over MPI alone."""

import functools
import inspect
import math
import os
import time
from datetime import timedelta

import pytest
from mpi4py import MPI

torch = pytest.importorskip("torch", minversion="2.11")
dist = torch.distributed
fc = pytest.importorskip("torch.distributed._functional_collectives")

import hpcdist.torch  # noqa: E402
from hpcdist.runtime.torchrun import set_by_hpcdist  # noqa: E402

pytestmark = pytest.mark.filterwarnings(r"ignore:.*torch\.distributed.* deprecated:FutureWarning")
among_several = pytest.mark.mpi(min_size=2)
in_step = pytest.mark.usefixtures("and_torch_goes_on")

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
WHOLE = [torch.bool, *INTEGERS, *UNSIGNED]


@pytest.fixture(scope="module", autouse=True)
def backend(_start):
    dist.init_process_group("hpcdist")
    yield
    dist.destroy_process_group()


@pytest.fixture
def and_torch_goes_on(rank, size):
    """After the test the ranks are in step: nothing is left over from what failed."""
    yield
    x = numbers(rank)
    dist.all_reduce(x)
    assert same(x, sum(numbers(each) for each in range(size)))


@pytest.fixture
def new_group():
    """Make groups that are gone after the test."""
    made = []

    def make(*args, **kwargs):
        made.append(dist.new_group(*args, **kwargs))
        return made[-1]

    yield make
    for group in made:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def numbers(seed, shape=(4,), dtype=torch.float32):
    """Return small numbers, exact in every dtype, that differ from seed to seed."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * (seed + 1) + seed) % 4).reshape(shape).to(dtype)


def blank_like(x):
    """Return zeros of the same layout."""
    blank = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    return blank.copy_(torch.zeros((), dtype=torch.float32).to(x.dtype))


def same(x, y):
    """Say whether two tensors hold the same bytes."""
    x, y = (each.detach().contiguous().reshape(-1) for each in (x, y))
    return x.dtype is y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def at_once(verb, *args, **kwargs):
    verb(*args, **kwargs)


def waited_for(verb, *args, **kwargs):
    work = verb(*args, async_op=True, **kwargs)
    assert work.wait()
    assert work.is_completed()


def as_a_future(verb, *args, **kwargs):
    future = verb(*args, async_op=True, **kwargs).get_future()
    future.wait()
    assert future.done()


# ---- the backend


def test_the_backend_needs_no_address(rank, size):
    assert "MASTER_ADDR" in set_by_hpcdist(os.environ) or "MASTER_ADDR" not in os.environ
    assert dist.get_backend() == "hpcdist"
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    assert dist.is_backend_available("hpcdist")


# ---- reductions


def in_place(op, x, whole, rank, size):
    dist.all_reduce(x, op)
    return x, whole


def on_the_last_rank(op, x, whole, rank, size):
    before = x.clone()
    dist.reduce(x, size - 1, op)
    return x, whole if rank == size - 1 else before


def scattered_from_a_list(op, x, whole, rank, size):
    out = blank_like(x[rank])
    dist.reduce_scatter(out, list(x), op)
    return out, whole[rank]


def scattered(op, x, whole, rank, size):
    out = blank_like(x[rank])
    dist.reduce_scatter_tensor(out, x, op)
    return out, whole[rank]


def scattered_onto_a_view_of_the_input(op, x, whole, rank, size):
    dist.reduce_scatter_tensor(x[rank], x, op)
    return x[rank], whole[rank]


def bitwise(function):
    return lambda stacked: functools.reduce(function, stacked)


REDUCTIONS = [  # operator of torch, the same on stacked wide numbers, its dtypes
    ("SUM", lambda x: x.sum(0), [*WHOLE, *FLOATS, *COMPLEX]),
    ("AVG", lambda x: x.mean(0), [*FLOATS, *COMPLEX]),
    ("PRODUCT", lambda x: x.prod(0), [*WHOLE, *FLOATS]),
    ("MIN", lambda x: x.amin(0), [*WHOLE, *FLOATS]),
    ("MAX", lambda x: x.amax(0), [*WHOLE, *FLOATS]),
    ("BAND", bitwise(torch.bitwise_and), WHOLE),
    ("BOR", bitwise(torch.bitwise_or), WHOLE),
    ("BXOR", bitwise(torch.bitwise_xor), WHOLE),
]


def wide(x):
    if x.is_complex():
        return x.to(torch.complex128)
    return x.to(torch.float64 if x.is_floating_point() else torch.int64)


REDUCED = [
    in_place,
    on_the_last_rank,
    scattered,
    scattered_from_a_list,
    scattered_onto_a_view_of_the_input,
]


def assert_all_reduce(op, given, whole, rank, size):
    dtype = given.dtype
    tolerance = 2 * torch.finfo(dtype).eps if dtype in FLOATS + COMPLEX else 0
    results = [reduced(op, given.clone(), whole.to(dtype), rank, size) for reduced in REDUCED]
    for reduced, (got, wanted) in zip(REDUCED, results, strict=True):
        assert got.dtype is dtype, reduced
        assert ((wide(got) - wide(wanted)).abs() <= tolerance * wide(wanted).abs()).all(), reduced


@pytest.mark.parametrize(
    ("op", "as_torch_does", "dtype"),
    [
        pytest.param(op, do, dtype, id=f"{op}-{dtype}")
        for op, do, dtypes in REDUCTIONS
        for dtype in dtypes
    ],
)
def test_operators_reduce_every_dtype(op, as_torch_does, dtype, rank, size):
    given = [numbers(each, (size, 3), dtype) for each in range(size)]
    whole = as_torch_does(torch.stack([wide(each) for each in given]))
    assert_all_reduce(getattr(dist.ReduceOp, op), given[rank], whole, rank, size)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("a_tensor", [False, True])
def test_a_premultiplied_sum_is_scaled(dtype, a_tensor, rank, size):
    factor = torch.tensor([0.5], dtype=dtype) if a_tensor else 0.5
    whole = 0.5 * sum(wide(numbers(each, (size, 3))) for each in range(size))
    op = dist._make_nccl_premul_sum(factor)
    assert_all_reduce(op, numbers(rank, (size, 3), dtype), whole, rank, size)


@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (2, 3, 4, 5)])
@pytest.mark.parametrize("a_tensor", [False, True])
def test_a_premultiplied_sum_of_a_strided_tensor_is_scaled(shape, a_tensor, rank, size):
    def strided(each):
        return numbers(each, shape[::-1]).permute(tuple(range(len(shape)))[::-1])

    whole = 0.5 * sum(strided(each) for each in range(size))
    op = dist._make_nccl_premul_sum(torch.tensor([0.5]) if a_tensor else 0.5)
    for run in (at_once, waited_for):
        x, y = strided(rank), strided(rank)
        run(dist.all_reduce, x, op)
        run(dist.reduce, y, size - 1, op)
        assert same(x, whole)
        assert same(y, whole if rank == size - 1 else strided(rank))


@among_several
@pytest.mark.usefixtures("and_torch_goes_on")
@pytest.mark.parametrize("count", [3, 300_000])
@pytest.mark.parametrize("op", ["PREMUL_SUM", "AVG", "SUM"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_reduction_that_fails_changes_no_tensor(op, dtype, count, rank, size):
    op = dist._make_nccl_premul_sum(0.5) if op == "PREMUL_SUM" else getattr(dist.ReduceOp, op)
    given = numbers(rank, (count + (rank == 0),), dtype)
    for verb in (dist.all_reduce, functools.partial(dist.reduce, dst=0)):
        for run in (at_once, waited_for):
            x = given.clone()
            with pytest.raises(hpcdist.MismatchError):
                run(verb, x, op=op)
            assert same(x, given)


def test_blocks_of_different_sizes_are_reduced_and_scattered(rank, size):
    given = [[numbers(10 * each + to, (to + 1, 2)) for to in range(size)] for each in range(size)]
    out = torch.zeros(rank + 1, 2)
    dist.reduce_scatter(out, given[rank])
    assert same(out, sum(blocks[rank] for blocks in given))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_tensors_are_summed(rank, size):
    def made_by(each):
        return torch.sparse_coo_tensor([[each, 9]], [1.0 + each, 2.0], (10,))

    x = made_by(rank)
    dist.all_reduce(x)
    assert same(x.to_dense(), sum(made_by(each).to_dense() for each in range(size)))


@in_step
@among_several
@pytest.mark.parametrize(
    "other", [(torch.eye(4), dist.ReduceOp.SUM), (torch.eye(3), dist.ReduceOp.AVG)]
)
def test_ranks_that_mean_different_sums_of_sparse_tensors_hear_of_it(other, rank, size):
    x, op = other if rank == size - 1 else (torch.eye(3), dist.ReduceOp.SUM)
    with pytest.raises(hpcdist.MismatchError, match=r"sparse tensor of \(3, 3\), SUM"):
        dist.all_reduce(x.to_sparse(), op)


def test_coalesced_tensors_are_reduced_like_single_ones(rank, size):
    shapes = [(3,), (2, 2), (), (0,)]
    tensors = [numbers(rank, shape) for shape in shapes]
    dist.all_reduce_coalesced(tensors, dist.ReduceOp.MAX)
    for shape, x in zip(shapes, tensors, strict=True):
        assert same(x, torch.stack([numbers(each, shape) for each in range(size)]).amax(0))


# ---- moving data


def broadcast(run, made, rank, size):
    x = made(rank)
    run(dist.broadcast, x, size - 1)
    return [x], [made(size - 1)]


def all_gather(run, made, rank, size):
    wanted = [made(each) for each in range(size)]
    got = [blank_like(each) for each in wanted]
    run(dist.all_gather, got, made(rank))
    return got, wanted


def all_gather_into_tensor(run, made, rank, size):
    got = torch.stack([blank_like(made(rank))] * size)
    run(dist.all_gather_into_tensor, got, made(rank))
    return got, [made(each) for each in range(size)]


def all_gather_of_a_view_of_the_output(run, made, rank, size):
    got = torch.stack([blank_like(made(rank))] * size)
    got[rank].copy_(made(rank))
    run(dist.all_gather_into_tensor, got, got[rank])
    return got, [made(each) for each in range(size)]


def gather(run, made, rank, size):
    wanted = [made(each) for each in range(size)] if rank == size - 1 else []
    got = [blank_like(each) for each in wanted]
    run(dist.gather, made(rank), got or None, dst=size - 1)
    return got, wanted


def scatter(run, made, rank, size):
    got = blank_like(made(rank))
    run(dist.scatter, got, [made(to) for to in range(size)] if rank == 0 else None, src=0)
    return [got], [made(rank)]


def all_to_all(run, made, rank, size):
    wanted = [made(each + rank) for each in range(size)]
    got = [blank_like(each) for each in wanted]
    run(dist.all_to_all, got, [made(rank + to) for to in range(size)])
    return got, wanted


def all_to_all_single(run, made, rank, size):
    wanted = torch.stack([made(each + rank) for each in range(size)])
    got = blank_like(wanted)
    run(dist.all_to_all_single, got, torch.stack([made(rank + to) for to in range(size)]))
    return got, wanted


LISTS_MOVE = [all_gather, gather, all_to_all]
ALL_MOVE = [
    *LISTS_MOVE,
    broadcast,
    scatter,
    all_gather_into_tensor,
    all_gather_of_a_view_of_the_output,
    all_to_all_single,
]


def assert_they_move(verbs, run, made, rank, size):
    results = [verb(run, made, rank, size) for verb in verbs]
    for verb, (got, wanted) in zip(verbs, results, strict=True):
        assert len(got) == len(wanted), verb
        assert all(same(x, y) for x, y in zip(got, wanted, strict=True)), verb


@pytest.mark.parametrize("dtype", [*WHOLE, *FLOATS, *COMPLEX, *FLOAT8], ids=str)
def test_tensors_of_every_dtype_move(dtype, rank, size):
    assert_they_move(ALL_MOVE, at_once, functools.partial(numbers, dtype=dtype), rank, size)


LAYOUTS = {
    "transposed": lambda seed: numbers(seed, (4, 6)).t(),
    "strided": lambda seed: numbers(seed, (8, 12))[::2, 1::3],
    "a bfloat16 column": lambda seed: numbers(seed, (4, 6), torch.bfloat16)[:, 2],
    "channels last": lambda seed: numbers(seed, (2, 3, 4, 5)).to(memory_format=torch.channels_last),
    "0-d": lambda seed: numbers(seed, ()),
    "empty": lambda seed: numbers(seed, (0, 3)),
    "large": lambda seed: numbers(seed, (300_000,)),
    "requires grad": lambda seed: numbers(seed).requires_grad_(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_every_layout_move(layout, rank, size):
    assert_they_move(ALL_MOVE, waited_for, LAYOUTS[layout], rank, size)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_every_layout_are_reduced(layout, rank, size):
    x = LAYOUTS[layout](rank)
    dist.all_reduce(x)
    assert same(x, sum(LAYOUTS[layout](each) for each in range(size)))
    assert x.requires_grad == (layout == "requires grad")


def test_ranks_may_give_tensors_of_different_shapes(rank, size):
    assert_they_move(LISTS_MOVE, at_once, lambda seed: numbers(seed, (seed % 3, 2)), rank, size)


@pytest.mark.parametrize("run", [waited_for, as_a_future])
def test_everything_moves_asynchronously(run, rank, size):
    assert_they_move(ALL_MOVE, run, numbers, rank, size)


def test_rows_are_exchanged_by_split_sizes(rank, size):
    def rows(source, to):
        return numbers(10 * source + to, (source + 2 * to, 3))

    given = [rows(rank, to) for to in range(size)]
    wanted = [rows(each, rank) for each in range(size)]
    got = torch.zeros(sum(map(len, wanted)), 3)
    dist.all_to_all_single(
        got, torch.cat(given), [len(each) for each in wanted], [len(each) for each in given]
    )
    assert same(got, torch.cat(wanted))


def test_coalesced_tensors_are_gathered_like_single_ones(rank, size):
    shapes = [(3,), (2, 2)]
    got = [[torch.zeros(shape) for shape in shapes] for _ in range(size)]
    dist.all_gather_coalesced(got, [numbers(rank, shape) for shape in shapes])
    for source, tensors in enumerate(got):
        assert all(same(x, numbers(source, x.shape)) for x in tensors)


@pytest.mark.parametrize("async_ops", [False, True])
def test_a_coalescing_block_issues_its_collectives_together(async_ops, rank, size):
    reduced = [numbers(rank + number, (5,)) for number in range(3)]
    gathered = [torch.zeros(size, 2) for _ in range(3)]
    scattered = [torch.zeros(2) for _ in range(3)]

    def block(verb, *columns):
        with dist._coalescing_manager(async_ops=async_ops) as all_of_them:
            for tensors in zip(*columns, strict=True):
                verb(*tensors)
        if async_ops:
            all_of_them.wait()

    block(dist.all_reduce, reduced)
    block(dist.all_gather_into_tensor, gathered, [numbers(rank + each, (2,)) for each in range(3)])
    block(
        dist.reduce_scatter_tensor,
        scattered,
        [numbers(rank + each, (size, 2)) for each in range(3)],
    )
    for number in range(3):
        others = [each + number for each in range(size)]
        assert same(reduced[number], sum(numbers(each, (5,)) for each in others))
        assert same(gathered[number], torch.stack([numbers(each, (2,)) for each in others]))
        assert same(scattered[number], sum(numbers(each, (size, 2)) for each in others)[rank])


@pytest.mark.parametrize("run", [at_once, waited_for])
def test_nobody_leaves_a_barrier_before_all_have_come(run, rank, size):
    if rank == size - 1:
        time.sleep(0.2)
    came = time.monotonic()
    run(dist.barrier)
    left = time.monotonic()
    assert left >= max(MPI.COMM_WORLD.allgather(came))


def test_a_parameter_is_written_without_touching_its_graph(rank, size):
    leaf = torch.nn.Parameter(torch.full((3,), rank + 1.0))
    gathered = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(gathered, leaf)
    dist.all_reduce(leaf)
    assert leaf.is_leaf
    assert not any(each.requires_grad for each in gathered)
    (leaf * 2).sum().backward()
    dist.all_reduce(leaf.grad, dist.ReduceOp.AVG)
    assert leaf.tolist() == [size * (size + 1) / 2] * 3
    assert leaf.grad.tolist() == [2.0] * 3


def test_the_memory_of_a_tensor_can_be_freed_after_a_collective(rank, size):
    x, rows = numbers(rank), torch.zeros(size, 4)
    dist.all_reduce(x)
    dist.all_gather_into_tensor(rows, x)
    for each in (x, rows):
        each.untyped_storage().resize_(0)  # as FSDP does
        assert each.untyped_storage().nbytes() == 0


# ---- messages


@among_several
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, *FLOAT8], ids=str)
def test_messages_of_every_dtype_arrive(dtype, rank, size):
    got = blank_like(numbers(0, (6,), dtype))
    work = dist.isend(numbers(rank, (6,), dtype), (rank + 1) % size)
    assert dist.recv(got, (rank - 1) % size) == (rank - 1) % size
    work.wait()
    assert same(got, numbers((rank - 1) % size, (6,), dtype))


@among_several
@pytest.mark.parametrize("layout", LAYOUTS)
def test_messages_of_every_layout_arrive_even_if_all_ranks_send_first(layout, rank, size):
    made, source = LAYOUTS[layout], (rank - 1) % size
    dist.send(made(rank), (rank + 1) % size)
    got = blank_like(made(source))
    dist.recv(got, source)
    assert same(got, made(source))


@among_several
@pytest.mark.parametrize("any_source", [None, "irecv"])
def test_a_message_from_any_rank_names_its_sender(any_source, rank, size):
    if rank:
        dist.send(torch.full((2,), float(rank)), 0)
        return
    senders = set()
    for _ in range(size - 1):
        got = torch.zeros(2)
        if any_source is None:
            sender = dist.recv(got)
        else:
            work = dist.irecv(got)
            work.wait()
            sender = work._source_rank()
        assert got.tolist() == [sender, sender]
        senders.add(sender)
    assert senders == set(range(1, size))


@among_several
def test_tags_select_messages(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    sends = [dist.isend(torch.tensor([float(tag)]), right, tag=tag) for tag in (1, 2, 3)]
    for tag in (3, 1, 2):
        got = torch.zeros(1)
        dist.recv(got, left, tag=tag)
        assert got.item() == tag
    for work in sends:
        work.wait()


@among_several
@pytest.mark.parametrize("sends_first", [True, False])
@pytest.mark.parametrize("count", [3, 200_000])
def test_a_batch_of_messages_turns_a_ring(sends_first, count, rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    got = [torch.zeros(count), torch.zeros(count)]
    batch = [
        dist.P2POp(dist.isend, torch.full((count,), rank + 0.25), right),
        dist.P2POp(dist.isend, torch.full((count,), rank + 0.5), right),
        dist.P2POp(dist.irecv, got[0], left),
        dist.P2POp(dist.irecv, got[1], left),
    ]
    for work in dist.batch_isend_irecv(batch if sends_first else batch[2:] + batch[:2]):
        work.wait()
    assert [set(x.tolist()) for x in got] == [{left + 0.25}, {left + 0.5}]


# ---- objects


def test_objects_move(rank, size):
    def made_by(each):
        return {"rank": each, "tensor": torch.arange(each * 1000)}

    def equal(got, each):
        return got["rank"] == each and torch.equal(got["tensor"], made_by(each)["tensor"])

    everywhere, at_root = [None] * size, [None] * size
    dist.all_gather_object(everywhere, made_by(rank))
    dist.gather_object(made_by(rank), at_root if rank == size - 1 else None, dst=size - 1)
    assert all(equal(got, each) for each, got in enumerate(everywhere))
    assert all(equal(got, each) for each, got in enumerate(at_root) if rank == size - 1)
    shared = [made_by(7), "text"] if rank == 0 else [None, None]
    dist.broadcast_object_list(shared, src=0)
    assert equal(shared[0], 7)
    assert shared[1] == "text"
    own = [None]
    dist.scatter_object_list(own, [made_by(each) for each in range(size)], src=size - 1)
    assert equal(own[0], rank)


@among_several
def test_lists_of_objects_are_sent(rank, size):
    for turn in range(2):
        if rank % 2 == turn and rank + 1 < size:
            dist.send_object_list([rank, {"to": rank + 1}], rank + 1)
        if rank % 2 != turn and rank > 0:
            got = [None, None]
            assert dist.recv_object_list(got, rank - 1) == rank - 1
            assert got == [rank - 1, {"to": rank}]


# ---- asynchronous operations


def test_works_take_effect_in_the_order_of_their_calls_and_are_waited_for_in_any(rank, size):
    x = torch.tensor([rank + 1.0])
    works = [
        dist.all_reduce(x, async_op=True),
        dist.all_reduce(x, dist.ReduceOp.PRODUCT, async_op=True),
        dist.broadcast(x, size - 1, async_op=True),
        dist.barrier(async_op=True),
    ]
    for work in reversed(works):
        work.wait()
    assert x.item() == (size * (size + 1) / 2) ** size


def _halved_sum(x, out):
    return dist.all_reduce(x, dist._make_nccl_premul_sum(0.5), async_op=True)


def _halved_blocks(x, out):
    op = dist._make_nccl_premul_sum(0.5)
    return dist.reduce_scatter_tensor(out, x, op, async_op=True)


@pytest.mark.parametrize("follow", [_halved_sum, _halved_blocks])
def test_a_work_takes_what_the_works_before_it_leave(follow, rank, size):
    x, out = torch.full((size * 1000,), rank + 1.0), torch.zeros(1000)
    if rank == size - 1:
        time.sleep(0.2)  # so that the others have called both before either begins
    works = [dist.all_reduce(x, dist.ReduceOp.PRODUCT, async_op=True), follow(x, out)]
    for work in works:
        work.wait()
    got = x if follow is _halved_sum else out
    assert set(got.tolist()) == {size * math.factorial(size) / 2}


def test_the_future_of_a_work_holds_its_tensors(rank, size):
    x = numbers(rank)
    work = dist.all_reduce(x, async_op=True)
    (got,) = work.get_future().wait()
    assert got.data_ptr() == x.data_ptr()
    assert same(got, sum(numbers(each) for each in range(size)))
    (again,) = work.get_future().value()
    assert again.data_ptr() == x.data_ptr()
    assert work.is_success()


def test_futures_are_chained(rank, size):
    tensors = [numbers(rank + number) for number in range(4)]
    futures = [
        dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
        for x in tensors
    ]
    for number, future in enumerate(torch.futures.collect_all(futures).wait()):
        assert same(future.wait(), 2 * sum(numbers(each + number) for each in range(size)))


def test_a_callback_issues_collectives_of_its_own(rank, size):
    def sum_again(done):
        (x,) = done.value()
        dist.all_reduce(x)  # at once
        return x

    def and_again(done):
        return dist.all_reduce(done.value(), async_op=True).get_future()

    given = [numbers(rank + number) for number in range(3)]
    futures = [
        dist.all_reduce(x, async_op=True).get_future().then(sum_again).then(and_again)
        for x in given
    ]
    dist.all_reduce(torch.ones(1))
    for number, future in enumerate(futures):
        (got,) = future.wait().wait()
        assert same(got, size**2 * sum(numbers(each + number) for each in range(size)))


def test_an_exception_of_a_callback_is_raised_by_its_future(rank, size):
    def fail(done):
        raise KeyError("of the callback")

    future = dist.all_reduce(numbers(rank), async_op=True).get_future().then(fail)
    with pytest.raises(Exception, match="of the callback"):
        future.wait()


def test_works_need_not_be_waited_for(rank, size):
    tensors = [numbers(rank, (5000,)) for _ in range(20)]
    for x in tensors:
        dist.all_reduce(x, async_op=True)
    dist.barrier()
    wanted = sum(numbers(each, (5000,)) for each in range(size))
    assert all(same(x, wanted) for x in tensors)


# ---- groups


@pytest.mark.parametrize("alone", [False, True])
def test_a_sub_group_works_among_its_members(alone, rank, size, new_group):
    halves = [sorted(set(range(0, size, 2))), sorted(set(range(1, size, 2)))]
    if alone:
        made = [
            new_group(half, use_local_synchronization=True) if rank in half else None
            for half in halves
        ]
    else:
        made = [new_group(half) if half else None for half in halves]
    members, group = halves[rank % 2], made[rank % 2]
    x, got = numbers(rank), [torch.zeros(4) for _ in members]
    dist.all_gather(got, x, group=group)
    assert all(same(y, numbers(each)) for y, each in zip(got, members, strict=True))
    dist.broadcast(x, members[-1], group=group)
    assert same(x, numbers(members[-1]))
    dist.broadcast(x, group_src=0, group=group)
    dist.all_reduce(x, group=group)
    assert same(x, len(members) * numbers(members[-1]))
    objects = [None] * len(members)
    dist.all_gather_object(objects, rank, group=group)
    assert objects == members == dist.get_process_group_ranks(group)
    assert dist.get_group_rank(group, rank) == members.index(rank) == group.rank()
    assert group.size() == len(members)


@among_several
def test_messages_inside_a_sub_group_name_ranks_of_the_world(rank, size, new_group):
    members = list(range(1, size))
    group = new_group(members)
    if rank == 0:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
    elif rank > 1:
        dist.send(numbers(rank), 1, group=group)
    else:
        senders = set()
        for _ in range(size - 2):
            got = torch.zeros(4)
            sender = dist.recv(got, group=group)
            assert same(got, numbers(sender))
            senders.add(sender)
        assert senders == set(members[1:])


def test_overlapping_groups_are_used_asynchronously_in_another_order_on_every_rank(
    rank, size, new_group
):
    pairs = sorted({tuple(sorted({each, (each + 1) % size})) for each in range(size)})
    groups = [(new_group(pair), pair) for pair in pairs]
    groups = [(group, pair) for group, pair in groups if rank in pair]
    for turn in range(5):
        order = groups if (rank + turn) % 2 else groups[::-1]
        tensors = [torch.full((2000,), rank + 1.0) for _ in order]
        works = [
            dist.all_reduce(x, group=group, async_op=True)
            for x, (group, _) in zip(tensors, order, strict=True)
        ]
        for work in works:
            work.wait()
        for x, (_, pair) in zip(tensors, order, strict=True):
            assert (x == sum(pair) + len(pair)).all()


def test_groups_of_the_same_ranks_do_not_mix(rank, size, new_group):
    groups = [new_group(), new_group(list(range(size))), new_group(use_local_synchronization=True)]
    order = list(enumerate(groups))[:: 1 if rank % 2 else -1]
    tensors = {number: torch.full((3,), 10.0**number) for number, _ in order}
    works = [dist.all_reduce(tensors[number], group=g, async_op=True) for number, g in order]
    for work in works:
        work.wait()
    assert all((tensors[number] == size * 10.0**number).all() for number in tensors)


def test_subgroups_of_one_rank_are_made_together(rank, size):
    mine, groups = dist.new_subgroups(1)
    x = numbers(rank)
    dist.all_reduce(x, group=mine)
    assert same(x, numbers(rank))
    assert len(groups) == size
    dist.destroy_process_group(mine)


def test_a_group_of_hpcdist_is_a_group_of_torch(rank, size):
    pair = hpcdist.new_group(sorted({0, size - 1}))
    if rank in pair.ranks:
        group = hpcdist.torch.process_group_of(pair)
        assert group is hpcdist.torch.process_group_of(pair)
        x = numbers(rank)
        dist.all_reduce(x, group=group)
        assert same(x, sum(numbers(each) for each in {0, size - 1}))
    hpcdist.destroy_process_group(pair)


@among_several
@pytest.mark.parametrize("make", ["by hpcdist", "by torch"])
def test_a_group_keeps_the_order_of_its_ranks(rank, size, new_group, make):
    backwards = list(reversed(range(size)))
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        pytest.skip("this torch sorts the ranks")
    if make == "by hpcdist":
        split = hpcdist.init_parallel_env().split(0, key=-rank)
        group = hpcdist.torch.process_group_of(split)
        assert group is hpcdist.torch.process_group_of(split)
        hpcdist.destroy_process_group(split)
    else:
        group = new_group(backwards, sort_ranks=False)
    assert dist.get_process_group_ranks(group) == backwards
    assert dist.get_rank(group) == size - 1 - rank
    everyones = torch.empty(size, dtype=torch.int64)
    dist.all_gather_into_tensor(everyones, torch.tensor([rank]), group=group)
    assert everyones.tolist() == backwards
    x = torch.tensor([rank + 1])
    dist.broadcast(x, 0, group=group)
    assert x.item() == 1


@among_several
def test_a_torch_that_sorts_ranks_is_refused_where_their_order_differs(rank, size, monkeypatch):
    monkeypatch.setattr(dist, "new_group", lambda ranks, backend=None: None)
    split = hpcdist.init_parallel_env().split(0, key=-rank)
    with pytest.raises(hpcdist.UsageError, match="cannot keep the order of the ranks"):
        hpcdist.torch.process_group_of(split)
    hpcdist.destroy_process_group(split)


# ---- functional collectives


def _uneven(rank, size):
    return [rank + 1] * size, [to + 1 for to in range(size)]


def _sent(xs, rank):
    starts = [sum(range(1, to + 1)) for to in range(len(xs) + 1)]
    return torch.cat([x[starts[rank] : starts[rank + 1]] for x in xs])


def _added(tensors):
    first, second = tensors
    return first + second


FUNCTIONAL = {  # x, rank, size -> what this rank gets; the x of all ranks, rank -> the same
    "all_reduce": (
        lambda x, rank, size: fc.all_reduce(x, "sum", dist.group.WORLD),
        lambda xs, rank: sum(xs),
    ),
    "all_gather_tensor": (
        lambda x, rank, size: fc.all_gather_tensor(x, 0, dist.group.WORLD),
        lambda xs, rank: torch.cat(xs),
    ),
    "all_gather_tensor of columns": (
        lambda x, rank, size: fc.all_gather_tensor(x, 1, dist.group.WORLD),
        lambda xs, rank: torch.cat(xs, 1),
    ),
    "reduce_scatter_tensor": (
        lambda x, rank, size: fc.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD),
        lambda xs, rank: sum(xs).chunk(len(xs))[rank],
    ),
    "reduce_scatter_tensor of columns": (
        lambda x, rank, size: fc.reduce_scatter_tensor(x, "sum", 1, dist.group.WORLD),
        lambda xs, rank: sum(xs).chunk(len(xs), 1)[rank],
    ),
    "all_to_all_single": (
        lambda x, rank, size: fc.all_to_all_single(x, None, None, dist.group.WORLD),
        lambda xs, rank: torch.cat([x.chunk(len(xs))[rank] for x in xs]),
    ),
    "all_to_all_single with split sizes": (
        lambda x, rank, size: fc.all_to_all_single(
            x[: sum(range(size + 1))], *_uneven(rank, size), dist.group.WORLD
        ),
        _sent,
    ),
    "all_reduce_coalesced": (
        lambda x, rank, size: _added(fc.all_reduce_coalesced([x, x + 1], "sum", dist.group.WORLD)),
        lambda xs, rank: sum(2 * x + 1 for x in xs),
    ),
    "all_gather_into_tensor_coalesced": (
        lambda x, rank, size: _added(
            fc.all_gather_into_tensor_coalesced([x, x + 1], dist.group.WORLD)
        ),
        lambda xs, rank: 2 * torch.cat(xs) + 1,
    ),
    "reduce_scatter_tensor_coalesced": (
        lambda x, rank, size: _added(
            fc.reduce_scatter_tensor_coalesced([x, x + 1], "sum", [0, 0], dist.group.WORLD)
        ),
        lambda xs, rank: sum(2 * x + 1 for x in xs).chunk(len(xs))[rank],
    ),
    "permute_tensor": (
        lambda x, rank, size: fc.permute_tensor(
            x.flatten(), [(each + 1) % size for each in range(size)], dist.group.WORLD
        ),
        lambda xs, rank: xs[rank - 1].flatten(),
    ),
    "broadcast": (
        lambda x, rank, size: fc.broadcast(x, size - 1, dist.group.WORLD),
        lambda xs, rank: xs[-1],
    ),
}


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_collectives_return_new_tensors(name, rank, size):
    ours, torchs = FUNCTIONAL[name]
    given = [numbers(each, (12, 12)) for each in range(size)]
    got = ours(given[rank], rank, size) * 1
    assert same(got, torchs(given, rank))
    assert same(given[rank], numbers(rank, (12, 12)))


@pytest.mark.parametrize("name", sorted(FUNCTIONAL.keys() - {"broadcast"}))
def test_gradients_flow_through_functional_collectives(name, rank, size):
    ours, torchs = FUNCTIONAL[name]
    given = [numbers(each, (12, 12)).requires_grad_() for each in range(size)]
    results = [torchs(given, each) for each in range(size)]
    loss = sum((y * numbers(each + 5, y.shape)).sum() for each, y in enumerate(results))
    (wanted,) = torch.autograd.grad(loss, given[rank])
    x = numbers(rank, (12, 12)).requires_grad_()
    y = ours(x, rank, size)
    (y * numbers(rank + 5, y.shape)).sum().backward()
    assert wanted.any()
    assert same(x.grad, wanted)


def compiled_program(x):
    y = fc.all_reduce(x * 2, "sum", dist.group.WORLD)
    y = fc.all_gather_tensor(y + 1, 0, dist.group.WORLD)
    y = fc.reduce_scatter_tensor(y.sin(), "sum", 0, dist.group.WORLD)
    return fc.all_to_all_single(y, None, None, dist.group.WORLD) - x


def program_that_writes(x):
    y = x * 2
    dist.all_reduce(y)
    gathered = torch.empty(y.shape[0] * dist.get_world_size(), y.shape[1])
    dist.all_gather_into_tensor(gathered, y)
    return gathered.cos()


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("program", [compiled_program, program_that_writes])
@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_compiled_programs_communicate(program, compiler, rank, size):
    torch._dynamo.reset()
    compiled = torch.compile(program, backend=compiler, fullgraph=True)
    for seed in (rank, rank + 1):
        x = numbers(seed, (12, 3))
        torch.testing.assert_close(compiled(x), program(x))


def program_that_dynamo_leaves_to_python(x):
    rank, size = dist.get_rank(), dist.get_world_size()
    y, received = x * 2, torch.zeros_like(x)
    dist.broadcast(y, 0)
    work = dist.all_reduce(y, async_op=True)
    z = x.sin()
    work.wait()
    works = dist.isend(y + rank, (rank + 1) % size), dist.irecv(received, (rank - 1) % size)
    for each in works:
        each.wait()
    dist.reduce(received, 0)
    given = [x + each for each in range(size)] if rank == 0 else None
    dist.scatter(x, given, 0)
    return y + z + received + x


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_compiled_programs_leave_to_python_what_dynamo_does_not_know(rank):
    torch._dynamo.reset()
    compiled = torch.compile(program_that_dynamo_leaves_to_python, backend="eager")
    for seed in (rank, rank + 1):
        x = numbers(seed, (12, 3))
        torch.testing.assert_close(
            compiled(x.clone()), program_that_dynamo_leaves_to_python(x.clone())
        )


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_a_compiled_module_with_buffers_trains_on_all_ranks(rank):
    states = []
    for compile_ in (lambda each: each, lambda each: torch.compile(each, backend="eager")):
        torch._dynamo.reset()
        torch.manual_seed(3)
        layers = torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).double())
        optimizer, called = torch.optim.SGD(model.parameters(), 0.1), compile_(model)
        for step in range(2):
            optimizer.zero_grad()
            called(numbers(rank + step, (12, 3), torch.float64)).square().sum().backward()
            optimizer.step()
        states.append(model.state_dict())
    torch.testing.assert_close(*states)


# ---- errors


DISAGREEMENTS = {
    "all_reduce": lambda n, size: (dist.all_reduce, torch.ones(n)),
    "all_reduce of dtypes": lambda n, size: (
        dist.all_reduce,
        torch.ones(3, dtype=torch.float32 if n == 3 else torch.float64),
    ),
    "all_reduce of operators": lambda n, size: (
        dist.all_reduce,
        torch.ones(3),
        dist.ReduceOp.SUM if n == 3 else dist.ReduceOp.MAX,
    ),
    "broadcast": lambda n, size: (dist.broadcast, torch.ones(n), 0),
    "all_gather_into_tensor": lambda n, size: (
        dist.all_gather_into_tensor,
        torch.ones(size * n),
        torch.ones(n),
    ),
    "reduce_scatter_tensor": lambda n, size: (
        dist.reduce_scatter_tensor,
        torch.ones(n),
        torch.ones(size * n),
    ),
    "all_to_all_single": lambda n, size: (
        dist.all_to_all_single,
        torch.ones(size * n),
        torch.ones(size * n),
    ),
}


@in_step
@among_several
@pytest.mark.parametrize("run", [at_once, waited_for, as_a_future])
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree_learn_it_all(name, run, rank, size):
    verb, *args = DISAGREEMENTS[name](3 + (rank == size - 1), size)
    # C++ carries the text of an error through a future, not its class
    errors = (RuntimeError, hpcdist.MismatchError) if run is as_a_future else hpcdist.MismatchError

    def disagree():
        run(verb, *args)
        dist.barrier()  # where the root of a small broadcast hears of it

    with pytest.raises(errors, match="the ranks disagree"):
        disagree()


@in_step
@among_several
def test_the_error_of_a_work_is_raised_by_every_wait(rank, size):
    work = dist.all_reduce(torch.ones(3 + rank), async_op=True)
    future = work.get_future()
    seen = future.then(lambda done: done.value())
    for _ in range(2):
        with pytest.raises(hpcdist.MismatchError):
            work.wait()
    for each in (future, seen):
        with pytest.raises(RuntimeError, match="the ranks disagree"):
            each.wait()
    assert work.is_completed()
    assert not work.is_success()


WRONG_ON_ONE_RANK = {
    "no room in the output": lambda bad, size: (
        dist.all_gather_into_tensor,
        torch.ones(3 * size + bad),
        torch.ones(3),
    ),
    "a list that is too short": lambda bad, size: (
        dist.all_gather,
        [torch.zeros(3) for _ in range(size - bad)],
        torch.ones(3),
    ),
    "a part of another size than its block": lambda bad, size: (
        dist.reduce_scatter,
        torch.zeros(dist.get_rank() + 1 + bad),
        [torch.ones(each + 1) for each in range(size)],
    ),
    "an operator that sparse tensors have not": lambda bad, size: (
        dist.all_reduce,
        torch.eye(3).to_sparse(),
        dist.ReduceOp.MAX if bad else dist.ReduceOp.SUM,
    ),
    "split sizes that do not add up": lambda bad, size: (
        dist.all_to_all_single,
        torch.ones(size),
        torch.ones(size),
        [1] * size,
        [2] * size if bad else [1] * size,
    ),
}


@in_step
@among_several
@pytest.mark.parametrize("run", [at_once, waited_for])
@pytest.mark.parametrize("name", WRONG_ON_ONE_RANK)
def test_a_mistake_of_one_rank_is_an_error_on_every_rank(name, run, rank, size):
    verb, *args = WRONG_ON_ONE_RANK[name](rank == size - 1, size)
    with pytest.raises(hpcdist.UsageError if rank == size - 1 else hpcdist.RemoteError):
        run(verb, *args)


@in_step
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dist.all_reduce(torch.ones(3, device="meta")), "meta"),
        (lambda: dist.all_reduce(torch.ones(3).to(torch.float8_e5m2)), "float8_e5m2"),
        (lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND), "BAND.*float32"),
        (lambda: dist.all_reduce(torch.ones(3, dtype=bool), dist.ReduceOp.AVG), "AVG.*bool"),
        (lambda: dist.all_reduce(torch.ones(3, dtype=torch.cfloat), dist.ReduceOp.MAX), "complex"),
        (lambda: dist.broadcast(torch.ones(3), 99), "99"),
        (lambda: dist.all_reduce([torch.ones(3)]), "tensor"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_sent(call, words, rank):
    with pytest.raises((ValueError, TypeError), match=words):
        call()


@in_step
@among_several
def test_the_time_limit_of_a_group_is_kept(rank, size, new_group):
    group = new_group(timeout=timedelta(seconds=0.3))
    x = torch.ones(3)
    if rank == size - 1:
        time.sleep(1)
    else:
        with pytest.raises(hpcdist.CollectiveTimeout):
            dist.all_reduce(x, group=group)
    MPI.COMM_WORLD.Barrier()


@in_step
def test_a_wait_that_times_out_may_be_repeated(rank, size):
    x = numbers(rank)
    for other in range(rank if rank == size - 1 else 0):
        MPI.COMM_WORLD.recv(source=other)
    work = dist.all_reduce(x, async_op=True)
    if rank != size - 1:
        with pytest.raises(hpcdist.CollectiveTimeout):
            work.wait(timedelta(seconds=0.05))
        MPI.COMM_WORLD.send(None, size - 1)
    work.wait()
    assert same(x, sum(numbers(each) for each in range(size)))


@in_step
def test_a_destroyed_group_is_refused(rank, size):
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)
    for use in (dist.all_reduce, dist.barrier):
        with pytest.raises((ValueError, RuntimeError), match=r"(?i)invalid|not initialized"):
            use(*[torch.ones(1)] * (use is dist.all_reduce), group=group)
    with pytest.raises(ValueError, match="Invalid process group"):
        dist.destroy_process_group(group)


# ---- the end, and a new beginning


@pytest.mark.parametrize(
    "arguments",
    [
        {"backend": "hpcdist"},
        {"backend": "hpcdist", "init_method": "hpcdist://"},
        {"backend": "cpu:hpcdist"},
        {"backend": "hpcdist", "timeout": timedelta(seconds=20)},
    ],
)
def test_torch_ends_and_begins_again(arguments, rank, size):
    pair = tuple({0, size - 1})
    left_over = [dist.new_group(pair), dist.new_group(use_local_synchronization=True)]
    work = dist.all_reduce(torch.ones(1000), group=left_over[1], async_op=True)
    dist.destroy_process_group()
    assert work.is_completed()
    assert not dist.is_initialized()
    hpcdist.barrier()
    dist.init_process_group(**arguments)
    x = numbers(rank)
    dist.all_reduce(x)
    assert same(x, sum(numbers(each) for each in range(size)))
    group = dist.new_group(pair)
    if rank in pair:
        dist.all_reduce(x, group=group)
        assert same(x, len(pair) * sum(numbers(each) for each in range(size)))


def test_what_torch_is_told_about_ranks_must_be_what_mpi_knows(rank, size):
    dist.destroy_process_group()
    with pytest.raises(hpcdist.UsageError, match="leave rank and world_size to MPI"):
        dist.init_process_group("hpcdist", store=dist.HashStore(), rank=rank, world_size=size + 1)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("hpcdist", store=dist.HashStore(), rank=rank, world_size=size)
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [size, size]
