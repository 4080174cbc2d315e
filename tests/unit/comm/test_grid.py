"""Grids of ranks: where everyone is, and what is refused; on ranks that are threads."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import hpcdist as dist
from hpcdist.comm.grid import balanced
from hpcdist.comm.group import Group
from hpcdist.transport.threads.group import ThreadGroup
from hpcdist.transport.threads.transport import ThreadTransport


def group_of(ranks, world_rank):
    transport = ThreadTransport(ThreadGroup(ranks), list(ranks).index(world_rank), 1)
    return Group(ranks, world_rank, 1, transport)


@given(st.integers(1, 200), st.integers(1, 3))
def test_chosen_dims_are_as_equal_as_factors_can_be(size, axes):
    chosen = balanced(size, axes)
    assert math.prod(chosen) == size
    assert list(chosen) == sorted(chosen, reverse=True)
    divisors = [each for each in range(1, size + 1) if size % each == 0]
    every = itertools.product(divisors, repeat=axes)
    longest = min(max(factors) for factors in every if math.prod(factors) == size)
    assert chosen[0] == longest


def test_large_worlds_get_their_dims_at_once():
    assert balanced(1_000_000, 3) == (100, 100, 100)
    assert balanced(72, 2) == (9, 8)
    assert balanced(999_983, 2) == (999_983, 1)


@given(st.permutations(range(12)), st.sampled_from([(12,), (3, 4), (2, 3, 2), (1, 12)]), st.data())
@settings(max_examples=50)
def test_ranks_are_laid_out_in_c_order_and_found_again(ranks, dims, data):
    grid = group_of(ranks, 0).grid(dims)
    layout = np.array(ranks).reshape(dims)
    for coords in np.ndindex(*dims):
        assert grid.rank_of(coords) == layout[coords]
        assert grid.coords_of(int(layout[coords])) == coords
    assert layout[grid.coords] == 0


@given(st.sampled_from(range(12)), st.integers(-2, 1), st.integers(-9, 9), st.booleans())
def test_a_shift_rolls_the_array_of_ranks_or_falls_over_its_edge(me, axis, steps, periodic):
    layout = np.arange(12).reshape(3, 4)
    grid = group_of(range(12), me).grid((3, -1), periodic)
    src, dst = grid.shift(axis, steps)
    rolled = [np.roll(layout, by, axis)[grid.coords] for by in (steps, -steps)]
    place, length = grid.coords[axis], layout.shape[axis]
    for got, wanted, at in zip((src, dst), rolled, (place - steps, place + steps), strict=True):
        assert got == (wanted if periodic or 0 <= at < length else dist.PROC_NULL)


def test_nobody_is_beyond_the_edges():
    grid = group_of(range(4), 0).grid((2, 2), (True, False))
    assert grid.neighbors == [2, 2, dist.PROC_NULL, 1]
    assert grid.rank_of((-1, 0)) == 2
    assert grid.rank_of((0, -1)) == dist.PROC_NULL
    assert (
        repr(grid) == "Grid(dims=(2, 2), periodic=(True, False), coords=(0, 0), group=_default_pg1)"
    )


@pytest.mark.parametrize(
    ("dims", "periodic", "words"),
    [
        ((3, 2), False, "product is 4"),
        ((3, -1), False, "product is 4"),
        ((2,), False, "product is 4"),
        ((-2, 2), False, "product is 4"),
        ((), False, "product is 4"),
        (5, False, "product is 4"),
        ("ab", False, "dims must be integers"),
        ((2.0, 2), False, "dims must be integers"),
        ((2, 2), (True,), "one per axis"),
        ((2, 2), 1, "must be a bool"),
    ],
)
def test_dims_that_do_not_fit_are_refused(dims, periodic, words):
    with pytest.raises(dist.UsageError, match=words):
        group_of(range(4), 0).grid(dims, periodic)


def test_wrong_arguments_of_a_grid_are_refused():
    grid = group_of(range(4), 0).grid((2, 2), periodic=True)
    for use, words in [
        (lambda: grid.shift(2), "axis=2 must be one of 0 to 1"),
        (lambda: grid.shift(0, 0.5), "displacement must be integers"),
        (lambda: grid.rank_of((0,)), "2 integers, one per axis"),
        (lambda: grid.coords_of(4), "rank=4"),
        (lambda: grid.sub(), "axes to keep"),
        (lambda: grid.neighbor_alltoall([], [np.ones(1)]), "list of 4 arrays.*1 entry"),
        (lambda: grid.neighbor_alltoall([], np.ones(4)), "list of 4 arrays.*an? ndarray"),
        (lambda: grid.neighbor_alltoall((), [np.ones(1)] * 4), "empty tuple"),
        (lambda: grid.neighbor_alltoall([None] * 4, [np.ones(1)] * 4), r"None for the neighbours"),
    ]:
        with pytest.raises(dist.UsageError, match=words):
            use()
    outsider = Group([1, 2], 0, 1, None)
    with pytest.raises(dist.UsageError, match="rank 0 is not in group"):
        outsider.grid((1, 2))
