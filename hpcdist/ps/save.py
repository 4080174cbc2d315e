"""Tables in checkpoints: a cut that is the same on all servers, whole or as what has changed.

A path is a series of checkpoints. Its last whole one, and the deltas after it, are what the tables
were at the last save; see `series`. A whole one removes those before it, once it stands. Each array
of a table (ids, rows, and what a store keeps beside) is one array of the checkpoint, whose parts
are those of the servers one after the other. `load` reads them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from secrets import token_hex
from typing import Any

import numpy as np

from hpcdist import checkpoint
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.checkpoint.background import finish_saving
from hpcdist.checkpoint.local_slice import LocalSlice
from hpcdist.checkpoint.remote import is_url
from hpcdist.checkpoint.storage import named, steps_of
from hpcdist.checkpoint.together import of_group
from hpcdist.comm.objects import all_gather_object
from hpcdist.comm.together import Together
from hpcdist.errors import UsageError
from hpcdist.ps.cluster import Cluster
from hpcdist.ps.route import HANDLERS, Told, Verb, perform
from hpcdist.ps.series import PARTS, REMOVED, WAITING, Save, content_of, last_save
from hpcdist.ps.server import Shard
from hpcdist.transport.waiting.work import Work

ALL, DELTA = 0, 1


def save_tables(
    cluster: Cluster,
    names: Sequence[str],
    path: str | os.PathLike[str],
    mode: int = ALL,
    *,
    async_save: bool = False,
) -> Work:
    """Write tables as they are when all workers have called this. Collective.

    What a worker has pushed before is in it once, what it pushes later is not.

    Args:
        cluster: whose tables.
        names: of them.
        path: a series of checkpoints, a folder.
        mode: 0 for all rows, 1 for those that were changed or removed since the last save there.
            Where there is none of these tables to go on, it is all.
        async_save: return when the rows have been copied, and write beside what comes next.

    Raises:
        UsageError: another mode; on every rank an error.
        CheckpointError: it cannot be written; on every rank, and the last save stands.

    """
    error, whole = found_at(path)
    if mode not in (ALL, DELTA):
        error = UsageError(f"mode must be 0 (all rows) or 1 (what has changed), got {mode!r}")
    error = error or flush(cluster, names)
    words = (tuple(names), whole, mode, async_save)
    return perform(cluster, Verb.SAVE, Told(words), error=error)  # type: ignore[no-any-return]


def flush(cluster: Cluster, names: Sequence[str]) -> Exception | None:
    """Wait until the servers have what this worker has pushed into some tables. Local.

    Returns what has gone wrong, for `perform` to tell the others, who would wait for this rank.
    """
    try:
        for name in names:
            worker = cluster.tables[name].worker
            if worker is not None:
                worker.flush()
    except Exception as error:
        return error
    return None


def found_at(path: str | os.PathLike[str]) -> tuple[Exception | None, str]:
    """Return the whole path; or why it is none, for `perform`."""
    try:
        text = named(path)
    except UsageError as error:
        return error, ""
    return None, text if is_url(text) else os.path.abspath(text)


# ---- saving


def _save(cluster: Cluster, _: Any, told: Told) -> Work:
    names, path, mode, async_save = told.words
    ranks = of_group(cluster.group)
    finish_saving(ranks)
    shards = {name: cluster.tables[name].shard for name in names}
    before = _gone_on_from(ranks, shards, path) if mode == DELTA else None
    step, token = ranks.lead(lambda: (max(steps_of(path), default=-1) + 1, token_hex(8)))
    copied: dict[str, dict[Sequence[str], Sequence[NumpyArray]]] = {}

    def copy() -> None:
        for name, shard in shards.items():
            copied[name] = {} if shard is None else _copied(shard, before is not None)
            if shard is not None:
                shard.changes.forget((path, token))

    ranks.share(copy)
    state: dict[str, Any] = {}
    for name in names:
        table = cluster.tables[name]
        state[name] = {"dim": np.array([table.options.dim]), "period": np.array([table.period])}
        for kind in (PARTS, WAITING, REMOVED):
            state[name] |= _slices(cluster, kind, copied[name].get(kind))
    try:
        return checkpoint.save(
            content_of(state, token, before),
            path,
            cluster.group,
            step=step,
            keep=1 if before is None else None,
            async_save=async_save,
        )
    except BaseException:
        for shard in shards.values():
            if shard is not None:
                shard.changes.forget(None)  # what has changed is not known any more
        raise


def _gone_on_from(ranks: Together, shards: dict[str, Any], path: str) -> Save | None:
    """Return the save that a delta can go on from; None where only a whole one is one of now."""
    last = ranks.lead(last_save, path)
    fits = last is not None and all(
        shard is None or (name in last.last and shard.changes.saved_to == (path, last.last[name]))
        for name, shard in shards.items()
    )
    return last if all(ranks.share(lambda: fits)) else None


def _copied(shard: Shard, delta: bool) -> dict[Sequence[str], Sequence[NumpyArray]]:
    """Return copies of what is saved of a shard."""
    with shard.lock:
        changed = shard.changes.all() if delta else None
        rows = shard.store.content(changed)
        gone = [] if changed is None else [np.setdiff1d(changed, rows.ids, assume_unique=True)]
        return {PARTS: rows, WAITING: shard.store.waiting(), REMOVED: gone}


def _slices(
    cluster: Cluster, parts: Sequence[str], arrays: Sequence[NumpyArray] | None
) -> dict[str, Any]:
    """Return this server's parts of arrays of a table; collective."""
    everyone: list[tuple[int, Any]] = []
    count = len(arrays[0]) if arrays else 0
    kinds = [(each.shape[1:], each.dtype.str) for each in arrays] if arrays else None
    all_gather_object(everyone, (count, kinds), cluster.group)
    total, begin = (sum(each[0] for each in everyone[:end]) for end in (None, cluster.group.rank))
    if not count or arrays is None:
        return {}
    return {
        part: LocalSlice(each, (total, *each.shape[1:]), (begin, *[0] * (each.ndim - 1)))
        for part, each in zip(parts, arrays, strict=True)
        if each[0].size
    }


def _saved(cluster: Cluster, _: Any, told: Told) -> None:
    finish_saving(of_group(cluster.group))


HANDLERS[Verb.SAVE] = _save
HANDLERS[Verb.SAVED] = _saved
