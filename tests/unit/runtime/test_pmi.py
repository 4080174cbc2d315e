"""What a launcher told of its server is checked before MPI believes it."""

from __future__ import annotations

import os
import socket

import pytest

from hpcdist.errors import UsageError
from hpcdist.runtime.pmi import check_pmi

MPICH = "MPICH Version: 5.0.2\nMPICH configure: --with-device=ch4:ofi"
OPEN_MPI = "Open MPI v5.0.11, package"
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_MPI_TYPE": "pmix"}
PMIX = {"PMIX_NAMESPACE": "slurm.pmix.1.0", "PMIX_RANK": "1"}


@pytest.fixture
def server():
    """Return the address of somebody who listens, as PMIx writes it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"pmix-server.7;tcp4://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def nobody(server):
    """Return the address of nobody: port 1 is never used."""
    return "pmix-server.7;tcp4://127.0.0.1:1"


def test_an_mpich_without_pmix_is_refused_where_srun_offers_only_that():
    with pytest.raises(UsageError) as caught:
        check_pmi(STEP | PMIX, MPICH)
    assert "SLURM_STEP_NUM_TASKS=4 says that this job has 4 ranks" in str(caught.value)
    assert "MPICH needs `srun --mpi=pmi2`" in str(caught.value)


def test_an_mpich_without_pmix_is_refused_under_the_mpiexec_of_open_mpi():
    with pytest.raises(UsageError, match="the mpiexec that belongs to MPICH"):
        check_pmi({**PMIX, "OMPI_COMM_WORLD_SIZE": "2"}, MPICH)


@pytest.mark.parametrize(
    ("environ", "library"),
    [
        (STEP | PMIX, f"{MPICH} --with-pmix=/usr"),
        (STEP | PMIX, OPEN_MPI),
        ({**STEP, **PMIX, "SLURM_STEP_NUM_TASKS": "1"}, MPICH),
        ({"PMI_FD": "0", "PMI_SIZE": "4"}, MPICH),
        ({}, MPICH),
    ],
)
def test_a_library_that_can_talk_to_the_launcher_is_let_in(environ, library):
    check_pmi(environ, library)


def test_a_file_that_is_not_open_is_no_server():
    read, write = os.pipe()
    os.close(write)
    check_pmi({"PMI_FD": str(read)}, MPICH)
    os.close(read)
    with pytest.raises(UsageError) as caught:
        check_pmi({"PMI_FD": str(read)}, MPICH)
    assert f"PMI_FD={read}, a file that is not open" in str(caught.value)
    assert str(caught.value).endswith('run `unset "${!PMI@}"` first')


def test_a_pmix_server_that_is_gone_is_refused(nobody, tmp_path):
    environ = {**STEP, "PMIX_SERVER_TMPDIR": str(tmp_path / "gone"), "PMIX_SERVER_URI41": nobody}
    with pytest.raises(UsageError) as caught:
        check_pmi(environ, OPEN_MPI)
    assert f"PMIX_SERVER_URI41={nobody}, which does not answer" in str(caught.value)
    assert '`unset "${!PMIX@}" "${!SLURM_@}"`' in str(caught.value)


def test_a_pmix_server_whose_folder_is_there_is_not_asked(nobody, tmp_path):
    check_pmi({"PMIX_SERVER_TMPDIR": str(tmp_path), "PMIX_SERVER_URI41": nobody}, OPEN_MPI)


def test_a_pmix_server_whose_folder_a_container_hides_is_asked(server, tmp_path):
    environ = {"PMIX_SERVER_TMPDIR": str(tmp_path / "hidden"), "PMIX_SERVER_URI41": server}
    check_pmi(environ, OPEN_MPI)
