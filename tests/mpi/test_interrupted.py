"""A rank leaves an operation by what its signal handler raises, and then uses its memory.

The first rank is interrupted once it waits. What it had lent is freed, and the memory is filled
with weights; only then do the other ranks come. The weights stay as they are, everyone who has to
hear of it does, and the group goes on.
"""

import gc
import signal
import sys
import threading
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
from interrupted_at import InterruptError
from mpi4py import MPI

import hpcdist as dist
from hpcdist.transport.shm.hot import switched_off
from hpcdist.transport.tuning import Algorithm, TuningRule, TuningTable

TAG = 4712
SIZES = {"small": 8 << 10, "60kB": 60_000, "100kB": 100_000, "1MB": 1 << 20, "16MB": 16 << 20}
WEIGHT = 7.0

pytestmark = pytest.mark.usefixtures("and_the_world_goes_on", "quick_collections")


def is_waiting(thread):
    frame = sys._current_frames()[thread]
    while frame is not None:
        if frame.f_code.co_name in ("_poll", "_await_end"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def interrupts(waits=is_waiting):
    """Interrupt this thread in the block once it waits."""

    def interrupt():
        while not stop.wait(1e-3):
            if waits(main):
                signal.pthread_kill(main, signal.SIGUSR1)
                return

    def handle(*_):
        raise InterruptError

    main, stop = threading.get_ident(), threading.Event()
    previous = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(InterruptError):
            yield
    finally:
        stop.set()
        thread.join()
        signal.signal(signal.SIGUSR1, previous)


def tell(size, first=1):
    for each in range(first, size):
        MPI.COMM_WORLD.send(None, each, TAG)


def await_first():
    MPI.COMM_WORLD.recv(source=0, tag=TAG)


def ordinary(nbytes, value):
    return np.full(max(nbytes // 8, 1), value)


def shared(nbytes, value):
    array = dist.empty(max(nbytes // 8, 1))
    array[:] = value
    return array


def tensor(nbytes, value):
    torch = pytest.importorskip("torch")
    return torch.full((max(nbytes // 8, 1),), value, dtype=torch.float64)


MAKERS = [ordinary, shared, tensor]


def blocks(make, nbytes, value):
    """As many bytes as there are, cut into one block for each rank."""
    size = MPI.COMM_WORLD.size
    return make(max(nbytes // 8 // size, 1) * 8 * size, value)


def block(make, nbytes, value):
    return make(max(nbytes // 8 // MPI.COMM_WORLD.size, 1) * 8, value)


def all_reduce(make, nbytes, value):
    x = make(nbytes, value)
    return lambda group: dist.all_reduce(x, group=group)


def reduce(make, nbytes, value):
    x = make(nbytes, value)
    return lambda group: dist.reduce(x, 0, group=group)


def broadcast(make, nbytes, value):
    x = make(nbytes, value)
    return lambda group: dist.broadcast(x, 0, group=group)


def broadcast_to_it(make, nbytes, value):
    x = make(nbytes, value)
    return lambda group: dist.broadcast(x, group.nranks - 1, group=group)


def all_gather(make, nbytes, value):
    x, out = block(make, nbytes, value), blocks(make, nbytes, value)
    return lambda group: dist.all_gather(out, x, group=group)


def gather(make, nbytes, value):
    x, out = block(make, nbytes, value), blocks(make, nbytes, value)
    return lambda group: dist.gather(x, out if group.rank == 0 else None, 0, group=group)


def scatter(make, nbytes, value):
    x, out = blocks(make, nbytes, value), block(make, nbytes, value)
    return lambda group: dist.scatter(out, x if group.rank == 0 else None, 0, group=group)


def reduce_scatter(make, nbytes, value):
    x, out = blocks(make, nbytes, value), block(make, nbytes, value)
    return lambda group: dist.reduce_scatter(out, x, group=group)


def alltoall_single(make, nbytes, value):
    x, out = blocks(make, nbytes, value), blocks(make, nbytes, value)
    return lambda group: dist.alltoall_single(out, x, group=group)


def alltoall(make, nbytes, value):
    size = MPI.COMM_WORLD.size
    x, out = ([block(make, nbytes, value) for _ in range(size)] for _ in range(2))
    return lambda group: dist.alltoall(out, x, group=group)


def scan(make, nbytes, value):
    x = make(nbytes, value)
    return lambda group: dist.scan(x, group=group)


OPERATIONS = [
    all_reduce,
    reduce,
    broadcast,
    broadcast_to_it,
    all_gather,
    gather,
    scatter,
    reduce_scatter,
    alltoall_single,
    alltoall,
    scan,
]


@pytest.fixture
def group(size):
    if size == 1:
        pytest.skip("a rank alone waits for nobody")
    made = dist.new_group(timeout=60)
    yield made
    dist.destroy_process_group(made)


def ends(operate, group, may_go_on):
    """Whether an operation that another rank has left ends as it may; it says so in either case."""
    try:
        operate(group)
    except dist.RemoteError as error:
        return error.in_step and error.rank == 0
    return may_go_on


def drill(group, operation, make, nbytes, goes_on=False):
    """Interrupt the first rank in an operation; see the module. `goes_on`: so do the others."""
    rank, size = group.rank, group.nranks
    goes_on = goes_on or nbytes <= SIZES["small"]
    operate = operation(make, nbytes, 1.0)
    weights, wrong = [], []
    if rank == 0:
        with interrupts():
            operate(group)
        del operate
        gc.collect()
        weights = [make(nbytes, WEIGHT) for _ in range(4)]
        tell(size)
    else:
        await_first()
        if not ends(operate, group, goes_on):
            wrong.append("what the others heard")
    dist.barrier(group)
    wrong += [i for i, each in enumerate(weights) if (np.asarray(each) != WEIGHT).any()]
    for nbytes_after in (8, nbytes):
        x = ordinary(nbytes_after, rank + 1.0)
        dist.all_reduce(x, group=group)
        if (x != size * (size + 1) / 2).any():
            wrong.append(f"all_reduce of {nbytes_after} bytes afterwards")
    return wrong


USUAL = [
    (ordinary, "compiled", "100kB"),
    (ordinary, "python", "60kB"),
    (shared, "compiled", "1MB"),
]
PATHS = {"compiled": nullcontext, "python": switched_off}


def combinations():
    for make in MAKERS:
        for path in PATHS:
            for size, nbytes in SIZES.items():
                marks = [] if (make, path, size) in USUAL else [pytest.mark.thorough]
                name = f"{make.__name__}-{path}-{size}"
                yield pytest.param(make, PATHS[path], nbytes, marks=marks, id=name)


def sizes():
    marks = {"small": [], "100kB": [], "60kB": [pytest.mark.thorough]}
    each = [
        pytest.param(nbytes, id=name, marks=marks.get(name, [pytest.mark.thorough]))
        for name, nbytes in SIZES.items()
    ]
    return pytest.mark.parametrize("nbytes", each)


@pytest.mark.parametrize(("make", "path", "nbytes"), [*combinations()])
def test_what_was_lent_is_the_program_s_again(group, make, path, nbytes):
    found = {}
    with path():
        for operation in OPERATIONS:
            wrong = drill(group, operation, make, nbytes)
            if wrong:
                found[operation.__name__] = wrong
    assert found == {}


@pytest.mark.parametrize("way", [Algorithm.ATTACHED, Algorithm.PIPELINED, Algorithm.MPI])
def test_so_it_is_by_every_way(group, way):
    rules = [
        TuningRule(operation, "ordinary", way)
        for operation in ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather")
        if way is not Algorithm.PIPELINED or "reduce" in operation
    ]
    group.transport.use_rules(TuningTable(rules, group.nranks, several_nodes=False))
    found = {}
    for operation in (all_reduce, reduce, reduce_scatter, broadcast, broadcast_to_it, all_gather):
        wrong = drill(group, operation, ordinary, 300_000)
        if wrong:
            found[operation.__name__] = wrong
    assert found == {}


# ---- messages


@pytest.mark.parametrize("path", [*PATHS.values()], ids=[*PATHS])
@sizes()
def test_an_interrupted_send_delivers_what_there_was_to_send(group, path, nbytes):
    rank, size = group.rank, group.nranks
    found, is_boxed = None, group.transport.mail is not None and nbytes <= SIZES["small"]
    with path():
        if rank == 0 and not is_boxed:
            x = ordinary(nbytes, 1.0)
            with interrupts():
                dist.send(x, 1, group=group)
            x[:] = WEIGHT  # the sender's later data
            del x
            weights = [ordinary(nbytes, WEIGHT) for _ in range(4)]
            tell(size)
            del weights
        elif rank == 0:
            dist.send(ordinary(nbytes, 1.0), 1, group=group)
            tell(size)
        else:
            await_first()
            if rank == 1:
                found = ordinary(nbytes, 0.0)
                dist.recv(found, 0, group=group)
    dist.barrier(group)
    if found is not None and nbytes <= 8 << 20:
        assert (found == 1.0).all()


@pytest.mark.parametrize("path", [*PATHS.values()], ids=[*PATHS])
@sizes()
def test_an_interrupted_recv_takes_nothing(group, path, nbytes):
    rank, size = group.rank, group.nranks
    found = weights = None
    with path():
        if rank == 0:
            out = ordinary(nbytes, 0.0)
            with interrupts():
                dist.recv(out, 1, group=group)
            del out
            weights = [ordinary(nbytes, WEIGHT) for _ in range(4)]
            tell(size)
            dist.all_reduce(np.ones(1), group=group)  # a wait, which takes in what has come
            found = ordinary(nbytes, 0.0)
            dist.recv(found, 1, group=group)
        else:
            await_first()
            if rank == 1:
                work = dist.isend(ordinary(nbytes, 1.0), 0, group=group)
            dist.all_reduce(np.ones(1), group=group)
            if rank == 1:
                work.wait()
    dist.barrier(group)
    if rank == 0:
        assert all((each == WEIGHT).all() for each in weights)
        assert (found == 1.0).all()


@pytest.mark.parametrize("nbytes", [100, 60_000, 1 << 20])
def test_an_interrupted_send_of_objects_delivers_what_there_was(group, nbytes):
    rank, size = group.rank, group.nranks
    found = [None]
    if rank == 0:
        x = ordinary(nbytes, 1.0)
        if nbytes > SIZES["small"]:
            with interrupts():
                dist.send_object_list([x], 1, group=group)
        else:
            dist.send_object_list([x], 1, group=group)
        x[:] = WEIGHT
        tell(size)
    else:
        await_first()
        if rank == 1:
            dist.recv_object_list(found, 0, group=group)
    dist.barrier(group)
    assert rank != 1 or (found[0] == 1.0).all()


# ---- objects


def all_gather_object(make, nbytes, value):
    return lambda group: dist.all_gather_object([], make(nbytes, value), group=group)


def broadcast_object_list(make, nbytes, value):
    return lambda group: dist.broadcast_object_list([make(nbytes, value)], 0, group=group)


def broadcast_object_to_it(make, nbytes, value):
    root = MPI.COMM_WORLD.size - 1
    return lambda group: dist.broadcast_object_list([make(nbytes, value)], root, group=group)


def all_to_all_object(make, nbytes, value):
    size = MPI.COMM_WORLD.size
    given = [make(nbytes // size, value) for _ in range(size)]
    return lambda group: dist.all_to_all_object([], given, group=group)


@pytest.mark.parametrize("nbytes", [100, 60_000, 1 << 20])
def test_objects_are_called_off_too(group, nbytes):
    found = {}
    for operation in (
        all_gather_object,
        broadcast_object_list,
        broadcast_object_to_it,
        all_to_all_object,
    ):
        wrong = drill(group, operation, ordinary, nbytes)
        if wrong:
            found[operation.__name__] = wrong
    assert found == {}


@pytest.mark.parametrize(
    "operation", [all_reduce, broadcast, broadcast_to_it, all_gather, alltoall, all_gather_object]
)
def test_between_nodes_the_others_go_on_with_what_there_was(world_with, rank, size, operation):
    if size == 1:
        pytest.skip("a rank alone waits for nobody")
    world_with(ranks_per_node=1)
    group = dist.new_group(timeout=60)
    assert [drill(group, operation, ordinary, each, goes_on=True) for each in (80, 100_000)] == [
        [],
        [],
    ]


def test_between_nodes_the_numbers_are_those_of_the_call(world_with, rank, size):
    if size == 1:
        pytest.skip("a rank alone waits for nobody")
    world_with(ranks_per_node=1)
    x = ordinary(100_000, 1.0)
    if rank == 0:
        with interrupts():
            dist.all_reduce(x)
        x[:] = WEIGHT
        tell(size)
    else:
        await_first()
        dist.all_reduce(x)
    dist.barrier()
    assert (x == (WEIGHT if rank == 0 else size)).all()


@pytest.mark.parametrize("nbytes", [80, 1 << 20])
@pytest.mark.parametrize("per_node", [1, None])
def test_a_plan_under_way_that_nobody_has_any_more_keeps_its_arrays(
    world_with, rank, size, nbytes, per_node
):
    if size == 1:
        pytest.skip("a rank alone waits for nobody")
    if per_node is not None:
        world_with(ranks_per_node=per_node)
    plan = dist.plan_all_reduce(ordinary(nbytes, 1.0))
    if rank == 0:
        plan.start()
        del plan
        gc.collect()
        weights = [ordinary(nbytes, WEIGHT) for _ in range(4)]
        tell(size)
    else:
        await_first()
        plan.start().wait()
    dist.barrier()
    assert rank or all((each == WEIGHT).all() for each in weights)
