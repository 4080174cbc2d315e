"""The picture of what a user gains: the same two mishaps with MPI alone and with hpcdist.

What the error says is what three simulated ranks get; how time passes is drawn by hand.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import hpcdist as dist
from website.svg import INK, PAPER, QUIET, RANKS, Picture

WIDTH, HEIGHT, GAP = 396, 208, 12
PALE, FRAME, ALARM, BLAMED = "#f3f4f6", "#d1d5db", "#b91c1c", "#fee2e2"

LINES = """\
if dist.get_rank() != 1:
    dist.all_reduce(x)
dist.broadcast(x, src=0)
"""
FIRST_LINE = 6
KILLED, EVERY = 25, 10
"""The step in which a rank is killed, and after how many steps the ranks commit."""


def wide() -> Picture:
    """Draw two panels beside each other."""
    return _panels(2)


def narrow() -> Picture:
    """Draw the same for a phone, one panel above the other."""
    return _panels(1)


def _panels(columns: int) -> Picture:
    rows = len(PANELS) // columns
    picture = Picture(
        columns * (WIDTH + GAP) + GAP,
        rows * (HEIGHT + GAP) + GAP,
        "MPI alone hangs, or ends, where hpcdist says what is wrong, or goes on",
    )
    for number, (mishap, who, draw) in enumerate(PANELS):
        left = GAP + number % columns * (WIDTH + GAP)
        top = GAP + number // columns * (HEIGHT + GAP)
        picture.box(left, top, WIDTH, HEIGHT, fill=PALE, stroke=FRAME)
        picture.text(left + 12, top + 20, mishap, 13.5, anchor="start", bold=True)
        picture.text(left + WIDTH - 12, top + 20, who, 13, anchor="end", fill=QUIET)
        draw(picture, left, top + 40)
    return picture


def _bar(
    picture: Picture, rank: int, left: float, top: float, span: tuple[int, int], words: str
) -> None:
    """Draw what a rank does in a span of time."""
    begin, end = span
    y = top + rank * 28
    picture.box(left + begin, y, end - begin, 22, fill=RANKS[rank])
    picture.text(left + (begin + end) / 2, y + 11, words, 11, fill=PAPER, bold=True)


def _stop(picture: Picture, rank: int, left: float, top: float, span: tuple[int, int],
          words: str) -> None:  # fmt: skip
    """Draw that a rank waits, or is no more."""
    begin, end = span
    y = top + rank * 28
    picture.box(left + begin, y, end - begin, 22, fill=BLAMED, stroke=ALARM, dashed=True)
    picture.text(left + (begin + end) / 2, y + 11, words, 11, fill=INK)


def _names(picture: Picture, left: float, top: float) -> None:
    for rank in range(3):
        picture.text(left + 12, top + rank * 28 + 11, f"rank {rank}", 12, anchor="start")


def _says(picture: Picture, left: float, top: float, *lines: str) -> None:
    """Write below the ranks what becomes of them."""
    for number, line in enumerate(lines):
        picture.text(left + 12, top + 104 + number * 19, line, 12.5, anchor="start")


def _hang(picture: Picture, left: float, top: float) -> None:
    _names(picture, left, top)
    for rank, name in enumerate(_calls()):
        _bar(picture, rank, left, top, (62, 130), "computes")
        _stop(picture, rank, left, top, (134, 384), f"waits in {name}")
    _says(
        picture, left, top,
        "Nothing is printed. All ranks wait",
        "until the time limit ends the job,",
        "and nobody knows which line it was.",
    )  # fmt: skip


def _error(picture: Picture, left: float, top: float) -> None:
    _names(picture, left, top)
    for rank, name in enumerate(_calls()):
        _bar(picture, rank, left, top, (62, 130), "computes")
        _stop(picture, rank, left, top, (134, 236), name)
        picture.arrow(left + 240, top + rank * 28 + 11, left + 268, top + 39)
    picture.box(left + 272, top + 25, 112, 28, fill=ALARM)
    picture.text(left + 328, top + 39, "MismatchError", 12, fill=PAPER, bold=True)
    picture.text(
        left + 12, top + 104, "Every rank is told which call at which line:", 12.5, anchor="start"
    )
    for number, line in enumerate(_message()):
        picture.text(left + 12, top + 123 + number * 16, line, 10.2, anchor="start", mono=True)


def _ends(picture: Picture, left: float, top: float) -> None:
    _names(picture, left, top)
    for rank in range(2):
        _bar(picture, rank, left, top, (62, 200), f"steps 0 to {KILLED - 1}")
        _stop(picture, rank, left, top, (204, 384), "ended by MPI")
    _bar(picture, 2, left, top, (62, 186), f"steps 0 to {KILLED - 1}")
    _stop(picture, 2, left, top, (190, 384), "killed")
    _says(
        picture, left, top,
        "The job ends, on all its nodes. It queues again",
        "and begins with the last checkpoint on disk.",
    )  # fmt: skip


def _goes_on(picture: Picture, left: float, top: float) -> None:
    back = KILLED - KILLED % EVERY
    _names(picture, left, top)
    for rank in range(2):
        _bar(picture, rank, left, top, (62, 200), f"steps 0 to {KILLED - 1}")
        _bar(picture, rank, left, top, (226, 384), f"steps {back}, {back + 1}, ...")
    _bar(picture, 2, left, top, (62, 186), f"steps 0 to {KILLED - 1}")
    _stop(picture, 2, left, top, (190, 384), "killed")
    _says(
        picture, left, top,
        f"The other ranks go on, from step {back}:",
        "they bring it back from each other's memory.",
        "A spare process can take the place of rank 2.",
    )  # fmt: skip


PANELS: tuple[tuple[str, str, Callable[[Picture, float, float], None]], ...] = (
    ("Rank 1 skips a call", "MPI alone", _hang),
    ("Rank 1 skips a call", "hpcdist", _error),
    ("Rank 2 is killed", "MPI alone", _ends),
    ("Rank 2 is killed", "hpcdist run --survive", _goes_on),
)


def _calls() -> list[str]:
    """Return the call in which each of three ranks stands."""
    first, second = (
        line.partition("dist.")[2].partition("(")[0] for line in LINES.splitlines()[1:]
    )
    return [first, second, first]


def _message() -> list[str]:
    """Return which call of which rank was at which line, as the ranks are told."""
    program = compile("\n" * (FIRST_LINE - 1) + LINES, "skip.py", "exec")
    try:
        dist.simulate(3, lambda: exec(program, {"dist": dist, "x": np.zeros(10)}))
    except dist.MismatchError as error:
        return [line.strip() for line in str(error).splitlines() if " at skip.py:" in line]
    raise RuntimeError("ranks that disagree were not told so")
