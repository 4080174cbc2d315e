"""Bytes for people: read from text, and shown with a binary unit."""

from __future__ import annotations

import re

from hpcdist.errors import UsageError

_SIZE = re.compile(r"(\d+)([KMG]?)(?:iB|B)?", re.IGNORECASE)
_SHIFTS = {"G": 30, "M": 20, "K": 10, "": 0}


def read_size(text: str) -> int:
    """Read bytes: ``"8"``, ``"64K"``, ``"2M"``, ``"1GiB"``; the units are powers of two."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{text!r} is not a size: write bytes, as 8, 64K, 2M or 1G")
    return int(found[1]) << _SHIFTS[found[2].upper()]


def read_sizes(text: str) -> tuple[int, ...]:
    """Read sizes such as ``"8,64K,2M"``, in their order."""
    return tuple(sorted({read_size(word) for word in text.split(",")}))


def volume(nbytes: float) -> str:
    """Show bytes in the largest unit below them."""
    unit, shift = next(each for each in _SHIFTS.items() if nbytes >= 1 << each[1] or not each[1])
    return f"{nbytes / (1 << shift):g} {unit + 'i' * bool(unit)}B"
