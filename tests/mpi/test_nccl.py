"""How a group gets its NCCL communicator; NCCL is a stand-in that makes none.

It says nothing about NCCL: only what the ranks do when making one fails or does not end.
"""

import threading

import pytest

import hpcdist as dist
from hpcdist.testing.slow_device import DEVICE
from hpcdist.transport.device.nccl.binding import Binding, Communicator
from hpcdist.transport.device.nccl.bootstrap import connect

pytestmark = pytest.mark.usefixtures("and_the_world_goes_on")


def nothing(*_):
    pass


class StandIn:
    """NCCL's functions, of which one makes what `make` returns; `told` is what was asked for."""

    def __init__(self, make):
        self.told = []
        self._make = make
        self.binding = Binding(
            lambda: 23000, lambda: b"id" * 64, self._communicator, nothing, nothing, (OSError,)
        )

    def _communicator(self, ranks, key, rank):
        self.told.append((ranks, key, rank))
        self._make()
        abort = lambda: self.told.append("abort")  # noqa: E731
        return Communicator(*[nothing] * 8, abort, nothing)


@pytest.fixture
def group(request):
    made = dist.new_group(timeout=getattr(request, "param", 30.0))
    yield made
    dist.destroy_process_group(made)


def test_all_ranks_are_told_the_id_of_the_first(group, rank, size):
    nccl = StandIn(nothing)
    stream, communicator = connect(group.transport.context, DEVICE, nccl.binding)
    assert nccl.told == [(size, b"id" * 64, rank)]
    assert stream is not DEVICE.current
    communicator.abort()
    assert nccl.told[1:] == ["abort"]


def test_a_communicator_that_one_rank_cannot_make_is_had_by_none(group, rank, size):
    def fail():
        if rank == size - 1:
            raise OSError("unhandled cuda error")

    nccl = StandIn(fail)
    expected = dist.TransportError if rank == size - 1 else dist.RemoteError
    with pytest.raises(expected, match=r"NCCL failed in creating a communicator: unhandled cuda"):
        connect(group.transport.context, DEVICE, nccl.binding)
    assert nccl.told[1:] == ([] if rank == size - 1 else ["abort"])


def test_an_id_that_cannot_be_made_is_an_error_before_anyone_waits(group):
    def fail():
        raise OSError("no network interface")

    nccl = StandIn(nothing)
    with pytest.raises(dist.TransportError, match=r"cannot be made: rank 0: no network interface"):
        connect(group.transport.context, DEVICE, nccl.binding._replace(unique_id=fail))
    assert nccl.told == []


@pytest.mark.parametrize("group", [0.5], indirect=True)
def test_a_communicator_that_is_never_made_is_a_timeout(group):
    held = threading.Event()
    nccl = StandIn(held.wait)
    try:
        with pytest.raises(dist.CollectiveTimeout, match=r"NCCL has not connected the ranks 0"):
            connect(group.transport.context, DEVICE, nccl.binding)
        waiting = [each for each in threading.enumerate() if each.name == "hpcdist-nccl-start"]
        assert waiting
    finally:
        held.set()
    for each in waiting:
        each.join()
    assert nccl.told[1:] == ["abort"]


@pytest.mark.parametrize("group", [0.5], indirect=True)
def test_a_communicator_that_is_late_on_one_rank_is_had_by_none(group, rank, size):
    if size == 1:
        pytest.skip("one rank waits for nobody")
    held = threading.Event()
    nccl = StandIn(held.wait if rank == 0 else nothing)
    try:
        with pytest.raises((dist.CollectiveTimeout, dist.RemoteError)):
            connect(group.transport.context, DEVICE, nccl.binding)
    finally:
        held.set()
    if rank:
        assert nccl.told[1:] == ["abort"]
