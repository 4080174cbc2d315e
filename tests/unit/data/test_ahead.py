"""What a thread makes ahead comes whole, no more than allowed, and its errors in their place."""

import gc
import threading
from itertools import count

import pytest

from hpcdist.data.ahead import Ahead


def threads_of(name):
    return [each for each in threading.enumerate() if each.name == name]


@pytest.mark.parametrize("depth", [1, 3])
def test_values_come_in_their_order(depth):
    with Ahead(range(50), depth, "ahead-order") as values:
        assert list(values) == list(range(50))
        assert list(values) == []
    assert threads_of("ahead-order") == []


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_are_made_than_may_wait(depth):
    made = []
    with Ahead(map(made.append, count()), depth, "ahead-bound") as values:
        for taken in range(1, 20):
            next(values)
            assert len(made) <= taken + depth + 1  # one is in the hand of the thread


def test_an_error_comes_where_the_value_would():
    def broken():
        yield 1
        raise OSError("the disk is gone")

    with Ahead(broken(), 2, "ahead-error") as values:
        assert next(values) == 1
        with pytest.raises(OSError, match="the disk is gone"):
            next(values)
        assert next(values, None) is None


def test_a_loop_that_is_left_ends_the_thread_and_what_it_iterates():
    ended = threading.Event()

    def endless():
        try:
            yield from count()
        finally:
            ended.set()

    def loop():
        with Ahead(endless(), 1, "ahead-left") as values:
            yield from values

    numbers = loop()
    assert next(numbers) == 0
    assert threads_of("ahead-left")
    del numbers
    gc.collect()
    assert threads_of("ahead-left") == []
    assert ended.is_set()
