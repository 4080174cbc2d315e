"""torch tensors: seen through NumPy without a copy, for every dtype torch and NumPy share.

Not by ``tensor.numpy()``: that forbids torch for ever to resize the tensor's memory, which FSDP
does to give it back between uses.
"""

from __future__ import annotations

import mmap
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import ml_dtypes
import numpy as np
import torch

from hpcdist.arrays.cuda import cuda_library
from hpcdist.arrays.interface import Library, NumpyArray
from hpcdist.errors import UsageError

_BITS: dict[torch.dtype, Any] = {
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz,
    torch.float8_e5m2fnuz: ml_dtypes.float8_e5m2fnuz,
}
"""Dtypes NumPy itself does not know: their memory is described as integers first."""

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_AT_HOME = _PACKAGE + "torch" + os.sep

_TORCH_OF = {np.dtype(bits): name for name, bits in _BITS.items()}

_TYPES: dict[torch.dtype, str] = {
    torch.bool: "|b1",
    torch.uint8: "|u1",
    torch.int8: "|i1",
    torch.uint16: "<u2",
    torch.int16: "<i2",
    torch.uint32: "<u4",
    torch.int32: "<i4",
    torch.uint64: "<u8",
    torch.int64: "<i8",
    torch.float16: "<f2",
    torch.float32: "<f4",
    torch.float64: "<f8",
    torch.complex64: "<c8",
    torch.complex128: "<c16",
    **{name: f"<u{np.dtype(bits).itemsize}" for name, bits in _BITS.items()},
}


@final
class _Memory:
    """What NumPy's array interface says about a tensor; keeps the tensor alive."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(
        self, tensor: Any, typestr: str, shape: Sequence[int], steps: Sequence[int] | None = None
    ) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "typestr": typestr,
            "data": (tensor.data_ptr() or _address_without_memory(tensor), False),
            "shape": tuple(shape),
            "strides": steps,
        }


def _address_without_memory(tensor: Any) -> int:
    """Return an address for an empty tensor: NumPy 1 takes 0 for the want of one."""
    if tensor.numel():
        raise UsageError(
            f"this {type(tensor).__name__} has no memory: it wraps other tensors, or its storage "
            "has been resized to nothing; send the tensors that it wraps (to_local() of a DTensor)"
        )
    return mmap.PAGESIZE


def _view(tensor: Any) -> Any:
    if not tensor.is_cpu and not tensor.is_cuda:
        raise UsageError(
            f"this tensor lives on {tensor.device}, whose memory hpcdist cannot reach; send "
            "tensor.cpu() and copy the result back"
        )
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        raise UsageError(
            f"this tensor (layout {tensor.layout}) has no plain memory of its own; send "
            "tensor.to_dense(), tensor.resolve_conj() or tensor.resolve_neg()"
        )
    if tensor.requires_grad and not tensor.is_leaf and torch.is_grad_enabled():
        _tell_of_autograd()
    dtype = tensor.dtype
    typestr = _TYPES.get(dtype)
    if typestr is None:
        raise UsageError(f"NumPy and MPI have no counterpart of {dtype}; convert it with .to()")
    if tensor.is_cuda:
        return _view_on_device(tensor, np.dtype(_BITS.get(dtype, typestr)))
    steps = tuple([step * tensor.element_size() for step in tensor.stride()])
    array: NumpyArray = np.asarray(_Memory(tensor, typestr, tensor.shape, steps))
    return array.view(_BITS[dtype]) if dtype in _BITS else array


def _tell_of_autograd() -> None:
    """Warn that a program hands over a tensor inside a graph of autograd; Python tells a line once.

    Nothing is said of what `hpcdist.torch` does, for itself and for torch's own engines.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        if frame.f_code.co_filename.startswith(_AT_HOME):
            return
        level, frame = level + 1, frame.f_back
    warnings.warn(
        "a tensor that autograd has computed was given to hpcdist, whose operations autograd does "
        "not see: a backward pass through it gives wrong gradients. Where no gradients are wanted, "
        "give tensor.detach() or call within torch.no_grad(); else use a differentiable function: "
        "of hpcdist.torch.model_parallel.functions, or of torch.distributed.nn.functional on "
        "backend 'hpcdist'",
        RuntimeWarning,
        stacklevel=level,
    )


def _view_on_device(tensor: Any, dtype: np.dtype) -> Any:
    cuda_library()  # says what is missing, if CuPy is
    from hpcdist.arrays.cupy import adopt

    steps = tuple([step * tensor.element_size() for step in tensor.stride()])
    shape = tuple(tensor.shape)
    return adopt(tensor.data_ptr(), tensor.get_device(), shape, steps, dtype, tensor)


def _wrap_device(data: Any, dtype: np.dtype) -> Any:
    name = _TORCH_OF.get(dtype)
    if name is None:
        return torch.from_dlpack(data)
    return torch.from_dlpack(data.view(f"i{dtype.itemsize}")).view(name)


def _wrap(array: NumpyArray) -> Any:
    name = _TORCH_OF.get(array.dtype)
    if name is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(f"i{array.itemsize}")).view(name)


def reduce_tensor(tensor: Any) -> Any:
    """Pickle a plain tensor on the host with its memory as an array, which may stay beside.

    Others are pickled as torch does it. A view is sent without what it is a view of.
    """
    plain = tensor.is_cpu and tensor.layout is torch.strided and not tensor.requires_grad
    if not plain or tensor.dtype not in _TYPES or tensor.is_conj() or tensor.is_neg():
        return tensor.__reduce_ex__(5)
    whole = tensor.contiguous()
    raw = np.asarray(_Memory(whole, "|u1", (whole.nbytes,)))
    return rebuild_tensor, (raw, tensor.dtype, tuple(tensor.shape))


def rebuild_tensor(raw: NumpyArray, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Return the tensor of `reduce_tensor`, in the memory of the array."""
    if not raw.size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).view(shape)


LIBRARY = Library(_view, _wrap, wrap_device=_wrap_device)


# ---- random numbers


def random_state() -> dict[str, Any]:
    """Return the states of torch's default generators, as bytes: the host's, the current GPU's."""
    state = {"cpu": _bytes_of(torch.get_rng_state())}
    if torch.cuda.is_initialized():
        state["cuda"] = _bytes_of(torch.cuda.get_rng_state())
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Let torch's default generators go on from a state that `random_state` has returned."""
    torch.set_rng_state(_tensor_of(state["cpu"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor_of(state["cuda"]))


def _bytes_of(tensor: Any) -> bytes:
    found: bytes = tensor.numpy().tobytes()
    return found


def _tensor_of(content: bytes) -> Any:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
