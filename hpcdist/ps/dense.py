"""`DenseTable`: an array in pieces, which are the rows of a `SparseTable`."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray, view_of
from hpcdist.arrays.transfer import on_host
from hpcdist.errors import UsageError
from hpcdist.ps.accessors import row_dtype
from hpcdist.ps.cluster import cluster_of
from hpcdist.ps.core import check_running
from hpcdist.ps.rooms import put_into, room_of
from hpcdist.ps.route import Told, Verb, perform
from hpcdist.ps.table import SparseTable
from hpcdist.transport.waiting.work import Work

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
            check_running(cluster)
            perform(cluster, Verb.CREATE, Told(()), error=error)
            raise
        initial: Callable[..., NumpyArray] = functools.partial(_rows_at, first)
        self._table = SparseTable(name, self._width, initializer=initial, **options)
        self._table.core.dense = True

    def pull(self, *, out: Any = None, sync_op: bool = True) -> Any:
        """Return the array; or a work, whose result it is. Collective in mode "sync".

        Args:
            out: an array of the table's shape, which takes the values, unless there is an error.
            sync_op: return the array; False: a work whose ``result()`` it is.

        """
        room = None
        if out is not None:
            try:
                room = room_of(out, self.shape, self._table.dtype)
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

    def prefetch(self) -> None:
        """Begin to get the array, for the next `pull`. See `SparseTable.prefetch`."""
        self._table.prefetch(self._ids)

    def flush(self) -> None:
        """Wait until the servers have received all pushes of this worker. Local."""
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

    def get_lr(self) -> float:
        """See `SparseTable.get_lr`."""
        return self._table.get_lr()

    def set_lr(self, value: float) -> None:
        """See `SparseTable.set_lr`."""
        self._table.set_lr(value)

    def shrink(self, threshold: float | None = None) -> int:
        """Remove nothing, and return 0: an array keeps all its elements. Collective.

        Args:
            threshold: as of `SparseTable.shrink`.

        """
        return self._table.shrink(threshold)

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


def _filled(out: Any, room: Any, found: NumpyArray) -> Any:
    put_into(room, found)
    return out
