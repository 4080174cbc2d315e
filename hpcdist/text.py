"""Numbers for people: sizes, durations, rates, ratios and ranges, as text and read from text."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hpcdist.errors import UsageError

_SIZE = r"(\d+)([KMG]?)(?:iB|B)?"
_SHIFTS = {"G": 30, "M": 20, "K": 10, "": 0}


def read_size(text: str) -> int:
    """Read bytes: ``"8"``, ``"64K"``, ``"2M"``, ``"1GiB"``; the units are powers of two."""
    found = re.fullmatch(_SIZE, text.strip(), re.IGNORECASE)
    if found is None:
        raise UsageError(f"{text!r} is not a size: write bytes, as 8, 64K, 2M or 1G")
    return int(found[1]) << _SHIFTS[found[2].upper()]


def volume(nbytes: float) -> str:
    """Show bytes in the largest unit below them."""
    unit, shift = next(each for each in _SHIFTS.items() if nbytes >= 1 << each[1] or not each[1])
    return f"{nbytes / (1 << shift):g} {unit + 'i' * bool(unit)}B"


def duration(seconds: float) -> str:
    """Show seconds with a fitting unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def bandwidth(bytes_per_s: float) -> str:
    """Show bytes per second, in powers of ten."""
    for unit, scale in (("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_s >= scale:
            return f"{bytes_per_s / scale:.2f} {unit}"
    return f"{bytes_per_s / 1e3:.2f} kB/s"


def rate(per_s: float) -> str:
    """Show how many happen in a second."""
    for unit, scale in (("M/s", 1e6), ("k/s", 1e3)):
        if per_s >= scale:
            return f"{per_s / scale:.2f} {unit}"
    return f"{per_s:.2f} /s"


def times(ratio: float) -> str:
    """Show a ratio."""
    return f"{ratio:.2f} x" if ratio >= 0.1 else f"{ratio:.2g} x"


def percent(share: float) -> str:
    """Show a share."""
    return f"{100 * share:.0f} %"


def read_sizes(text: str) -> tuple[int, ...]:
    """Read sizes in bytes: ``"8,64K"``, or ``"8:64M"`` (doubling), ``"8:64M:8"`` (times 8)."""
    if ":" not in text:
        return tuple(sorted({read_size(word) for word in text.split(",")}))
    first, last, *factor = text.split(":")
    if len(factor) > 1:
        raise UsageError(f"{text!r} is no range of sizes: write FIRST:LAST or FIRST:LAST:FACTOR")
    return _geometric(text, read_size(first), read_size(last), read_counts(factor or ["2"])[0])


def _geometric(text: str, first: int, last: int, factor: int) -> tuple[int, ...]:
    if not 0 < first <= last or factor < 2:
        raise UsageError(
            f"{text!r} is no range of sizes: it begins above 0, ends at the same size or a larger "
            "one, and its factor is 2 or more"
        )
    found = [first]
    while found[-1] * factor <= last:
        found.append(found[-1] * factor)
    return tuple(found)


def read_counts(words: list[str]) -> tuple[int, ...]:
    """Read whole numbers of at least 1, such as numbers of ranks."""
    for word in words:
        if not word.strip().isdigit() or int(word) < 1:
            raise UsageError(f"{word!r} is not a whole number of at least 1")
    return tuple(int(word) for word in words)


def an(noun: str) -> str:
    """Return a noun after its indefinite article.

    Example:
        >>> an("list"), an("int"), an("ndarray")
        ('a list', 'an int', 'an ndarray')

    """
    sounds = ("a", "e", "i", "o", "u", "ndarray")
    return f"{'an' if noun.lower().startswith(sounds) else 'a'} {noun}"


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number before its noun.

    Example:
        >>> counted(1, "entry", "entries"), counted(2, "rank")
        ('1 entry', '2 ranks')

    """
    return f"{number} {one if number == 1 else many or one + 's'}"


def in_short(numbers: Iterable[int]) -> str:
    """Return numbers as text, runs of them joined.

    Example:
        >>> in_short([8, 0, 1, 2])
        '0-2,8'

    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def read_short(text: str) -> tuple[int, ...]:
    """Return the numbers of a text such as ``0-2,8``; none for an empty one.

    Example:
        >>> read_short("0-2,8")
        (0, 1, 2, 8)

    """
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)
