"""Alarms while an object is pickled for other ranks, on the compiled path and beside it."""

import signal

import pytest

import hpcdist as dist


class AlarmError(Exception):
    """What the handler of a program raises."""


class Slow:
    """A value whose pickling takes until the alarm, which comes each time, or once."""

    def __init__(self, each_time):
        self.each_time, self.has_come = each_time, False

    def __reduce__(self):
        if self.each_time or not self.has_come:
            self.has_come = True
            signal.raise_signal(signal.SIGUSR1)
        return int, ()


@pytest.fixture(autouse=True)
def handler():
    def ring(number, frame):
        raise AlarmError("time is up")

    before = signal.signal(signal.SIGUSR1, ring)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("each_time", [True, False])
@pytest.mark.parametrize("sync_op", [True, False])
def test_an_alarm_is_raised_and_the_other_ranks_hear_of_it(rank, size, sync_op, each_time):
    late = rank == size - 1

    def value():
        return Slow(each_time) if late else 1

    for call in (
        lambda: dist.all_gather_object([], value(), sync_op=sync_op),
        lambda: dist.gather_object(value(), [] if rank == 0 else None, sync_op=sync_op),
        lambda: dist.all_to_all_object([], [value()] * size, sync_op=sync_op),
        lambda: dist.broadcast_object_list([value()], size - 1, sync_op=sync_op),
    ):
        with pytest.raises(AlarmError if late else dist.RemoteError, match="time is up"):
            call().wait()
    dist.all_gather_object(found := [], rank)
    assert found == [*range(size)]


@pytest.mark.parametrize("each_time", [True, False])
def test_an_alarm_keeps_objects_from_being_sent(rank, each_time):
    with pytest.raises(AlarmError, match="time is up"):
        dist.send_object_list([Slow(each_time)], rank)
    dist.send_object_list([1], rank)
    dist.recv_object_list(found := [None], rank)
    assert found == [1]
