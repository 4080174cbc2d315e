"""Functions of neighbours and of parts, on simulated ranks; see `stencil_checks`."""

import numpy as np
import pytest
import stencil_checks
from tiers import first_of

import hpcdist as dist
from hpcdist.mesh.windows import Edge, How, runs_of


@pytest.mark.parametrize("check", stencil_checks.check)
@pytest.mark.parametrize("size", first_of([3, 1]))
def test_on_simulated_ranks(size, check):
    dist.simulate(size, check, timeout=60)


def places(lo, hi, length, edge):
    """Return the places of the array that a window has, put together of its runs."""
    found = np.full(hi - lo, -1)
    for run in runs_of(lo, hi, length, edge):
        own = np.arange(run.source, run.end)
        ordered = own[::-1] if run.how is How.BACKWARDS else own
        assert (found[run.target : run.target + run.length] == -1).all()
        found[run.target : run.target + run.length] = ordered
    return found.tolist()


MODES = {
    Edge.PERIODIC: "wrap",
    Edge.REFLECT: "reflect",
    Edge.SYMMETRIC: "symmetric",
    Edge.NEAREST: "edge",
}


@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("edge", MODES)
def test_a_window_has_the_places_that_pad_has(edge, length):
    reach = 12
    wanted = np.pad(np.arange(length), reach, MODES[edge])
    for lo in range(-reach, length + reach + 1):
        for hi in range(lo, length + reach + 1):
            assert places(lo, hi, length, edge) == wanted[lo + reach : hi + reach].tolist()


def test_a_window_on_nothing_has_the_places_inside():
    assert places(-2, 5, 3, Edge.NOTHING) == [-1, -1, 0, 1, 2, -1, -1]
    assert places(4, 6, 3, Edge.NOTHING) == [-1, -1]
