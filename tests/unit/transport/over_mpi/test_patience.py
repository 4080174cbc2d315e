"""Operations of MPI that are polled, and what interrupts them."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("mpi4py")

from interrupted_at import InterruptError
from mpi4py import MPI

import hpcdist as dist
from hpcdist.transport.mpi import early, patience
from hpcdist.transport.waiting import polling


@pytest.fixture
def comm():
    made = patience.PolledComm(MPI.COMM_SELF)
    made.limited, made.what = SimpleNamespace(timeout_s=5.0, under_way=[]), lambda: "it"
    return made


@pytest.mark.parametrize("moment", ["before it has begun", "once it has begun"])
def test_an_interrupted_operation_is_ended_before_the_interrupt_is_raised(
    comm, monkeypatch, moment
):
    begun = []

    def interrupted(requests, *steps):
        if moment == "once it has begun":
            polling.at_once(requests, *steps)
        begun.append(requests)
        if len(begun) == 1:
            raise InterruptError
        polling.at_once(requests, *steps)

    monkeypatch.setattr(patience, "at_once", interrupted)
    x, y = np.arange(3.0), np.zeros(3)
    comm.Allreduce(x, y)
    assert (y == x).all()
    assert len(begun) == (2 if moment == "before it has begun" else 1)
    _, error = polling.held.pop()
    assert type(error) is InterruptError


def test_what_mpi_refuses_is_raised_at_once(comm):
    with pytest.raises(MPI.Exception):
        comm.Bcast(np.zeros(3), 7)
    assert not polling.held


def test_what_mpi_has_under_way_is_kept_when_a_death_ends_the_wait():
    deaths = SimpleNamespace(known=lambda: {3}, failure=lambda what: dist.RankFailure(what, [3]))
    context = SimpleNamespace(timeout_s=5.0, ranks=[3], site=SimpleNamespace(deaths=deaths))
    requests = [MPI.REQUEST_NULL]
    with pytest.raises(dist.RankFailure):
        patience.finish_when(context, lambda: "it", lambda: False, requests)
    assert any(each is requests for each in early._orphans)
    early._orphans.clear()
