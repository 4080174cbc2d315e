"""`empty`, `zeros`, `empty_like`: arrays made for communication.

They are ordinary NumPy arrays, in memory that the ranks of a node share: a collective on them
reads and writes them where they are. `shared_memory` and `share_arrays` have NumPy make all its
larger arrays so.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcdist.arrays.dtypes import dtype_row
from hpcdist.arrays.libraries import NumpyArray, view_of
from hpcdist.comm.group import Group
from hpcdist.comm.session import is_simulated, resolve_group
from hpcdist.transport.shm import ordinary

if TYPE_CHECKING:
    import numpy.typing as npt

Shape = int | tuple[int, ...]


def empty(
    shape: Shape, dtype: npt.DTypeLike = np.float64, group: Group | None = None
) -> NumpyArray:
    """Return a new array with arbitrary contents, for collectives of `group`. Local.

    Args:
        shape: its shape.
        dtype: anything NumPy takes as a dtype of fixed size.
        group: the ranks it will be communicated with; None for all.

    The memory of all such arrays of a process is bounded by ``HPCDIST_SHARED_HEAP_MB``; it is
    reused when an array and all views of it are gone. Where it is used up, or does not
    exist (simulated ranks, a single rank), the array is an ordinary one.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> x = dist.empty((2, 3))
        >>> x[:] = 1.0
        >>> _ = dist.all_reduce(x)

    """
    transport = resolve_group(group).transport
    dtype = np.dtype(dtype)
    dtype_row(dtype)
    if transport is not None:
        sizes = (shape,) if hasattr(shape, "__index__") else shape
        room = transport.empty(math.prod(map(operator.index, sizes)) * dtype.itemsize)
        if room is not None:
            return room.view(dtype).reshape(shape)
    return np.empty(shape, dtype)


def zeros(
    shape: Shape, dtype: npt.DTypeLike = np.float64, group: Group | None = None
) -> NumpyArray:
    """Return a new array of zeros, for collectives of `group`. Local; see `empty`.

    Args:
        shape: its shape.
        dtype: anything NumPy takes as a dtype of fixed size.
        group: the ranks it will be communicated with; None for all.

    Example:
        >>> import hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> dist.zeros(3)
        array([0., 0., 0.])

    """
    array = empty(shape, dtype, group)
    array.fill(0)
    return array


def empty_like(array: Any, group: Group | None = None) -> NumpyArray:
    """Return a new NumPy array of the shape and dtype of `array`. Local; see `empty`.

    Args:
        array: an array of any library; its contents are not copied.
        group: the ranks it will be communicated with; None for all.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> gradients = np.ones((2, 3), dtype=np.float32)
        >>> shared = dist.empty_like(gradients)
        >>> shared.shape, shared.dtype
        ((2, 3), dtype('float32'))

    """
    view = array if type(array) is np.ndarray else view_of(array)
    return empty(view.shape, view.dtype, group)


def empty_near(like: NumpyArray, size: int, group: Group | None = None) -> NumpyArray:
    """Return new flat memory like that of `view_of`: on its device, or as `empty`. Local."""
    if type(like) is np.ndarray:
        return empty(size, like.dtype, group)
    return np.empty_like(like, shape=(size,))


@contextmanager
def shared_memory() -> Iterator[None]:
    """Have NumPy take its arrays from shared memory inside the block, as `empty` does. Local.

    That is the memory of every new array of at least 256 KiB, results of expressions among them:
    ``dist.all_reduce(a + b)`` reads and writes it in place. An array keeps its memory after the
    block. It is reused when the array and all views of it are gone.

    As NumPy has it, this holds for the thread, or the asynchronous task, that enters the block, not
    for others that it starts (`share_arrays` is for those). Ranks need not do it alike. Arrays are
    ordinary ones where shared memory is used up (``HPCDIST_SHARED_HEAP_MB``) or does not exist:
    before `init_parallel_env`, on a single rank, in a simulated rank, in a forked child, and where
    hpcdist was installed without its compiled parts.

    Memory is taken from the system when an array is made, not when it is touched: large arrays most
    of which stay untouched are better made outside of the block. ``os.fork`` copies those arrays,
    so that the child has its own (`subprocess` does not).

    Example:
        >>> import numpy as np
        >>> import hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> a, b = np.ones(100_000), np.ones(100_000)
        >>> with dist.shared_memory():
        ...     total = a + b
        >>> work = dist.all_reduce(total)
        >>> bool((total == 2 * world.nranks).all())
        True

    """
    before = None if is_simulated() else ordinary.begin_here()
    try:
        yield
    finally:
        ordinary.end_here(before)


def share_arrays() -> None:
    """Have NumPy take its arrays from shared memory from now on, on all threads. Local.

    Like `shared_memory`, for the whole process; ``HPCDIST_SHARE_ARRAYS=1`` does it in
    `init_parallel_env`. It may be called before that. In a simulated rank it does nothing.
    Code that gives NumPy another memory handler keeps that.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def program():
        ...     dist.share_arrays()  # before the arrays are made
        ...     x = np.ones(100_000)
        ...     dist.all_reduce(x)
        ...     return x.sum()
        >>> [float(total) for total in dist.simulate(2, program)]
        [200000.0, 200000.0]

    """
    if not is_simulated():
        ordinary.share_all()
