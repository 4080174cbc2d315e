"""Which step all ranks go back to: the latest of which every part is in some rank's memory. Pure.

Ranks can differ by one step, as a rank may die while others have ended a commit and others not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from hpcdist.checkpoint.boxes import Box
from hpcdist.checkpoint.cover import flaw_of
from hpcdist.checkpoint.memory.random_state import plan_streams
from hpcdist.checkpoint.memory.vault import Catalog, Header
from hpcdist.checkpoint.nodes import ARRAYS, Node, leaves
from hpcdist.checkpoint.plan import Array
from hpcdist.checkpoint.state import merge_nodes
from hpcdist.named_tuple import NamedTuple

Stored = Mapping[str, Mapping[Box, tuple[int, ...]]]
"""By the name of an array and its parts: the ranks that keep them."""


class Choice(NamedTuple):
    """What all ranks go back to.

    Attributes:
        run: of the trainings of the job.
        serial: of the commit.
        step: how many steps had been done.
        structure: the state, taken apart.
        arrays: those in it.
        stored: who has which parts.
        random: for each rank the state of the random numbers with which it goes on.
        is_full: whether every rank still has all that it kept, so that nothing is to be repaired.

    """

    run: int
    serial: int
    step: int
    structure: Node
    arrays: dict[str, Array]
    stored: Stored
    random: list[Node | None]
    is_full: bool


class Nothing(NamedTuple):
    """Why there is no step to go back to; `was_there` says that there was one."""

    why: str
    was_there: bool


def choose(everyone: Sequence[Sequence[Catalog]]) -> Choice | Nothing:
    """Return what all ranks go back to.

    Args:
        everyone: what each rank of the group keeps.

    """
    run = max((each.run for found in everyone for each in found), default=0)
    by_serial: dict[int, dict[int, Catalog]] = defaultdict(dict)
    for rank, found in enumerate(everyone):
        for each in found:
            if each.run == run:
                by_serial[each.serial][rank] = each
    reasons = []
    for serial in sorted(by_serial, reverse=True):
        made = _chosen(by_serial[serial], len(everyone))
        if isinstance(made, Choice):
            return made
        reasons.append(made)
    if not reasons:
        return Nothing("nothing has been committed", was_there=False)
    return Nothing("; ".join(reasons), was_there=True)


def _chosen(catalogs: Mapping[int, Catalog], size: int) -> Choice | str:
    """Return a generation as a choice, for so many ranks of now, or what it lacks."""
    first = next(iter(catalogs.values()))
    headers: dict[int, Header] = {}
    stored: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    arrays: dict[str, Array] = {}
    for rank, each in catalogs.items():
        headers |= each.headers
        for name, dtype, shape, box in each.held:
            arrays[name] = Array(dtype, shape)
            stored[name][box].append(rank)
    gone = [rank for rank in range(first.size) if rank not in headers]
    if gone:
        return (
            f"step {first.step} is not complete: what rank(s) {', '.join(map(str, gone))} of "
            f"{first.size} kept is gone, and so are the copies"
        )
    numbers = [*range(first.size)]
    structure = merge_nodes([headers[rank].structure for rank in numbers], numbers)
    missing = _missing(structure, arrays, stored)
    if missing:
        return f"step {first.step} is not complete: parts of {missing!r} are gone, and their copies"
    before = [catalogs[rank].rank if rank in catalogs else -1 for rank in range(size)]
    streams = plan_streams(before, first.size)
    return Choice(
        first.run,
        first.serial,
        first.step,
        structure,
        arrays,
        {
            name: {box: tuple(found) for box, found in boxes.items()}
            for name, boxes in stored.items()
        },
        [None if stream is None else headers[stream].random for stream in streams],
        before == numbers,
    )


def _missing(
    structure: Node, arrays: Mapping[str, Array], stored: Mapping[str, Mapping[Box, list[int]]]
) -> str | None:
    """Return an array of which not all is stored."""
    for _, leaf in leaves(structure):
        ((kind, name),) = leaf.items()
        if kind in ARRAYS and (
            name not in arrays or flaw_of([*stored[name]], arrays[name].shape) is not None
        ):
            return str(name)
    return None
