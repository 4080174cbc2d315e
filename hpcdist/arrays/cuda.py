"""Memory of CUDA devices: all of it is seen through CuPy, whatever library it belongs to."""

from __future__ import annotations

import importlib

from hpcdist.arrays.interface import Library
from hpcdist.errors import UsageError


def cuda_library() -> Library:
    """Return CuPy's row, through which all arrays in CUDA memory are seen.

    Raises:
        UsageError: CuPy is not installed.

    """
    try:
        row: Library = importlib.import_module("hpcdist.arrays.cupy").LIBRARY
    except ImportError as error:
        raise UsageError(
            f"an array in GPU memory travels through CuPy, which is not usable here ({error}): "
            "pip install cupy-cuda12x (or cupy-cuda13x), or copy the array to the host first "
            "(tensor.cpu()) and back afterwards"
        ) from error
    return row
