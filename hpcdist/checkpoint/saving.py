"""`save`: write a state so that it is whole on disk, or not there at all.

First all ranks describe what they hold and the first one plans; then every rank writes its share;
then the first one commits. What fails anywhere before the commit leaves what was there before.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from hpcdist.checkpoint.background import Saving, finish_saving, start_saving
from hpcdist.checkpoint.blocks import Piece, blocks_of
from hpcdist.checkpoint.claim import Claim
from hpcdist.checkpoint.formats import lay_out
from hpcdist.checkpoint.holdings import Part, Views, all_held, part_of
from hpcdist.checkpoint.manifest import Manifest, entry_of
from hpcdist.checkpoint.nodes import Node
from hpcdist.checkpoint.plan import Array, Held, Share, join_holdings, share_out
from hpcdist.checkpoint.state import describe_state, merge_nodes
from hpcdist.checkpoint.storage import (
    check_order,
    check_step,
    commit,
    data_file,
    finish,
    give_up,
    named,
    prepare,
    prune,
    step_folder,
    write_data,
)
from hpcdist.checkpoint.together import writing_together
from hpcdist.comm.dispatch import not_a_member
from hpcdist.comm.group import Group
from hpcdist.comm.session import is_simulated
from hpcdist.comm.together import Together
from hpcdist.errors import MismatchError, UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.waiting.work import Work


def save(
    state: Any,
    path: str | os.PathLike[str],
    group: Group | None = None,
    *,
    step: int | None = None,
    keep: int | None = None,
    async_save: bool = False,
    coordinator_rank: int | None = None,
) -> Work:
    """Write `state` to the folder `path`, each array once, spread over the ranks. Collective.

    An array that several ranks have is taken to be the same on all of them, and one writes it.
    A `LocalSlice` says which part of an array a rank has; a `DistArray` and torch's `DTensor` know.
    Everything else must be equal on all ranks, but some ranks may have keys that others have not.
    Of objects, such as models, optimizers and schedulers, the ``state_dict()`` is saved, of sharded
    ones each rank's part. Whenever the job is killed, the folder holds the whole new checkpoint or
    what it held before.

    Args:
        state: arrays, `LocalSlice`s, `DistArray`s, numbers, strings, bytes, None, and objects that
            have ``state_dict`` and ``load_state_dict``, in dicts, lists and tuples.
        path: a folder; it is made, and an older checkpoint in it is replaced. Or the URL of one,
            such as ``s3://bucket/run`` or ``webhdfs://host:9870/run`` (see `hpcdist.fs`).
        group: the ranks that hold the state; None for all. Without `init_parallel_env` this
            process alone.
        step: makes `path` a series of checkpoints, of which this is one; a number from 0 on.
        keep: how many checkpoints of the series stay, with this one; None for all.
        async_save: return when the state has been copied, and write in the background.
            The work's `wait` raises what went wrong. A save waits for the one before it, and the
            program for the last one.
        coordinator_rank: the world rank that looks and decides; default: the group's first.

    Returns:
        A work whose `result()` is the folder of the checkpoint.

    Raises:
        UsageError: something in the state cannot be saved, or parts of it are missing; on every
            rank.
        MismatchError: two ranks disagree about what is saved; on every rank.
        CheckpointError: a disk is full or read-only, something else would be overwritten, or
            another job is saving to this folder; on every rank, and what was there is unchanged.

    Example:
        >>> import numpy as np, tempfile
        >>> from hpcdist import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     work = checkpoint.save({"weights": np.ones(3), "epoch": 2}, folder)
        ...     print(checkpoint.load(None, folder))
        {'weights': array([1., 1., 1.]), 'epoch': 2}

    """
    check_order("save", state, path)
    ranks = writing_together(group, coordinator_rank, "hpcdist.checkpoint.save")
    if ranks.group is not None and not ranks.group.is_member():
        return not_a_member(ranks.group)
    claims: list[Claim] = []
    try:
        with ranks:  # an interrupt on one rank, wherever it comes, ends it on all
            finish_saving(ranks)
            order, views = _plan(ranks, state, (named(path), step, keep, async_save), claims)

            def take() -> list[Part]:
                return [part_of(share, views[share.name]) for share in order.shares]

            if not async_save:
                _write(ranks, order, take)
                return Saving(order.folder)
            copies = _copied(take)
        return start_saving(ranks, order.folder, lambda own: _write(own, order, copies))
    except BaseException:
        for each in claims:
            give_up(each)
        raise


class _Description(NamedTuple):
    """What a rank tells the first one."""

    structure: Node
    held: list[Held]
    settings: tuple[Any, ...]


class _Layout(NamedTuple):
    """What the first rank keeps for the manifest."""

    structure: Node
    arrays: dict[str, Array]
    step: int | None
    series: str
    keep: int | None
    claim: Claim


class _Order(NamedTuple):
    """What the first rank tells each rank to write; the layout it tells itself alone."""

    folder: str
    file: str
    shares: list[Share]
    layout: _Layout | None


class _Written(NamedTuple):
    """What a rank has written: its file, and where each share is in it."""

    file: str
    nbytes: int
    pieces: list[tuple[Share, int, bytes]]


def _plan(
    ranks: Together, state: Any, settings: tuple[Any, ...], claims: list[Claim]
) -> tuple[_Order, Views]:
    """Agree on who writes what and where; the first rank adds its claim. Collective."""
    views: Views = {}

    def describe() -> _Description:
        structure, found = describe_state(state)
        views.update(found)
        return _Description(structure, all_held(views), settings)

    return ranks.decide(describe, lambda everyone: _orders(ranks, everyone, claims)), views


def _orders(ranks: Together, everyone: Sequence[_Description], claims: list[Claim]) -> list[_Order]:
    """Plan on the first rank, and make and claim the folder."""
    path, step, keep, _ = everyone[0].settings
    check_step(step, keep)
    if path.lower().startswith("memory:") and ranks.size > 1 and not is_simulated():
        raise UsageError(
            f"{path!r} is in the memory of one process, and each rank has its own; save to a "
            "folder or a store that all ranks see"
        )
    for rank, each in zip(ranks.ranks, everyone, strict=True):
        if each.settings != everyone[0].settings:
            raise MismatchError(
                f"the ranks save differently: rank {ranks.ranks[0]} with (path, step, keep, "
                f"async_save) = {everyone[0].settings}, but rank {rank} with {each.settings}; let "
                "all ranks make the same call"
            )
    structure = merge_nodes([each.structure for each in everyone], ranks.ranks)
    arrays, shared = join_holdings([each.held for each in everyone], ranks.ranks)
    shares = share_out(arrays, shared, ranks.size)
    folder = path if step is None else step_folder(path, step)
    claim = prepare(folder, step)
    claims.append(claim)
    layout = _Layout(structure, arrays, step, path, keep, claim)
    return [
        _Order(folder, data_file(claim.token, rank), own, layout if rank == ranks.first else None)
        for rank, own in enumerate(shares)
    ]


# ---- writing


Take = Callable[[], list[Part]]
"""Takes what this rank writes; raises what went wrong with it."""


def _copied(take: Take) -> Take:
    """Copy what this rank writes, now. An error is raised later, when all ranks hear of it."""
    try:
        copies = [each._replace(memory=memoryview(bytearray(each.memory))) for each in take()]
    except Exception as error:
        failure = error

        def fail() -> list[Part]:
            raise failure

        return fail
    return lambda: copies


def _write(ranks: Together, order: _Order, take: Take) -> None:
    """Write this rank's parts, and commit if all ranks have. Collective.

    Only the first rank removes files, as it alone knows whether it has committed: another one may
    hear of nothing any more when a rank dies.
    """
    try:
        ranks.decide(
            lambda: _write_own(order, take()),
            lambda written: _commit(order, written),
            undo=lambda: _undo(order),
        )
    except BaseException:
        _release(order)  # where a rank never answers, nobody undoes
        raise


def _undo(order: _Order) -> None:
    if order.layout is not None:
        finish(order.layout.claim)


def _release(order: _Order) -> None:
    if order.layout is not None:
        give_up(order.layout.claim)


def _write_own(order: _Order, parts: Sequence[Part]) -> _Written:
    if not parts:
        return _Written(order.file, 0, [])
    entries = [entry_of(*part.share, part.array) for part in parts]
    named = {entry.name: part for entry, part in zip(entries, parts, strict=True)}
    if len(named) < len(parts):
        raise UsageError(
            "two arrays of the state have names that can be confused: let none of them end in [m:n]"
        )
    first, placed = lay_out(entries)
    contents = [(each.offset, blocks_of(named[each.name].memory)) for each in placed]
    sums = write_data(order.folder, order.file, first, contents)
    pieces = [
        (named[each.name].share, each.offset, found)
        for each, found in zip(placed, sums, strict=True)
    ]
    return _Written(order.file, placed[-1].offset + placed[-1].nbytes, pieces)


def _commit(order: _Order, written: Sequence[_Written]) -> list[None]:
    """Make what all ranks have written the checkpoint, on the first rank."""
    layout = order.layout
    assert layout is not None
    files = [(each.file, each.nbytes) for each in written if each.pieces]
    pieces: dict[str, list[Piece]] = {name: [] for name in layout.arrays}
    for number, each in enumerate(each for each in written if each.pieces):
        for (name, box), offset, sums in each.pieces:
            pieces[name].append(Piece(number, offset, box, sums))
    for found in pieces.values():
        found.sort(key=operator.attrgetter("box"))
    manifest = Manifest(layout.structure, layout.arrays, pieces, files, len(written), layout.step)
    commit(layout.claim, manifest)
    finish(layout.claim)
    with suppress(OSError):  # the checkpoint is whole, whatever cannot be removed
        if layout.step is not None and layout.keep is not None:
            prune(layout.series, layout.step, layout.keep)
    return [None] * len(written)
