"""Who is which rank after a death: computed alike by all that are left, from what they tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Told(NamedTuple):
    """What a rank that is left tells: which it was of how many, and after how many recoveries."""

    rank: int
    size: int
    generation: int = 0


class Roles(NamedTuple):
    """The new world.

    Attributes:
        renumbered: the new rank of each old one that is left; they close up, in the old order.
        lost: the old ranks that are gone.
        generation: how many recoveries there have been, with this one.

    """

    renumbered: Mapping[int, int]
    lost: tuple[int, ...]
    generation: int


def plan_roles(told: Sequence[Told]) -> Roles:
    """Give each rank that is left its new number.

    Args:
        told: of each of them, in any order.

    Example:
        >>> plan_roles([Told(3, 4), Told(0, 4), Told(1, 4)])
        Roles(renumbered={0: 0, 1: 1, 3: 2}, lost=(2,), generation=1)

    """
    left = sorted(each.rank for each in told)
    size = max(each.size for each in told)
    return Roles(
        {rank: number for number, rank in enumerate(left)},
        tuple(rank for rank in range(size) if rank not in left),
        1 + max(each.generation for each in told),
    )


class Kept(NamedTuple):
    """A group that goes on: its id, the ranks of its members before and now, its time limit."""

    id: int
    before: tuple[int, ...]
    ranks: tuple[int, ...]
    timeout_s: float


GroupTable = Mapping[tuple[int, tuple[int, ...]], float]
"""The groups of a rank, the world left out: id and old ranks, and the time limit in seconds."""


def plan_groups(tables: Sequence[GroupTable], roles: Roles) -> list[Kept]:
    """Return the groups whose members are all left and all know them, in an order that all have.

    Args:
        tables: of each rank of the new world.
        roles: the new world.

    Example:
        >>> roles = plan_roles([Told(0, 3), Told(2, 3)])
        >>> [each.ranks for each in plan_groups([{(1, (0, 2)): 1.0}] * 2, roles)]
        [(0, 1)]

    """
    kept = []
    for key in sorted({key for table in tables for key in table}):
        id, before = key
        if all(rank in roles.renumbered for rank in before):
            ranks = tuple(roles.renumbered[rank] for rank in before)
            if all(key in tables[rank] for rank in ranks):
                kept.append(Kept(id, before, ranks, tables[ranks[0]][key]))
    return kept
