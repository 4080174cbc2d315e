"""`SparseTable`: rows by id that all ranks of a cluster share."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, Literal, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray, view_of
from hpcdist.arrays.transfer import on_host
from hpcdist.comm.group import Group
from hpcdist.errors import HpcdistError, UsageError
from hpcdist.integers import integer
from hpcdist.ps import load, save
from hpcdist.ps.cluster import cluster_of
from hpcdist.ps.core import Table, check_running
from hpcdist.ps.given import check_all_finite
from hpcdist.ps.ids import as_ids
from hpcdist.ps.merging import merge, spread, unique
from hpcdist.ps.modes import Mode, Sync, mode_of
from hpcdist.ps.options import Options
from hpcdist.ps.rooms import as_given, put_into, room_of, rows_in
from hpcdist.ps.route import Pending, Told, Verb, meet, perform
from hpcdist.ps.worker import Worker
from hpcdist.transport.waiting.work import DONE, Work


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
            ``"rowwise_adagrad"``, ``"adam"``, ``"ftrl"`` or an algorithm of `hpcdist.optim`.
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
        check_running(cluster)
        needed = (name, options)
        words = (f"name={name!r}", *(options.words() if options is not None else ()))
        first = cluster.dedicated and cluster.worker == 0  # whom those who serve can ask
        told = Told(words, needed if first else None)
        self.core: Table = perform(cluster, Verb.CREATE, told, error=error, own=needed)
        self._fetched: tuple[NumpyArray, Pending] | None = None

    @property
    def name(self) -> str:
        """Its key in the cluster."""
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
        """When other workers see the pushes of this one."""
        return self.core.options.mode

    # ---- rows

    def pull(self, ids: Any, *, out: Any = None, sync_op: bool = True) -> Any:
        """Return the rows of `ids`, as an array of the library of `ids`.

        Collective in mode "sync", where each worker may have other ids, or none.

        Args:
            ids: integers of up to 64 bits, of any shape, in an array or a list.
            out: an array of shape ``(*ids.shape, dim)``, which takes the rows; after an error it
                may have some of them.
            sync_op: return the rows; False: a work whose ``result()`` they are.

        Raises:
            UsageError: `ids` are no integers, or `out` does not fit; on every rank an error.
            CollectiveTimeout: in mode "ssp": a worker is too far behind; the message has its rank.

        """
        error = None
        try:
            flat, shape = as_ids(ids)
            room = None if out is None else room_of(out, (*shape, self.dim), self.dtype)
        except UsageError as reason:
            error = reason
        self._ready(Verb.PULL, error)
        rows = rows_in(room, (flat.size, self.dim), self.dtype)
        begun = (self._prefetched if self._fetched is not None else self._worker.pull)(flat, rows)
        like = ids if out is None else out

        def give(rows: NumpyArray) -> Any:
            found = rows.reshape(*shape, self.dim)
            if room is None:
                return as_given(like, found)
            if not (isinstance(room, np.ndarray) and np.may_share_memory(rows, room)):
                put_into(room, found)
            return out

        work = begun.then(give)
        return work.result() if sync_op else work

    def push(self, ids: Any, grads: Any, *, clicks: Any = None, sync_op: bool = True) -> Work:
        """Apply gradients to rows with the optimizer; gradients of equal ids are summed.

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
            self._worker.pull(once, rows_in(None, (once.size, self.dim), self.dtype)),
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
        """Wait until the servers have received all pushes of this worker. Local."""
        self._ready(None, None)
        self._worker.flush()

    def stats(self) -> dict[str, Any]:
        """Return statistics of the table and of each of its servers. Collective.

        Returns:
            A dict:

            - ``rows``, ``bytes``: of all servers;
            - ``balance``: the rows of the fullest server, by the mean;
            - ``hot``: the ids that are pulled and pushed most often, with about how often: pairs;
            - ``servers``: for each server a dict of its own figures.

        """
        return self._all(Verb.STATS)  # type: ignore[no-any-return]

    def get_lr(self) -> float:
        """Return the learning rate. Local."""
        return float(self.core.accessor.options["learning_rate"])

    def set_lr(self, value: float) -> None:
        """Set the learning rate of all later pushes. Collective.

        Args:
            value: a number the optimizer takes; the same on all workers.

        Raises:
            UsageError: it takes no such number; on every rank.
            MismatchError: the workers give different ones; on every rank.

        """
        self._all(Verb.SET_LR, value)

    def export(self) -> tuple[NumpyArray, NumpyArray]:
        """Return this worker's share of all ids that have a row, ascending, and their rows.

        Collective. Each row is in the share of one worker: of one that serves, too, the rows that
        it keeps. What workers have pushed before is in them.

        Returns:
            Ids (int64), and an array of a row for each.

        """
        return self._all(Verb.EXPORT)  # type: ignore[no-any-return]

    def shrink(
        self, threshold: float | None = None, *, decay: float = 1.0, unseen: int | None = None
    ) -> int:
        """Remove the rows whose score is below `threshold`; return how many. Collective.

        Args:
            threshold: a score, for `ShowClickEntry` (None: 0.8); with `CountFilterEntry` how
                often an id that has no row yet must have appeared (None: all are forgotten).
            decay: for `ShowClickEntry`: shows and clicks are multiplied by it before.
            unseen: for `ShowClickEntry`: remove rows, too, that were not pushed since so many calls
                of this before; None: never.

        Raises:
            UsageError: an argument is out of its range, or of an entry that the table has not; on
                every rank.

        """
        return self._all(Verb.SHRINK, threshold, decay, unseen)  # type: ignore[no-any-return]

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
        """Replace the table by a saved one, on any number of servers. Collective.

        Args:
            path: the folder that `save` wrote to.

        """
        self._drop()
        load.load_tables(self._cluster, [self.name], path)

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
        check_running(self._cluster)
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
        host = view if isinstance(view, np.ndarray) else on_host(view)
        return np.ascontiguousarray(host).reshape(-1, self.dim)

    def _marks(self, clicks: Any, shape: Sequence[int]) -> NumpyArray:
        entry, size = self.core.options.entry, math.prod(shape)
        marks = np.ones((size, 0 if entry is None else 2), np.float32)
        if clicks is not None:
            told = np.asarray(clicks if isinstance(clicks, (list, tuple)) else view_of(clicks))
            if entry is None or told.shape != tuple(shape) or told.dtype.kind not in "biuf":
                raise UsageError(
                    "clicks need a table with ShowClickEntry, and a number for each id, got "
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


def _check_name(name: Any, dim: Any) -> None:
    if not isinstance(name, str) or not name:
        raise UsageError(f"the name of a table must be a string, got {name!r}")
    integer(dim, "dim, the elements of a row,", 1)
