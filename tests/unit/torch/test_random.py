"""Random states beside torch's own."""

from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

import hpcdist as dist  # noqa: E402
from hpcdist.torch.model_parallel.random import (  # noqa: E402
    MODEL_PARALLEL_RNG,
    AsOf,
    RNGStatesTracker,
    get_rng_state_tracker,
    model_parallel_random_seed,
    snapshot,
)


@pytest.fixture
def tracker():
    made = RNGStatesTracker()
    made.add("a", 1)
    made.add("b", 2)
    return made


def draw(tracker, name):
    with tracker.rng_state(name):
        return torch.rand(3)


def test_a_state_goes_on_where_it_was_whatever_is_drawn_elsewhere(tracker):
    expected = torch.rand(6, generator=torch.Generator().manual_seed(1))
    first = draw(tracker, "a")
    draw(tracker, "b")
    torch.rand(5)
    assert torch.equal(torch.cat([first, draw(tracker, "a")]), expected)


def test_torchs_own_state_is_not_touched(tracker):
    torch.manual_seed(9)
    expected = torch.rand(4)
    torch.manual_seed(9)
    tracker.add("c", 3)
    draw(tracker, "a")
    with pytest.raises(KeyError), tracker.rng_state("b"):
        raise KeyError
    assert torch.equal(torch.rand(4), expected)


def test_blocks_may_be_nested(tracker):
    expected = [torch.rand(4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    with tracker.rng_state("a"):
        first = torch.rand(2)
        with tracker.rng_state("b"):
            inner = torch.rand(4)
        outer = torch.cat([first, torch.rand(2)])
    assert torch.equal(outer, expected[0])
    assert torch.equal(inner, expected[1])


def test_states_are_taken_and_brought_back(tracker):
    states = tracker.get_states_tracker()
    assert states.keys() == {"a", "b"}
    first = draw(tracker, "a")
    tracker.set_states_tracker(states)
    assert torch.equal(draw(tracker, "a"), first)
    tracker.reset()
    assert tracker.get_states_tracker() == {}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda tracker: tracker.add("a", 5), "'a', of seed 1, already exists"),
        (lambda tracker: tracker.add("c", 2), "'b', of seed 2, already exists"),
        (lambda tracker: tracker.add("c", "7"), "must be an integer"),
        (lambda tracker: draw(tracker, "c"), "'c' does not exist; there are 'a', 'b'"),
        (lambda tracker: tracker.set_states_tracker({"c": {}}), "'c' does not exist"),
    ],
)
def test_wrong_names_and_seeds_are_refused(tracker, call, words):
    with pytest.raises(dist.UsageError, match=words):
        call(tracker)


# ---- ranks in one process


def test_each_simulated_rank_has_random_states_of_its_own():
    ours = get_rng_state_tracker()

    def one_rank():
        model_parallel_random_seed(5, mp_group=dist.get_group())
        dist.barrier()
        states = get_rng_state_tracker().get_states_tracker()[MODEL_PARALLEL_RNG]["cpu"]
        get_rng_state_tracker().add("mine", 1000 + dist.get_rank())
        dist.barrier()
        return get_rng_state_tracker(), states

    (first, a), (second, b) = dist.simulate(2, one_rank)
    assert len({id(each) for each in (ours, first, second)}) == 3
    assert not torch.equal(a, b)
    assert MODEL_PARALLEL_RNG not in ours.get_states_tracker()


def test_what_a_simulated_rank_computes_again_draws_from_its_own_states():
    def one_rank():
        tracker = get_rng_state_tracker()
        tracker.add("mine", dist.get_rank())
        then = AsOf(snapshot())
        drawn = []
        for context in (nullcontext(), then):
            for rank in range(dist.get_world_size()):  # torch has one default generator for all
                if rank == dist.get_rank():
                    with context, tracker.rng_state("mine"):
                        drawn.append(torch.rand(3))
                dist.barrier()
        return drawn

    first, second = dist.simulate(2, one_rank)
    for once, again in (first, second):
        assert torch.equal(once, again)
    assert not torch.equal(first[0], second[0])
