"""Device pointers handed to MPI: only where the library says it can, and only what it can.

mpi4py takes an array's pointer and does not ask what still writes to it, so the stream is waited
for before every call. Device pointers in an operation that an MPI library does not support end in
a segmentation fault; what is not in `ALLOWED` is staged.

Sources: Open MPI 5 documentation, "CUDA", and its coll/cuda component (nonblocking reductions,
Reduce_scatter and Reduce_local have no device path); MPICH, "GPU support"; mpi4py, "GPU-aware MPI".
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, final

from mpi4py import MPI

from hpcdist.arrays.device import DeviceRuntime, Event, Stream
from hpcdist.config import Config
from hpcdist.runtime.cuda_awareness import cuda_awareness
from hpcdist.runtime.process import snapshot
from hpcdist.transport.call.call import AnyArrays, Call
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.device.backend import DeviceBackend, Launch
from hpcdist.transport.device.choose import Candidate, Standing
from hpcdist.transport.device.host_waits import arrive, await_end
from hpcdist.transport.mpi.collectives import VERBS

if TYPE_CHECKING:
    from hpcdist.transport.mpi.context import MpiContext

ALLOWED = frozenset(
    {
        Kind.ALL_REDUCE,
        Kind.REDUCE,
        Kind.REDUCE_SCATTER,
        Kind.SCAN,
        Kind.EXSCAN,
        Kind.BROADCAST,
        Kind.ALL_GATHER,
        Kind.GATHER,
        Kind.SCATTER,
        Kind.ALLTOALL,
    }
)
"""Operations of which every MPI verb we use (all blocking) is supported on device memory."""

CANDIDATE = Candidate("mpi", "this MPI is CUDA-aware", alone=True)

_SELF_TEST_S = 60.0


def standing(config: Config, runtime: DeviceRuntime, uuid: str) -> Standing:
    """Return whether this MPI gets device pointers. Local."""
    return Standing(why_not(config.cuda_selftest) if uuid else f"{runtime.name} is no CUDA device")


def why_not(self_test: bool) -> str:
    """Return why this MPI gets no device pointers; empty if it is CUDA-aware. Local.

    Args:
        self_test: besides, exchange device memory in a child process, which may crash in our place.

    """
    vendor, _ = MPI.get_vendor()
    row = _TRAPS.get(vendor)
    trap = "" if row is None else row(self_test)
    if trap:
        return trap
    awareness = cuda_awareness()
    if not awareness.aware:
        return f"{vendor} is not CUDA-aware: {awareness.source}"
    failure = _tried() if self_test else ""
    return failure and f"{vendor} says that it is CUDA-aware, but device memory failed: {failure}"


@final
class CudaMpi(DeviceBackend):
    """The MPI verbs of the host, on device pointers; they block the host. Local to make."""

    def __init__(self, context: MpiContext) -> None:
        self._context = context
        self._streams: dict[DeviceRuntime, Stream] = {}

    def can(self, call: AnyArrays) -> bool:
        """Return whether every MPI verb that we use for `call` takes device memory."""
        return call.kind in ALLOWED

    def run(self, launch: Launch, detail: tuple[int, int]) -> tuple[Any, Stream]:
        """Run the operation and block the host until it has ended; what is left is on a stream."""
        runtime, call = launch.runtime, launch.call
        stream = self._streams.get(runtime)
        if stream is None:  # only one operation of a group is here at a time
            stream = self._streams[runtime] = runtime.new_stream()
        launch.on_own_stream().make_wait(stream)
        with runtime.on(stream):
            synchronized: Any = _Synchronized(self._context, runtime, stream)
            return VERBS[call.kind](synchronized, call, detail), stream

    def await_on_host(self, event: Event, call: Call, timeout_s: float) -> None:
        """See `DeviceBackend.await_on_host`."""
        await_end(event, call, self._context.ranks, timeout_s)


@final
class _Synchronized:
    """A context whose communicator waits for the stream before each call."""

    def __init__(self, context: MpiContext, runtime: DeviceRuntime, stream: Stream) -> None:
        self._context = context
        self.comm = _Comm(context.comm, runtime, stream, context.timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


@final
class _Comm:
    def __init__(
        self, comm: MPI.Intracomm, runtime: DeviceRuntime, stream: Stream, timeout_s: float
    ) -> None:
        self._comm, self._runtime, self._stream, self._timeout_s = comm, runtime, stream, timeout_s

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._comm, name)
        if not callable(verb):  # as `size`
            return verb

        def call(*args: Any) -> Any:
            event = self._runtime.record(self._stream)
            arrive(self._runtime, event, self._timeout_s)
            return verb(*args)

        return call


# ---- is it CUDA-aware


def _open_mpi(self_test: bool) -> str:
    if MPI.Get_library_version().startswith("Open MPI v4") and not self_test:
        return (
            "Open MPI 4 tells how it was built, not whether it found a GPU; "
            "HPCDIST_CUDA_SELFTEST=1 tries it"
        )
    return ""


def _cray(_: bool) -> str:
    if snapshot().get("MPICH_GPU_SUPPORT_ENABLED") != "1":
        return "MPICH_GPU_SUPPORT_ENABLED is not 1, which Cray MPICH needs"
    return ""


_TRAPS: dict[str, Callable[[bool], str]] = {"Open MPI": _open_mpi, "Cray MPICH": _cray}
"""By MPI library: why its answer is not believed, whether or not device memory is tried besides."""

_SELF_TEST = """
import cupy
from mpi4py import MPI
given, taken = cupy.arange(1 << 18, dtype="f4"), cupy.zeros(1 << 18, dtype="f4")
cupy.cuda.get_current_stream().synchronize()
MPI.COMM_SELF.Sendrecv(given, 0, recvbuf=taken, source=0)
assert (taken == given).all()
taken[...] = 0
cupy.cuda.get_current_stream().synchronize()
MPI.COMM_SELF.Allreduce(given, taken)
assert (taken == given).all()
"""


@cache
def _tried() -> str:
    """Send device memory to itself in a child process that is no rank; return how that failed."""
    prefixes = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "HYDRA", "MPI_LOCAL")
    environ = {name: value for name, value in snapshot().items() if not name.startswith(prefixes)}
    try:
        child = subprocess.run(
            [sys.executable, "-c", _SELF_TEST],
            env=environ,
            capture_output=True,
            text=True,
            timeout=_SELF_TEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {_SELF_TEST_S:g} s"
    if child.returncode < 0:
        return signal.Signals(-child.returncode).name
    said = child.stderr.strip().rpartition("\n")[2] or f"exit code {child.returncode}"
    return said if child.returncode else ""
