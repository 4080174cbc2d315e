"""The picture of how fast collectives are inside a node, as `benchmarks/shared.py` measured it."""

from __future__ import annotations

from math import log2

from website.svg import INK, QUIET, RANKS, Picture

SIZES = ("8 B", "1 K", "8 K", "64 K", "256 K", "1 M", "4 M", "16 M", "64 M")
MEASURED = {
    "all_reduce": (
        (1.74, 2.47, 2.88, 3.07, 3.16, 2.32, 1.88, 2.42, 3.03),
        (1.74, 2.5, 2.87, 9.16, 9.25, 8.48, 3.57, 3.55, 3.63),
    ),
    "reduce_scatter": (
        (2.1, 3.15, 3.93, 2.62, 3.99, 3.42, 2.94, 6.67, 5.22),
        (2.14, 3.21, 3.86, 5.99, 9.73, 10.23, 4.25, 8.11, 5.14),
    ),
    "broadcast": (
        (1.17, 2.86, 1.74, 1.08, 1.52, 3.44, 1.91, 2.03, 1.89),
        (1.14, 2.81, 1.77, 2.29, 2.76, 5.6, 2.14, 1.72, 1.54),
    ),
    "all_gather": (
        (2.11, 2.82, 1.24, 1.1, 1.1, 1.06, 1.01, 1.16, 1.25),
        (1.99, 2.86, 1.22, 1.61, 1.72, 1.28, 1.14, 0.88, 1.1),
    ),
    "alltoall": (
        (2.06, 3.07, 2.49, 1.11, 1.06, 1.11, 1.09, 0.99, 1.27),
        (2.01, 3.07, 2.34, 1.89, 1.63, 1.39, 1.12, 1.02, 1.15),
    ),
}
"""MPI's time by hpcdist's, of ordinary arrays and of those in shared memory, at each size."""
COLOURS = (*RANKS, INK)
LEFT, TOP, WIDTH, HEIGHT = 44, 48, 300, 200
LOWEST, HIGHEST = 0.5, 16.0


def speed() -> Picture:
    """Draw MPI's time by hpcdist's over the size, of ordinary and of shared arrays."""
    picture = Picture(720, 312, "How many times as long MPI takes, 2 ranks on a node")
    for half, title in enumerate(("ordinary arrays", "arrays of dist.empty")):
        left = LEFT + half * 356
        picture.text(left + WIDTH / 2, 20, f"MPI's time / hpcdist's: {title}", 13, bold=True)
        _axes(picture, left)
        for place, (operation, colour) in enumerate(zip(MEASURED, COLOURS, strict=True)):
            measured = MEASURED[operation]
            points = [(_x(left, at), _y(ratio)) for at, ratio in enumerate(measured[half])]
            picture.line(points, colour, 2.5)
            if not half:
                picture.box(LEFT + place * 132, 288, 12, 12, fill=colour)
                picture.text(LEFT + place * 132 + 18, 294, operation, 12, anchor="start", mono=True)
    return picture


def _axes(picture: Picture, left: float) -> None:
    ratio = LOWEST
    while ratio <= HIGHEST:
        thick = 1.8 if ratio == 1 else 0.6
        picture.line([(left, _y(ratio)), (left + WIDTH, _y(ratio))], QUIET, thick)
        picture.text(left - 8, _y(ratio), f"{ratio:g} x", 11, fill=QUIET, anchor="end")
        ratio *= 2
    for at, size in enumerate(SIZES):
        picture.text(_x(left, at), TOP + HEIGHT + 16, size, 11, fill=QUIET)


def _x(left: float, at: int) -> float:
    return left + 12 + at * (WIDTH - 24) / (len(SIZES) - 1)


def _y(ratio: float) -> float:
    share = log2(ratio / LOWEST) / log2(HIGHEST / LOWEST)
    return round(TOP + HEIGHT * (1 - share), 1)
