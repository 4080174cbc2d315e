"""Many arrays as few operations: `fused` and what it is made of.

Arrays of one dtype are joined until they fill a piece, which is sent as one; an array as large
as a piece is sent from where it lies. Any layout, library and dtype of fixed size will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from hpcdist.arrays.buffer import Buffer, as_buffer, is_writeable, typed, wrap_like
from hpcdist.arrays.device import align_streams, device_runtime_of
from hpcdist.arrays.libraries import NumpyArray, library_of
from hpcdist.arrays.packing import join, scatter_into
from hpcdist.comm.group import Group
from hpcdist.comm.memory import empty
from hpcdist.errors import UsageError
from hpcdist.parallel.buckets import plan_buckets
from hpcdist.parallel.options import DEFAULT_MB, bucket_limits

Operation = Callable[[NumpyArray], Any]


def fused(buffers: Sequence[Buffer], group: Group, operation: Operation) -> list[Any]:
    """Run `operation` on the contents of all `buffers`, a few joined arrays at a time.

    Collective if `operation` is; every rank must bring the same shapes and dtypes.

    Args:
        buffers: what `as_buffer` makes of the arrays.
        group: the ranks that take part; pieces are as large as suits them.
        operation: changes a flat NumPy array in place, for example by `all_reduce`.

    Returns:
        The arrays in order: the same objects with new contents where they can be written, new
        arrays of the same library where they cannot.

    """
    _, limit = bucket_limits(group, DEFAULT_MB, DEFAULT_MB)
    results = [buffer.array for buffer in buffers]
    for indices in _pieces(buffers, limit):
        parts = [buffers[index] for index in indices]
        if _is_writable(parts[0]):
            host = type(parts[0].data) is np.ndarray
            flat = join(parts, partial(empty, group=group) if host else None)
            operation(wrap_like(parts[0].array, flat, parts[0].dtype, (flat.size,)))
            scatter_into(flat, parts)
            align_streams(flat)  # the arrays' own library reads them next
        else:
            flat = _joined_copy(parts)
            operation(typed(flat, parts[0].dtype))
            for index, array in zip(indices, _cut(flat, parts), strict=True):
                results[index] = library_of(results[index]).wrap(array)
    return results


def _pieces(buffers: Sequence[Buffer], limit: int) -> list[list[int]]:
    nbytes = [buffer.data.nbytes for buffer in buffers]
    kinds = [
        (each.dtype.name, _is_writable(each), device_runtime_of(each.data)) for each in buffers
    ]
    large = [index for index, size in enumerate(nbytes) if size >= limit]
    return plan_buckets(nbytes, kinds, [limit], sparse=large)


def _is_writable(buffer: Buffer) -> bool:
    return is_writeable(buffer.data if buffer.home is None else buffer.home)


def _joined_copy(parts: Sequence[Buffer]) -> NumpyArray:
    return np.concatenate([part.data.reshape(-1) for part in parts])


def _cut(flat: NumpyArray, parts: Sequence[Buffer]) -> Iterator[NumpyArray]:
    """Give the runs of `flat` that belong to `parts`, in their dtype and shape."""
    start = 0
    for part in parts:
        stop = start + part.data.size
        yield typed(flat[start:stop], part.dtype).reshape(part.shape)
        start = stop


def build_groups(vars: Sequence[Any], group_size: int) -> list[list[Any]]:
    """Join arrays into flat ones of at most `group_size` bytes. Local.

    Args:
        vars: arrays, taken in order; a group ends where the dtype changes, too.
        group_size: bytes. An array larger than that is a group of its own.

    Returns:
        For each group a list of three: the flat array (a copy, of the library of the group's
        first array), the list of its arrays, and the list of their shapes.

    Reference: ``paddle.distributed.parallel.build_groups``.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> groups = dist.build_groups([np.ones(2), np.zeros(3)], group_size=1024)
        >>> groups[0][0]
        array([1., 1., 0., 0., 0.])

    """
    if not isinstance(group_size, int) or group_size <= 0:
        raise UsageError(f"group_size must be a positive number of bytes, got {group_size!r}")
    buffers = [as_buffer(array, f"vars[{index}]") for index, array in enumerate(vars)]
    return [
        [
            wrap_like(parts[0].array, _joined_copy(parts), parts[0].dtype, (-1,)),
            [part.array for part in parts],
            [list(part.shape) for part in parts],
        ]
        for parts in _runs(buffers, group_size)
    ]


def _runs(buffers: Sequence[Buffer], group_size: int) -> list[list[Buffer]]:
    runs: list[list[Buffer]] = []
    filled = 0
    for buffer in buffers:
        same = bool(runs) and runs[-1][0].dtype == buffer.dtype
        if not same or filled + buffer.data.nbytes > group_size:
            runs.append([])
            filled = 0
        runs[-1].append(buffer)
        filled += buffer.data.nbytes
    return runs
