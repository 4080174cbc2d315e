"""`Mpi`: the MPI libraries of this machine, and how to make mpi4py load each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_osc": "^ucx",  # silences a harmless error message
}


class Mpi(NamedTuple):
    """An MPI library: its launcher, and the environment that makes mpi4py load it."""

    name: str
    version: str
    mpiexec: str
    environ: dict[str, str]


def find_libraries(named: Iterable[str] = ()) -> list[Mpi]:
    """Return one MPI library of each family: `named` launchers first, then the usual places."""
    usual = [Path(sys.executable).parent / "mpiexec", ROOT / ".mpich/bin/mpiexec"]
    found: dict[str, Mpi] = {}
    for candidate in (*named, *usual, shutil.which("mpiexec")):
        if candidate and Path(candidate).exists():
            library = identify(str(candidate))
            found.setdefault(library.name, library)
    return list(found.values())


def identify(mpiexec: str) -> Mpi:
    """Ask `mpiexec` which library it belongs to."""
    asked = subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout
    name = "openmpi" if "Open MPI" in asked else "mpich"
    numbers = [word for word in asked.split() if word[0].isdigit() and "." in word]
    libraries = str(Path(mpiexec).absolute().parents[1] / "lib")
    path = os.pathsep.join(filter(None, (libraries, os.environ.get("LD_LIBRARY_PATH"))))
    environ = {"MPI4PY_MPIABI": name, "LD_LIBRARY_PATH": path}
    environ |= OPENMPI if name == "openmpi" else {}
    return Mpi(name, numbers[0] if numbers else "", mpiexec, environ)
