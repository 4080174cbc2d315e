"""`lent`: for a block, the ranks of a node see each other's arrays, where they lie.

An exchange that copies nothing: whoever needs something of others once, to compute with it,
reads it in their memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm.collectives import barrier
from hpcdist.comm.dispatch import dispatch
from hpcdist.comm.exchanges import exchange
from hpcdist.comm.group import Group
from hpcdist.errors import TransportError
from hpcdist.transport.base import Transport
from hpcdist.transport.call.call import Give, Read, Refusal
from hpcdist.transport.call.kinds import Kind


@contextmanager
def lent(
    array: NumpyArray, shapes: Sequence[tuple[int, ...]], *, key: int, words: str, group: Group
) -> Iterator[list[NumpyArray] | None]:
    """Give, for a block, the arrays of all ranks of a group, read-only. Collective, as is its end.

    Nobody may write to what is lent before the end of the block, which waits for all ranks. An
    array that others cannot see where it lies is copied to where they do, once.

    Args:
        array: of this rank; all are of one dtype.
        shapes: of the arrays of all ranks.
        key: equal on all ranks, and other for each other purpose; see `exchange`.
        words: what is lent, for errors.
        group: the ranks.

    Raises:
        TransportError: this rank has no memory for a copy; `RemoteError` on the others.

    Returns:
        The arrays by rank; None on all ranks where one of them has no memory that others see.

    """
    transport = group.transport
    assert transport is not None
    try:
        shown = _shown(transport, array)  # kept until the end
    except Exception as error:  # no memory, or a warning that the program makes an error
        reason = TransportError(f"an array that is lent cannot be copied for other ranks: {error}")
        reason.__cause__ = error
        dispatch(group, True, lambda _: Refusal(Kind.EXCHANGE, 0, reason))
        raise reason from error
    place = None if shown is None else transport.place_of(shown)
    own, places = np.array([-1 if place is None else place]), np.empty(group.nranks, np.int64)
    reads, gives = _to_all(group.nranks)
    exchange(own, places, reads, gives, rule_op=None, key=key, words=words, group=group)
    if places.min() < 0:
        yield None
        return
    try:
        yield [
            _seen(transport, rank, place, shape, array.dtype)
            for rank, (place, shape) in enumerate(zip(places.tolist(), shapes, strict=True))
        ]
    finally:  # where this rank fails, too: others wait for it
        barrier(group)


def _shown(transport: Transport, array: NumpyArray) -> NumpyArray | None:
    """Return the bytes of an array where others see them, or a copy of them; None if nowhere."""
    own = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if transport.place_of(own) is not None:
        return own
    copied = transport.empty(max(own.nbytes, 1))
    if copied is not None:
        copied[: own.nbytes] = own
    return copied


def _seen(
    transport: Transport, rank: int, place: int, shape: tuple[int, ...], dtype: np.dtype
) -> NumpyArray:
    nbytes = math.prod(shape) * dtype.itemsize
    memory = transport.seen(rank, place, nbytes) if nbytes else np.empty(0, np.uint8)
    array = memory.view(dtype).reshape(shape)
    array.flags.writeable = False
    return array


@lru_cache(maxsize=64)
def _to_all(size: int) -> tuple[tuple[Read, ...], tuple[Give, ...]]:
    """Return the boxes by which every rank tells all ranks one number."""
    one = (slice(0, 1),)
    reads = tuple(Read(rank, (1,), one, (slice(rank, rank + 1),), False) for rank in range(size))
    return reads, tuple(Give(rank, one) for rank in range(size))
