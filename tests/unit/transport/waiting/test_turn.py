"""The turn of a group: who has it, and who is in the middle of an operation."""

import threading

import pytest

from hpcdist.transport.waiting.turn import PythonTurn, Turn

pytestmark = pytest.mark.parametrize("turn", [Turn, PythonTurn], indirect=True)


@pytest.fixture
def turn(request):
    return request.param()


def on_another_thread(function, *args):
    """Return what a function returns there."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function(*args)))
    thread.start()
    thread.join()
    return found[0]


def test_only_the_thread_that_has_taken_the_turn_is_inside(turn):
    assert not turn.is_inside()
    assert turn.take(False)
    assert turn.is_inside()
    assert not on_another_thread(turn.is_inside)
    turn.give_back()
    assert not turn.is_inside()


def test_a_turn_is_taken_once_until_it_is_given_back(turn):
    assert turn.take(False)
    assert not on_another_thread(turn.take, False)
    assert turn.is_inside()
    turn.give_back()
    assert on_another_thread(turn.take, False)


def test_a_served_job_is_inside_only_where_it_says_so(turn):
    seen = []

    def job():
        seen.append(turn.is_inside())
        seen.append(turn.call(lambda answer: answer and turn.is_inside(), True))
        seen.append(turn.is_inside())

    turn.serve(job)
    assert seen == [False, True, False]


def test_a_part_of_an_operation_leaves_the_rest_of_it_inside(turn):
    turn.take(False)
    assert turn.call(turn.is_inside)
    assert turn.is_inside()


@pytest.mark.parametrize("way", ["serve", "call"])
def test_an_error_passes_and_ends_what_it_leaves(turn, way):
    with pytest.raises(ZeroDivisionError):
        getattr(turn, way)(lambda: 1 / 0)
    assert not turn.is_inside()
    assert on_another_thread(turn.take, False)


def test_a_job_is_served_when_the_turn_is_free(turn):
    order = []
    turn.take(False)
    server = threading.Thread(target=turn.serve, args=(lambda: order.append("served"),))
    server.start()
    server.join(0.05)
    order.append("given back")
    turn.give_back()
    server.join()
    assert order == ["given back", "served"]
