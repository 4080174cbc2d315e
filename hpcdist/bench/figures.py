"""Numbers for people: durations, rates and ratios as text, and sizes read from text."""

from __future__ import annotations

from hpcdist.diagnostics import sizes
from hpcdist.diagnostics.sizes import read_size
from hpcdist.errors import UsageError


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
        return sizes.read_sizes(text)
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
