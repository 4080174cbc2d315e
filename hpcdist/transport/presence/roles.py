"""Who is which rank after a death: computed alike by all that are left, from what they tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hpcdist.named_tuple import NamedTuple


class Told(NamedTuple):
    """What a process that is left tells.

    Attributes:
        rank: which rank it was; -1 for a spare, which waits for a place.
        size: of how many; 0 for a spare.
        generation: after how many recoveries.
        process: its number among the processes that were started; -1 if unknown.
        node: a number of its node.

    """

    rank: int
    size: int
    generation: int = 0
    process: int = -1
    node: int = 0


SPARE = -1
"""In place of a rank: the process is a spare, and waits."""


class Seat(NamedTuple):
    """Who a rank is: the number of its process, and of its node."""

    process: int
    node: int


class Roles(NamedTuple):
    """The new world.

    Attributes:
        renumbered: the new rank of each old one that is left; they close up, in the old order,
            where a rank is gone whose place nobody has taken.
        lost: the old ranks that are gone.
        generation: how many recoveries there have been, with this one.
        ranks: the new rank of each process that has told, in the order of what was told; `SPARE` if
            it waits.
        seats: who the new ranks are.
        gone: the processes of the old ranks that are gone; () if unknown.
        taken: for each rank that is gone and whose place a spare has taken the number of that
            process.

    """

    renumbered: Mapping[int, int]
    lost: tuple[int, ...]
    generation: int
    ranks: tuple[int, ...]
    seats: tuple[Seat, ...] = ()
    gone: tuple[int, ...] = ()
    taken: Mapping[int, int] = MappingProxyType({})


def plan_roles(told: Sequence[Told], seats: Sequence[Seat] = ()) -> Roles:
    """Give each process that is left its number.

    Spares take the places of the dead with the lowest numbers, so that as many ranks as
    possible keep theirs; each time a spare on the node of the dead rank, if there is one. Where no
    rank is left nobody gets a number.

    Args:
        told: of each process that is left.
        seats: who the old ranks are; () if unknown.

    Example:
        >>> plan_roles([Told(3, 4), Told(0, 4), Told(1, 4)]).renumbered
        {0: 0, 1: 1, 3: 2}
        >>> plan_roles([Told(0, 3), Told(2, 3), Told(SPARE, 0, process=3)]).ranks
        (0, 2, 1)

    """
    left = {each.rank for each in told if each.rank != SPARE}
    size = max(each.size for each in told) if left else 0
    lost = tuple(rank for rank in range(size) if rank not in left)
    taken = _replacements(told, lost, seats)
    number = {place: rank for rank, place in enumerate(sorted({*left, *taken}))}
    place_of = {index: place for place, index in taken.items()}
    ranks = [number.get(place_of.get(index, each.rank), SPARE) for index, each in enumerate(told)]
    ranked = sorted((rank, each) for rank, each in zip(ranks, told, strict=True) if rank != SPARE)
    return Roles(
        {rank: number[rank] for rank in sorted(left)},
        lost,
        1 + max(each.generation for each in told),
        tuple(ranks),
        tuple(Seat(each.process, each.node) for _, each in ranked),
        tuple(seats[rank].process for rank in lost) if seats else (),
        {place: told[index].process for place, index in taken.items()},
    )


def _replacements(
    told: Sequence[Told], lost: Sequence[int], seats: Sequence[Seat]
) -> dict[int, int]:
    """Return by old rank who of those that told takes its place."""
    spares = [index for index, each in enumerate(told) if each.rank == SPARE]
    found: dict[int, int] = {}
    for rank in lost[: len(spares)]:
        home = seats[rank].node if seats else -1
        found[rank] = min(spares, key=lambda index: told[index].node != home)
        spares.remove(found[rank])
    return found


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
