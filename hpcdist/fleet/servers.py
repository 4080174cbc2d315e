"""The names of `fleet` for tables: begin and end, save and load; each by the `Fleet` at hand.

Every rank keeps its part of the tables, unless `init` was told of ranks that only serve. A
`table_id` is the name of a table, or its number in the order in which they were made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hpcdist.checkpoint.storage import named
from hpcdist.errors import UsageError
from hpcdist.fleet.job import TABLES, current_fleet
from hpcdist.ps.cluster import Cluster
from hpcdist.ps.core import Table
from hpcdist.ps.load import load_tables
from hpcdist.ps.route import Told, Verb, follow, perform
from hpcdist.ps.save import flush, save_tables

_T = TypeVar("_T")


def init_worker(scopes: Sequence[Any] | None = None) -> None:
    """Wait until all ranks are there, and fill the tables from the folder of `init_server`.

    Collective over the workers; servers have to be serving (`run_server`).

    Args:
        scopes: accepted for Paddle's sake.

    Raises:
        UsageError: this rank only serves.
        CheckpointError: what `init_server` has named cannot be read.

    Example:
        >>> import hpcdist as dist
        >>> from hpcdist import ps
        >>> def work():
        ...     dist.fleet.init()
        ...     dist.fleet.init_worker()
        ...     rows = ps.SparseTable("words", 4, optimizer="sgd").pull([3, 7])
        ...     dist.fleet.stop_worker()
        ...     return rows.shape
        >>> dist.simulate(2, work)
        [(2, 4), (2, 4)]

    """
    perform(_workers("init_worker"), Verb.BEGIN, Told(()))


def stop_worker() -> None:
    """Wait until the servers have all that this worker has pushed, and all workers have stopped.

    Collective over the workers; one that comes early goes on keeping its rows for the others.
    Again, it does nothing.

    Raises:
        UsageError: this rank only serves.
        HpcdistError: a push from before has failed.

    Example:
        >>> import hpcdist as dist
        >>> from hpcdist import ps
        >>> def work():
        ...     dist.fleet.init()
        ...     dist.fleet.init_worker()
        ...     rows = ps.SparseTable("words", 4, optimizer="sgd").pull([3, 7])
        ...     dist.fleet.stop_worker()
        ...     return rows.shape
        >>> dist.simulate(2, work)
        [(2, 4), (2, 4)]

    """
    cluster = _workers("stop_worker")
    if cluster.stopped:
        return
    failed: list[Exception] = []
    for table in cluster.tables.values():
        try:
            table.worker.stop()
        except Exception as error:  # the others wait for this worker all the same
            failed.append(error)
    cluster.stopped = True
    follow(cluster, Verb.STOPPED)
    if failed:
        raise failed[0]


def init_server(*args: Any, **kwargs: Any) -> None:
    """Set the folder from which tables are filled when the workers begin (`init_worker`). Local.

    Args:
        args: none, or `dirname`, what `save_persistables` was given, and `var_names`, the names of
            the tables to be filled; all by default.
        kwargs: the same by name.

    Raises:
        UsageError: other arguments.

    Example:
        >>> import hpcdist as dist
        >>> def serve():
        ...     dist.fleet.init()
        ...     dist.fleet.init_server()  # or init_server("where the tables were saved")
        ...     dist.fleet.init_worker()
        ...     dist.fleet.stop_worker()
        >>> dist.simulate(2, serve)
        [None, None]

    """
    given = dict(zip(("dirname", "var_names"), args, strict=False)) | kwargs
    if len(args) > 2 or not {*given} <= {"dirname", "var_names"}:
        raise UsageError(f"init_server takes dirname and var_names, got {args} and {kwargs}")
    cluster = current_fleet("init_server").cluster
    dirname, names = given.get("dirname"), given.get("var_names")
    if dirname is not None:
        cluster.begins_from = _folder(dirname), None if names is None else tuple(names)


def run_server() -> None:
    """Serve until all workers have called `stop_worker`. On ranks that only serve.

    Raises:
        UsageError: this rank trains, too.
        RemoteError: a worker has died.

    Example:
        >>> import hpcdist as dist
        >>> def job():
        ...     dist.fleet.init(server_num=1)  # the last rank
        ...     if dist.fleet.is_server():
        ...         dist.fleet.run_server()
        ...         return "served"
        ...     dist.fleet.init_worker()
        ...     dist.fleet.stop_worker()
        ...     return "worked"
        >>> dist.simulate(3, job)
        ['worked', 'worked', 'served']

    """
    cluster = current_fleet("run_server").cluster
    if cluster.worker >= 0:
        raise UsageError(
            "fleet.run_server is for ranks that only serve, and this one trains: it keeps its part "
            "of the tables meanwhile; call it where fleet.is_server(), after "
            "fleet.init(server_num=...) or with a role maker"
        )
    if not cluster.over:
        follow(cluster, Verb.SERVES)


def server_index() -> int:
    """Return this rank's number among those that only serve. Local.

    Example:
        >>> import hpcdist as dist
        >>> def job():
        ...     dist.fleet.init(server_num=1)  # the last rank
        ...     return dist.fleet.server_index() if dist.fleet.is_server() else None
        >>> dist.simulate(3, job)
        [None, None, 0]

    """
    return current_fleet("server_index").server_index()


def shrink(threshold: int | None = None) -> None:
    """Remove the rows of all tables that are worth less than `threshold`. Collective.

    Args:
        threshold: the lowest score that stays; None for the usual one.

    Example:
        >>> import hpcdist as dist
        >>> from hpcdist import ps
        >>> def work():
        ...     dist.fleet.init()
        ...     ps.SparseTable("words", 4, optimizer="sgd").pull([3, 7])
        ...     dist.fleet.shrink()
        >>> dist.simulate(2, work)
        [None, None]

    """
    cluster = _workers("shrink")
    for table in cluster.tables.values():
        error = flush(cluster, [table.name])
        perform(cluster, Verb.SHRINK, Told((threshold, 1.0, None)), table, error)


def set_date(table_id: int | str, day_id: str) -> None:
    """Note the day that a table has come to, which `print_table_stat` shows. Local.

    Args:
        table_id: the name of the table, or its number.
        day_id: the day.

    Example:
        >>> import hpcdist as dist
        >>> from hpcdist import ps
        >>> def work():
        ...     dist.fleet.init()
        ...     ps.SparseTable("words", 4, optimizer="sgd")
        ...     dist.fleet.set_date("words", "20270131")
        >>> dist.simulate(2, work)
        [None, None]

    """
    _table(_workers("set_date"), table_id).day = str(day_id)


def print_table_stat(table_id: int | str, pass_id: int, threshold: float) -> None:
    """Print, on the first worker, how many rows and bytes a table has. Collective.

    Args:
        table_id: the name of the table, or its number.
        pass_id: printed with it, as is the day of `set_date`.
        threshold: accepted for Paddle's sake.

    Example:
        >>> import hpcdist as dist
        >>> from hpcdist import ps
        >>> def work():
        ...     dist.fleet.init()
        ...     ps.SparseTable("words", 4, optimizer="sgd").pull([3, 7])
        ...     dist.fleet.print_table_stat("words", pass_id=1, threshold=0)
        >>> _ = dist.simulate(2, work)  # doctest: +ELLIPSIS
        table ...

    """
    cluster = _workers("print_table_stat")
    table = _found(cluster, lambda: _table(cluster, table_id))
    error = flush(cluster, [table.name])
    found = perform(cluster, Verb.STATS, Told(()), table, error)
    if cluster.worker == 0:
        day = f", day {table.day}" if table.day else ""
        print(
            f"table {table.name!r}, pass {pass_id}{day}: {found['rows']} rows, {found['bytes']} "
            f"bytes on {len(cluster.servers)} servers, the fullest with {found['balance']:.2f} "
            "times the mean",
            flush=True,
        )


def save_cache_model(dirname: str, **configs: Any) -> int:
    """Write all tables to a folder, and return how many rows there are. Collective.

    Rows are cached by the memory of the nodes: what is saved is all of them.

    Args:
        dirname: the folder.
        **configs: `mode`, as of `save_persistables`; others are accepted.

    Example:
        >>> import tempfile, hpcdist as dist
        >>> from hpcdist import ps
        >>> def work(folder):
        ...     dist.fleet.init()
        ...     ps.SparseTable("words", 4, optimizer="sgd").pull([3, 7])
        ...     return dist.fleet.save_cache_model(folder)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(dist.simulate(2, work, folder))
        [2, 2]

    """
    cluster = _workers("save_cache_model")
    path = _found(cluster, lambda: _folder(dirname))
    save_tables(cluster, [*cluster.tables], path, configs.get("mode", 0)).wait()
    tables = cluster.tables.values()
    return sum(perform(cluster, Verb.STATS, Told(()), table)["rows"] for table in tables)


def save_cache_table(
    table_id: int | str, pass_id: int, mem_cache_key_threshold: int = 4000000000
) -> None:
    """Raise `UsageError`: no rows are cached apart from the table, so there is nothing to write.

    Args:
        table_id: the name of the table, or its number.
        pass_id: without effect.
        mem_cache_key_threshold: without effect.

    """
    table = _table(_workers("save_cache_table"), table_id)
    raise UsageError(
        f"table {table.name!r} keeps no cache apart from its rows; save_one_table writes them"
    )


def save_one_table(table_id: int | str, path: str, mode: int) -> None:
    """Write one table to a folder. Collective.

    Args:
        table_id: the name of the table, or its number.
        path: the folder.
        mode: 0 for all rows, 1 for what has changed.

    Example:
        >>> import tempfile, hpcdist as dist
        >>> from hpcdist import ps
        >>> def work(folder):
        ...     dist.fleet.init()
        ...     rows = ps.SparseTable("words", 4, optimizer="sgd").pull([3, 7])
        ...     dist.fleet.save_one_table("words", folder, mode=0)
        ...     dist.fleet.load_one_table("words", folder, mode=0)
        ...     return rows.shape
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(dist.simulate(2, work, folder))
        [(2, 4), (2, 4)]

    """
    cluster = _workers("save_one_table")
    table = _found(cluster, lambda: _table(cluster, table_id))
    save_tables(cluster, [table.name], path, mode)


def load_one_table(table_id: int | str, path: str, mode: int) -> None:
    """Replace one table by what was saved, by any number of servers. Collective.

    Args:
        table_id: the name of the table, or its number.
        path: the folder; all saves in it are read that are needed.
        mode: accepted for Paddle's sake.

    Example:
        >>> import tempfile, hpcdist as dist
        >>> from hpcdist import ps
        >>> def work(folder):
        ...     dist.fleet.init()
        ...     rows = ps.SparseTable("words", 4, optimizer="sgd").pull([3, 7])
        ...     dist.fleet.save_one_table("words", folder, mode=0)
        ...     dist.fleet.load_one_table("words", folder, mode=0)
        ...     return rows.shape
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(dist.simulate(2, work, folder))
        [(2, 4), (2, 4)]

    """
    cluster = _workers("load_one_table")
    table = _found(cluster, lambda: _table(cluster, table_id))
    load_tables(cluster, [table.name], path)


def save_dense_params(
    executor: Any, dirname: str, scope: Any, program: Any, var_names: list[str] | None = None
) -> None:
    """Write the tables that are `DenseTable`s to a folder. Collective.

    Args:
        executor: accepted for Paddle's sake.
        dirname: the folder.
        scope: accepted for Paddle's sake.
        program: accepted for Paddle's sake.
        var_names: the names of the tables to be written; None for all.

    Example:
        >>> import tempfile, hpcdist as dist
        >>> from hpcdist import ps
        >>> def work(folder):
        ...     dist.fleet.init()
        ...     ps.DenseTable("weights", (4, 3), optimizer="sgd")
        ...     dist.fleet.save_dense_params(None, folder, None, None)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(dist.simulate(2, work, folder))
        [None, None]

    """
    cluster = _workers("save_dense_params")
    dense = [name for name, table in cluster.tables.items() if table.dense]
    save_tables(cluster, _found(cluster, lambda: _chosen(dense, var_names)), dirname)


def load_model(path: str, mode: int) -> None:
    """Replace all tables by what `save_persistables` has written. Collective.

    Args:
        path: the folder; all saves in it are read that are needed.
        mode: accepted for Paddle's sake.

    Example:
        >>> import tempfile, hpcdist as dist
        >>> from hpcdist import ps
        >>> def work(folder):
        ...     dist.fleet.init()
        ...     table = ps.SparseTable("words", 4, optimizer="sgd")
        ...     before = table.pull([3, 7])
        ...     dist.fleet.save_persistables(None, folder)
        ...     table.push([3, 7], before)
        ...     dist.fleet.load_model(folder, mode=0)
        ...     return bool((table.pull([3, 7]) == before).all())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(dist.simulate(2, work, folder))
        [True, True]

    """
    cluster = _workers("load_model")
    load_tables(cluster, [*cluster.tables], _found(cluster, lambda: _folder(path)))


def load_inference_model(path: str, mode: int) -> None:
    """Alias of `load_model`; for the weights, use `hpcdist.load_merged_state_dict`. Collective.

    Args:
        path: the folder; all saves in it are read that are needed.
        mode: accepted for Paddle's sake.

    """
    cluster = _workers("load_inference_model")
    load_tables(cluster, [*cluster.tables], _found(cluster, lambda: _folder(path)))


def check_save_pre_patch_done() -> None:
    """Wait until what is saved beside the training is on disk. Collective over the workers.

    Example:
        >>> import hpcdist as dist
        >>> def work():
        ...     dist.fleet.init()
        ...     dist.fleet.check_save_pre_patch_done()
        >>> dist.simulate(2, work)
        [None, None]

    """
    cluster = _workers("check_save_pre_patch_done")
    perform(cluster, Verb.SAVED, Told(()))


# ---- what they share


def _workers(name: str) -> Cluster:
    cluster = current_fleet(name).cluster
    if cluster.worker < 0:
        raise UsageError(
            f"fleet.{name} is for workers, and this rank only serves; call fleet.run_server() here"
        )
    if cluster.stopped and name != "stop_worker":
        raise UsageError(f"fleet.{name} was called after fleet.stop_worker(); call it before")
    return cluster


def _found(cluster: Cluster, find: Callable[[], _T]) -> _T:
    """Return the result of `find`; tell the other workers of an error, so that they do not wait."""
    try:
        return find()
    except UsageError as error:
        perform(cluster, Verb.BARRIER, Told(()), error=error)
        raise


def _table(cluster: Cluster, table_id: Any) -> Table:
    tables: list[Table] = [*cluster.tables.values()]
    for table in tables:
        if table_id in (table.name, table.number) and not isinstance(table_id, bool):
            return table
    there = ", ".join(f"{each.number} ({each.name!r})" for each in tables) or "none yet"
    raise UsageError(f"there is no table {table_id!r}; tables there are: {there}")


def _chosen(names: Sequence[str], wanted: Sequence[str] | None) -> list[str]:
    unknown = [each for each in wanted or () if each not in names]
    if unknown:
        raise UsageError(f"there are no tables {unknown}; tables there are: {[*names]}")
    return [each for each in names if wanted is None or each in wanted]


def _folder(dirname: Any) -> str:
    path = named(dirname)
    return path if os.path.basename(path.rstrip("/")) == TABLES else os.path.join(path, TABLES)
