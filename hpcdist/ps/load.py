"""Tables from checkpoints: read piece by piece, and handed to those who own the rows now.

Each rank reads an equal run of every array. The tables change when all has been read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.checkpoint.background import finish_saving
from hpcdist.checkpoint.formats import dtype_of_name
from hpcdist.checkpoint.reading import read_rows
from hpcdist.checkpoint.storage import data_files, step_folder
from hpcdist.checkpoint.together import of_group
from hpcdist.comm.collectives import barrier
from hpcdist.errors import CheckpointError
from hpcdist.ps.accessors import accessor_of
from hpcdist.ps.cluster import Cluster
from hpcdist.ps.route import HANDLERS, Told, Verb, hand_over, perform, requests_of
from hpcdist.ps.rows import RowStore
from hpcdist.ps.save import flush, found_at
from hpcdist.ps.series import PARTS, REMOVED, WAITING, Save, series_of

_PIECE_BYTES, _PIECES = 4 << 20, 32
"""A rank reads so many bytes of rows at a time, or more where there would be too many pieces."""


def load_tables(cluster: Cluster, names: Sequence[str], path: str | os.PathLike[str]) -> None:
    """Replace tables by what was saved, by any number of servers. Collective.

    Raises:
        CheckpointError: there is no save, a delta goes on from one that is not there, or it is of
            other tables; on every rank, and the tables stay as they are.

    """
    error, whole = found_at(path)
    error = error or flush(cluster, names)
    perform(cluster, Verb.LOAD, Told((tuple(names), whole)), error=error)


def fill(cluster: Cluster, names: Sequence[str]) -> None:
    """Fill tables from where the cluster begins, as far as they are there. Collective."""
    if cluster.begins_from is None:
        return
    path, wanted = cluster.begins_from
    there = of_group(cluster.group).lead(series_of, path)[0].names
    _read_all(cluster, [n for n in names if n in there and (wanted is None or n in wanted)], path)


def _load(cluster: Cluster, _: Any, told: Told) -> None:
    _read_all(cluster, *told.words)


def _begin(cluster: Cluster, _: Any, told: Told) -> None:
    everyone = of_group(cluster.group).share(lambda: cluster.begins_from)
    cluster.begins_from = next((each for each in everyone if each is not None), None)
    cluster.begun = True
    fill(cluster, list(cluster.tables))


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
        _read(cluster, name, path, save, REMOVED, None if store is None else store.remove)
        _read(cluster, name, path, save, PARTS, None if store is None else store.restore)
    put = None if store is None else store.restore_waiting
    _read(cluster, name, path, saves[-1], WAITING, put)  # all that wait are in every save
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
    for (what, width), part in zip(widths.items(), PARTS[2:], strict=True):
        array = arrays.get(f"tables.{name}.{part}")
        found = 0 if array is None else array.shape[1]
        if found != width:
            raise CheckpointError(
                f"table {name!r} was saved with another {what} take {found} elements of a row "
                f"instead of {width}; make it as it was saved"
            )


HANDLERS[Verb.LOAD] = _load
HANDLERS[Verb.BEGIN] = _begin
