"""What MPI says of a death, in words of hpcdist."""

import pytest
from mpi4py import MPI

from hpcdist.errors import RankFailure, TransportError
from hpcdist.transport.mpi.survival import translate
from hpcdist.transport.presence.deaths import Deaths

OF_DEATH = [MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED, MPI.ERR_IN_STATUS]


class Said(MPI.Exception):
    """What MPI raises, with a class of its own choice."""

    def __init__(self, code):
        super().__init__(MPI.ERR_OTHER)
        self.code = code

    def Get_error_class(self):  # noqa: N802 # as MPI names it
        return self.code


@pytest.mark.parametrize("code", [*OF_DEATH, MPI.ERR_TRUNCATE])
def test_where_a_job_goes_on_what_may_come_of_a_death_is_a_rank_failure(code, monkeypatch):
    monkeypatch.setenv("OMPI_MCA_mpi_ft_enable", "1")
    error = translate(Said(code), "a gather", Deaths())
    assert isinstance(error, RankFailure if code in OF_DEATH else TransportError)
    assert "a gather" in str(error)
    if code in OF_DEATH:
        assert error.ranks == ()
        assert "call dist.recover()" in str(error)


@pytest.mark.parametrize("code", OF_DEATH)
def test_elsewhere_it_is_an_error_of_mpi(code, monkeypatch):
    monkeypatch.delenv("OMPI_MCA_mpi_ft_enable", raising=False)
    assert isinstance(translate(Said(code), "a gather", Deaths()), TransportError)


def test_who_has_died_is_named_whatever_mpi_says(monkeypatch):
    monkeypatch.setenv("OMPI_MCA_mpi_ft_enable", "1")
    error = translate(Said(MPI.ERR_OTHER), "a gather", Deaths(lambda: [2]))
    assert isinstance(error, RankFailure)
    assert error.ranks == (2,)
