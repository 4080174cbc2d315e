"""A process group of hpcdist in the eyes of torch's tools: its store, its backend, its dispatcher.

What a tool sees of a program on hpcdist is what it sees of the same program on gloo.
"""

import gc
import os
import time
from datetime import timedelta

import pytest
from event_checks import Timeline, of_all_ranks
from mpi4py import MPI

torch = pytest.importorskip("torch", minversion="2.11")

from torch._C._distributed_c10d import (  # noqa: E402
    AllgatherOptions,
    AllreduceOptions,
    FakeWork,
)
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh  # noqa: E402
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from torch.utils._python_dispatch import (  # noqa: E402
    TorchDispatchMode,
    return_and_correct_aliasing,
)
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten  # noqa: E402

import hpcdist.torch  # noqa: E402
from hpcdist.torch.behind import PYTHON_MAKES_BACKENDS  # noqa: E402
from hpcdist.torch.verbs import torchs_own  # noqa: E402

dist = torch.distributed
c10d = dist.distributed_c10d

pytestmark = pytest.mark.filterwarnings(
    r"ignore:.*torch\.distributed.* deprecated:FutureWarning",
    "ignore:.*Please use `torch:FutureWarning",
)
among_several = pytest.mark.mpi(min_size=2)

GLOO_KNOWS_ALL_TO_ALL = hasattr(c10d.ProcessGroup, "all_gather_single")  # both since torch 2.13


@pytest.fixture(scope="module", autouse=True)
def backend(_start):
    dist.init_process_group("hpcdist")
    yield
    dist.destroy_process_group()


@pytest.fixture
def new_group():
    """Make groups of all ranks that are gone after the test."""
    made = []

    def make(**options):
        made.append(dist.new_group(**options))
        return made[-1]

    yield make
    for group in made:
        dist.destroy_process_group(group)


@pytest.fixture
def both(new_group):
    """Return a group of hpcdist and one of gloo."""
    return new_group(backend="hpcdist"), new_group(backend="gloo")


def numbers(rank, count=6):
    return torch.arange(float(count)) + rank


# ---- the store


def test_what_one_rank_stores_all_ranks_read(rank, size):
    store = c10d._get_default_store()
    store.set(f"from {rank}", f"said {rank}")
    store.wait([f"from {each}" for each in range(size)])
    assert [store.get(f"from {each}") for each in range(size)] == [
        f"said {each}".encode() for each in range(size)
    ]
    assert store.add("sum", rank + 1) >= rank + 1
    dist.barrier()
    assert store.add("sum", 0) == size * (size + 1) // 2


def test_another_backend_meets_over_the_store(new_group, rank, size):
    group = new_group(backend="gloo")
    assert dist.get_backend(group) == "gloo"
    x = numbers(rank)
    dist.all_reduce(x, group=group)
    assert torch.equal(x, sum(map(numbers, range(size))))


@pytest.mark.parametrize("init_method", ["env://", "hpcdist://"])
def test_torchs_own_backend_needs_no_address(init_method, rank, size):
    dist.destroy_process_group()
    try:
        dist.init_process_group("gloo", init_method=init_method)
        x = numbers(rank)
        dist.all_reduce(x)
        assert torch.equal(x, sum(map(numbers, range(size))))
        dist.destroy_process_group()
    finally:
        if not dist.is_initialized():
            dist.init_process_group("hpcdist")


def test_a_new_beginning_has_a_store_of_its_own(rank, size):
    for turn in range(3):
        store = c10d._get_default_store()
        assert not store.check(["turn"])
        dist.barrier()
        if rank == 0:
            store.set("turn", str(turn))
        assert store.get("turn") == str(turn).encode()
        x = numbers(rank)
        dist.all_reduce(x, group=dist.new_group(backend="gloo"))
        assert torch.equal(x, sum(map(numbers, range(size))))
        dist.destroy_process_group()
        dist.init_process_group("hpcdist")


@pytest.mark.thorough
def test_an_end_leaves_nothing_open(rank, size):
    def open_files():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def begin_anew():
        dist.destroy_process_group()
        dist.init_process_group("hpcdist")
        dist.barrier()
        return open_files()

    begin_anew()
    first, *others = (begin_anew() for _ in range(4))
    assert min(others) <= first  # MPI may open a connection meanwhile: once, not each time


def test_a_group_that_somebody_keeps_lets_go_of_its_store():
    """Caches of torch keep groups for long; the first rank would run out of open files."""
    kept = c10d._get_default_group()
    assert kept.get_group_store() is not None
    dist.destroy_process_group()
    assert kept.get_group_store() is None
    dist.init_process_group("hpcdist")


def test_a_store_of_the_user_is_taken(folder, rank, size):
    dist.destroy_process_group()
    try:
        store = dist.FileStore(f"{folder}.store", size)
        dist.init_process_group("hpcdist", store=store, rank=rank, world_size=size)
        x = numbers(rank)
        dist.all_reduce(x, group=dist.new_group(backend="gloo"))
        assert torch.equal(x, sum(map(numbers, range(size))))
    finally:
        dist.destroy_process_group()
        dist.init_process_group("hpcdist")


@among_several
def test_a_store_that_a_rank_cannot_reach_is_an_error_on_every_rank(monkeypatch, rank, size):
    if rank == size - 1:

        def refuse(host, port):
            raise RuntimeError("no route to host")

        monkeypatch.setattr(hpcdist.torch.stores, "_connect", refuse)
    dist.destroy_process_group()
    try:
        with pytest.raises(hpcdist.UsageError, match=f"rank {size - 1} could not reach .*no route"):
            dist.init_process_group("hpcdist")
    finally:
        monkeypatch.undo()
        dist.init_process_group("hpcdist")


# ---- the dispatcher


def every_verb(group, rank, size):
    """Call every verb; return what this rank has got."""
    x, out = numbers(rank), torch.zeros(6 * size)
    blocks = [torch.zeros(6) for _ in range(size)]
    part, exchanged = torch.zeros(6), torch.zeros(6 * size)
    dist.all_reduce(x, group=group)
    dist.broadcast(x, 0, group=group)
    dist.all_gather_into_tensor(out, x + rank, group=group)
    dist.all_gather(blocks, x + rank, group=group)
    dist.reduce_scatter_tensor(part, out, group=group)
    dist.reduce_scatter(part, [each + part for each in blocks], group=group)
    dist.reduce(x, 0, group=group)
    x = torch.zeros(6) if rank else x  # what the others hold after a reduction is not defined
    dist.gather(part, blocks if rank == 0 else None, group=group)
    dist.scatter(part, [each + 1 for each in blocks] if rank == 0 else None, group=group)
    dist.all_to_all_single(exchanged, out + rank, group=group)
    if GLOO_KNOWS_ALL_TO_ALL:
        dist.all_to_all(blocks, list((out - rank).chunk(size)), group=group)
    dist.all_reduce_coalesced([x, part], group=group)
    dist.barrier(group=group)
    work = dist.all_reduce(part, group=group, async_op=True)
    work.wait()
    assert work.is_completed()
    return [x, out, *blocks, part, exchanged]


class Recorder(TorchDispatchMode):
    """Notes the operations of torch.distributed that pass."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.seen.append((func.__name__, len(args)))
        return func(*args, **(kwargs or {}))


def record(function, *args):
    with Recorder() as recorder:
        result = function(*args)
    return result, recorder.seen


def count(function, *args):
    with CommDebugMode() as mode:
        result = function(*args)
    return result, dict(mode.get_comm_counts())


def watch(function, *args):
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        result = function(*args)
    averages = profiler.key_averages()
    return result, {each.key: each.count for each in averages if each.key.startswith("c10d::")}


def inside_one_another(function, *args):
    with Recorder() as outer, CommDebugMode() as counts:
        result, inner = record(function, *args)
    return result, (outer.seen, inner, dict(counts.get_comm_counts()))


@pytest.mark.parametrize("look", [record, count, watch, inside_one_another])
def test_a_tool_sees_what_it_sees_on_gloo(look, both, rank, size):
    ours, gloos = (look(every_verb, group, rank, size) for group in both)
    assert ours[1]
    assert ours[1] == gloos[1]
    assert all(map(torch.equal, ours[0], gloos[0]))


def test_what_is_looked_at_is_what_is_not(rank, size):
    world = dist.group.WORLD
    plain = every_verb(world, rank, size)
    for look in (record, watch):
        assert all(map(torch.equal, plain, look(every_verb, world, rank, size)[0]))


@among_several
def test_messages_are_seen_and_arrive(rank, size):
    def ring():
        work = dist.isend(numbers(rank), (rank + 1) % size)
        got = torch.zeros(6)
        assert dist.recv(got) == (rank - 1) % size
        work.wait()
        return got

    got, seen = record(ring)
    assert torch.equal(got, numbers((rank - 1) % size))
    assert [name for name, _ in seen] == ["send.default", "recv_any_source_.default"]


def test_an_error_is_the_same_where_somebody_looks_on(rank, size):
    for look in (record, watch):
        with pytest.raises(hpcdist.UsageError, match="99"):
            look(dist.reduce_scatter_tensor, torch.ones(99), torch.ones(size))
    x = numbers(rank)
    dist.all_reduce(x)
    assert torch.equal(x, sum(map(numbers, range(size))))


def test_torchs_backend_does_what_is_handed_over_to_it(both, rank, size):
    group, gloo = both
    if not PYTHON_MAKES_BACKENDS:  # as for tensors on GPUs, in the place of which gloo stands here
        cpu = torch.device("cpu")
        kind = c10d.ProcessGroup.BackendType.GLOO
        group._register_backend(cpu, kind, gloo._get_backend(cpu))
    x, gathered = numbers(rank), torch.zeros(6 * size)
    options = AllreduceOptions(), AllgatherOptions()
    torchs_own("allreduce")(group, [x], options[0]).wait()
    torchs_own("all_gather_single")(group, gathered, numbers(rank), options[1]).wait()
    assert torch.equal(x, sum(map(numbers, range(size))))
    assert torch.equal(gathered, torch.cat([numbers(each) for each in range(size)]))


def test_a_mode_may_answer_in_the_place_of_the_group(rank):
    class Answers(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.c10d.allreduce_coalesced_.default:
                return FakeWork().boxed()
            return func(*args, **(kwargs or {}))

    x = numbers(rank)
    with Answers():
        dist.all_reduce_coalesced([x], async_op=True)
    assert torch.equal(x, numbers(rank))


# ---- what tools ask for


def test_a_group_has_a_backend_for_each_device_it_serves(rank, size):
    group = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    assert (backend.rank(), backend.size(), backend.name()) == (rank, size, "hpcdist")
    with pytest.raises(RuntimeError, match="xpu"):
        group._get_backend(torch.device("xpu"))


def test_a_group_tells_its_ranks(rank, size):
    told = repr(dist.group.WORLD)
    assert told.startswith(f"<HpcdistProcessGroup: rank: {rank}, nranks: {size}, ")
    assert told.endswith(f"torch's name {dist.group.WORLD.group_name!r}>")


@pytest.mark.thorough
@among_several
def test_the_time_limit_of_a_group_can_be_changed(new_group, rank, size):
    group = new_group()
    dist.barrier(group=group)
    c10d._set_pg_timeout(timedelta(seconds=0.3), group)
    MPI.COMM_WORLD.Barrier()
    if rank == 0:
        with pytest.raises(hpcdist.CollectiveTimeout, match=r"within 0\.3 s"):
            dist.all_reduce(numbers(rank), group=group)
    MPI.COMM_WORLD.Barrier()


def test_a_destroyed_group_has_no_time_limit_to_change(rank):
    group = dist.new_group()
    dist.destroy_process_group(group)
    for use in (group.set_timeout, group.monitored_barrier):
        with pytest.raises(hpcdist.UsageError, match="destroyed"):
            use(timedelta(seconds=1))


@among_several
def test_a_monitored_barrier_names_the_ranks_that_are_missing(new_group, rank, size):
    group = new_group()
    dist.monitored_barrier(group)
    if rank == size - 1:
        MPI.COMM_WORLD.Barrier()
        with pytest.raises(
            hpcdist.CollectiveTimeout, match=r"timed out in monitoredBarrier.*after"
        ):
            dist.monitored_barrier(group)
    else:
        with pytest.raises(hpcdist.CollectiveTimeout, match=rf"missing ranks: {size - 1}\b"):
            dist.monitored_barrier(group, timedelta(seconds=0.3), wait_all_ranks=True)
        MPI.COMM_WORLD.Barrier()
    time.sleep(0.4)  # longer than the barrier's limit, which is that of no other operation
    x = numbers(rank)
    dist.all_reduce(x, group=group)
    assert torch.equal(x, sum(map(numbers, range(size))))


def test_functional_collectives_write_into_given_tensors(both, rank, size):
    ops, results = torch.ops._c10d_functional, []
    for group in both:
        gathered, part = torch.zeros(6 * size), torch.zeros(6)
        name = group.group_name
        got = ops.all_gather_into_tensor_out(numbers(rank), size, name, out=gathered)
        assert ops.wait_tensor(got).data_ptr() == gathered.data_ptr()
        if hasattr(ops, "reduce_scatter_tensor_out"):
            given = gathered * (rank + 1)
            ops.wait_tensor(ops.reduce_scatter_tensor_out(given, "sum", size, name, out=part))
        results.append((gathered, part))
    assert all(map(torch.equal, *results))
    assert torch.equal(results[0][0], torch.cat([numbers(each) for each in range(size)]))


# ---- averages of integers


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16]


def summed_up(x, rank, size):
    dist.all_reduce(x, dist.ReduceOp.AVG)
    return x, 0, len(x)


def at_the_last(x, rank, size):
    dist.reduce(x, size - 1, dist.ReduceOp.AVG)
    return (x, 0, len(x)) if rank == size - 1 else (x, 0, 0)


def scattered(x, rank, size):
    part = len(x) // size
    out = torch.zeros(part, dtype=x.dtype)
    dist.reduce_scatter_tensor(out, x, dist.ReduceOp.AVG)
    return out, rank * part, (rank + 1) * part


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("reduce", [summed_up, at_the_last, scattered])
def test_an_average_of_integers_is_the_sum_divided_towards_zero(reduce, dtype, rank, size):
    lowest = -7 if dtype.is_signed else 0

    def given(each):
        return torch.arange(3 * size) + lowest + each

    whole = sum(map(given, range(size))).div(size, rounding_mode="trunc")
    got, begin, end = reduce(given(rank).to(dtype), rank, size)
    assert got.dtype is dtype
    assert got[: end - begin].tolist() == whole[begin:end].tolist()


# ---- DTensor


def forget_meshes_of_groups_that_have_ended():
    """torch takes a mesh of an earlier world for one of this, where both have the same ranks."""
    from torch.distributed.tensor import debug

    getattr(debug, "_clear_sharding_prop_cache", lambda: None)()


@among_several
@pytest.mark.parametrize("shape", [(4, 6), (3, 5), (1, 7), (12, 12)])
def test_shards_are_exchanged_and_nothing_is_gathered(shape, rank, size):
    forget_meshes_of_groups_that_have_ended()
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(float(shape[0] * shape[1])).reshape(shape)
    rows = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    columns, there = count(rows.redistribute, mesh, [Shard(1)])
    assert torch.equal(columns.to_local(), distribute_tensor(whole, mesh, [Shard(1)]).to_local())
    _, back = count((columns * columns).sum().backward)
    exchange = torch.ops._dtensor.shard_dim_alltoall
    assert there.keys() == {exchange}
    assert exchange in back
    assert not {each for each in back if "all_gather" in str(each)}
    assert torch.equal(rows.grad.full_tensor(), 2 * whole)


def test_shards_on_another_backend_go_its_own_way(rank, size):
    mesh = init_device_mesh("cpu", (size,), backend_override={0: "gloo"})
    whole = torch.arange(24.0).reshape(4, 6)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(rows.redistribute(mesh, [Shard(1)]).full_tensor(), whole)


# ---- tensors that wrap others


class Pair(torch.Tensor):
    """Two tensors as one, as torchao wraps numbers and their scales; each operation is of both."""

    @staticmethod
    def __new__(cls, a, b):
        shape, named = a.shape, {"dtype": a.dtype, "requires_grad": a.requires_grad}
        return torch.Tensor._make_wrapper_subclass(cls, shape, strides=a.stride(), **named)

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def on(part):
            given = tree_map_only(Pair, lambda each: getattr(each, part), (args, kwargs or {}))
            return tree_flatten(func(*given[0], **given[1]))

        (ours, spec), (others, _) = on("a"), on("b")
        pairs = zip(ours, others, strict=True)
        made = [Pair(a, b) if isinstance(a, torch.Tensor) else a for a, b in pairs]
        return return_and_correct_aliasing(func, args, kwargs, tree_unflatten(made, spec))


def of_every_kind(make, rank, size):
    """Return what each collective writes; `make` makes the tensors."""

    def several(count=3):
        return [make(numbers(rank + each, count)) for each in range(size)]

    x, y, z = (make(numbers(rank)) for _ in range(3))
    dist.all_reduce(x, dist.ReduceOp.MAX)
    work = dist.all_reduce(y, async_op=True)
    dist.broadcast(z, size - 1)
    assert work.wait()
    gathered, scattered, reduced = several(), make(numbers(0, 3)), make(numbers(0, 3))
    dist.all_gather(gathered, make(numbers(rank, 3)))
    dist.scatter(scattered, several() if rank == 0 else None, 0)
    dist.reduce_scatter(reduced, several())
    into = several() if rank == 0 else []
    dist.gather(make(numbers(rank, 3)), into or None, 0)
    exchanged, flat = several(), make(torch.zeros(3 * size))
    dist.all_to_all(exchanged, several())
    dist.all_to_all_single(flat, make(numbers(rank, 3 * size)))
    whole, cut = make(torch.zeros(3 * size)), make(torch.zeros(3))
    dist.all_gather_into_tensor(whole, make(numbers(rank, 3)))
    dist.reduce_scatter_tensor(cut, make(numbers(rank, 3 * size)))
    got = make(torch.zeros(3))
    sent = dist.isend(make(numbers(rank, 3)), (rank + 1) % size)
    dist.recv(got, (rank - 1) % size)
    sent.wait()
    return [x, y, z, *gathered, scattered, reduced, *into, *exchanged, flat, whole, cut, got]


@pytest.mark.parametrize("look", [None, record, watch])
def test_tensors_that_wrap_others_are_sent_as_those(look, rank, size):
    make = lambda a: Pair(a, 10 * a)  # noqa: E731
    found = (look or apart)(of_every_kind, make, rank, size)[0]
    for name, factor in (("a", 1), ("b", 10)):
        expected = of_every_kind(lambda a, factor=factor: factor * a, rank, size)
        assert all(map(torch.equal, [getattr(each, name) for each in found], expected))


def apart(function, *args):
    return function(*args), None


def test_wrapped_tensors_within_wrapped_ones_and_their_futures(rank, size):
    x = Pair(Pair(numbers(rank), numbers(rank + 1)), Pair(numbers(rank + 2), numbers(rank + 3)))
    work = dist.all_reduce(x, async_op=True)
    (written,) = work.get_future().wait()
    assert written is x
    assert work.result() == [x]
    for more, each in enumerate((x.a.a, x.a.b, x.b.a, x.b.b)):
        assert torch.equal(each, sum(numbers(other + more) for other in range(size)))


def test_what_has_no_memory_is_refused_before_anything_is_sent(rank, size):
    import hpcdist

    x = numbers(rank)
    x.untyped_storage().resize_(0)
    wrapped = Pair(numbers(rank), numbers(rank))
    rows = distribute_tensor(numbers(0), init_device_mesh("cpu", (size,)), [Shard(0)])
    for send in (dist.all_reduce, hpcdist.all_reduce, lambda each: record(dist.all_reduce, each)):
        for each in (x, rows) if send is not hpcdist.all_reduce else (x, rows, wrapped):
            with pytest.raises(hpcdist.UsageError, match="has no memory"):
                send(each)
    with pytest.raises(hpcdist.UsageError, match="pass src"):
        dist.recv(wrapped)


# ---- listeners


def test_listeners_of_hpcdist_hear_of_what_torch_calls(rank, size, new_group):
    group, x = new_group(), torch.ones(3)
    recorder = Timeline()
    dist.all_reduce(x, group=group)
    work = dist.broadcast(x, size - 1, group=group, async_op=True)
    work.wait()
    dist.barrier(group)
    messages = [
        dist.P2POp(dist.isend, x, (rank + 1) % size, group),
        dist.P2POp(dist.irecv, torch.empty(3), (rank - 1) % size, group),
    ]
    for work in dist.batch_isend_irecv(messages) if size > 1 else []:
        work.wait()
    found = of_all_ranks(recorder.stop())
    assert not recorder.under_way
    assert [[event["name"] for event in events] for events in found.values()] == [
        [name] * size for name in ("all_reduce", "broadcast", "barrier")
    ]
    for begin, _ in recorder.spans[:2]:
        assert (begin.shape, begin.dtype, begin.ranks) == ((3,), "float32", tuple(range(size)))
    kinds = sorted(begin.name for begin, _ in recorder.spans if begin.sequence is None)
    assert kinds == ["recv", "send"] * (size > 1)
