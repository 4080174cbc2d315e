"""What is installed: versions, settings, and what the MPI library says of itself."""

from __future__ import annotations

import ctypes
import importlib
import platform
import re
from collections.abc import Iterator, Mapping
from ctypes.util import find_library
from importlib import metadata
from pathlib import Path

from hpcdist.compiled import what_is_missing
from hpcdist.config import Config, variable_of
from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime.cuda_awareness import loaded
from hpcdist.runtime.mpi import load_mpi
from hpcdist.transport.shm.kernel import compiled

NOT_INSTALLED = "not installed"
_YES = ("1", "true", "yes", "on")
_NCCL_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_CPUINFO = Path("/proc/cpuinfo")
_VECTOR_UNITS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "sve": "SVE", "asimd": "NEON"}
"""The flags of a processor that name its vector units, the widest first."""


class Setting(NamedTuple):
    """A setting, its value, and where that comes from."""

    variable: str
    value: str
    source: str


class Library(NamedTuple):
    """The MPI library that was loaded.

    Attributes:
        vendor: its name, as mpi4py tells it.
        text: name, version and the version of the standard.
        thread_level: what it provides.
        yields: whether a waiting rank leaves its core to others; None for other libraries than
            Open MPI.

    """

    vendor: str
    text: str
    thread_level: str
    yields: bool | None


# ---- versions and settings


def own_version() -> str:
    """Return the version of hpcdist."""
    return str(importlib.import_module("hpcdist").__version__)


def versions() -> dict[str, str]:
    """Return the versions of hpcdist's dependencies; nothing is started."""
    return {
        "hpcdist": own_version(),
        "Python": platform.python_version(),
        "NumPy": _version_of("numpy"),
        "mpi4py": _version_of("mpi4py"),
        "compiled parts": "; ".join(what_is_missing()) or "all",
    }


def surroundings() -> dict[str, str]:
    """Return what else results and defects may depend on: torch, the processor, the system."""
    return {
        "torch": _version_of("torch"),
        "processor": processor(_CPUINFO.read_text()) if _CPUINFO.exists() else platform.machine(),
        "system": f"{_distribution()}, {platform.system()} {platform.release()}, "
        f"{' '.join(platform.libc_ver())}",
    }


def processor(cpuinfo: str) -> str:
    r"""Return the name of the processor and its widest vector unit, as Linux tells them.

    Example:
        >>> processor("model name\t: Some CPU\nflags\t\t: fpu sse2 avx avx2 fma")
        'Some CPU, AVX2'

    """
    told = dict(re.findall(r"^(model name|flags|Features)\s*: (.*)$", cpuinfo, re.MULTILINE))
    flags = f"{told.get('flags', '')} {told.get('Features', '')}".split()
    units = [unit for flag, unit in _VECTOR_UNITS.items() if flag in flags]
    return ", ".join([told.get("model name", platform.machine()), *units[:1]])


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return "no os-release"


def _version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED


def compiled_dtypes() -> list[str]:
    """Return the dtypes that the compiled kernel reduces; none where there is no kernel."""
    codes = [] if compiled is None else compiled.CODES
    return list(dict.fromkeys(name.rpartition("_")[2] for name in codes))


def settings_of(config: Config, environ: Mapping[str, str]) -> list[Setting]:
    """Return every setting, its value and its source."""
    found = []
    for name, value in config._asdict().items():
        variable = variable_of(name, environ)
        source = "environment" if environ.get(variable) else "default"
        found.append(Setting(variable, str(value), source))
    return found


# ---- the MPI library; MPI has been started


def mpi_library(environ: Mapping[str, str]) -> Library:
    """Return the name, the version and the thread level of the MPI library."""
    mpi = load_mpi()
    vendor, numbers = mpi.get_vendor()
    standard = ".".join(map(str, mpi.Get_version()))
    names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    levels = {getattr(mpi, f"THREAD_{name}"): name for name in names}
    return Library(
        vendor,
        f"{vendor} {'.'.join(map(str, numbers))}, MPI {standard}",
        levels[mpi.Query_thread()],
        environ.get("OMPI_MCA_mpi_yield_when_idle", "").lower() in _YES
        if vendor == "Open MPI"
        else None,
    )


# ---- NCCL


def nccl_version() -> str:
    """Return the version of the NCCL that would be loaded, or that there is none."""
    for path in _nccl_libraries():
        number = ctypes.c_int()
        try:
            ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
        except (OSError, AttributeError):
            continue
        return f"{in_parts(number.value)} ({path})"
    return NOT_INSTALLED


def in_parts(number: int) -> str:
    """Return NCCL's number as it is written: 2.9 and newer count in ten thousands.

    Example:
        >>> in_parts(22809), in_parts(2708)
        ('2.28.9', '2.7.8')

    """
    scale = 10_000 if number >= 10_000 else 1_000
    return f"{number // scale}.{number % scale // 100}.{number % 100}"


def _nccl_libraries() -> Iterator[str]:
    yield from loaded(re.compile(r"/libnccl\.so[\d.]*$"))
    for wheel in _NCCL_WHEELS:
        try:
            files = metadata.files(wheel) or []
        except metadata.PackageNotFoundError:
            continue
        yield from (str(file.locate()) for file in files if file.name.startswith("libnccl.so"))
    found = find_library("nccl")
    if found is not None:
        yield found
