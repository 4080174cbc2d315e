"""Alarms of the program: it gets its own exception, and the other ranks hear of it."""

import signal
import sys

import numpy as np
import pytest

import hpcdist as dist
from hpcdist import checkpoint
from hpcdist.checkpoint import array_files, formats
from hpcdist.comm.alarms import is_alarm


class AlarmError(Exception):
    """What the handler of a program raises, for example when its time is up."""


def ring(number, frame):
    raise AlarmError("time is up")


class Handler:
    def method(self, _, __):
        ring(0, None)


@pytest.fixture(autouse=True)
def handler(request):
    before = signal.signal(signal.SIGUSR1, getattr(request, "param", ring))
    yield
    signal.signal(signal.SIGUSR1, before)


def interrupt():
    signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize(
    "handler", [ring, lambda *_: ring(0, None), Handler().method], indirect=True
)
def test_what_a_signal_handler_raises_is_an_alarm(handler):
    with pytest.raises(AlarmError) as caught:
        interrupt()
    assert is_alarm(caught.value)


def test_what_anything_else_raises_is_none():
    with pytest.raises(AlarmError) as caught:
        ring(signal.SIGUSR1, None)
    assert not is_alarm(caught.value)


class Slow:
    """A value whose pickling, or reading, takes until the alarm of its rank."""

    def __init__(self, rank, at=0):
        self.is_late = rank == at

    def __reduce__(self):
        if self.is_late:
            call_handler()
        return int, (5,)

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **_):
        if self.is_late:
            call_handler()
        return np.ones(3).__dlpack__()


def call_handler():
    """Do as a signal does: `simulate` runs the ranks on threads, which get none."""
    ring(signal.SIGUSR1, sys._getframe())


@pytest.mark.parametrize(
    "call",
    [
        lambda value, rank: dist.all_gather_object([], value),
        lambda value, rank: dist.broadcast_object_list([value], src=0),
        lambda value, rank: dist.gather_object(value, [] if rank == 1 else None, dst=1),
        lambda value, rank: dist.scatter_object_list([], [value] * 2, src=0),
        lambda value, rank: dist.all_to_all_object([], [value] * 2),
        lambda value, rank: dist.all_gather_object([], value, sync_op=False).wait(),
        lambda value, rank: dist.all_reduced({"loss": value}),
    ],
)
def test_an_alarm_while_a_value_is_read_is_raised_and_the_others_hear_of_it(call):
    def program():
        rank = dist.get_rank()
        with pytest.raises(dist.RemoteError if rank else AlarmError, match="time is up"):
            call(Slow(rank), rank)
        dist.all_gather_object(found := [], rank)
        return found

    assert dist.simulate(2, program) == [[0, 1]] * 2


class Stateful:
    """An object whose state is taken, or given, until the alarm."""

    def __init__(self, taken=True):
        self.taken = taken

    def state_dict(self):
        if self.taken:
            interrupt()
        return {"a": 1}

    def load_state_dict(self, state):
        interrupt()


def test_an_alarm_while_the_state_of_an_object_is_taken_or_given_is_raised(tmp_path):
    checkpoint.save({"x": Stateful(taken=False)}, tmp_path / "c")
    for call in (
        lambda: checkpoint.save({"x": Stateful()}, tmp_path / "d"),
        lambda: checkpoint.load({"x": Stateful()}, tmp_path / "c"),
        lambda: checkpoint.load({"x": Stateful(taken=False)}, tmp_path / "c"),
    ):
        with pytest.raises(AlarmError):
            call()


def test_an_alarm_while_a_file_is_read_is_no_damage(monkeypatch, tmp_path):
    with pytest.raises(AlarmError), array_files._naming("a.npy"):
        interrupt()
    monkeypatch.setattr(np.lib.format, "descr_to_dtype", lambda _: interrupt())
    with pytest.raises(AlarmError):
        formats.dtype_of_name("float32")
