"""The picture of a recovery: who keeps copies of what, and what comes from where after a death."""

from __future__ import annotations

from collections.abc import Sequence

from hpcdist.checkpoint.boxes import run
from hpcdist.checkpoint.memory.buddies import plan_buddies
from hpcdist.checkpoint.memory.choice import Stored
from hpcdist.checkpoint.memory.moves import Wish, plan_moves
from hpcdist.checkpoint.plan import Array
from website.svg import INK, PAPER, QUIET, RANKS, Picture

ELEMENTS = 12
NODES = (0, 0, 1, 1)
DEAD = 2
CELL = 17
PALE, FRAME, ALARM = "#f3f4f6", "#d1d5db", "#b91c1c"


def recovery() -> Picture:
    """Draw what four ranks keep, the death of one, and the two ways to go on."""
    picture = Picture(760, 330, "Four ranks keep copies at each other; one dies, and others go on")
    buddies = plan_buddies(NODES, 1)
    copies = [buddies.index((rank,)) for rank in range(4)]
    _ranks(picture, 14, "commit: a part, and a copy", copies, dead=())
    _ranks(picture, 268, f"rank {DEAD} dies", copies, dead=(DEAD,))
    picture.arrow(240, 170, 262, 170)
    picture.arrow(494, 130, 520, 96)
    picture.arrow(494, 210, 520, 236)
    left = [rank for rank in range(4) if rank != DEAD]
    stored = {
        "w": {
            run(owner * 3, owner * 3 + 3): tuple(
                place for place, rank in enumerate(left) if owner in (rank, copies[rank])
            )
            for owner in range(4)
        }
    }
    _after(picture, 36, "restore: three ranks go on", stored, [NODES[rank] for rank in left])
    stored["w"] = {
        box: tuple(rank if rank < DEAD else rank + 1 for rank in ranks)
        for box, ranks in stored["w"].items()
    }
    _after(picture, 188, "or a spare takes its place", stored, NODES, spare=DEAD)
    return picture


def _ranks(
    picture: Picture, left: float, title: str, copies: Sequence[int], dead: Sequence[int]
) -> None:
    """Draw the ranks of two nodes, each with its part and with its copy of another's."""
    picture.text(left + 110, 24, title, 12.5, bold=True)
    for node in range(2):
        picture.box(left, 44 + node * 136, 222, 122, fill=PALE, stroke=FRAME)
        picture.text(left + 111, 156 + node * 136, f"node {node}", 11, fill=QUIET)
    for rank, owner in enumerate(copies):
        top = 56 + rank * 46 + NODES[rank] * 44
        if rank in dead:
            picture.box(left + 8, top - 6, 206, 36, stroke=ALARM, dashed=True)
            picture.text(left + 38, top + 12, f"rank {rank}", 12, fill=ALARM)
            picture.text(left + 140, top + 12, "with all that it kept", 12, fill=ALARM)
            continue
        picture.text(left + 38, top + 12, f"rank {rank}", 12)
        _cells(picture, left + 76, top, [rank] * 3)
        picture.box(left + 144, top - 4, 3 * CELL + 9, CELL + 13, stroke=QUIET, dashed=True)
        _cells(picture, left + 149, top, [owner] * 3)


def _after(
    picture: Picture,
    top: float,
    title: str,
    stored: Stored,
    nodes: Sequence[int],
    spare: int | None = None,
) -> None:
    """Draw what each rank has then, in the colours of the ranks that had it."""
    picture.text(640, top - 12, title, 12.5, bold=True)
    size = len(nodes)
    share = ELEMENTS // size
    wishes = [[Wish("w", run(rank * share, rank * share + share))] for rank in range(size)]
    plans = plan_moves(stored, wishes, {"w": Array("float64", (ELEMENTS,))}, nodes)
    for rank, plan in enumerate(plans):
        y = top + 8 + rank * 31
        picture.text(562, y + 10, f"rank {rank}", 12, bold=rank == spare)
        moves = sorted((*plan.here, *plan.received), key=lambda move: move.copy.target)
        owners = [move.box.offsets[0] // 3 for move in moves for _ in range(move.copy.size)]
        _cells(picture, 594, y, owners)
        sources = sorted({move.source for move in plan.received})
        words = f"from {' and '.join(map(str, sources))}" if sources else "has it"
        picture.text(684, y + 10, words, 11, fill=INK if sources else QUIET, anchor="start")


def _cells(picture: Picture, x: float, y: float, owners: Sequence[int]) -> None:
    for place, owner in enumerate(owners):
        picture.box(x + place * (CELL + 1), y, CELL, CELL + 4, fill=RANKS[owner])
        picture.text(x + place * (CELL + 1) + CELL / 2, y + 11, str(owner), 11, fill=PAPER)
