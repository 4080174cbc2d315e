"""bfloat16 by its bits, for array libraries that have no arithmetic for it.

A bfloat16 is the upper half of a float32. Rounding is to nearest, ties to even, as in IEEE 754;
NaN stays NaN and becomes quiet.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_HALF = 0x7FFF
_QUIET = 0x40


def widened(bits: Any) -> Any:
    """Return float32 numbers for the bits (uint16) of bfloat16 ones."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrowed(wide: Any) -> Any:
    """Return the bits (uint16) of the bfloat16 numbers nearest to float32 ones."""
    bits = wide.view(np.uint32)
    upper = bits >> np.uint32(16)
    nearest = (bits + (upper & np.uint32(1)) + np.uint32(_HALF)) >> np.uint32(16)
    return np.where(np.isnan(wide), upper | np.uint32(_QUIET), nearest).astype(np.uint16)
