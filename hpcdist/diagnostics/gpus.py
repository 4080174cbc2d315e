"""The GPUs of a node, as NVML tells them, and which of them a rank may use.

No CUDA context is made in this process: NVML is part of the driver. Reference: NVML API,
device queries; CUDA C++ Programming Guide, CUDA environment variables.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from hpcdist.named_tuple import NamedTuple

_NVML = "libnvidia-ml.so.1"
_TEXT_BYTES = 96
_KERNEL = "import cupy; cupy.zeros(1) + 1"
_KERNEL_S = 120.0


class Gpu(NamedTuple):
    """One GPU, by the name that no renumbering changes."""

    uuid: str
    name: str


class Gpus(NamedTuple):
    """The GPUs that a rank may use, in its order; `why_none` where there is not one.

    `no_kernel` is what CuPy says where it is installed and cannot run a kernel.
    """

    usable: tuple[Gpu, ...] = ()
    why_none: str = ""
    no_kernel: str = ""


def find_gpus(visible: str | None) -> Gpus:
    """Return the GPUs of this node that a rank may use.

    Args:
        visible: the rank's ``CUDA_VISIBLE_DEVICES``, None where it is not set.

    """
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        return Gpus((), f"no NVIDIA driver: {_NVML} cannot be loaded")
    code = nvml.nvmlInit_v2()
    if code:
        return Gpus((), f"NVML does not start: error {code}")
    try:
        found = chosen(_all(nvml), visible)
    finally:
        nvml.nvmlShutdown()
    if not found:
        return Gpus((), f"CUDA_VISIBLE_DEVICES={visible} leaves none")
    return Gpus(found, no_kernel=no_kernel())


def no_kernel() -> str:
    """Return why CuPy cannot run a kernel, which it compiles; empty if it can, or is not here.

    It needs NVRTC and the headers of CUDA, which no wheel of CuPy brings. A process of its own
    tries it.
    """
    if importlib.util.find_spec("cupy") is None:
        return ""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _KERNEL],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_KERNEL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


def _all(nvml: Any) -> list[Gpu]:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    found = []
    for index in range(count.value):
        device = ctypes.c_void_p()
        if not nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
            ask = (nvml.nvmlDeviceGetUUID, nvml.nvmlDeviceGetName)
            found.append(Gpu(*(_text(function, device) for function in ask)))
    return found


def _text(function: Any, device: ctypes.c_void_p) -> str:
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    function(device, text, ctypes.c_uint(_TEXT_BYTES))
    return text.value.decode(errors="replace")


def chosen(gpus: Sequence[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, as CUDA reads it.

    What stands behind the first word that names no GPU is not looked at.

    Example:
        >>> both = (Gpu("GPU-a", "H200"), Gpu("GPU-b", "H200"))
        >>> [gpu.uuid for gpu in chosen(both, "1,0")]
        ['GPU-b', 'GPU-a']

    """
    if visible is None:
        return tuple(gpus)
    found: list[Gpu] = []
    for word in visible.split(","):
        gpu = _named(gpus, word.strip())
        if gpu is None:
            break
        found.append(gpu)
    return tuple(found)


def _named(gpus: Sequence[Gpu], word: str) -> Gpu | None:
    if word.isdigit():
        return gpus[int(word)] if int(word) < len(gpus) else None
    if word.startswith("MIG-"):
        return Gpu(word, "MIG device")
    fitting = [gpu for gpu in gpus if word.startswith("GPU-") and gpu.uuid.startswith(word)]
    return fitting[0] if len(fitting) == 1 else None
