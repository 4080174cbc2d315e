"""Waits: when they end, whose refusal is held, and errands that change while they are done."""

import time

import pytest

from hpcdist.errors import UsageError
from hpcdist.transport.waiting import polling
from hpcdist.transport.waiting.polling import poll
from hpcdist.transport.waiting.queue import CollectiveQueue, refusal


@pytest.fixture(autouse=True)
def _nothing_stays_held():
    yield
    assert not polling.held


def once(action):
    """Return what does `action` when called first, and is true from then on."""
    calls = []

    def done():
        calls.append(True)
        if len(calls) == 1:
            action()
        return True

    return done


def refuse():
    raise refusal()


@polling.raising_held
def wait(done):
    return polling.poll(done, 600)


def test_a_refusal_that_interrupts_a_wait_is_raised_at_its_end():
    with pytest.raises(UsageError, match="in the middle of another one"):
        wait(once(refuse))
    assert wait(lambda: True)


def test_what_has_to_end_is_not_left_by_a_refusal():
    ended = once(refuse)
    with pytest.raises(UsageError, match="in the middle of another one") as caught:
        polling.to_the_end(ended)
    assert caught.value.held
    with pytest.raises(UsageError) as caught:
        polling.to_the_end(once(fail))
    assert not caught.value.held


def fail():
    raise UsageError("wrong")


def test_a_refusal_is_forgotten_where_the_wait_fails():
    def failing():
        polling.poll(once(refuse), 600)
        raise KeyError("what went wrong")

    for function in (
        lambda: polling.raising_held(failing)(),
        lambda: CollectiveQueue("l").run(failing),
    ):
        with pytest.raises(KeyError, match="what went wrong"):
            function()
        assert not polling.held


def test_an_operation_in_a_handler_does_not_raise_the_refusal_of_the_one_under_way():
    ended = []

    def use_another_group():
        assert wait(lambda: True)
        ended.append(CollectiveQueue("other").run(lambda: "other"))
        with pytest.raises(KeyError):
            CollectiveQueue("other").run({}.__getitem__, "absent")

    def operation():
        polling.poll(once(refuse), 600)
        polling.poll(once(use_another_group), 600)
        ended.append("outer")

    with pytest.raises(UsageError, match="in the middle of another one"):
        CollectiveQueue("outer").run(operation)
    assert ended == ["other", "outer"]


def test_errands_may_be_begun_and_ended_in_the_middle_of_errands():
    done = []

    def errand(name):
        return lambda waited: done.append(name)

    added, removed = errand("added"), errand("removed")

    def changes(waited):
        done.append("changes")
        polling.add_errand(added)
        polling.remove_errand(removed)
        assert polling.do_errands(waited) == 0.0

    polling.add_errand(changes)
    polling.add_errand(removed)
    polling.do_errands(1.0)
    polling.remove_errand(changes)
    assert done == ["changes"]
    polling.do_errands(1.0)
    polling.remove_errand(added)
    assert done == ["changes", "added"]


def test_poll_stops_when_it_is_done_or_when_time_is_up():
    answers = iter([False] * 100 + [True])
    assert poll(lambda: next(answers), 10)
    began = time.monotonic()
    assert not poll(lambda: False, 0.05)
    assert time.monotonic() - began >= 0.05
    assert poll(lambda: True, 0)
    assert not poll(lambda: False, 0)


def test_poll_attends_to_other_things_now_and_then():
    waited = []
    poll(lambda: len(waited) >= 3, 10, waited.append, 0.01)
    assert waited == sorted(waited)
    assert len(waited) == 3
