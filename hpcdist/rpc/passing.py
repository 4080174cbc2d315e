"""Memory that is passed: a large buffer is written once, and the receiver maps what was written.

The memory is an anonymous file whose only descriptor goes through a Unix socket to the other rank,
so it is gone with the array there, however either process ends. Through the socket itself a buffer
is copied twice; but that is into memory which both sides have used before, and new memory costs
more than the second copy until a buffer is `LARGE`.
"""

from __future__ import annotations

import os
from typing import Any

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.transport.shm.segment import map_descriptor

LARGE = 2 << 20
"""Buffers of at least this many bytes are passed."""


def put(buffer: memoryview) -> int | None:
    """Copy a buffer into memory of its own; return its descriptor, None if there is no room."""
    try:
        descriptor = os.memfd_create("hpcdist-rpc", os.MFD_CLOEXEC)
    except (OSError, AttributeError):
        return None
    try:
        done = 0
        while done < buffer.nbytes:
            done += os.pwrite(descriptor, buffer[done:], done)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def take(descriptor: int, nbytes: int) -> NumpyArray:
    """Return the memory behind a descriptor, which is closed, as an array of its own.

    Raises:
        OSError: it is shorter than was said, or cannot be mapped.

    """
    try:
        if os.fstat(descriptor).st_size < nbytes:
            raise OSError(f"the memory that was passed has less than {nbytes} bytes")
        return map_descriptor(descriptor, nbytes)
    finally:
        os.close(descriptor)


def close_all(descriptors: Any) -> None:
    """Close descriptors."""
    for each in descriptors:
        os.close(each)
