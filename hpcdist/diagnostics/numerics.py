"""What chooses code by the machine, so that equal numbers may give other bits on other ranks.

`numerics` asks, on each rank; `numeric_problems` says what to pin where the answers differ. Pure.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist.diagnostics.installation import processor
from hpcdist.diagnostics.problem import Check, Problem
from hpcdist.runtime.process import my_cores

_CPUINFO = Path("/proc/cpuinfo")
_THREADS = {
    "mkl": "MKL_NUM_THREADS",
    "openblas": "OPENBLAS_NUM_THREADS",
    "blis": "BLIS_NUM_THREADS",
    "accelerate": "VECLIB_MAXIMUM_THREADS",
}
"""Which variable sets the threads of a BLAS, by a part of its name; OMP_NUM_THREADS comes after."""

_PINS = {
    "processor": "take nodes of one kind (srun --constraint), or pin what chooses code by the "
    "processor: NPY_DISABLE_CPU_FEATURES, OPENBLAS_CORETYPE or MKL_CBWR=COMPATIBLE, for torch "
    "ATEN_CPU_CAPABILITY=default",
    "vector units of NumPy": "set NPY_DISABLE_CPU_FEATURES to what some ranks have and others not",
    "BLAS": "start all ranks from one installation of NumPy",
    "threads of BLAS": "set OMP_NUM_THREADS (MKL_NUM_THREADS, OPENBLAS_NUM_THREADS) on all ranks, "
    "and bind as many cores to each",
}


def numerics(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what the bits of this rank's numbers may depend on, but for versions and settings.

    Example:
        >>> list(numerics({}))
        ['processor', 'vector units of NumPy', 'BLAS', 'threads of BLAS']

    """
    config: Any = {}
    with suppress(TypeError):  # before NumPy 1.25
        config = np.show_config(mode="dicts")
    blas = config.get("Build Dependencies", {}).get("blas", {})
    name = str(blas.get("name", "unknown"))
    return {
        "processor": processor(_CPUINFO.read_text()) if _CPUINFO.exists() else platform.machine(),
        "vector units of NumPy": " ".join(config.get("SIMD Extensions", {}).get("found", ())),
        "BLAS": f"{name} {blas.get('version', '')}".strip(),
        "threads of BLAS": threads_of(name, environ, len(my_cores()[1])),
    }


def threads_of(blas: str, environ: Mapping[str, str], cores: int) -> str:
    """Return how many threads a BLAS uses, by its variables; without one, as there are cores.

    Example:
        >>> threads_of("scipy-openblas", {"OMP_NUM_THREADS": "2"}, 8)
        '2'

    """
    own = [variable for part, variable in _THREADS.items() if part in blas.lower()]
    told = (environ.get(variable) for variable in (*own, "OMP_NUM_THREADS"))
    return next(filter(None, told), str(cores))


def numeric_problems(differs: Iterable[tuple[str, Mapping[str, str]]]) -> Iterator[Problem]:
    """Give what to pin, for each answer that differs: its name, and which ranks gave which."""
    for name, values in differs:
        held = "; ".join(f"{text or 'none'} on {ranks}" for text, ranks in values.items())
        yield Problem(
            Check.NUMERICS,
            False,
            f"equal numbers may give other bits: the ranks differ in {name}: {held}",
            _PINS[name],
        )
