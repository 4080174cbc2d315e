"""What one rank finds wrong before an operation waits until all ranks have come."""

import pytest

import hpcdist as dist
from hpcdist.comm.states import verifying


def looked_at(wrong=(), states=lambda rank: "x"):
    """Return what `verifying` raises here, and the sum of a following operation."""
    rank, caught = dist.get_rank(), None
    try:
        with verifying() as alike:
            alike += [(states(rank), (), "")]
            if rank in wrong:
                raise dist.UsageError(f"rank {rank} was given nonsense")
    except dist.HpcdistError as error:
        caught = error
    told = []
    dist.all_gather_object(told, rank)
    return type(caught), str(caught), told


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_that_find_nothing_wrong_go_on(size):
    everyone = list(range(size))
    assert dist.simulate(size, looked_at) == [(type(None), "None", everyone)] * size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_error_of_one_rank_is_raised_on_all_which_stay_in_step(size):
    (kind, words, told), *others = dist.simulate(size, looked_at, (0,))
    assert (kind, told) == (dist.UsageError, list(range(size)))
    assert "rank 0 was given nonsense" in words
    assert all(kind is dist.RemoteError for kind, _, _ in others)
    assert all("rank 0 was given nonsense" in words for _, words, _ in others)
    assert all(told == list(range(size)) for _, _, told in others)


def test_ranks_that_find_something_else_each_hear_of_it():
    found = dist.simulate(2, looked_at, (), str)
    assert [kind for kind, _, _ in found] == [dist.MismatchError] * 2


def test_what_is_no_usage_error_leaves_at_once():
    def broken():
        with pytest.raises(KeyError), verifying():
            raise KeyError("a defect, which has met nobody")
        return dist.get_rank()

    assert dist.simulate(2, broken) == [0, 1]
