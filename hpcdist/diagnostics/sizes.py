"""Bytes for people: read from text, and shown with a binary unit."""

from __future__ import annotations

import re

from hpcdist.errors import UsageError

_SIZE = re.compile(r"(\d+)([KMG]?)(?:iB|B)?", re.IGNORECASE)
_SHIFTS = {"G": 30, "M": 20, "K": 10, "": 0}


def read_sizes(text: str) -> tuple[int, ...]:
    """Read bytes such as ``"8,64K,2M"``; the units are powers of two."""
    found = [_SIZE.fullmatch(word.strip()) for word in text.split(",")]
    sizes = {int(each[1]) << _SHIFTS[each[2].upper()] for each in found if each}
    if None in found or 0 in sizes:
        raise UsageError(f"{text!r} is not a list of sizes: write bytes, as 8,64K,2M")
    return tuple(sorted(sizes))


def show(nbytes: int) -> str:
    """Show bytes in the largest unit below them."""
    unit, shift = next(each for each in _SHIFTS.items() if nbytes >> each[1] or not each[1])
    return f"{nbytes / (1 << shift):g} {unit + 'i' * bool(unit)}B"
