"""Tables in checkpoints: a cut that is the same on all servers, whole or as what has changed.

A path is a series of checkpoints. Its last whole one, and the deltas after it, are what the tables
were at the last save; see `series`. A whole one removes those before it, once it stands. Each array
of a table (ids, rows, and what a store keeps beside) is one array of the checkpoint, whose parts
are those of the servers one after the other; loaded, each rank reads an equal run of it, piece by
piece, and hands the rows to those who own them now.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from secrets import token_hex
from typing import Any

import numpy as np

from hpcdist import checkpoint
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.checkpoint.background import finish_saving
from hpcdist.checkpoint.formats import dtype_of_name
from hpcdist.checkpoint.local_slice import LocalSlice
from hpcdist.checkpoint.reading import read_rows
from hpcdist.checkpoint.remote import is_url
from hpcdist.checkpoint.storage import data_files, named, step_folder, steps_of
from hpcdist.checkpoint.together import of_group
from hpcdist.comm.collectives import barrier
from hpcdist.comm.objects import all_gather_object
from hpcdist.comm.together import Together
from hpcdist.errors import CheckpointError, UsageError
from hpcdist.ps.accessors import accessor_of
from hpcdist.ps.cluster import Cluster
from hpcdist.ps.route import HANDLERS, Told, Verb, hand_over, perform, requests_of
from hpcdist.ps.rows import RowStore
from hpcdist.ps.series import Save, content_of, last_save, series_of
from hpcdist.transport.base import Work

_PARTS = ("ids", "rows", "state", "counters")
_WAITING = ("waiting", "pushes")
"""Ids that have no row yet, and how often they were pushed."""

_REMOVED = ("removed",)
"""Ids that a delta takes away: evicted, shrunk or removed since the save before."""

_PIECE_BYTES, _PIECES = 4 << 20, 32
"""A rank reads so many bytes of rows at a time, or more where there would be too many pieces."""

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
    error, whole = _found(path)
    if mode not in (ALL, DELTA):
        error = UsageError(f"mode must be 0 (all rows) or 1 (what has changed), got {mode!r}")
    error = error or flush(cluster, names)
    words = (tuple(names), whole, mode, async_save)
    return perform(cluster, Verb.SAVE, Told(words), error=error)  # type: ignore[no-any-return]


def load_tables(cluster: Cluster, names: Sequence[str], path: str | os.PathLike[str]) -> None:
    """Replace tables by what was saved, by any number of servers. Collective.

    Raises:
        CheckpointError: there is no save, a delta goes on from one that is not there, or it is of
            other tables; on every rank, and the tables stay as they are.

    """
    error, whole = _found(path)
    error = error or flush(cluster, names)
    perform(cluster, Verb.LOAD, Told((tuple(names), whole)), error=error)


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


def fill(cluster: Cluster, names: Sequence[str]) -> None:
    """Fill tables from where the cluster begins, as far as they are there. Collective."""
    if cluster.begins_from is None:
        return
    path, wanted = cluster.begins_from
    there = of_group(cluster.group).lead(series_of, path)[0].names
    _read_all(cluster, [n for n in names if n in there and (wanted is None or n in wanted)], path)


def _found(path: str | os.PathLike[str]) -> tuple[Exception | None, str]:
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
    state: dict[str, Any] = {}
    for name, shard in shards.items():
        parts: dict[Sequence[str], Sequence[NumpyArray]] = {}
        if shard is not None:
            with shard.lock:
                changed = None if before is None else shard.changes.all()
                rows = parts[_PARTS] = shard.store.content(changed)
                parts[_WAITING] = shard.store.waiting()
                if changed is not None:
                    parts[_REMOVED] = [np.setdiff1d(changed, rows.ids, assume_unique=True)]
                shard.changes.forget((path, token))
        table = cluster.tables[name]
        state[name] = {"dim": np.array([table.options.dim]), "period": np.array([table.period])}
        for kind in (_PARTS, _WAITING, _REMOVED):
            state[name] |= _slices(cluster, kind, parts.get(kind))
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


# ---- loading


def _load(cluster: Cluster, _: Any, told: Told) -> None:
    _read_all(cluster, *told.words)


def _begin(cluster: Cluster, _: Any, told: Told) -> None:
    everyone = of_group(cluster.group).share(lambda: cluster.begins_from)
    cluster.begins_from = next((each for each in everyone if each is not None), None)
    cluster.begun = True
    fill(cluster, list(cluster.tables))


def _saved(cluster: Cluster, _: Any, told: Told) -> None:
    finish_saving(of_group(cluster.group))


def _read_all(cluster: Cluster, names: Sequence[str], path: str) -> None:
    ranks = of_group(cluster.group)
    stores: dict[str, RowStore] = {}
    periods: dict[str, int] = {}
    with ranks:
        finish_saving(ranks)
        saves: list[Save] = ranks.lead(series_of, path)
        for name in names:
            for save in saves:
                _check(cluster, name, path, save)
        try:
            for name in names:
                if cluster.server >= 0:
                    stores[name] = cluster.tables[name].new_store(shared=True)
                periods[name] = _read_table(cluster, name, path, saves, stores.get(name))
        except BaseException:
            for each in stores.values():
                each.close()
            raise
    for name in names:
        table = cluster.tables[name]
        table.period = periods[name]
        if table.worker is not None:
            table.worker.forget()
        if table.shard is not None:
            stores[name].period = table.period
            table.shard.replace(stores[name])
    barrier(cluster.group)  # or a worker could still pull the rows of before, by RPC


def _read_table(
    cluster: Cluster, name: str, path: str, saves: Sequence[Save], store: RowStore | None
) -> int:
    """Lay the saves that a table is in one over the other, on who owns the rows. Collective.

    Returns the table's period.
    """
    saves = [each for each in saves if each.has(name)]
    for save in saves:
        _read(cluster, name, path, save, _REMOVED, None if store is None else store.remove)
        _read(cluster, name, path, save, _PARTS, None if store is None else store.restore)
    put = None if store is None else store.restore_waiting
    _read(cluster, name, path, saves[-1], _WAITING, put)  # all that wait are in every save
    return _period(cluster, name, path, saves[-1])


def _period(cluster: Cluster, name: str, path: str, save: Save) -> int:
    """Return how often a table had been shrunk. Collective."""

    def look() -> int:
        with data_files(step_folder(path, save.step), save.manifest) as files:
            return int(read_rows(files, save.manifest, [f"tables.{name}.period"], 0, 1)[0][0])

    return of_group(cluster.group).lead(look)


def _read(
    cluster: Cluster,
    name: str,
    path: str,
    save: Save,
    parts: Sequence[str],
    put: Callable[..., None] | None,
) -> None:
    """Read arrays of a table piece by piece, and give them to who owns their ids. Collective."""
    ranks, manifest = of_group(cluster.group), save.manifest
    where = [f"tables.{name}.{part}" for part in parts]
    there = [each for each in where if each in manifest.arrays]
    if not there:
        return
    count, nbytes = manifest.arrays[there[0]].shape[0], sum(map(manifest.nbytes, there))
    with data_files(step_folder(path, save.step), manifest) as files:
        for run in runs_of(count, nbytes, cluster.group.rank, cluster.group.nranks):
            took: list[list[NumpyArray]] = []
            ranks.share(partial(_take, took, files, manifest, there, *run))
            found = _handed_over(cluster, took[0])
            if put is not None:
                by_name = dict(zip(there, found, strict=True))
                put(*map(by_name.get, where))


def _take(took: list[list[NumpyArray]], *what: Any) -> None:
    took.append(read_rows(*what))


def runs_of(count: int, nbytes: int, rank: int, size: int) -> list[tuple[int, int]]:
    """Return which rows a rank reads, run by run; every rank has as many runs. Pure."""
    begin, end = rank * count // size, (rank + 1) * count // size
    pieces = min(max(1, -(-nbytes // (size * _PIECE_BYTES))), _PIECES)
    ends = [begin + (end - begin) * number // pieces for number in range(pieces + 1)]
    return [*pairwise(ends)]


def _handed_over(cluster: Cluster, arrays: list[NumpyArray]) -> list[NumpyArray]:
    """Send each row to the server that owns its id; return what came to this one. Collective."""
    plan = requests_of(arrays[0], len(cluster.servers))
    gives = np.zeros(cluster.group.nranks, np.int64)
    gives[list(cluster.servers)] = plan.counts
    return hand_over(cluster, [each[plan.order] for each in arrays], gives)


def _check(cluster: Cluster, name: str, path: str, save: Save) -> None:
    """Refuse a save that has other rows than a table."""
    options, arrays = cluster.tables[name].options, save.manifest.arrays
    if not save.has(name):
        if save.after is not None:  # nothing of it was saved then
            return
        there = ", ".join(save.names)
        raise CheckpointError(f"{path} has no table {name!r}; tables there: {there}")
    rows = arrays.get(f"tables.{name}.rows")
    if rows is None:
        return
    dim, saved = options.dim, (rows.shape[1], dtype_of_name(rows.dtype).name)
    if saved != (dim, options.dtype):
        raise CheckpointError(
            f"table {name!r} was saved with dim and dtype {saved}, but has "
            f"{(dim, options.dtype)}; make it as it was saved"
        )
    widths = {
        "optimizer, whose state": accessor_of(options.optimizer, options.dtype).state_width(dim),
        "entry, whose counters": 0 if options.entry is None else options.entry.terms.counters,
    }
    for (what, width), part in zip(widths.items(), _PARTS[2:], strict=True):
        array = arrays.get(f"tables.{name}.{part}")
        found = 0 if array is None else array.shape[1]
        if found != width:
            raise CheckpointError(
                f"table {name!r} was saved with another {what} of a row has {found} elements "
                f"instead of {width}; make it as it was saved"
            )


HANDLERS[Verb.SAVE] = _save
HANDLERS[Verb.LOAD] = _load
HANDLERS[Verb.BEGIN] = _begin
HANDLERS[Verb.SAVED] = _saved
