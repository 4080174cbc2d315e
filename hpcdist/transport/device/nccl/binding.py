"""NCCL's functions as one small table, from CuPy or from NVIDIA's nccl4py.

Pointers, counts, codes and streams are integers, in the order of nccl.h. What a function reports as
a failure is one of `Binding.failures`; `failure` says it in words. Which of the two is taken makes
no difference to what NCCL does: both call the libnccl.so.2 that is loaded already, by torch for
example, and else the one of the wheel ``nvidia-nccl-cu12`` (or ``-cu13``), or the system's.

Sources: nccl.h; cupy_backends/cuda/libs/nccl.pyx of CuPy 14.2; nccl/bindings of nccl4py 0.6, which
promises no more than its name for these functions, so no other version is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from importlib import metadata
from typing import Any, Literal

from hpcdist.errors import TransportError
from hpcdist.named_tuple import NamedTuple

Provider = Literal["cupy", "nccl4py"]

SHARES_GPUS = 23000
"""NCCL 2.30, the first that lets several ranks use one GPU (NCCL_MULTI_RANK_GPU_ENABLE)."""

_OLDEST = 21000
"""NCCL 2.10, the first with the operator AVG."""

_NCCL4PY = "0.6."
_IN_PROGRESS = 7
_STATUS = {_IN_PROGRESS: "ncclInProgress", 8: "ncclTimeout"}
"""ncclResult_t of which CuPy 14.2 cannot make an NcclError: it raises a KeyError instead."""


class Communicator(NamedTuple):
    """The functions of one communicator; `count` is in elements, `root` and `peer` are ranks.

    `check` raises what NCCL reports about the operations under way. `abort` and `destroy` raise
    nothing, and are the last that is called.
    """

    all_reduce: Callable[[int, int, int, int, int, int], None]
    """(send, recv, count, dtype, op, stream)"""
    reduce: Callable[[int, int, int, int, int, int, int], None]
    """(send, recv, count, dtype, op, root, stream)"""
    broadcast: Callable[[int, int, int, int, int, int], None]
    """(send, recv, count, dtype, root, stream)"""
    reduce_scatter: Callable[[int, int, int, int, int, int], None]
    """(send, recv, count of recv, dtype, op, stream)"""
    all_gather: Callable[[int, int, int, int, int], None]
    """(send, recv, count of send, dtype, stream)"""
    send: Callable[[int, int, int, int, int], None]
    """(buffer, count, dtype, peer, stream)"""
    recv: Callable[[int, int, int, int, int], None]
    """(buffer, count, dtype, peer, stream)"""
    check: Callable[[], None]
    abort: Callable[[], None]
    destroy: Callable[[], None]


class Binding(NamedTuple):
    """NCCL's other functions, and what all of them raise.

    `communicator` takes the number of ranks, what `unique_id` has returned on one of them, and the
    own rank; it is for the current device of the thread, and waits for all ranks.
    """

    version: Callable[[], int]
    unique_id: Callable[[], Any]
    communicator: Callable[[int, Any, int], Communicator]
    group_start: Callable[[], None]
    group_end: Callable[[], None]
    failures: tuple[type[Exception], ...]


def why_not(provider: Provider = "cupy") -> str:
    """Return why this process cannot use NCCL; empty if it can. Local."""
    try:
        found = binding(provider).version()
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        name, extra = _NAMES[provider]
        return f"{name} has no NCCL ({error}): pip install 'hpcdist[{extra}]' (or cuda12)"
    return f"NCCL {found} is older than {_OLDEST}" if found < _OLDEST else ""


def version(provider: Provider = "cupy") -> int:
    """Return the version of the NCCL library in use, as 22809 for 2.28.9; 0 if there is none."""
    return 0 if why_not(provider) else binding(provider).version()


@cache
def binding(provider: Provider) -> Binding:
    """Return the functions of NCCL as `provider` has them; `ImportError` without it."""
    return _OPEN[provider]()


def failure(what: str, error: Exception) -> TransportError:
    """Return the error that says what has failed, and what to do."""
    reason = f"{error}" or type(error).__name__
    if isinstance(error, KeyError):
        reason = _STATUS.get(error.args[0] if error.args else 0, f"status {reason}")
    return TransportError(
        f"NCCL failed in {what}: {reason}; run with NCCL_DEBUG=WARN to see why, or set "
        "HPCDIST_DEVICE_BACKEND=staged to go on without NCCL"
    )


def _quiet(end: Callable[[], Any]) -> Callable[[], None]:
    """Wrap `end` so that its exceptions are suppressed: after it nothing is left to do."""

    def run() -> None:
        with suppress(Exception):
            end()

    return run


# ---- CuPy


def _from_cupy() -> Binding:
    from cupy.cuda import nccl

    if not nccl.available:
        raise ImportError("libnccl.so.2 was not found")

    def communicator(ranks: int, key: Any, rank: int) -> Communicator:
        return _cupy_communicator(nccl.NcclCommunicator(ranks, key, rank))

    failures = (RuntimeError, MemoryError, KeyError)  # KeyError: see _STATUS
    return Binding(
        nccl.get_version,
        nccl.get_unique_id,  # bytes, before CuPy 14 a tuple: handed to NcclCommunicator as it is
        communicator,
        nccl.groupStart,
        nccl.groupEnd,
        failures,
    )


def _cupy_communicator(made: Any) -> Communicator:
    def check() -> None:
        try:
            made.check_async_error()
        except KeyError as error:
            if error.args != (_IN_PROGRESS,):
                raise

    return Communicator(
        made.allReduce,
        made.reduce,
        made.broadcast,
        made.reduceScatter,
        made.allGather,
        made.send,
        made.recv,
        check,
        _quiet(made.abort),
        _quiet(made.destroy),
    )


# ---- nccl4py


def _from_nccl4py() -> Binding:
    installed = metadata.version("nccl4py")
    if not installed.startswith(_NCCL4PY):
        raise ImportError(f"it is version {installed}; hpcdist supports {_NCCL4PY}x")
    from nccl.bindings import nccl

    def unique_id() -> bytes:
        return bytes(nccl.get_unique_id())

    def communicator(ranks: int, key: Any, rank: int) -> Communicator:
        own = nccl.UniqueId.from_buffer(key)
        return _nccl4py_communicator(nccl, nccl.comm_init_rank(ranks, own, rank))

    failures = (nccl.NCCLError, RuntimeError, MemoryError, ValueError)  # ValueError: a new status
    return Binding(
        nccl.get_version, unique_id, communicator, nccl.group_start, nccl.group_end, failures
    )


def _nccl4py_communicator(nccl: Any, made: Any) -> Communicator:
    """Fill in the communicator, which comes last but one in NCCL's functions."""

    def all_reduce(send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> None:
        nccl.all_reduce(send, recv, count, dtype, op, made, stream)

    def reduce(
        send: int, recv: int, count: int, dtype: int, op: int, root: int, stream: int
    ) -> None:
        nccl.reduce(send, recv, count, dtype, op, root, made, stream)

    def broadcast(send: int, recv: int, count: int, dtype: int, root: int, stream: int) -> None:
        nccl.broadcast(send, recv, count, dtype, root, made, stream)

    def reduce_scatter(send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> None:
        nccl.reduce_scatter(send, recv, count, dtype, op, made, stream)

    def all_gather(send: int, recv: int, count: int, dtype: int, stream: int) -> None:
        nccl.all_gather(send, recv, count, dtype, made, stream)

    def send(buffer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        nccl.send(buffer, count, dtype, peer, made, stream)

    def recv(buffer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        nccl.recv(buffer, count, dtype, peer, made, stream)

    def check() -> None:
        nccl.check_status(nccl.comm_get_async_error(made))  # ncclInProgress is no error

    return Communicator(
        all_reduce,
        reduce,
        broadcast,
        reduce_scatter,
        all_gather,
        send,
        recv,
        check,
        _quiet(partial(nccl.comm_abort, made)),
        _quiet(partial(nccl.comm_destroy, made)),
    )


_NAMES: dict[Provider, tuple[str, str]] = {
    "cupy": ("CuPy", "cuda13"),
    "nccl4py": ("nccl4py", "cuda13,nccl4py"),
}
"""How it is called, and what of hpcdist's extras brings it."""

_OPEN: dict[Provider, Callable[[], Binding]] = {"cupy": _from_cupy, "nccl4py": _from_nccl4py}
