"""The memory of what MPI has under way."""

import gc

import pytest

pytest.importorskip("mpi4py")

from mpi4py import MPI

from hpcdist.transport.mpi import exchange


@pytest.mark.parametrize(
    "make", [exchange.reduced_exchange, lambda comm: exchange.gathered_exchange(comm)[0]]
)
def test_an_exchange_that_nobody_has_any_more_keeps_its_memory_until_it_is_closed(make):
    before = {*exchange._open}
    made = make(MPI.COMM_SELF)
    close = made.close
    made.post(5, -5, 1, -1, 9, -9, 0, None, 0)
    del made
    gc.collect()
    assert {*exchange._open} > before
    close()
    assert {*exchange._open} == before
