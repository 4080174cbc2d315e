"""An interrupted rank leaves an operation on arrays of a GPU whose streams are busy."""

import gc
import threading
import time

import pytest
from interrupted_drill import (
    OPERATIONS,
    SIZES,
    WEIGHT,
    await_first,
    drill,
    interrupts,
    runs,
    tell,
)

import hpcdist as dist

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("and_the_world_goes_on")]
LATE_S = 0.02
ENOUGH_S = 30


def sizes(*thorough):
    """Parametrize a test by the bytes of an array: 100 kB, and more where tests are thorough."""
    others = [
        pytest.param(SIZES.get(each, 8), id=each, marks=pytest.mark.thorough) for each in thorough
    ]
    return pytest.mark.parametrize("nbytes", [pytest.param(SIZES["100kB"], id="100kB"), *others])


def hold_up_until(cupy, event):
    cupy.cuda.get_current_stream().launch_host_func(event.wait, ENOUGH_S)


@pytest.fixture
def late(cupy):
    """Make arrays whose numbers come late."""

    def make(nbytes, value):
        array = cupy.empty(max(nbytes // 8, 1))
        cupy.cuda.get_current_stream().launch_host_func(time.sleep, LATE_S)
        array[...] = value
        return array

    return make


@pytest.fixture
def group(way, size):
    if size == 1:
        pytest.skip("a rank alone waits for nobody")
    made = dist.new_group(timeout=60)
    yield made
    dist.destroy_process_group(made)


@sizes("small")
def test_what_not_all_have_come_to_is_called_off(group, late, nbytes):
    found = {}
    for operation in OPERATIONS:
        wrong = drill(group, operation, late, nbytes)
        if wrong:
            found[operation.__name__] = wrong
    assert found == {}


@sizes("small")
def test_between_nodes_the_others_go_on_with_what_there_was(way, world_with, late, size, nbytes):
    if size == 1:
        pytest.skip("a rank alone waits for nobody")
    world_with(ranks_per_node=1)
    group = dist.new_group(timeout=10)
    found = {}
    for operation in OPERATIONS:
        wrong = drill(group, operation, late, nbytes, goes_on=True)
        if wrong:
            found[operation.__name__] = wrong
    assert found == {}


# ---- what all have come to


has_a_part_to_do = runs("on_helper")
"""Whether others wait for a thread: all have come to its operation, or it sends."""


@pytest.fixture
def interrupted_while_its_stream_is_held_up(cupy, rank):
    """Run an operation on all ranks; the first one is interrupted in it, when all have come."""

    def run(operate):
        if rank:
            operate()
            return
        interrupted = threading.Event()
        hold_up_until(cupy, interrupted)
        with interrupts(has_a_part_to_do, interrupted.set):
            operate()

    return run


@sizes("8 bytes", "1MB")
def test_what_all_have_come_to_ends_before_the_interrupt(
    cupy, group, way, rank, size, nbytes, interrupted_while_its_stream_is_held_up
):
    if way == "nccl":
        pytest.skip("the host waits for nothing")
    dist.all_reduce(cupy.ones(1), group=group)  # which opens the way
    x, blocks = cupy.full(nbytes // 8, rank + 1.0), cupy.zeros((size, nbytes // 8))
    interrupted_while_its_stream_is_held_up(lambda: dist.all_reduce(x, group=group))
    assert (x == size * (size + 1) / 2).all()
    interrupted_while_its_stream_is_held_up(lambda: dist.all_gather(blocks, x, group=group))
    assert (blocks == size * (size + 1) / 2).all()
    interrupted_while_its_stream_is_held_up(lambda: dist.scan(x, group=group))
    assert (x == (rank + 1) * size * (size + 1) / 2).all()


def test_the_end_on_the_device_may_be_waited_for_again(cupy, group, way, rank, size):
    x, interrupted = cupy.ones(1000), threading.Event()
    if rank == 0:
        hold_up_until(cupy, interrupted)
    work = dist.all_reduce(x, sync_op=False, group=group)
    if rank == 0:
        with interrupts(runs("synchronize"), interrupted.set):
            work.synchronize()
    work.synchronize()
    assert (x == size).all()


# ---- messages


@sizes("8 bytes", "1MB")
def test_an_interrupted_send_delivers_what_there_was(cupy, group, late, rank, nbytes):
    found = None
    if rank == 0:
        x, interrupted = late(nbytes, 1.0), threading.Event()
        hold_up_until(cupy, interrupted)
        with interrupts(has_a_part_to_do, interrupted.set):
            dist.send(x, 1, group=group)
        x[...] = WEIGHT  # the sender's later numbers
        del x
        weights = late(nbytes, WEIGHT)
    elif rank == 1:
        found = late(nbytes, 0.0)
        dist.recv(found, 0, group=group)
    dist.barrier(group)
    assert rank != 0 or (weights == WEIGHT).all()
    assert rank != 1 or (found == 1.0).all()


@sizes("8 bytes", "1MB")
def test_an_interrupted_recv_takes_nothing(group, late, rank, size, nbytes):
    if rank == 0:
        out = late(nbytes, 0.0)
        with interrupts():
            dist.recv(out, 1, group=group)
        del out
        gc.collect()
        weights = [late(nbytes, WEIGHT) for _ in range(4)]
        tell(size)
        found = late(nbytes, 0.0)
        dist.recv(found, 1, group=group)
        assert all((each == WEIGHT).all() for each in weights)
        assert (found == 1.0).all()
    else:
        await_first()
        if rank == 1:
            dist.send(late(nbytes, 1.0), 0, group=group)
    dist.barrier(group)
