"""`MEMORIES`: where the arrays of a measurement are; a new kind of memory is a new row.

Everything else is the same wherever they are. Of a device the benchmark needs its `DeviceRuntime`,
a way to make arrays, and one to wait on the host for what the device was told to do: an operation
there has ended when the event of its end is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from hpcdist.arrays.cuda import cuda_library
from hpcdist.arrays.device import DeviceRuntime
from hpcdist.arrays.dtypes import dtype_row
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm.group import Group
from hpcdist.comm.memory import empty
from hpcdist.errors import TransportError, UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime import gpu
from hpcdist.transport.shm.ordinary import left_to_numpy

HOST = "cpu"
"""The device of ordinary and of shared memory."""


class Device(NamedTuple):
    """A device that has memory of its own.

    Attributes:
        engine: the one of this process.
        wait: blocks the host until the current streams have done all they were told.
        missing: says why this process has no such device; empty if it has.
        about: says what it is, for people.
        torch: the device as torch names it, empty where torch has none.
        matrix: rows of a matrix whose product with another takes well below a millisecond.

    """

    engine: Callable[[], DeviceRuntime]
    wait: Callable[[Any], None]
    missing: Callable[[], str]
    about: Callable[[Any], str]
    torch: str = ""
    matrix: int = 256


class Memory(NamedTuple):
    """A kind of memory.

    Attributes:
        zeros: makes an array of so many elements of a dtype, for the ranks of a group.
        device: whose memory it is, None for the host's.

    """

    zeros: Callable[[int, np.dtype[Any], Group], NumpyArray]
    device: Device | None = None

    def waiter(self) -> Callable[[], None] | None:
        """Return what waits on the host for the device; None where nothing is left to wait for."""
        device = self.device
        return None if device is None else partial(device.wait, device.engine())


# ---- host memory


def _ordinary(count: int, dtype: np.dtype[Any], _: Group) -> NumpyArray:
    with left_to_numpy():  # which may have been told to make all arrays in shared memory
        return _filled(np.empty(count, dtype))


def _shared(count: int, dtype: np.dtype[Any], group: Group) -> NumpyArray:
    return _filled(empty(count, dtype, group))


def _filled(array: NumpyArray) -> NumpyArray:
    """Write zeros, so that the memory is there."""
    array.fill(0)
    return array


# ---- CUDA


def _no_cuda() -> str:
    if find_spec("cupy") is None:
        return "CuPy is not installed: pip install cupy-cuda12x (or cupy-cuda13x)"
    try:
        _cuda_engine()
    except ImportError as error:
        return f"CuPy cannot be imported: {error}"
    except TransportError as error:
        return str(error)
    return ""


def _cuda_engine() -> DeviceRuntime:
    from hpcdist.arrays.cupy import current_runtime

    return current_runtime()


def _cuda_zeros(count: int, dtype: np.dtype[Any], _: Group) -> NumpyArray:
    library = cuda_library()
    assert library.wrap_device is not None
    made: NumpyArray = library.wrap_device(
        library.wrap(np.zeros(count, dtype_row(dtype).carrier or dtype)), dtype
    )
    return made


def _wait_for_streams(engine: DeviceRuntime) -> None:
    for stream in engine.current_streams():
        stream.synchronize()


def _about_gpu(engine: DeviceRuntime) -> str:
    from hpcdist.transport.device.nccl import binding

    name = gpu.describe(int(engine.name.partition(":")[2])).name
    version = binding.version()
    return f"{name}, NCCL {version}" if version else f"{name}, no NCCL"


_CUDA = Device(_cuda_engine, _wait_for_streams, _no_cuda, _about_gpu, torch="cuda", matrix=1024)

MEMORIES: dict[str, Memory] = {
    "ordinary": Memory(_ordinary),
    "shared": Memory(_shared),
    "cuda": Memory(_cuda_zeros, _CUDA),
}
"""By the names that rows have for them; those of devices are also the names of the devices."""


# ---- the choice


def memory_of(name: str | None) -> Memory:
    """Return the memory of a measurement; of one that has no arrays, the host's."""
    return MEMORIES[name or "ordinary"]


def host_memories() -> dict[str, Memory]:
    """Return the kinds of host memory."""
    return {name: memory for name, memory in MEMORIES.items() if memory.device is None}


def devices() -> list[str]:
    """Return the names of the devices that arrays can be on, the host first."""
    return [HOST, *(name for name, memory in MEMORIES.items() if memory.device is not None)]


def are_on_device(names: Sequence[str]) -> bool:
    """Return whether memory of one of these names is a device's."""
    return any(MEMORIES[name].device is not None for name in names)


def check_devices(comm: Any, names: Sequence[str]) -> str | None:
    """Check that every rank has the devices of these memories; collective.

    Args:
        comm: an mpi4py communicator.
        names: keys of `MEMORIES`.

    Returns:
        What the device of the last one is, for people; None if it is the host.

    Raises:
        UsageError: a rank has no such device; on all ranks, in the same words.

    """
    about: str | None = None
    for name in names:
        device = MEMORIES[name].device
        if device is None:
            continue
        reasons = comm.allgather(device.missing())
        without = [rank for rank, reason in enumerate(reasons) if reason]
        if without:
            where = "" if len(without) == len(reasons) else f" on {_ranks(without)}"
            raise UsageError(f"device {name} cannot be used{where}: {reasons[without[0]]}")
        about = device.about(device.engine())
    return about


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
