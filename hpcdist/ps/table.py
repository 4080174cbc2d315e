"""`SparseTable` and `DenseTable`: rows that all ranks of a cluster share."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, final

import numpy as np

from hpcdist.arrays.device import device_runtime_of
from hpcdist.arrays.libraries import NumpyArray, library_of, view_of
from hpcdist.arrays.transfer import fill, on_host
from hpcdist.comm.group import Group
from hpcdist.comm.objects import all_gather_object
from hpcdist.comm.session import require_session
from hpcdist.comm.together import together
from hpcdist.errors import HpcdistError, MismatchError, UsageError
from hpcdist.ps import save
from hpcdist.ps.accessors import row_dtype
from hpcdist.ps.cluster import Cluster, cluster_of
from hpcdist.ps.hot import Hot, hottest
from hpcdist.ps.ids import as_ids
from hpcdist.ps.merging import merge, spread, unique
from hpcdist.ps.modes import Async, Mode, Ssp, Sync, mode_of
from hpcdist.ps.route import HANDLERS, Pending, Told, Verb, meet, perform
from hpcdist.ps.rows import RowStore, check_all_finite
from hpcdist.ps.server import Shard
from hpcdist.ps.shared import new_owned
from hpcdist.ps.worker import Worker, worker_of
from hpcdist.transport.base import DONE, Work


class Options(NamedTuple):
    """What a table is made of; see `SparseTable`."""

    dim: int
    dtype: str = "float32"
    optimizer: Any = "adagrad"
    initializer: Any = ("uniform", 0.01)
    entry: Any = None
    max_rows: int | None = None
    store: Literal["memory", "ssd"] = "memory"
    folder: str | None = None
    seed: int = 0
    mode: Mode = Sync()
    check_finite: bool = False

    def new_store(self, *, shared: bool = False) -> RowStore:
        """Return an empty store of such rows; `shared`: that others of the node can read."""
        by_calls = isinstance(self.mode, (Async, Ssp)) and self.store == "memory"
        owned = new_owned() if shared and by_calls else None
        return RowStore(
            self.dim,
            dtype=self.dtype,
            optimizer=self.optimizer,
            initializer=self.initializer,
            entry=self.entry,
            max_rows=self.max_rows,
            store=self.store,
            folder=self.folder,
            seed=self.seed,
            owned=owned,
        )

    def nothing(self) -> tuple[NumpyArray, ...]:
        """Return ids, gradients and marks of no rows."""
        marks = 0 if self.entry is None else 2
        return (
            np.empty(0, np.int64),
            np.empty((0, self.dim), self.dtype),
            np.empty((0, marks), np.float32),
        )

    def words(self) -> tuple[str, ...]:
        """Return what ranks compare."""
        return tuple(f"{name}={_in_words(value)}" for name, value in self._asdict().items())


def _in_words(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return blake2b(value.tobytes(), digest_size=8).hexdigest()
    if isinstance(value, functools.partial):
        return " ".join(map(_in_words, (value.func, *value.args)))
    name = getattr(value, "__qualname__", None)
    if name is not None:
        return f"{value.__module__}.{name}"
    plain = isinstance(value, (str, int, float, tuple, type(None)))
    return repr(value) if plain else f"{type(value).__name__}{sorted(_fields(value).items())!r}"


def _fields(value: Any) -> dict[str, str]:
    given = vars(value) if hasattr(value, "__dict__") else {}
    return {name: repr(each) for name, each in given.items() if isinstance(each, _PLAIN)}


_PLAIN = (str, int, float, bool, type(None))


@final
class Table:
    """A table of one cluster, as one rank has it.

    Attributes:
        name: what it is found by.
        number: of the tables of the cluster, in the order in which they were made.
        options: what it was made of.
        shard: the rows that this rank keeps; None where it does not serve.
        worker: what this rank does with what it pulls and pushes; None where it only serves.
        dense: whether it is that of a `DenseTable`.
        day: what `fleet.set_date` has said.
        layer: the `sparse_embedding` that it has here.
        hot: which ids this rank reads most often without asking their server.

    """

    def __init__(self, cluster: Cluster, name: str, options: Options) -> None:
        self.name, self.options = name, options
        self.number = len(cluster.tables)
        serves = cluster.server >= 0
        self.shard = Shard(options.new_store(shared=True), len(cluster.workers)) if serves else None
        self.worker: Worker | None = None
        self.dense, self.day = False, ""
        self.layer: Any = None
        self.hot = Hot()


def _create(cluster: Cluster, _: Any, told: Told) -> Table:
    """Make a table, or find the one of this name. Collective, after all ranks agree."""
    name, options = told.needed
    found: Table | None = cluster.tables.get(name)
    if found is not None:
        before, now = found.options.words(), told.words[1:]
        if before != now:
            differ = next(pair for pair in zip(before, now, strict=True) if pair[0] != pair[1])
            raise MismatchError(
                f"there is a table {name!r} with {differ[0]}, but it is now asked for with "
                f"{differ[1]}; give the same options, or another name"
            )
        return found
    with together(cluster.group):
        if not isinstance(options.mode, Sync) and require_session().rpc is None:
            from hpcdist.rpc import init_rpc

            init_rpc(group=cluster.group)
        table = Table(cluster, name, options)
        cluster.tables[name] = table
        if cluster.worker >= 0:
            table.worker = worker_of(options.mode, cluster, table)
    save.fill(cluster, [name])
    return table


def _stats(cluster: Cluster, table: Table, _: Told) -> dict[str, Any]:
    own = None
    if table.shard is not None:
        with table.shard.lock:
            store, hot = table.shard.store, table.shard.hot.hottest()
            own = {**store.stats(), "rows": len(store), "hot": hot}
    everyone: list[Any] = []
    all_gather_object(everyone, (own, table.hot.hottest()), cluster.group)
    servers = [everyone[rank][0] for rank in cluster.servers]
    read = [hot for _, hot in everyone]
    rows = [each["rows"] for each in servers]
    mean = sum(rows) / len(rows)
    return {
        "rows": sum(rows),
        "bytes": sum(each.get("bytes", 0) for each in servers),
        "balance": max(rows) / mean if mean else 1.0,
        "hot": hottest([*read, *(each["hot"] for each in servers)]),
        "servers": servers,
    }


def _shrink(cluster: Cluster, table: Table, told: Told) -> int:
    (threshold,) = told.words
    if threshold is not None and not isinstance(threshold, (int, float)):
        raise UsageError(
            f"threshold must be a number, or None for the usual one, got {threshold!r}"
        )
    removed = 0 if table.shard is None else table.shard.shrink(threshold)
    everyone: list[int] = []
    all_gather_object(everyone, removed, cluster.group)
    return sum(everyone)


HANDLERS[Verb.CREATE] = _create
HANDLERS[Verb.STATS] = _stats
HANDLERS[Verb.SHRINK] = _shrink


@final
class SparseTable:
    """Rows found by 64-bit ids, spread over the ranks by a hash. Collective.

    Every rank works and serves, unless `fleet.init` has told otherwise. A second table of the same
    name is the same table.

    Args:
        name: what it is found by.
        dim: elements of a row.
        dtype: of the rows.
        optimizer: how a gradient changes a row: ``"sgd"``, ``"momentum"``, ``"adagrad"``,
            ``"adam"``, ``"ftrl"`` or an algorithm of `hpcdist.optim`.
        initializer: what a row is at first: ``("uniform", width)``, or a function of ids and `dim`
            that returns rows.
        entry: which ids get a row: `CountFilterEntry` and others; None for all.
        max_rows: rows that each server keeps at most; None for as many as there are.
        store: ``"memory"``, or ``"ssd"`` for files mapped into memory.
        folder: where these files are.
        seed: of initial rows.
        mode: ``"sync"``, ``"async"``, ``"geo"``, ``"ssp"`` or one with settings, such as
            ``hpcdist.ps.Ssp(staleness=2)``; None for what `fleet.init` was told, or else sync.
        check_finite: refuse gradients with NaN or infinity, before anything is sent; otherwise the
            optimizer takes them, as it does those of a dense parameter.
        group: the ranks that share it; None for all.

    Raises:
        UsageError: an argument is wrong; on every rank an error.
        MismatchError: the ranks give different options, or there is a table of this name with
            other ones; on every rank.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> from hpcdist import ps
        >>> table = ps.SparseTable("k-mers", 4, optimizer="sgd")
        >>> rows = table.pull(np.array([3, 7, 3]))
        >>> table.push(np.array([3, 7, 3]), np.ones((3, 4), np.float32)).is_completed()
        True

    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        dtype: str = "float32",
        optimizer: Any = "adagrad",
        initializer: Any = ("uniform", 0.01),
        entry: Any = None,
        max_rows: int | None = None,
        store: Literal["memory", "ssd"] = "memory",
        folder: str | os.PathLike[str] | None = None,
        seed: int = 0,
        mode: Any = None,
        check_finite: bool = False,
        group: Group | None = None,
    ) -> None:
        cluster = self._cluster = cluster_of(group)
        error, options = None, None
        try:
            _check_name(name, dim)
            options = Options(
                dim,
                np.dtype(dtype).name,
                optimizer,
                initializer,
                entry,
                max_rows,
                store,
                None if folder is None else os.fspath(folder),
                seed,
                cluster.mode if mode is None else mode_of(mode),
                bool(check_finite),
            )
            options.new_store().close()  # what is wrong is found on this rank
        except (HpcdistError, TypeError, ValueError) as reason:
            error = reason
        _check_running(cluster)
        needed = (name, options)
        words = (f"name={name!r}", *(options.words() if options is not None else ()))
        first = cluster.dedicated and cluster.worker == 0  # whom those who serve can ask
        told = Told(words, needed if first else None)
        self.core: Table = perform(cluster, Verb.CREATE, told, error=error, own=needed)
        self._fetched: tuple[NumpyArray, Pending] | None = None

    @property
    def name(self) -> str:
        """What it is found by."""
        return self.core.name

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self.core.options.dim

    @property
    def dtype(self) -> np.dtype:
        """Of the rows."""
        return np.dtype(self.core.options.dtype)

    @property
    def mode(self) -> Mode:
        """When the others see what this worker pushes."""
        return self.core.options.mode

    # ---- rows

    def pull(self, ids: Any, *, out: Any = None, sync_op: bool = True) -> Any:
        """Return the rows of `ids`, as an array of the library of `ids`.

        Collective in mode "sync", where each worker may have other ids, or none.

        Args:
            ids: integers of up to 64 bits, of any shape, in an array or a list.
            out: an array of shape ``(*ids.shape, dim)``, which takes the rows.
            sync_op: return the rows; False: a work whose ``result()`` they are.

        Raises:
            UsageError: `ids` are no integers, or `out` does not fit; on every rank an error.
            CollectiveTimeout: in mode "ssp": a worker is too far behind; the message has its rank.

        """
        error = None
        try:
            flat, shape = as_ids(ids)
            room = None if out is None else _room(out, (*shape, self.dim), self.dtype)
        except UsageError as reason:
            error = reason
        self._ready(Verb.PULL, error)
        rows = _rows_in(room, (flat.size, self.dim), self.dtype)
        begun = (self._prefetched if self._fetched is not None else self._worker.pull)(flat, rows)
        like = ids if out is None else out

        def give(rows: NumpyArray) -> Any:
            found = rows.reshape(*shape, self.dim)
            if room is None:
                return _like(like, found)
            if not (isinstance(room, np.ndarray) and np.may_share_memory(rows, room)):
                _fill(room, found)
            return out

        work = begun.then(give)
        return work.result() if sync_op else work

    def push(self, ids: Any, grads: Any, *, clicks: Any = None, sync_op: bool = True) -> Work:
        """Apply gradients to rows with the optimizer; those of equal ids are summed.

        Collective in mode "sync": the gradients of all workers are summed in the order of the
        ranks, and each row is changed once. The arrays may be changed when the function returns.

        Args:
            ids: integers of up to 64 bits, of any shape, in an array or a list.
            grads: an array of shape ``(*ids.shape, dim)``, of the table's dtype.
            clicks: for `ShowClickEntry`: of the shape of `ids`, whether each was clicked; how often
                it was shown is how often it is in `ids`.
            sync_op: accepted, of no effect.

        Raises:
            UsageError: gradients of another shape or dtype than the rows, or that are not finite
                where the table has `check_finite`; on every rank an error.

        """
        error = None
        try:
            flat, shape = as_ids(ids)
            given = self._gradients(grads, shape)
            if self.core.options.check_finite:
                check_all_finite(flat, given)
            marks = self._marks(clicks, shape)
        except UsageError as reason:
            error = reason
        self._ready(Verb.PUSH, error)
        if isinstance(self.mode, Sync):
            self._drop()
        merged = merge(flat, given)
        sums = merge(flat, marks).grads if marks.shape[1] else marks[: len(merged.ids)]
        self._worker.push(merged.ids, merged.grads, sums)
        return DONE

    def prefetch(self, ids: Any) -> None:
        """Begin to get the rows of `ids`, for the next `pull` of the same ids.

        Collective in mode "sync". There the next pull has to be of these ids, and a push before it
        makes the rows old, so that they are pulled anew; in other modes they are taken as they are.

        Args:
            ids: as in `pull`.

        """
        error = None
        try:
            flat, _ = as_ids(ids)
        except UsageError as reason:
            error = reason
        self._ready(Verb.PULL, error)
        self._drop()
        once, _ = unique(flat)
        self._fetched = (
            once,
            self._worker.pull(once, _rows_in(None, (once.size, self.dim), self.dtype)),
        )

    def _prefetched(self, ids: NumpyArray, rows: NumpyArray) -> Pending:
        assert self._fetched is not None
        (expected, pending), self._fetched = self._fetched, None
        once, inverse = unique(ids)
        if np.array_equal(expected, once):
            return pending.then(spread(inverse, rows))
        pending.wait()
        if isinstance(self.mode, Sync):  # another worker may have kept to it, and is further on
            why = "the pull after a prefetch must be of the same ids; prefetch what is pulled next"
            self._ready(Verb.PULL, UsageError(why))
        return self._worker.pull(ids, rows)

    def _drop(self) -> None:
        if self._fetched is not None:
            self._fetched[1].wait()
            self._fetched = None

    # ---- all of it

    def flush(self) -> None:
        """Wait until the servers have all that this worker has pushed. Local."""
        self._ready(None, None)
        self._worker.flush()

    def stats(self) -> dict[str, Any]:
        """Return what there is of the table, and where. Collective.

        Returns:
            A dict:

            - ``rows``, ``bytes``: of all servers;
            - ``balance``: the rows of the fullest server, by the mean;
            - ``hot``: the ids that are pulled and pushed most often, with about how often: pairs;
            - ``servers``: for each server a dict of its own figures.

        """
        return self._all(Verb.STATS)  # type: ignore[no-any-return]

    def shrink(self, threshold: float | None = None) -> int:
        """Remove rows that are worth less than `threshold`; return how many. Collective.

        Args:
            threshold: a score, for `ShowClickEntry` (None: 0.8); with `CountFilterEntry` a number
                of pushes, of ids that have no row yet (None: all of these are forgotten).

        """
        return self._all(Verb.SHRINK, threshold)  # type: ignore[no-any-return]

    def save(
        self, path: str | os.PathLike[str], mode: int = 0, *, async_save: bool = False
    ) -> Work:
        """Write the table as it is now; see `hpcdist.ps.save_tables`. Collective.

        Args:
            path: a folder, which takes a series of saves.
            mode: 0 for all rows, 1 for those that have changed since the last save there.
            async_save: return when the rows have been copied, and write in the background.

        """
        return save.save_tables(self._cluster, [self.name], path, mode, async_save=async_save)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace the table by what was saved, on any number of servers. Collective.

        Args:
            path: the folder that `save` wrote to.

        """
        self._drop()
        save.load_tables(self._cluster, [self.name], path)

    def _all(self, verb: Verb, *words: Any) -> Any:
        self._ready(None, None)
        self._drop()
        error = save.flush(self._cluster, [self.name])
        return perform(self._cluster, verb, Told(words), self.core, error)

    # ---- arguments

    @property
    def _worker(self) -> Worker:
        assert self.core.worker is not None
        return self.core.worker

    def _ready(self, verb: Verb | None, error: UsageError | None) -> None:
        """Raise where this rank cannot take part; in lock step, raise on all workers."""
        _check_running(self._cluster)
        if self.core.worker is None:
            raise UsageError(
                f"this rank only serves table {self.name!r}; call fleet.run_server() here, and "
                "pull and push on workers"
            )
        if error is None:
            return
        if verb is not None and isinstance(self.mode, Sync):
            meet(self._cluster, verb, self.core.number, None, error)
        raise error

    def _gradients(self, grads: Any, shape: Sequence[int]) -> NumpyArray:
        view = view_of(grads)
        wanted = (*shape, self.dim)
        if tuple(view.shape) != wanted or view.dtype != self.dtype:
            raise UsageError(
                f"gradients for ids of shape {tuple(shape)} of table {self.name!r} must be of "
                f"shape {wanted} and dtype {self.dtype}, got {tuple(view.shape)} and {view.dtype}"
            )
        host = view if device_runtime_of(view) is None else on_host(view)
        return np.ascontiguousarray(host).reshape(-1, self.dim)

    def _marks(self, clicks: Any, shape: Sequence[int]) -> NumpyArray:
        entry, size = self.core.options.entry, math.prod(shape)
        marks = np.ones((size, 0 if entry is None else 2), np.float32)
        if clicks is not None:
            told = np.asarray(clicks if isinstance(clicks, (list, tuple)) else view_of(clicks))
            if entry is None or told.shape != tuple(shape) or told.dtype.kind not in "biuf":
                raise UsageError(
                    "clicks are for a table with ShowClickEntry, a number for each id, got "
                    f"{told.shape} of {told.dtype} for ids of shape {tuple(shape)} and "
                    f"entry={entry!r}"
                )
            marks[:, 1] = told.reshape(-1)
        elif entry is not None:
            marks[:, 1] = 0
        return marks

    def __repr__(self) -> str:
        options = self.core.options
        return f"SparseTable({self.name!r}, {options.dim}, {options.dtype}, {options.mode})"


_WIDTH = 256
"""Elements of a row of a `DenseTable`: what one server keeps in a piece."""


@final
class DenseTable:
    """An array spread over the servers, which workers pull and push whole. Collective.

    Args:
        name: what it is found by.
        shape: of the array.
        value: what it is at first: an array, the same on all ranks, or None for zeros.
        options: `dtype`, `optimizer`, `mode` and `group`, as of a `SparseTable`.

    Raises:
        UsageError: an argument is wrong.
        MismatchError: the ranks give different options; on every rank.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> from hpcdist import ps
        >>> bias = ps.DenseTable("bias", (3,), optimizer="sgd", value=np.ones(3, np.float32))
        >>> bias.pull()
        array([1., 1., 1.], dtype=float32)

    """

    def __init__(
        self, name: str, shape: int | Sequence[int], *, value: Any = None, **options: Any
    ) -> None:
        try:
            self.shape = _shape_of(shape)
            self._size = math.prod(self.shape)
            self._width = min(_WIDTH, max(self._size, 1))
            self._ids = np.arange(-(-self._size // self._width))
            dtype = row_dtype(options.get("dtype", "float32"))
            first = (
                self._rows(_fitting(value, self.shape), dtype)
                if value is not None
                else (np.zeros((len(self._ids), self._width), dtype))
            )
        except UsageError as error:
            cluster = cluster_of(options.get("group"))
            _check_running(cluster)
            perform(cluster, Verb.CREATE, Told(()), error=error)
            raise
        initial: Callable[..., NumpyArray] = functools.partial(_rows_at, first)
        self._table = SparseTable(name, self._width, initializer=initial, **options)
        self._table.core.dense = True

    def pull(self, *, out: Any = None, sync_op: bool = True) -> Any:
        """Return the array; or a work, whose result it is. Collective in mode "sync".

        Args:
            out: an array of the table's shape, which takes the values.
            sync_op: return the array; False: a work whose ``result()`` it is.

        """
        room = None
        if out is not None:
            try:
                room = _room(out, self.shape, self._table.dtype)
            except UsageError as error:
                self._table._ready(Verb.PULL, error)
        work = self._table.pull(self._ids, sync_op=False).then(
            lambda rows: rows.reshape(-1)[: self._size].reshape(self.shape)
        )
        if room is not None:
            work = work.then(functools.partial(_filled, out, room))
        return work.result() if sync_op else work

    def push(self, grad: Any, *, sync_op: bool = True) -> Work:
        """Apply a gradient to the array with the optimizer. Collective in mode "sync".

        Args:
            grad: an array of the table's shape.
            sync_op: accepted, of no effect.

        """
        try:
            flat = _fitting(grad, self.shape, self._table.dtype)
        except UsageError as error:
            self._table._ready(Verb.PUSH, error)
            raise
        return self._table.push(self._ids, self._rows(flat, flat.dtype), sync_op=sync_op)

    def flush(self) -> None:
        """Wait until the servers have all that this worker has pushed. Local."""
        self._table.flush()

    def save(
        self, path: str | os.PathLike[str], mode: int = 0, *, async_save: bool = False
    ) -> Work:
        """See `SparseTable.save`."""
        return self._table.save(path, mode, async_save=async_save)

    def load(self, path: str | os.PathLike[str]) -> None:
        """See `SparseTable.load`."""
        self._table.load(path)

    def stats(self) -> dict[str, Any]:
        """See `SparseTable.stats`."""
        return self._table.stats()

    def _rows(self, flat: NumpyArray, dtype: Any) -> NumpyArray:
        rows = np.zeros((len(self._ids), self._width), dtype)
        rows.reshape(-1)[: self._size] = flat
        return rows

    def __repr__(self) -> str:
        return f"DenseTable({self._table.name!r}, {self.shape})"


def _rows_at(rows: NumpyArray, ids: NumpyArray, dim: int) -> NumpyArray:
    return rows[ids]


def _shape_of(shape: Any) -> tuple[int, ...]:
    """Return the shape of a dense table."""
    found = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if not all(isinstance(n, (int, np.integer)) and n >= 0 for n in found):
        raise UsageError(f"shape must be an integer from 0 on, or several, got {shape!r}")
    return tuple(map(int, found))


def _fitting(array: Any, shape: tuple[int, ...], dtype: Any = None) -> NumpyArray:
    """Return the elements of an array of a dense table, on the host, flat."""
    given = on_host(view_of(array))
    if given.shape != shape or (dtype is not None and given.dtype != dtype):
        wanted = "" if dtype is None else f" and dtype {dtype}"
        raise UsageError(
            f"the array must be of shape {shape}{wanted}, got {given.shape} and {given.dtype}"
        )
    return given.reshape(-1)


# ---- what they share


def _check_name(name: Any, dim: Any) -> None:
    if not isinstance(name, str) or not name:
        raise UsageError(f"a table is found by its name, a string, got {name!r}")
    whole = isinstance(dim, (int, np.integer)) and not isinstance(dim, bool)
    if not whole or dim < 1:
        raise UsageError(f"dim, the elements of a row, must be an integer from 1 on, got {dim!r}")


def _check_running(cluster: Cluster) -> None:
    if cluster.stopped or cluster.over:
        raise UsageError(
            "this worker has stopped (fleet.stop_worker); nothing is pulled or pushed afterwards"
        )


def _room(out: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Return the memory of what takes rows."""
    room = view_of(out)
    if tuple(room.shape) != shape or room.dtype != dtype:
        raise UsageError(
            f"out must be of shape {shape} and dtype {dtype}, got {tuple(room.shape)} and "
            f"{room.dtype}"
        )
    if isinstance(room, np.ndarray) and not room.flags.writeable:
        raise UsageError("out cannot be written to; pass an array that can")
    return room


def _rows_in(room: Any, shape: tuple[int, int], dtype: Any) -> NumpyArray:
    """Return an array for rows: the memory of what takes them, if it is contiguous on the host."""
    if isinstance(room, np.ndarray) and room.flags.c_contiguous:
        rows: NumpyArray = room.view().reshape(shape)
        return rows
    return np.empty(shape, dtype)


def _like(like: Any, found: NumpyArray) -> Any:
    """Return rows as an array of the library, and on the device, of `like`."""
    if isinstance(like, (np.ndarray, list, tuple, range, int, np.generic)):
        return found
    library, view = library_of(like), view_of(like)
    if device_runtime_of(view) is None or library.wrap_device is None:
        return library.wrap(found)
    room = np.empty_like(view, shape=found.shape, dtype=found.dtype)
    fill(room, np.ascontiguousarray(found))
    return library.wrap_device(room, found.dtype)


def _filled(out: Any, room: Any, found: NumpyArray) -> Any:
    _fill(room, found)
    return out


def _fill(room: Any, found: NumpyArray) -> None:
    if device_runtime_of(room) is None:
        room[...] = found
    else:
        fill(room, np.ascontiguousarray(found))
