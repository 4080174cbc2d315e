"""What collectives do, in pictures that are drawn from what they did.

Block b of rank r is a number with one bit of its own. Sums of such numbers tell which blocks are
in them, so the right half of a picture is what four simulated ranks really had afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import hpcdist as dist
from website.svg import QUIET, Picture

N = 4
Blocks = np.ndarray
Step = Callable[[], tuple[Blocks, Blocks]]


def own(*blocks: int) -> Blocks:
    """Return these blocks of the rank that asks."""
    return np.array([1 << (N * dist.get_rank() + block) for block in blocks])


def _if_first(blocks: Blocks) -> Blocks:
    return blocks if dist.get_rank() == 0 else np.zeros_like(blocks)


def _in_place(collective: Callable[[Blocks], object], start: Callable[[], Blocks]) -> Step:
    def step() -> tuple[Blocks, Blocks]:
        x = start()
        before = x.copy()
        collective(x)
        return before, x

    return step


def _into(
    collective: Callable[[Blocks, Blocks], object], start: Callable[[], Blocks], size: int
) -> Step:
    def step() -> tuple[Blocks, Blocks]:
        x, out = start(), np.zeros(size, int)
        collective(out, x)
        return x, out

    return step


def _one() -> Blocks:
    return own(0)


def _all() -> Blocks:
    return own(*range(N))


STEPS: dict[str, Step] = {
    "broadcast(x, src=0)": _in_place(lambda x: dist.broadcast(x, src=0), lambda: _if_first(_one())),
    "reduce(x, dst=0)": _in_place(lambda x: dist.reduce(x, dst=0), _one),
    "all_reduce(x)": _in_place(dist.all_reduce, _one),
    "scan(x)": _in_place(dist.scan, _one),
    "exscan(x)": _in_place(dist.exscan, _one),
    "scatter(out, xs, src=0)": _into(
        lambda out, x: dist.scatter(out, x if dist.get_rank() == 0 else None, src=0),
        lambda: _if_first(_all()),
        1,
    ),
    "gather(x, outs, dst=0)": _into(
        lambda out, x: dist.gather(x, out if dist.get_rank() == 0 else None, dst=0), _one, N
    ),
    "all_gather(outs, x)": _into(dist.all_gather, _one, N),
    "reduce_scatter(out, xs)": _into(dist.reduce_scatter, _all, 1),
    "alltoall(outs, xs)": _into(dist.alltoall, _all, N),
}


def bits_of(number: int) -> list[int]:
    """Return the blocks of which a number is the sum."""
    return [1 << bit for bit in range(N * N) if number >> bit & 1]


def decoded(number: int) -> tuple[list[int], str]:
    """Return the ranks whose blocks are in a number, and its label: A0, or Σ0 for a sum."""
    bits = [bit.bit_length() - 1 for bit in bits_of(number)]
    ranks = [bit // N for bit in bits]
    block = bits[0] % N if bits else 0
    if len(bits) > 1:
        return ranks, f"Σ{block}"
    return ranks, f"{'ABCD'[ranks[0]]}{block}" if bits else ""


def draw(call: str) -> Picture:
    """Draw what four ranks had before a call and after it."""
    results = dist.simulate(N, STEPS[call])
    cell, row, left, right = 46, 36, 70, 304
    picture = Picture(right + N * cell + 4, 44 + N * row + 8, f"{call} on four ranks")
    picture.text(left + N * cell / 2, 22, "before", fill=QUIET)
    picture.text(right + N * cell / 2, 22, "after", fill=QUIET)
    starts = {
        int(block): (left + place * cell, 42 + rank * row)
        for rank, (before, _) in enumerate(results)
        for place, block in enumerate(before)
    }
    for rank, (_, after) in enumerate(results):
        for place, block in enumerate(after):
            origins = [starts[each] for each in bits_of(int(block))]
            x, y = right + place * cell, 42 + rank * row
            picture.cell(x, y, cell - 6, 28, *decoded(int(block)), origins=origins)
    for rank, (before, _) in enumerate(results):  # above what sets out from them
        y = 42 + rank * row
        picture.text(34, y + 14, f"rank {rank}")
        for place, block in enumerate(before):
            picture.cell(left + place * cell, y, cell - 6, 28, *decoded(int(block)))
    name, middle = call.partition("(")[0], (left + N * cell + right) / 2  # above what moves
    picture.text(middle, 12, name, 12, mono=True)
    picture.arrow(middle - 60, 26, middle + 60, 26)
    return picture
