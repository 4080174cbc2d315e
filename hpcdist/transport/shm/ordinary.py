"""Ordinary arrays in the heap: NumPy's own, made while a thread or the process asks for it.

NumPy lets a program say where the memory of its arrays comes from (NEP 49). From `LEAST` bytes on
it comes from the heap that `Heap.serve` has named, while that has room, else from where NumPy takes
it. An array keeps what it got; where that goes back is seen by its address.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hpcdist.transport.flight.call_site import outer_frame
from hpcdist.transport.shm.blocks import compiled

LEAST: int | None = None if compiled is None else compiled.LEAST
"""Bytes from which the memory of an array comes from the heap; None: that is not compiled here."""


def begin_here() -> Any:
    """Take the arrays of this context (PEP 567) from the heap; return what `end_here` takes."""
    return None if compiled is None else compiled.set_handler(compiled.handler)


def end_here(before: Any) -> None:
    """Take the arrays of this context from where they came before `begin_here`."""
    if before is not None:
        compiled.set_handler(before)


@contextmanager
def left_to_numpy() -> Iterator[None]:
    """Make the arrays of this context as NumPy does by itself inside the block."""
    before = None if compiled is None else compiled.set_handler(compiled.others)
    try:
        yield
    finally:
        end_here(before)


def share_all(on: bool = True) -> bool:
    """Take the arrays of all threads from the heap, or not; return whether that was so. Local.

    Args:
        on: whether they are to.

    """
    if compiled is None:
        return False
    try:
        before: bool = compiled.share_all(on)
        works = not on or _asks_us()
    except OSError:
        before = works = False
    if not works:
        warnings.warn(
            f"NumPy {np.__version__} does not let hpcdist say where the memory of all arrays comes "
            "from; use `with hpcdist.shared_memory():`, which does it for a block",
            RuntimeWarning,
            stacklevel=outer_frame()[1],
        )
    return before


def _asks_us() -> bool:
    """Return whether a new array is made by our functions."""
    before = compiled.asked()
    np.empty(1)
    return bool(compiled.asked() > before)
