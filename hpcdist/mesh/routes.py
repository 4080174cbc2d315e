"""One layout becomes another in one exchange: which boxes each rank reads, and of whom.

The meshes may differ; then the ranks of both take part. `route_of` is pure, and remembered by the
layout; `exchange_boxes` is collective over the ranks of the joint mesh.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from hpcdist.boxes import Box, lengths, volume, within
from hpcdist.comm.exchanges import exchange
from hpcdist.comm.group import Group
from hpcdist.mesh.agreement import key_of
from hpcdist.mesh.layout import Layout
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.mesh.reads import Piece, gives_of, reads_of
from hpcdist.mesh.reducing import OPERATORS, neutral_of, reduce_type_of
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.call import Give, Read
from hpcdist.transport.call.reduction import ReduceOp
from hpcdist.transport.waiting.work import Work


class Route(NamedTuple):
    """What one rank does in the exchange that makes one layout of another.

    Attributes:
        reads: what it takes.
        gives: what is taken from it.
        gaps: its new layout, if there is more in its part than it takes: what is neutral.
        op: how contributions are combined; None where none are.
        key: which exchange it is, as a number.
        words: which exchange it is.

    """

    reads: tuple[Read, ...]
    gives: tuple[Give, ...]
    gaps: Layout | None
    op: ReduceOp | None
    key: int
    words: str


def exchange_boxes(local: Any, src: Layout, dst: Layout, room: Any) -> Work:
    """Fill `room`, this rank's part of `dst`, out of the parts of `src` that the ranks have."""
    group = joint_mesh(src.mesh, dst.mesh).group
    return follow(route_of(src, dst, group.world_rank), group, local, room)


def follow(
    route: Route, group: Group | None, local: Any, room: Any, *, sync_op: bool = True
) -> Work:
    """Fill `room` as the route says; `group` has the ranks of the joint mesh."""
    if route.gaps is not None:
        room[...] = neutral_of(route.gaps, room.dtype)
    return exchange(
        local if local.flags.c_contiguous else local.copy(order="C"),
        room,
        route.reads,
        route.gives,
        rule_op=route.op,
        key=route.key,
        words=route.words,
        group=group,
        sync_op=sync_op,
    )


@lru_cache(maxsize=256)
def joint_mesh(one: ProcessMesh, other: ProcessMesh) -> ProcessMesh:
    """Return a mesh of the ranks of both."""
    return one if one == other else ProcessMesh(sorted({*one.ranks, *other.ranks}))


def route_of(src: Layout, dst: Layout, rank: int) -> Route:
    """Return what a rank of the joint mesh does, to have its part of `dst`."""
    key = "route", dst, rank
    found: Route | None = src.memo.get(key)
    return found or src.remember(key, _route(src, dst, rank))


def _route(src: Layout, dst: Layout, rank: int) -> Route:
    ranks = sorted(joint_mesh(src.mesh, dst.mesh).ranks)
    number = {each: at for at, each in enumerate(ranks)}
    here, kind = src.mesh.coordinate_of(rank), reduce_type_of(src)
    reads: list[Read] = []
    gaps = None
    place = dst.mesh.coordinate_of(rank)
    if place is not None:
        want, pieces = dst.box(place), reads_of(src, dst, place)
        reads = [_read(src, piece, want, number) for piece in pieces]
        if sum(volume(piece.box) for piece in pieces if piece.first) < volume(want):
            gaps = dst
    gives: list[Give] = []
    if here is not None:
        own = src.box(here)
        gives = [
            Give(number[dst.mesh.rank_at(taker)], within(box, own))
            for taker, box in gives_of(src, dst, here)
        ]
    op = None if kind is None else OPERATORS[kind]
    words = f"reshard {src!r} to {dst!r}"
    key = key_of(f"{words} {src.cuts} {dst.cuts}", src.mesh, dst.mesh)  # words leave out some
    return Route(tuple(reads), tuple(gives), gaps, op, key, words)


def _read(src: Layout, piece: Piece, want: Box, number: dict[int, int]) -> Read:
    have = src.box(piece.coordinate)
    rank = number[src.mesh.rank_at(piece.coordinate)]
    source, target = within(piece.box, have), within(piece.box, want)
    return Read(rank, lengths(have), source, target, not piece.first)
