"""`load`: read a checkpoint on any number of ranks, into arrays or shards of any division.

The first rank finds the checkpoint and tells the others what is in it; each rank then reads the
bytes that it wants, and no others.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from hpcdist.checkpoint.background import finish_saving
from hpcdist.checkpoint.blocks import Files, Piece
from hpcdist.checkpoint.folder import check_order, open_checkpoint
from hpcdist.checkpoint.formats import dtype_of_name, name_of_dtype
from hpcdist.checkpoint.host import Target, look, new_target, to_write
from hpcdist.checkpoint.manifest import Manifest
from hpcdist.checkpoint.plan import Array
from hpcdist.checkpoint.shard import Shard, bounds_of
from hpcdist.checkpoint.state import fill_state, match_state
from hpcdist.checkpoint.team import reading_team
from hpcdist.comm.group import Group
from hpcdist.comm.issue import not_a_member
from hpcdist.errors import UsageError

_SHOWN = 5
"""So many differences between a state and a checkpoint are told."""


def load(
    state: Any,
    path: str | os.PathLike[str],
    group: Group | None = None,
    *,
    step: int | None = None,
    check_first: bool = True,
    coordinator_rank: int | None = None,
) -> Any:
    """Fill `state` with what a checkpoint has; return it. Collective.

    Any number of ranks may load what any other number has saved; each of them says what it wants,
    whole arrays or `Shard`s. Without `init_parallel_env` this process reads alone, without MPI.

    Args:
        state: as given to `save`. Arrays are filled where they are, dicts and lists, too; what
            cannot change (numbers, JAX arrays) is replaced in them. It may want less than was
            saved. None, here or in place of any part, becomes what was saved, with NumPy arrays.
        path: the folder given to `save`; of a series the last checkpoint.
        group: the ranks that load; None for all.
        step: of a series this checkpoint.
        check_first: read twice what is written over arrays of yours, so that a damaged checkpoint
            changes nothing; without, they may be partly filled when damage is found.
        coordinator_rank: the world rank that looks and decides; default: the group's first.

    Returns:
        The state; a new one where it cannot be changed.

    Raises:
        UsageError: the checkpoint has other arrays, shapes or dtypes than `state`; on every rank.
        CheckpointError: there is no checkpoint, or it is damaged; on every rank.

    """
    check_order("load", state, path)
    team = reading_team(group, coordinator_rank)
    if team.group is not None and not team.group.is_member():
        not_a_member(team.group)
        return state
    finish_saving(team)
    folder, manifest = team.lead(lambda: open_checkpoint(os.fspath(path), step))
    wishes: dict[str, _Wish] = {}
    team.share(lambda: wishes.update(_wishes(state, manifest, folder)))
    with Files(folder, manifest.files) as files:
        if check_first:
            team.share(lambda: _check(files, manifest, wishes))
        team.share(lambda: _read(files, manifest, wishes))
    return fill_state(state, manifest.structure, lambda name: wishes[name].target.finish())


def load_arrays(folder: str, manifest: Manifest, names: Iterable[str]) -> dict[str, Any]:
    """Return new arrays with what a checkpoint has under these names; local."""
    wishes = {name: _new_wish(manifest.arrays[name]) for name in names}
    with Files(folder, manifest.files) as files:
        _read(files, manifest, wishes)
    return {name: wish.target.finish() for name, wish in wishes.items()}


class _Wish(NamedTuple):
    """What a rank wants of an array: elements from `start` to before `stop`, and where to."""

    start: int
    stop: int
    target: Target


def _wishes(state: Any, manifest: Manifest, folder: str) -> dict[str, _Wish]:
    """Return what this rank wants, by name; all that does not fit is one `UsageError`."""
    given, problems, new = match_state(state, manifest.structure)
    wishes = {name: _new_wish(manifest.arrays[name]) for name in new}
    for name, array in given.items():
        try:
            wishes[name] = _wish(name, array, manifest.arrays[name])
        except UsageError as error:
            problems.append(str(error))
    if problems:
        more = len(problems) - _SHOWN
        told = "; ".join(problems[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise UsageError(
            f"the checkpoint {folder} is not one of this state; nothing was loaded: {told}"
        )
    return wishes


def _new_wish(array: Array) -> _Wish:
    return _Wish(0, array.size, new_target(dtype_of_name(array.dtype), array.shape))


def _wish(name: str, given: Any, saved: Array) -> _Wish:
    data = given.data if isinstance(given, Shard) else given
    dtype, shape = look(data, name)
    start, stop = 0, saved.size
    if isinstance(given, Shard):
        shape, start, stop = bounds_of(given, name, math.prod(shape))
    if (name_of_dtype(dtype), shape) != saved:
        raise UsageError(
            f"{name!r} is {saved.dtype} of shape {saved.shape} in the checkpoint, but "
            f"{name_of_dtype(dtype)} of shape {shape} here"
        )
    return _Wish(start, stop, to_write(data, name))


def _reads(
    manifest: Manifest, name: str, wish: _Wish
) -> Iterator[tuple[Piece, int, int, int, int]]:
    """Tell piece by piece: its bytes, those wanted of them (from, to), and where they go."""
    itemsize = dtype_of_name(manifest.arrays[name].dtype).itemsize
    for piece in manifest.pieces[name]:
        low, high = max(wish.start, piece.start), min(wish.stop, piece.stop)
        if low < high:
            nbytes, first, last, place = (
                each * itemsize
                for each in (
                    piece.stop - piece.start,
                    low - piece.start,
                    high - piece.start,
                    low - wish.start,
                )
            )
            yield piece, nbytes, first, last, place


def _check(files: Files, manifest: Manifest, wishes: Mapping[str, _Wish]) -> None:
    """Read what will be written over arrays of the user."""
    for name, wish in wishes.items():
        if not wish.target.is_new:
            for piece, nbytes, first, last, _ in _reads(manifest, name, wish):
                files.check(name, piece, nbytes, first, last)


def _read(files: Files, manifest: Manifest, wishes: Mapping[str, _Wish]) -> None:
    for name, wish in wishes.items():
        for piece, nbytes, first, last, place in _reads(manifest, name, wish):
            part = wish.target.memory[place : place + last - first]
            files.read_into(part, name, piece, nbytes, first)
