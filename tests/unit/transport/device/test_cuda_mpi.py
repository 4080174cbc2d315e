"""Whether an MPI that says that it is CUDA-aware is believed."""

import pytest

from hpcdist.runtime.cuda_awareness import Awareness
from hpcdist.transport.device import cuda_mpi


@pytest.fixture(autouse=True)
def _says_that_it_is(monkeypatch):
    monkeypatch.setattr(cuda_mpi, "cuda_awareness", lambda: Awareness(True, "its query"))
    cuda_mpi._tried.cache_clear()
    yield
    cuda_mpi._tried.cache_clear()


def this_is(monkeypatch, vendor, version):
    monkeypatch.setattr(cuda_mpi.MPI, "get_vendor", lambda: (vendor, (int(version[-1]), 0, 0)))
    monkeypatch.setattr(cuda_mpi.MPI, "Get_library_version", lambda: version)


@pytest.mark.parametrize(
    ("program", "failure"),
    [
        ("pass", ""),
        ("import os; os.abort()", "SIGABRT"),
        ("raise ValueError('no such memory')", "ValueError: no such memory"),
        ("raise SystemExit(3)", "exit code 3"),
    ],
)
def test_how_device_memory_failed_in_the_child_is_said(monkeypatch, program, failure):
    this_is(monkeypatch, "Open MPI", "Open MPI v5")
    monkeypatch.setattr(cuda_mpi, "_SELF_TEST", program)
    assert cuda_mpi.why_not(self_test=False) == ""
    said = cuda_mpi.why_not(self_test=True)
    assert said.endswith(failure)
    assert bool(said) == bool(failure)


def test_open_mpi_4_is_believed_after_a_try_alone(monkeypatch):
    this_is(monkeypatch, "Open MPI", "Open MPI v4")
    monkeypatch.setattr(cuda_mpi, "_SELF_TEST", "pass")
    assert "HPCDIST_CUDA_SELFTEST=1 tries it" in cuda_mpi.why_not(self_test=False)
    assert cuda_mpi.why_not(self_test=True) == ""
