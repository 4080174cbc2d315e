"""Whether MPI can start where the launcher said: `check_pmi`, asked before MPI is initialised.

A launcher tells a rank by variables where its server for PMI-2 or PMIx is. An MPI library that is
told of a server it does not know, or of one that is gone, ends or crashes instead of saying so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress

from hpcdist.errors import UsageError
from hpcdist.runtime.place import Environ, expected_size
from hpcdist.runtime.remedy import not_together, remedy
from hpcdist.runtime.slurm import in_slurm_step

_LIMIT_S = 1.0
_SERVER = r";tcp4://([\d.]+):(\d+)"


def check_pmi(environ: Environ, mpi_library: str) -> None:
    """Raise where MPI would fail to start because of what the launcher told, or left behind.

    Args:
        environ: the environment of the process.
        mpi_library: the text of `MPI.Get_library_version()`.

    Raises:
        UsageError: the launcher speaks PMIx and the library does not, or the server is gone; the
            message names the remedy.

    Example:
        >>> check_pmi({}, "Open MPI v5.0.11")

    """
    plain_mpich = mpi_library.startswith("MPICH Version")
    if plain_mpich and "PMI_FD" not in environ:
        _check_language(environ, mpi_library)
    elif plain_mpich and not _is_open(environ["PMI_FD"]):
        raise _gone(environ, f"PMI_FD={environ['PMI_FD']}, a file that is not open", "PMI")
    elif mpi_library.startswith("Open MPI") and (told := lost_server(environ)):
        raise _gone(environ, told, "PMIX")


def _check_language(environ: Environ, mpi_library: str) -> None:
    """Raise where only PMIx is there, and an MPICH that was built without it."""
    expected = expected_size(environ)
    if "PMIX_NAMESPACE" not in environ or "pmix" in mpi_library.lower():
        return
    if expected is not None and expected[0] > 1:
        size, name = expected
        raise not_together(
            f"{name}={size} says that this job has {size} ranks, and the launcher speaks PMIx, "
            "which this MPICH does not",
            remedy(environ, name, mpi_library),
        )


def _gone(environ: Environ, told: str, kind: str) -> UsageError:
    kinds = [kind, "SLURM_"] if in_slurm_step(environ) else [kind]
    names = " ".join(f'"${{!{each}@}}"' for each in kinds)
    return UsageError(
        f"the environment names {told}, as the server of the launcher: these variables are left "
        f"of a job that has ended; use a fresh shell, or run `unset {names}` first"
    )


def _is_open(number: str) -> bool:
    try:
        os.fstat(int(number))
    except (OSError, ValueError, OverflowError):
        return False
    return True


def lost_server(environ: Mapping[str, str]) -> str | None:
    """Return what names a PMIx server that is gone, None where it may be there.

    A container may hide the server's folder, so a missing folder alone says nothing.
    """
    folder = environ.get("PMIX_SERVER_TMPDIR", "")
    if not folder or not _is_missing(folder):
        return None
    for name in sorted(name for name in environ if name.startswith("PMIX_SERVER_URI")):
        server = re.search(_SERVER, environ[name])
        if server is not None and not _answers(server[1], int(server[2])):
            return f"{name}={environ[name]}, which does not answer"
    return None


def _is_missing(folder: str) -> bool:
    try:
        os.stat(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _answers(host: str, port: int) -> bool:
    import socket

    with suppress(OSError), socket.create_connection((host, port), _LIMIT_S):
        return True
    return False
