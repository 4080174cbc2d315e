"""Between nodes a few bytes travel along with the agreement: one exchange, and nothing else."""

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.transport.mpi import transport
from hpcdist.transport.mpi.exchange import GATHERED_UP_TO, ROOM


@pytest.fixture
def alone(world_with, size, monkeypatch):
    """Put each rank on a node of its own; return the kinds of what MPI carries besides."""
    if not 1 < size <= GATHERED_UP_TO:
        pytest.skip("needs two to sixteen ranks")
    world_with(ranks_per_node=1)
    carried, verb_of = [], transport.verb_of

    def noted(kind):
        return lambda *args: [carried.append(kind.name.lower()), verb_of(kind)(*args)][1]

    monkeypatch.setattr(transport, "verb_of", noted)
    return carried


def numbers(nbytes):
    return np.arange(nbytes // 8.0)


def test_arrays_of_a_few_bytes_are_all_there(alone, rank, size):
    x, y = numbers(ROOM), np.empty((size, 1))
    dist.all_reduce(x)
    np.testing.assert_array_equal(x, size * numbers(ROOM))
    dist.stream.all_gather(y, np.array([rank / 2]))
    np.testing.assert_array_equal(y[:, 0], np.arange(size) / 2)
    x = numbers(ROOM) if rank == size - 1 else np.zeros(ROOM // 8)
    dist.broadcast(x, size - 1)
    np.testing.assert_array_equal(x, numbers(ROOM))
    dist.alltoall_single(y, np.full((size, 1), float(rank)))
    np.testing.assert_array_equal(y[:, 0], np.arange(size))
    assert alone == []


def test_what_is_longer_goes_by_mpi(alone, size):
    x = numbers(ROOM + 8)
    dist.all_reduce(x)
    np.testing.assert_array_equal(x, size * numbers(ROOM + 8))
    assert alone == ["all_reduce"]


@pytest.mark.parametrize(("length", "carried"), [(20, []), (1000, ["all_gather_object"])])
def test_objects_travel_along_where_the_longest_fits(alone, rank, size, length, carried):
    found = []
    dist.all_gather_object(found, (rank, "x" * (length if rank == 0 else 3)))
    assert [first for first, _ in found] == list(range(size))
    assert [len(text) for _, text in found] == [length, *[3] * (size - 1)]
    assert alone == carried


def test_an_array_that_fits_on_some_ranks_only_is_whole_on_all(alone, rank, size):
    found = []
    dist.all_gather(found, numbers(8 if rank else 2 * ROOM))
    assert [each.nbytes for each in found] == [2 * ROOM, *[8] * (size - 1)]
    assert alone == ["all_gather"]
