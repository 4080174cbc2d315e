"""Draw the pictures of the documentation: `python -m website.pictures`.

What a picture says about data it takes from the library, on simulated ranks; only how time passes
is drawn by hand. `tests/docs` checks that the files are what this draws.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

import hpcdist as dist
from website import collectives, gains, gallery, speed, timeline
from website.messages import messages
from website.recovery import recovery
from website.svg import INK, PAPER, QUIET, RANKS, Picture

FOLDER = Path(__file__).parents[1] / "docs/images"
PALE = "#f3f4f6"
FRAME = "#d1d5db"


def groups() -> Picture:
    """Draw a world of eight ranks on two nodes, and how `split` cuts it in two ways."""
    colours = dist.simulate(8, lambda: [_split_by(lambda r: r // 4), _split_by(lambda r: r % 4)])
    picture = Picture(640, 318, "Eight ranks on two nodes: the world, and groups made by split")
    names = ("the world", "split(rank // 4): one group a node", "split(rank % 4): one rank of each")
    for part, name in enumerate(names):
        top = 34 + part * 98
        picture.text(24, top - 14, name, anchor="start", mono=part > 0, size=12.5)
        for node in range(2):
            picture.box(20 + node * 304, top, 292, 56, fill=PALE, stroke=FRAME)
            picture.text(166 + node * 304, top + 66, f"node {node}", 11, fill=QUIET)
            for place in range(4):
                rank = node * 4 + place
                fill = "#4b5563" if part == 0 else RANKS[min(colours[rank][part - 1]) % 4]
                x = 34 + node * 304 + place * 68
                picture.box(x, top + 11, 58, 34, fill=fill)
                picture.text(x + 29, top + 28, str(rank), 14, fill=PAPER, bold=True)
    return picture


def _split_by(colour: Callable[[int], int]) -> list[int]:
    return dist.init_parallel_env().split(colour(dist.get_rank())).ranks


def agreement() -> Picture:
    """Draw how ranks compare a call before anything is sent."""
    picture = Picture(720, 210, "Ranks compare fingerprints of their calls before data are sent")
    for case, (shapes, verdict, fill) in enumerate(
        [
            (("(10,)", "(10,)", "(10,)"), "alike: data move", RANKS[2]),
            (("(10,)", "(12,)", "(10,)"), "MismatchError on all ranks", "#b91c1c"),
        ]
    ):
        left = 16 + case * 356
        for rank, shape in enumerate(shapes):
            y = 20 + rank * 44
            odd = shape != shapes[0]
            picture.box(
                left,
                y,
                190,
                34,
                fill="#fee2e2" if odd else PALE,
                stroke="#b91c1c" if odd else FRAME,
            )
            picture.text(left + 95, y + 17, f"rank {rank}: all_reduce {shape}", 12, mono=True)
            picture.arrow(left + 194, y + 17, left + 236, 81)
        picture.box(left + 240, 60, 92, 42, fill=INK)
        picture.text(left + 286, 81, "compare", 12, fill=PAPER, mono=True)
        picture.arrow(left + 286, 106, left + 286, 142)
        picture.box(left + 110, 146, 222, 36, fill=fill)
        picture.text(left + 221, 164, verdict, 13, fill=PAPER, bold=True)
    return picture


def shared_memory() -> Picture:
    """Draw the two ways of an all_reduce inside a node."""
    picture = Picture(
        720, 286, "An all_reduce inside a node: ordinary arrays, and arrays in shared memory"
    )
    halves = ("np.zeros(...): copied where all can read", "dist.zeros(...): read where it lies")
    for half, title in enumerate(halves):
        left = 16 + half * 356
        picture.text(left + 166, 20, title, 12.5, mono=False, bold=True)
        for rank in range(3):
            x = left + rank * 116
            picture.text(x + 50, 48, f"rank {rank}", 12)
            if half == 0:
                picture.cell(x, 62, 100, 26, [rank], "array")
                picture.arrow(x + 50, 92, x + 50, 126)
                picture.arrow(x + 50, 178, x + 50, 212)
                picture.box(x, 216, 100, 26, fill="#4b5563")
                picture.text(x + 50, 229, "sum", 12, fill=PAPER, bold=True)
        picture.box(
            left - 4,
            130 if half == 0 else 62,
            340,
            44 if half == 0 else 180,
            stroke=QUIET,
            dashed=True,
        )
        if half == 0:
            picture.text(left + 166, 152, "staging memory that the ranks share", 12, fill=QUIET)
            picture.text(
                left + 166,
                264,
                "each rank copies its array once; the others read the copy",
                12,
                fill=QUIET,
            )
            continue
        for rank in range(3):
            for piece in range(3):
                picture.cell(
                    left + 6 + rank * 116, 76 + piece * 36, 90, 26, [rank], f"part {piece}"
                )
        for piece in range(3):
            y = 89 + piece * 36
            picture.arrow(left + 98, y, left + 118, y)
            picture.arrow(left + 214, y, left + 234, y)
        picture.text(left + 166, 202, "rank i adds up part i of all arrays,", 12, fill=QUIET)
        picture.text(left + 166, 220, "and writes the sum into all of them", 12, fill=QUIET)
        picture.text(left + 166, 264, "nothing is copied", 12, fill=QUIET)
    return picture


def lanes() -> Picture:
    """Draw an all_reduce of two nodes with two ranks each, which all of them carry together."""
    steps = (
        "before",
        "added up inside\neach node",
        "added up between\nthe nodes",
        "shared inside\neach node",
    )
    picture = Picture(720, 254, "An all_reduce between nodes, on as many lanes as a node has ranks")
    for rank, states in enumerate(dist.simulate(4, _by_lanes)):
        top = 52 + rank * 40 + rank // 2 * 22
        if rank % 2 == 0:
            picture.box(12, top - 8, 696, 84, fill=PALE, stroke=FRAME)
            picture.text(36, top + 34, f"node {rank // 2}", 11, fill=QUIET)
        picture.text(84, top + 14, f"rank {rank}", 12)
        for step, blocks in enumerate(states):
            first = rank % 2 if len(blocks) == 1 else 0  # a rank has the part of its lane
            for place in range(2):
                x = 112 + step * 152 + place * 54
                found = place - first
                block = int(blocks[found]) if 0 <= found < len(blocks) else 0
                picture.cell(x, top, 48, 28, *collectives.decoded(block))
            if step:
                picture.arrow(72 + step * 152, 138, 106 + step * 152, 138)
    for step, words in enumerate(steps):
        for line, part in enumerate(words.split("\n")):
            picture.text(163 + step * 152, 14 + line * 15, part, 12, fill=QUIET)
    return picture


def _by_lanes() -> tuple[np.ndarray, ...]:
    """Return what this rank has at each step."""
    world = dist.init_parallel_env()
    node, lane = world.split(world.rank // 2), world.split(world.rank % 2)
    x, part, whole = collectives.own(0, 1), np.zeros(1, int), np.zeros(2, int)
    dist.reduce_scatter(part, x, group=node)
    inside = part.copy()
    dist.all_reduce(part, group=lane)
    dist.all_gather(whole, part, group=node)
    return x, inside, part, whole


def buckets() -> Picture:
    """Draw a backward pass whose buckets travel beside it, and one that stops for them."""
    picture = Picture(720, 250, "Buckets of gradients travel while the backward pass goes on")
    layers, width = ("layer 4", "layer 3", "layer 2", "layer 1"), 92
    for part, (title, beside) in enumerate(
        (("beside the computing", True), ("one after the other", False))
    ):
        top = 30 + part * 116
        picture.text(16, top, title, 13, anchor="start", bold=True)
        x = 100.0
        picture.text(88, top + 30, "computes", 12, anchor="end", fill=QUIET)
        picture.text(88, top + 62, "sends", 12, anchor="end", fill=QUIET)
        for number, layer in enumerate(layers):
            picture.cell(x, top + 16, width - 4, 28, [number % 2 * 2], layer)
            x += width
            if number % 2:
                picture.box(x, top + 48, 84, 28, fill=RANKS[1])
                picture.text(x + 42, top + 62, f"bucket {number // 2}", 12, fill=PAPER, bold=True)
                x += 0 if beside else 88
        end = x + 88 if beside else x
        picture.box(end, top + 16, 52, 28, fill="#4b5563")
        picture.text(end + 26, top + 30, "step", 12, fill=PAPER, bold=True)
    return picture


def zero() -> Picture:
    """Draw what each of four ranks keeps, in bytes for each parameter."""
    ranks, parts = 4, (("weights", 2), ("gradients", 2), ("optimizer state", 12))
    levels = (("DataParallel", 0), ("os", 1), ("os_g", 2), ("p_g_os", 3))
    colours = (RANKS[0], RANKS[2], RANKS[1])
    picture = Picture(
        720, 250, "Bytes for each parameter on each of four ranks, by level of sharding"
    )
    for row, (level, cut) in enumerate(levels):
        y, x, total = 24 + row * 44, 130.0, 0.0
        picture.text(118, y + 15, level, 13, anchor="end", mono=True)
        for place, (_, nbytes) in enumerate(parts):
            kept = nbytes / ranks if place >= len(parts) - cut else nbytes
            picture.box(x, y, kept * 31 - 2, 30, fill=colours[place])
            x, total = x + kept * 31, total + kept
        picture.text(x + 8, y + 15, f"{total:g} bytes", 13, anchor="start")
    for place, (name, _) in enumerate(parts):
        picture.box(130 + place * 150, 212, 14, 14, fill=colours[place])
        picture.text(152 + place * 150, 219, name, 12, anchor="start")
    return picture


def layouts() -> Picture:
    """Draw which ranks of a mesh have which elements of an array, as the library cuts it."""
    cases = (
        [dist.Shard(0), dist.Shard(1)],
        [dist.Shard(0), dist.Replicate()],
        [dist.Replicate(), dist.Shard(1)],
        [dist.Shard(0), dist.Shard(0)],
        [dist.Shard(1), dist.Shard(0)],
        [dist.Replicate(), dist.Replicate()],
    )
    picture = Picture(720, 352, "Four rows and six columns on a mesh of two by two ranks")
    for number, placements in enumerate(cases):
        left, top = 20 + number % 3 * 234, 40 + number // 3 * 150
        names = ", ".join(map(str, placements)).replace("dim=", "")
        picture.text(left + 105, top - 16, f"[{names}]", 11.5, mono=True)
        for (y, x), ranks in _owners(placements).items():
            picture.cell(left + x * 35, top + y * 26, 32, 23, ranks)
    for rank in range(4):
        picture.box(210 + rank * 80, 324, 14, 14, fill=RANKS[rank])
        picture.text(230 + rank * 80, 331, f"rank {rank}", 12, anchor="start")
    return picture


def _owners(placements: list[object]) -> dict[tuple[int, int], list[int]]:
    """Return for each element of an array the ranks that have it."""
    rows, columns = 4, 6
    places = np.arange(rows * columns).reshape(rows, columns)

    def held() -> set[int]:
        mesh = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])
        return set(dist.shard_tensor(places, mesh, placements).local.ravel().tolist())

    parts = dist.simulate(4, held)
    return {
        divmod(place, columns): [rank for rank, part in enumerate(parts) if place in part]
        for place in range(rows * columns)
    }


PICTURES: dict[str, Callable[[], Picture]] = {
    "gains": gains.wide,
    "gains-narrow": gains.narrow,
    "groups": groups,
    "messages": messages,
    "agreement": agreement,
    "shared-memory": shared_memory,
    "lanes": lanes,
    "buckets": buckets,
    "zero": zero,
    "layouts": layouts,
    "hanging": timeline.hanging,
    "speed": speed.speed,
    "recovery": recovery,
    "gallery-heat": gallery.heat,
    **{
        f"collective-{call.partition('(')[0]}": lambda call=call: collectives.draw(call)
        for call in collectives.STEPS
    },
}


def main() -> None:
    """Write all pictures into the folder of images."""
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(str(draw()))


if __name__ == "__main__":
    main()
