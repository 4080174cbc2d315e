"""torch tensors: seen through NumPy without a copy, for every dtype torch and NumPy share."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

from hpcdist.arrays.libraries import Library, NumpyArray, device_message
from hpcdist.errors import UsageError

_RENAMED: dict[torch.dtype, tuple[torch.dtype, Any]] = {
    # torch dtype: (the integer torch shows to NumPy, the dtype those bits mean)
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
    torch.float8_e4m3fnuz: (torch.uint8, ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2fnuz: (torch.uint8, ml_dtypes.float8_e5m2fnuz),
}
_TORCH_OF = {np.dtype(bits): name for name, (_, bits) in _RENAMED.items()}


def _view(tensor: Any) -> NumpyArray:
    try:
        array: NumpyArray = tensor.numpy()  # nearly always; the rest says why it cannot
    except (RuntimeError, TypeError):
        return _view_of_another_kind(tensor)
    return array


def _view_of_another_kind(tensor: Any) -> NumpyArray:
    if tensor.device.type != "cpu":
        raise UsageError(device_message(f"{tensor.device.type} tensor"))
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        raise UsageError(
            f"this tensor (layout {tensor.layout}) has no plain memory of its own; send "
            "tensor.to_dense(), tensor.resolve_conj() or tensor.resolve_neg()"
        )
    tensor = tensor.detach()
    renamed = _RENAMED.get(tensor.dtype)
    if renamed is None:
        array: NumpyArray = tensor.numpy()
        return array
    integer, bits = renamed
    renamed_array: NumpyArray = tensor.view(integer).numpy().view(bits)
    return renamed_array


def _wrap(array: NumpyArray) -> Any:
    name = _TORCH_OF.get(array.dtype)
    if name is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(f"i{array.itemsize}")).view(name)


LIBRARY = Library(_view, _wrap)
