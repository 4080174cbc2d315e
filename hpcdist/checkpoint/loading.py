"""`load`: read a checkpoint on any number of ranks, into arrays or slices of any division.

The first rank finds the checkpoint and tells the others what is in it; all compare it with their
states (`matching`); each rank then reads what it wants, and little else (`reading`). Nothing is
changed before all ranks have found that everything fits.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hpcdist.checkpoint.background import finish_saving
from hpcdist.checkpoint.matching import EXACT, Fill, Matching, ObjectState, Rule
from hpcdist.checkpoint.nodes import Node, Path, name_of, topmost
from hpcdist.checkpoint.objects import give
from hpcdist.checkpoint.plan import Array
from hpcdist.checkpoint.reading import Wish, check, finisher, read, take
from hpcdist.checkpoint.storage import check_order, data_files, named, open_checkpoint
from hpcdist.checkpoint.together import reading_together
from hpcdist.comm.alarms import is_alarm
from hpcdist.comm.dispatch import not_a_member
from hpcdist.comm.group import Group
from hpcdist.comm.together import Together
from hpcdist.errors import CheckpointError, CheckpointWarning
from hpcdist.named_tuple import NamedTuple
from hpcdist.text import an

_SHOWN = 5
"""So many differences between a state and a checkpoint are told."""


def load(
    state: Any,
    path: str | os.PathLike[str],
    group: Group | None = None,
    *,
    step: int | None = None,
    strict: bool = True,
    check_first: bool = True,
    coordinator_rank: int | None = None,
) -> Any:
    """Fill `state` from a checkpoint, and return it. Collective.

    Any number of ranks may load what any other number has saved; each of them says what it wants,
    whole arrays or `LocalSlice`s. Without `init_parallel_env` this process reads alone, without
    MPI.

    Args:
        state: as given to `save`. Objects with ``load_state_dict``, such as models, optimizers and
            schedulers, load their state. Arrays are filled where they are, dicts and lists, too;
            what cannot change (numbers, JAX arrays) is replaced in them. None, here or in place of
            any part, becomes what was saved: tensors of torch, arrays of NumPy or JAX, values.
        path: the folder given to `save`; without `step`, the last checkpoint of a series.
        group: the ranks that load; None for all.
        step: this checkpoint of a series.
        strict: refuse a checkpoint that has something that no rank wants, or lacks something that a
            rank wants; False: load what both have, and name the rest in a `CheckpointWarning`.
        check_first: read twice what is written over arrays of yours, so that a damaged checkpoint
            changes nothing; without, they may be partly filled when damage is found.
        coordinator_rank: the world rank that looks and decides; default: the group's first.

    Returns:
        The state; a new one where it cannot be changed.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it is not one of this state: it
            has other names, shapes or dtypes; on every rank.

    Example:
        >>> import tempfile, numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> state = {"w": np.zeros(3), "step": 0}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = dist.checkpoint.save({"w": np.ones(3), "step": 7}, folder)
        ...     print(dist.checkpoint.load(state, folder))
        {'w': array([1., 1., 1.]), 'step': 7}

    """
    check_order("load", state, path)
    loaded, told = load_into(
        state, path, group, step, _strictly if strict else _as_far, check_first, coordinator_rank
    )
    if told:
        warnings.warn(told, CheckpointWarning, stacklevel=2)
    return loaded


class Report(NamedTuple):
    """The comparison of a rank's state with a checkpoint: contradictions, and what only one has."""

    problems: list[str]
    missing: list[str]
    left: set[Path]
    with_arrays: set[str]
    """Names of objects whose states have arrays here; another rank may have no part of theirs."""


Tolerance = Callable[[list[str], list[str]], list[str]]
"""Of what only the state has, and only the checkpoint, returns what is refused."""


def _strictly(missing: list[str], left: list[str]) -> list[str]:
    return [*missing, *left]


def _as_far(missing: list[str], left: list[str]) -> list[str]:
    return []


def what_is_wanted(missing: list[str], left: list[str]) -> list[str]:
    """Refuse only what is wanted, and not there."""
    return missing


def load_into(
    state: Any,
    path: str | os.PathLike[str],
    group: Group | None,
    step: int | None,
    refused: Tolerance,
    check_first: bool = True,
    coordinator_rank: int | None = None,
    rule: Rule = EXACT,
) -> tuple[Any, str]:
    """Load as `load` does; return the state and a description of the tolerated differences."""
    ranks = reading_together(group, coordinator_rank, "hpcdist.checkpoint.load")
    if ranks.group is not None and not ranks.group.is_member():
        not_a_member(ranks.group)
        return state, ""
    with ranks:  # an interrupt on one rank, wherever it comes, ends it on all
        finish_saving(ranks)
        folder, manifest = ranks.lead(lambda: open_checkpoint(named(path), step))
        where = f"the checkpoint {folder}"
        found = compare(ranks, state, manifest.structure, manifest.arrays, where, refused, rule)
        with data_files(folder, manifest) as files:
            wishes: list[Wish] = []
            ranks.share(lambda: wishes.extend(take(files, manifest, found.matching.wanted)))
            yours = [each for each in wishes if not each.target.is_new]
            if check_first:
                ranks.share(lambda: check(files, yours))
            ranks.share(lambda: read(files, [each for each in wishes if each.target.is_new]))
            load_small(ranks, found.early)
            ranks.share(lambda: read(files, yours))
        finish = finisher(wishes)
        ranks.share(lambda: load_all(found.late, finish))
        return found.fill(finish), found.told


class Compared(NamedTuple):
    """How a state is filled, once all ranks have found that it can be."""

    matching: Matching
    fill: Fill
    told: str
    """A description of what was tolerated."""
    early: list[ObjectState]
    """Objects that have no arrays on any rank."""
    late: list[ObjectState]


def compare(
    ranks: Together,
    state: Any,
    structure: Node,
    arrays: Mapping[str, Array],
    where: str,
    refused: Tolerance,
    rule: Rule = EXACT,
) -> Compared:
    """Compare the states of all ranks with what was saved. Collective; nothing is changed.

    Args:
        ranks: those that take part.
        state: this rank's.
        structure: what was saved, taken apart.
        arrays: the arrays in it.
        where: it was found, for messages.
        refused: what must not be missing or left.
        rule: how much may differ otherwise.

    Raises:
        CheckpointError: they do not fit; on every rank.

    """
    matching = Matching(arrays)
    fills: list[Fill] = []

    def look() -> Report:
        fills.append(matching.match(state, structure, rule))
        with_arrays = {each.name for each in matching.objects if each.has_arrays}
        left = matching.left(structure)
        return Report(matching.problems, matching.missing, left, with_arrays)

    def judge(found: Sequence[Report]) -> list[tuple[str, set[str]]]:
        with_arrays = set[str]().union(*(each.with_arrays for each in found))
        return [(_judge(found, where, structure, refused), with_arrays)] * ranks.size

    told, with_arrays = ranks.decide(look, judge)
    early = [each for each in matching.objects if each.name not in with_arrays]
    late = [each for each in matching.objects if each.name in with_arrays]
    return Compared(matching, fills[0], told, early, late)


def _judge(found: Sequence[Report], where: str, structure: Node, refused: Tolerance) -> str:
    """Describe what only one of the state and the checkpoint has.

    A part of the checkpoint is left if no rank wants it.

    Raises:
        CheckpointError: there are contradictions, or this is refused.

    """
    paths = topmost(structure, set.intersection(*(each.left for each in found)))
    left = [f"{name_of(path)!r} is in the checkpoint, but not in the state" for path in paths]
    missing = _each_once(
        f"{name!r} is not in the checkpoint" for each in found for name in each.missing
    )
    problems = _each_once(problem for each in found for problem in each.problems)
    if problems or refused(missing, left):
        remedy = "" if problems else "; strict=False loads what both have"
        absent = {name for each in found for name in each.missing}
        differ = [name for name in map(name_of, paths) if _has_other_parts(name, absent)]
        if differ:
            remedy += (
                f". {differ[0]!r} was saved from an object of another kind: load it into one alike "
                "(optimizers of group_sharded_parallel load one another's, of any level, no others)"
            )
        raise CheckpointError(
            f"{where} is not one of this state; nothing was loaded: "
            f"{_listed([*problems, *refused(missing, left)])}{remedy}"
        )
    if not missing and not left:
        return ""
    return f"not all of {where} and of the state: {_listed([*missing, *left])}"


def _has_other_parts(name: str, missing: Collection[str]) -> bool:
    """Return whether the state has something of this name, too."""
    return any(each.startswith(f"{name}.") or name.startswith(f"{each}.") for each in missing)


def _each_once(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _listed(texts: Sequence[str]) -> str:
    more = len(texts) - _SHOWN
    return "; ".join(texts[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


# ---- objects


def load_small(ranks: Together, objects: Sequence[ObjectState]) -> None:
    """Load the states of objects without arrays, all or none: an object can refuse its state.

    They come before anything else is changed.
    """
    begun: list[tuple[Any, Any]] = []

    def load_all() -> None:
        for each in objects:
            begun.append((each.thing, copy.deepcopy(each.before)))
            _load_one(each, _no_array)

    try:
        ranks.share(load_all)
    except Exception:
        for thing, before in reversed(begun):
            with suppress(Exception):
                give(thing, before)
        raise


def _no_array(name: str) -> Any:
    raise KeyError(name)


def load_all(objects: Sequence[ObjectState], finish: Callable[[str], Any]) -> None:
    """Load the states of objects. Collective for those that are sharded."""
    for each in objects:
        _load_one(each, finish)


def _load_one(each: ObjectState, finish: Callable[[str], Any]) -> None:
    try:
        give(each.thing, each.fill(finish))
    except Exception as error:
        if is_alarm(error):
            raise
        loaded = "; other parts of the state have been loaded" if each.has_arrays else ""
        raise CheckpointError(
            f"{each.name!r}, {an(type(each.thing).__name__)}, refuses the state that was saved: "
            f"{type(error).__name__}: {error}{loaded}"
        ) from error
