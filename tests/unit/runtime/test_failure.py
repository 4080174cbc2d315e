"""The last words of a rank that an exception ends."""

from contextlib import contextmanager

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.runtime.failure import account_of
from hpcdist.transport.call.reduction import check_op
from hpcdist.transport.waiting.work import DONE


def lines_of(function, **options):
    with pytest.raises(Exception) as info:  # noqa: PT011 (which is for its caller)
        function()
    return account_of(info.value, **options)


def wrong_operator():
    check_op("nonsense")


def test_an_error_of_hpcdist_comes_first_and_then_the_lines_of_the_program():
    first, *frames, last = lines_of(wrong_operator)
    assert first.startswith("hpcdist.UsageError: Unknown reduce_op type for 'nonsense'")
    assert '    check_op("nonsense")' in frames[-2:]  # Python 3.13 underlines it
    assert not any("hpcdist/transport" in line for line in frames)
    assert "HPCDIST_TRACEBACK=full" in last


def test_what_contextlib_calls_in_between_is_left_out_too():
    @contextmanager
    def ends_wrongly():
        yield
        wrong_operator()

    with pytest.raises(dist.UsageError) as info, ends_wrongly():
        pass
    assert any("contextlib.py" in line for line in account_of(info.value, in_full=True))
    assert not any("contextlib.py" in line for line in account_of(info.value))


def test_in_full_it_is_as_python_tells_it():
    first, *frames, last = lines_of(wrong_operator, in_full=True)
    assert first == "Traceback (most recent call last):"
    assert any("hpcdist/transport/call/reduction.py" in line for line in frames)
    assert last.startswith("hpcdist.errors.UsageError: ")


def test_so_is_an_error_of_the_program():
    def program():
        raise ValueError("mine")

    assert lines_of(program)[-1] == "ValueError: mine"


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def test_an_error_that_has_no_words_is_named_all_the_same():
    def alone():
        raise UnprintableError

    def cause():
        raise dist.TransportError("the array was not sent") from UnprintableError()

    assert "UnprintableError" in lines_of(alone)[-1]
    assert "UnprintableError" in lines_of(cause)[1]


def test_a_cause_is_told():
    def program():
        try:
            raise OSError("no room")
        except OSError as error:
            raise dist.TransportError("the array was not sent") from error

    first, second, *_ = lines_of(program)
    assert (first, second) == (
        "hpcdist.TransportError: the array was not sent",
        "caused by OSError: no room",
    )


def test_a_cause_that_the_error_repeats_is_not_told_twice():
    def program():
        try:
            raise OSError("no room")
        except OSError as error:
            raise dist.TransportError(f"rank 0: {error}") from error

    first, second, *_ = lines_of(program)
    assert first == "hpcdist.TransportError: rank 0: no room"
    assert second.startswith('  File "')


@pytest.mark.parametrize(
    ("mistake", "hint"),
    [
        (lambda: dist.all_reduce(np.ones(1), async_op=True), "sync_op=False"),
        (lambda: dist.optim.Adam([], lr=0.1), "learning_rate"),
        (lambda: dist.all_gather(np.ones(1)), "all_gather(arrays, x)"),
        (lambda: dist.recv(src=0), "recv(x, src)"),
        (lambda: DONE[0], "dist.all_reduced(x) returns it"),
        (lambda: DONE + 1, "dist.all_reduced(x) returns it"),
        (lambda: dist.Group([0], 0, 0, None).size, "group.nranks"),
    ],
)
def test_a_habit_from_another_library_is_told_by_what_is_right_here(mistake, hint):
    assert hint in lines_of(mistake)[-1]
