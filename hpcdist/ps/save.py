"""Tables in checkpoints: a cut that is the same on all servers, whole or as what has changed.

A path is a series of checkpoints. Its last whole one, and the deltas after it, are what the tables
were at the last save. A whole one removes those before it, once it stands. Each array of a table
(ids, rows, and what a store keeps beside) is one array of the checkpoint, whose parts are those of
the servers one after the other; loaded, each rank reads an equal run of it and hands the rows to
those who own them now.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcdist import checkpoint
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.checkpoint.background import finish_saving
from hpcdist.checkpoint.formats import dtype_of_name
from hpcdist.checkpoint.loading import load_into, what_is_wanted
from hpcdist.checkpoint.local_slice import LocalSlice
from hpcdist.checkpoint.manifest import Manifest
from hpcdist.checkpoint.plan import Array
from hpcdist.checkpoint.remote import is_url
from hpcdist.checkpoint.storage import named, read_manifest, step_folder, steps_of
from hpcdist.checkpoint.together import of_group
from hpcdist.comm.collectives import alltoall_single, barrier
from hpcdist.comm.objects import all_gather_object
from hpcdist.errors import CheckpointError, UsageError
from hpcdist.ps.accessors import accessor_of
from hpcdist.ps.cluster import Cluster
from hpcdist.ps.route import HANDLERS, Told, Verb, perform, requests_of
from hpcdist.transport.base import Work

_PARTS = ("ids", "rows", "state", "counters")
_WAITING = ("waiting", "pushes")
"""Ids that have no row yet, and how often they were pushed."""

_WHOLE = "whole"
"""An array that is in a save of all rows."""

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
        mode: 0 for all rows, 1 for those that have changed since the last save there. Where there
            is none to go on, or rows have been removed since, it is all.
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
        CheckpointError: there is no save, or it is of other tables; on every rank, and the tables
            stay as they are.

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
    saves = of_group(cluster.group).lead(_last_whole, path)
    there = _names(saves[0][1])
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
    goes_on = all(each is None or each.saved_to == path for each in shards.values())
    before, delta = _before(cluster, path, mode == DELTA and goes_on)
    state: dict[str, Any] = {}
    for name, shard in shards.items():
        arrays = waiting = None
        if shard is not None:
            with shard.lock:
                arrays = _copied(shard.store, shard.changed() if delta else None)
                waiting = [*shard.store.waiting()]
                shard.forget_changes(path)
        dim = np.array([cluster.tables[name].options.dim])
        state[name] = {
            **_slices(cluster, _PARTS, arrays),
            **_slices(cluster, _WAITING, waiting),
            "dim": dim,
        }
    content = {"tables": state, **({} if delta else {_WHOLE: np.ones(1)})}
    try:
        return checkpoint.save(
            content,
            path,
            cluster.group,
            step=before + 1,
            keep=None if delta else 1,
            async_save=async_save,
        )
    except BaseException:
        for shard in shards.values():
            if shard is not None:
                shard.saved_to = None  # what has changed is not known any more
        raise


def _before(cluster: Cluster, path: str, delta: bool) -> tuple[int, bool]:
    """Return the number of the last save at a path, and whether a delta can go on from there."""
    everyone: list[bool] = []
    all_gather_object(everyone, delta, cluster.group)
    steps: list[int] = of_group(cluster.group).lead(steps_of, path)
    return (steps[-1] if steps else -1), all(everyone) and bool(steps)


def _copied(store: Any, only: NumpyArray | None) -> list[NumpyArray]:
    """Return copies of what a store has, of some ids or of all."""
    taken: list[list[NumpyArray]] = []
    for chunk in store.chunks():
        if only is None:
            taken.append([np.array(each) for each in chunk])
        else:
            there = np.isin(chunk[0], only, assume_unique=True)
            taken.append([np.asarray(each)[there] for each in chunk])
    if not taken:
        return []
    return [np.concatenate(each) for each in zip(*taken, strict=True)]


def _slices(
    cluster: Cluster, parts: Sequence[str], arrays: list[NumpyArray] | None
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
    finish_saving(ranks)
    saves: list[tuple[int, Manifest]] = ranks.lead(_last_whole, path)
    stores = {
        name: cluster.tables[name].options.new_store(shared=True) if cluster.server >= 0 else None
        for name in names
    }
    for step, manifest in saves:
        for name in names:
            _check(cluster, name, path, manifest)
            for parts, put in ((_PARTS, "restore"), (_WAITING, "restore_waiting")):
                arrays = _read(cluster, name, parts, path, step, manifest)
                if arrays is None:
                    continue
                found, store = _handed_over(cluster, arrays), stores[name]
                if store is not None:
                    getattr(store, put)(*found)
    for name in names:
        shard, worker = cluster.tables[name].shard, cluster.tables[name].worker
        if worker is not None:
            worker.forget()
        if shard is not None:
            with shard.lock:
                shard.store.close()
                shard.store = stores[name]
                shard.saved_to = None
    barrier(cluster.group)  # or a worker could still pull the rows of before, by RPC


def _last_whole(path: str) -> list[tuple[int, Manifest]]:
    """Return the saves to be read, oldest first: the last whole one and the deltas after it."""
    found: list[tuple[int, Manifest]] = []
    for step in reversed(steps_of(path)):
        found.insert(0, (step, read_manifest(step_folder(path, step))))
        if _WHOLE in found[0][1].arrays:
            return found
    raise CheckpointError(f"there is no whole save of tables in {path}")


def _read(
    cluster: Cluster, name: str, parts: Sequence[str], path: str, step: int, manifest: Manifest
) -> list[NumpyArray] | None:
    """Read an equal run of a saved table on each rank; None where it has no rows. Collective."""
    wish = {
        part: _own_run(cluster, manifest.arrays[where])
        for part in parts
        if (where := f"tables.{name}.{part}") in manifest.arrays
    }
    if parts[0] not in wish:
        return None
    state = {"tables": {name: wish}}
    load_into(state, path, cluster.group, step, what_is_wanted)
    rows = len(wish[parts[0]].data)
    return [wish[part].data if part in wish else np.empty((rows, 0), "f4") for part in parts]


def _own_run(cluster: Cluster, array: Array) -> LocalSlice:
    rank, size, count = cluster.group.rank, cluster.group.nranks, array.shape[0]
    begin, end = rank * count // size, (rank + 1) * count // size
    data = np.empty((end - begin, *array.shape[1:]), dtype_of_name(array.dtype))
    return LocalSlice(data, array.shape, (begin, *[0] * (len(array.shape) - 1)))


def _handed_over(cluster: Cluster, arrays: list[NumpyArray]) -> list[NumpyArray]:
    """Send each row to the server that owns its id; return what came to this one. Collective."""
    plan = requests_of(arrays[0], len(cluster.servers))
    gives = np.zeros(cluster.group.nranks, np.int64)
    gives[list(cluster.servers)] = plan.counts
    gets = np.empty_like(gives)
    alltoall_single(gets, gives, cluster.group)
    taken = []
    for each in arrays:
        out = np.empty((int(gets.sum()), *each.shape[1:]), each.dtype)
        alltoall_single(
            out,
            np.ascontiguousarray(each[plan.order]),
            cluster.group,
            in_split_sizes=gives.tolist(),
            out_split_sizes=gets.tolist(),
        )
        taken.append(out)
    return taken


def _names(manifest: Manifest) -> list[str]:
    """Return the names of the tables of a save."""
    return sorted(each[7:-4] for each in manifest.arrays if each.endswith(".dim"))


def _check(cluster: Cluster, name: str, path: str, manifest: Manifest) -> None:
    options = cluster.tables[name].options
    if f"tables.{name}.dim" not in manifest.arrays:
        there = ", ".join(_names(manifest))
        raise CheckpointError(f"{path} has no table {name!r}; tables there: {there}")
    rows = manifest.arrays.get(f"tables.{name}.rows")
    if rows is None:
        return
    saved = rows.shape[1], dtype_of_name(rows.dtype).name
    if saved != (options.dim, options.dtype):
        raise CheckpointError(
            f"table {name!r} was saved with dim and dtype {saved}, but has "
            f"{(options.dim, options.dtype)}; make it as it was saved"
        )
    state = manifest.arrays.get(f"tables.{name}.state")
    width = accessor_of(options.optimizer, options.dtype).state_width(options.dim)
    if (0 if state is None else state.shape[1]) != width:
        raise CheckpointError(
            f"table {name!r} was saved with another optimizer, whose state of a row has "
            f"{0 if state is None else state.shape[1]} elements instead of {width}; make it as it "
            "was saved"
        )


HANDLERS[Verb.SAVE] = _save
HANDLERS[Verb.LOAD] = _load
HANDLERS[Verb.BEGIN] = _begin
HANDLERS[Verb.SAVED] = _saved
