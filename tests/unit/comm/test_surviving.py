"""`survive` calls a function again; what it makes of deaths is shown without any."""

import pytest

import hpcdist as dist
from hpcdist.comm import surviving


@pytest.fixture
def recoveries(monkeypatch):
    """Do without recoveries; return the time limits that they got."""
    limits = []

    def recover(timeout=None):
        limits.append(timeout)
        return dist.get_group()

    monkeypatch.setattr(surviving, "recover", recover)
    return limits


def failing(times, error=None):
    """Return a function that fails at first, and what it was called with."""
    calls = []

    def function(world, *args, **kwargs):
        calls.append((world.nranks, args, kwargs))
        if len(calls) <= times:
            raise error or dist.RankFailure("rank 1 died", [1])
        return "done"

    return function, calls


def alone(function, *args, **kwargs):
    (result,) = dist.simulate(1, function, *args, **kwargs)
    return result


def test_a_function_gets_the_world_and_its_arguments(recoveries):
    function, calls = failing(0)
    assert alone(dist.survive(function), 1, x=2) == "done"
    assert calls == [(1, (1,), {"x": 2})]
    assert recoveries == []


def test_it_is_called_again_after_each_recovery(recoveries):
    function, calls = failing(2)
    assert alone(dist.survive(timeout=5.0)(function), 1) == "done"
    assert len(calls) == 3
    assert recoveries == [5.0, 5.0]


def test_the_last_attempt_fails(recoveries):
    function, calls = failing(9)
    with pytest.raises(dist.RankFailure):
        alone(dist.survive(attempts=3)(function))
    assert (len(calls), len(recoveries)) == (3, 2)


def test_other_errors_are_no_deaths(recoveries):
    function, calls = failing(1, ValueError("a mistake"))
    with pytest.raises(ValueError, match="a mistake"):
        alone(dist.survive(function))
    assert (len(calls), len(recoveries)) == (1, 0)


def test_an_error_that_came_of_a_death_is_one(recoveries):
    error = ValueError("the engine has failed")
    error.__cause__ = dist.RankFailure("rank 1 died", [1])
    function, _ = failing(1, error)
    assert alone(dist.survive(function)) == "done"
    assert len(recoveries) == 1


def test_what_torch_has_made_of_a_death_is_one(recoveries):
    words = "Got the following error when running the callback: RankFailure: rank 1 died during"
    function, _ = failing(1, RuntimeError(words))
    assert alone(dist.survive(function)) == "done"
    assert len(recoveries) == 1


def test_there_is_at_least_one_attempt():
    with pytest.raises(dist.UsageError, match="attempts must be at least 1, got 0"):
        dist.survive(attempts=0)


def test_the_function_keeps_its_name():
    @dist.survive
    def train(world):
        """Train."""

    assert (train.__name__, train.__doc__) == ("train", "Train.")
