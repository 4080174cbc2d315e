"""The MPI libraries that jobs of these tests are started with."""

from __future__ import annotations

import os
from pathlib import Path

from tiers import first_of

from hpcdist.launch.launchers import find_site
from hpcdist.runtime.process import snapshot

ROOT = Path(__file__).parents[2]


def _environments():
    """Return the environment for each MPI: this Python's own, and an MPICH in .mpich."""
    found = {"the MPI of this Python": snapshot()}
    mpich = ROOT / ".mpich"
    if (mpich / "bin" / "mpiexec").exists():
        found["MPICH"] = snapshot() | {
            "MPI4PY_MPIABI": "mpich",
            "LD_LIBRARY_PATH": str(mpich / "lib"),
            "PATH": f"{mpich / 'bin'}:{os.environ['PATH']}",
        }
    return {name: env for name, env in found.items() if find_site(env).mpiexec is not None}


ENVIRONMENTS = _environments()
"""For each MPI its name and the environment of a job."""

EVERY_MPI = first_of(ENVIRONMENTS) if ENVIRONMENTS else []
"""The names, as parameters of tests; all but the first are left to `make test-all`."""
