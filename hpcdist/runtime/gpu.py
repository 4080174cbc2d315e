"""Which GPU a process uses: chosen by its place on the node, and known by its UUID.

Numbers are those CUDA gives the devices a process sees; under Slurm's cgroups every process may
call its own device 0, so devices are told apart by their UUID.
"""

from __future__ import annotations

import os

from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple

_UUID_BYTES = 16


class Gpu(NamedTuple):
    """A GPU: its number in this process, name, UUID (hexadecimal), PCI address, free bytes."""

    number: int
    name: str
    uuid: str
    pci: str
    memory: int


def choose(visible: int, local_rank: int, wanted: int | None, setting: str = "device") -> int:
    """Choose a device: the wanted one, the only one, or one by the rank on the node.

    Args:
        visible: number of devices this process sees.
        local_rank: its rank among the processes of its node.
        wanted: a number given by the user, or None.
        setting: where the user gave it.

    Raises:
        UsageError: there is no such device.

    """
    if visible == 0:
        raise UsageError(
            f"a GPU was asked for by {setting}, but this process sees none; look at "
            "CUDA_VISIBLE_DEVICES, and ask Slurm for GPUs (--gpus-per-node=N), or use device='cpu'"
        )
    if wanted is None:
        return local_rank % visible
    if wanted >= visible:
        raise UsageError(
            f"{setting}={wanted} was asked for, but this process sees devices 0 to {visible - 1}; "
            "numbers count from 0 among the devices in CUDA_VISIBLE_DEVICES"
        )
    return wanted


def read_device(text: str, setting: str = "device") -> int | None:
    """Read ``gpu``, ``gpu:1``, ``cuda:1`` or ``1``: the number, None for any device.

    Args:
        text: what the user gave.
        setting: where.

    Raises:
        UsageError: it is none of these.

    """
    kind, _, number = text.strip().lower().partition(":")
    if kind.isdigit() and not number:
        return int(kind)
    if kind not in ("gpu", "cuda") or (number and not number.isdigit()):
        raise UsageError(f"{setting}={text!r} is unknown; use 'auto', 'cpu', 'gpu' or 'gpu:0'")
    return int(number) if number else None


def has_nodes() -> bool:
    """Return whether this machine has NVIDIA GPUs, without asking CUDA."""
    return any(name[:6] == "nvidia" and name[6:7].isdecimal() for name in os.listdir("/dev"))


def count() -> int:
    """Return the number of devices this process sees; 0 without CuPy, driver or GPU."""
    try:
        from cupy.cuda import runtime
    except ImportError:
        return 0
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError:
        return 0


def bind(number: int) -> None:
    """Make a device the current one of this thread, for CuPy and for torch, which follow CUDA."""
    from cupy.cuda import runtime

    runtime.setDevice(number)


def describe(number: int) -> Gpu:
    """Describe a device of this process."""
    from cupy.cuda import runtime

    properties = runtime.getDeviceProperties(number)
    return Gpu(
        number,
        properties["name"].decode(),
        properties["uuid"][:_UUID_BYTES].hex(),
        runtime.deviceGetPCIBusId(number).lower(),
        int(properties["totalGlobalMem"]),
    )


def free_and_total(number: int) -> tuple[int, int]:
    """Return how many bytes of a device are free, and how many it has."""
    import cupy

    with cupy.cuda.Device(number):
        free, total = cupy.cuda.runtime.memGetInfo()
    return int(free), int(total)


def uuid_of(device: str) -> str:
    """Return what tells a device from all others of its node, by its name, such as ``cuda:0``.

    That is its UUID, of which CuPy shows no more than what is before a zero byte, and its PCI
    address, which parts of one GPU have in common. Empty for devices that are not CUDA's.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return ""
    found = describe(int(number))
    return f"{found.uuid} at {found.pci}"


def order_launches() -> None:
    """Make NCCL start the kernels of all groups in the order of issue; call before its first use.

    Otherwise two kernels that wait for other ranks may wait for each other (NCCL user guide,
    NCCL_LAUNCH_ORDER_IMPLICIT; NCCL 2.26 and newer).
    """
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")


def let_nccl_share() -> None:
    """Allow NCCL 2.30 and newer to serve ranks that share a GPU; before its first communicator.

    It reads the variable once per process (NCCL user guide, NCCL_MULTI_RANK_GPU_ENABLE).
    """
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
