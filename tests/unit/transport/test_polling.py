"""Waits: whose refusal is held and raised, and errands that change while they are done."""

import pytest

from hpcdist.errors import UsageError
from hpcdist.transport import patience
from hpcdist.transport.lane import Lane, refusal


@pytest.fixture(autouse=True)
def _nothing_stays_held():
    yield
    assert not patience.held


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


@patience.raising_held
def wait(done):
    return patience.poll(done, 600)


def test_a_refusal_that_interrupts_a_wait_is_raised_at_its_end():
    with pytest.raises(UsageError, match="in the middle of another one"):
        wait(once(refuse))
    assert wait(lambda: True)


def test_a_refusal_is_forgotten_where_the_wait_fails():
    def failing():
        patience.poll(once(refuse), 600)
        raise KeyError("what went wrong")

    for function in (lambda: patience.raising_held(failing)(), lambda: Lane("l").run(failing)):
        with pytest.raises(KeyError, match="what went wrong"):
            function()
        assert not patience.held


def test_an_operation_in_a_handler_does_not_raise_the_refusal_of_the_one_under_way():
    ended = []

    def use_another_group():
        assert wait(lambda: True)
        ended.append(Lane("other").run(lambda: "other"))
        with pytest.raises(KeyError):
            Lane("other").run({}.__getitem__, "absent")

    def operation():
        patience.poll(once(refuse), 600)
        patience.poll(once(use_another_group), 600)
        ended.append("outer")

    with pytest.raises(UsageError, match="in the middle of another one"):
        Lane("outer").run(operation)
    assert ended == ["other", "outer"]


def test_errands_may_be_begun_and_ended_in_the_middle_of_errands():
    done = []

    def errand(name):
        return lambda waited: done.append(name)

    added, removed = errand("added"), errand("removed")

    def changes(waited):
        done.append("changes")
        patience.add_errand(added)
        patience.remove_errand(removed)
        assert patience.do_errands(waited) == 0.0

    patience.add_errand(changes)
    patience.add_errand(removed)
    patience.do_errands(1.0)
    patience.remove_errand(changes)
    assert done == ["changes"]
    patience.do_errands(1.0)
    patience.remove_errand(added)
    assert done == ["changes", "added"]
