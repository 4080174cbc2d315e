"""`Config`: every setting hpcdist takes from the environment; nothing else reads ``HPCDIST_*``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Literal, get_args, get_type_hints

from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple


class Config(NamedTuple):
    """Settings of this process, each from the variable ``HPCDIST_<NAME>``."""

    timeout_s: float = 1800.0
    """Seconds after which an operation that not all ranks have joined is an error."""
    piece_mb: float = 4.0
    """MiB of a large reduction inside one node that are handed to MPI at a time."""
    shared_heap_mb: float = 4096.0
    """MiB of memory shared inside a node that the arrays of one process may take at most."""
    share_arrays: bool = False
    """Take NumPy's arrays of at least 256 KiB from that memory, as `share_arrays` does."""
    recorder: Literal["on", "off"] = "on"
    """Whether each rank notes its last operations in a file of its node, for `hpcdist ps`."""
    stall_s: float | None = 60.0
    """Seconds of waiting after which a rank says once who waits for whom; 0: never."""
    early_mb: float = 1024.0
    """MiB of messages that a rank takes in, at most, before the receives for them are called."""
    tuning: str | None = None
    """File written by ``hpcdist tune``: which algorithm operations take at this site."""
    reductions: Literal["fast", "ordered"] = "fast"
    """Whether floating-point reductions are computed in the order of the ranks on every way."""
    kernel: Literal["auto", "never"] = "auto"
    """Whether reductions in shared memory use the compiled loops, where there are any."""
    device: str | None = None
    """GPU of this process, by its number among those it sees; usually by the rank on the node."""
    device_backend: Literal["auto", "nccl", "mpi", "staged"] = "auto"
    """How arrays on a GPU travel; "auto" takes the fastest way that is proven on all ranks."""
    device_chunk_mb: float = 4.0
    """MiB of a GPU's array that are copied through host memory at a time."""
    share_gpu: bool = False
    """Allow several ranks on one GPU; NCCL 2.30 serves them if device_backend asks for it."""
    nccl_binding: Literal["cupy", "nccl4py"] = "cupy"
    """The Python package whose functions of NCCL are called; the library is the same."""
    nccl_sums: Literal["float32", "native"] = "float32"
    """Whether 16-bit floats on GPUs are added in float32 and rounded once, or as NCCL does it."""
    device_batches: Literal["staged", "nccl"] = "staged"
    """How a batch of messages on GPUs travels; "nccl" needs both ranks to batch alike."""
    cuda_selftest: bool = False
    """Try device memory with a CUDA-aware MPI in a child process before it is trusted."""
    ranks_per_node: int | None = None
    """Take so many ranks for a node, in order, whatever they run on; to try things out."""
    survive: bool = False
    """Go on when a rank dies; `hpcdist run --survive` sets it, and starts an MPI that can."""
    traceback: Literal["short", "full"] = "short"
    """Whether the last words of a rank that an error ends have the lines of hpcdist, too."""
    allow_singleton: bool = False
    """Accept a world of one rank although the launcher started more."""
    overlap: Literal["auto", "always", "never"] = "auto"
    """Whether gradients travel while the backward pass computes; "auto" measures."""
    check_nan: bool = False
    """Check gradients for NaN before they are averaged, and name the parameter and the rank."""
    rpc_interface: str | None = None
    """Networks between nodes by which functions are called: names, or addresses, with commas."""
    array_replicate: Literal["error", "warn", "allow"] = "error"
    """What functions without a rule do to arrays that are cut, as `array_policy` says it."""
    array_sums: Literal["fast", "reproducible"] = "fast"
    """How floating-point numbers of arrays are added, as `array_policy` says it."""
    array_placements: tuple[int | None, ...] = ()
    """How new arrays are cut along the axes of their mesh: ``S0``, ``R`` or ``S0,S-1``."""


def read_config(environ: Mapping[str, str] | None = None) -> Config:
    """Read the configuration; an unusable value is a `UsageError` naming the variable."""
    environ = os.environ if environ is None else environ
    given: dict[str, Any] = {}
    for name in Config._fields:
        variable = variable_of(name, environ)
        text = environ.get(variable)
        if text:
            kind = _kinds()[name]
            read = _READERS.get(kind) or partial(_choice, get_args(kind))
            given[name] = read(variable, text)
    return Config(**given)


@lru_cache
def _kinds() -> dict[str, Any]:
    """Return the type of each setting."""
    return get_type_hints(Config)


def unknown_settings(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that looks like a setting, and is none."""
    known = {f"HPCDIST_{name.upper()}" for name in Config._fields}
    known |= {*_FORMER.values(), *_OF_OTHERS}
    unknown = [
        name
        for name in sorted(environ)
        if name.startswith("HPCDIST_") and name not in known and "_TEST_" not in name
    ]
    if not unknown:
        return []
    import difflib

    near = {name: difflib.get_close_matches(name, known, 1, 0.8) for name in unknown}
    return [
        f"{name} is set and has no effect"
        + (f"; did you mean {near[name][0]}?" if near[name] else "; unset it")
        for name in unknown
    ]


def variable_of(name: str, environ: Mapping[str, str]) -> str:
    """Return the variable of a setting: a former one if that alone is set."""
    variable, former = f"HPCDIST_{name.upper()}", _FORMER.get(name)
    return former if former and environ.get(former) and not environ.get(variable) else variable


def common(config: Config) -> tuple[Any, ...]:
    """Return the settings that have to be the same on all ranks, for `check_common`."""
    return tuple(getattr(config, name) for name in _COMMON)


def check_common(by_rank: Sequence[tuple[Any, ...]]) -> None:
    """Raise `UsageError` where the `common` settings of two ranks differ."""
    for name, values in zip(_COMMON, zip(*by_rank, strict=True), strict=True):
        for rank, value in enumerate(values):
            if value != values[0]:
                variable = f"HPCDIST_{name.upper()}"
                raise UsageError(
                    f"{variable} is {values[0]} on rank 0, but {value} on rank {rank}; give all "
                    "ranks the same value, or none"
                )


def _number(variable: str, text: str, otherwise: str = "") -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    endless = value == float("inf") and not variable.endswith("_S")
    if not value > 0 or endless:
        raise UsageError(
            f"{variable}={text!r} is not a positive number{otherwise}; set one or unset it"
        )
    return value


def _seconds_or_never(variable: str, text: str) -> float | None:
    return None if text.strip() in ("0", "0.0") else _number(variable, text, ", nor 0 for never")


def _integer(variable: str, text: str) -> int:
    value = _number(variable, text)
    if not value.is_integer():
        raise UsageError(f"{variable}={text!r} is not a whole number; set one or unset it")
    return int(value)


def _count(variable: str, text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{variable}={text!r} is not a whole number; set one or unset it")
    return int(text)


def _switch(variable: str, text: str) -> bool:
    if text.lower() not in _SWITCHES:
        raise UsageError(f"{variable}={text!r} is neither 0 nor 1; set one of them or unset it")
    return _SWITCHES[text.lower()]


def _cuts(variable: str, text: str) -> tuple[int | None, ...]:
    """Return the dimension that each axis of a mesh cuts, None for those that cut none."""
    found: list[int | None] = []
    for each in text.split(","):
        kind, dim = each.strip()[:1].upper(), each.strip()[1:]
        if (kind, dim) == ("R", ""):
            found.append(None)
        elif kind == "S" and dim.removeprefix("-").isdecimal():
            found.append(int(dim))
        else:
            raise UsageError(
                f"{variable}={text!r} is no list of R (whole on each rank) and S0, S1, S-1 ... "
                "(cut along this dimension), one for each axis of the mesh; set one or unset it"
            )
    return tuple(found)


def _choice(choices: Sequence[str], variable: str, text: str) -> str:
    if text.lower() not in choices:
        raise UsageError(
            f"{variable}={text!r} is none of {', '.join(choices)}; set one or unset it"
        )
    return text.lower()


_FORMER = {"device_backend": "HPCDIST_DEVICE_WAY"}
"""Variables of settings that have been renamed, which still count where the new one is not set."""

_OF_OTHERS = (
    "HPCDIST_LABELLED",
    "HPCDIST_MIN_RANKS",
    "HPCDIST_OWN_RANK",
    "HPCDIST_REPORT_DIR",
    "HPCDIST_RESTART_COUNT",
    "HPCDIST_SPARES",
    "HPCDIST_TORCHRUN",
)
"""Variables that hpcdist sets for its own processes."""

_COMMON = (
    "device_backend",
    "device_batches",
    "nccl_sums",
    "reductions",
    "array_replicate",
    "array_sums",
    "array_placements",
)
_SWITCHES = {"0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}
_READERS: dict[Any, Callable[[str, str], Any]] = {
    float: _number,
    float | None: _seconds_or_never,
    bool: _switch,
    int | None: _integer,
    int: _count,
    tuple[int | None, ...]: _cuts,
    str | None: lambda variable, text: text,
}
