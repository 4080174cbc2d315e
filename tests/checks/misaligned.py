"""Arrays that begin anywhere in memory."""

import numpy as np


def misaligned(array, by):
    """Return a copy that begins `by` bytes beyond a multiple of 64."""
    room = np.zeros(array.nbytes + 192, np.uint8)
    start = -room.ctypes.data % 64 + by
    copy = room[start : start + array.nbytes].view(array.dtype)
    copy[...] = array
    return copy
