"""Numbers in short: ``0-3,8`` as Linux and Slurm write them, both ways."""

from __future__ import annotations

from collections.abc import Iterable


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
