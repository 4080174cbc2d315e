"""`FlatMemory`: where the gradients of virtual ranks lie when they travel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, final

from hpcdist.arrays.libraries import NumpyArray, view_of
from hpcdist.parallel.buckets import plan_buckets
from hpcdist.parallel.virtual.exchange import Exchange

_LINE = 64


@final
class FlatMemory:
    """Flat arrays of gradients, bucket by bucket.

    [Note: aligned gradients] Each begins at a multiple of 64 bytes, so that norms and optimizers
    find it at the same places of vectors, in whatever bucket it is.

    Args:
        trained: the parameters, in order.
        likes: for each an array of no elements, of the dtype in which it is summed, where it is.
        exchange: what averages.
        limit: bytes of a bucket.
        empty: returns new memory like one of `likes`, of so many elements.

    """

    def __init__(
        self,
        trained: Sequence[Any],
        likes: Sequence[Any],
        exchange: Exchange,
        limit: int,
        empty: Callable[[Any, int], Any],
    ) -> None:
        self._trained, self._likes = [*trained], likes
        self._exchange, self._empty = exchange, empty
        self._shapes = [tuple(each.shape) for each in trained]
        nbytes = [
            math.prod(shape) * like.itemsize
            for shape, like in zip(self._shapes, likes, strict=True)
        ]
        kinds = [(f"{each.dtype}", f"{getattr(each, 'device', None)}") for each in likes]
        self._buckets = plan_buckets(nbytes, kinds, [limit])
        self._flats = [self._flat(bucket) for bucket in self._buckets]

    def is_for(self, trained: Sequence[Any]) -> bool:
        """Return whether these are the parameters."""
        known = self._trained
        return len(known) == len(trained) and all(map(lambda a, b: a is b, known, trained))

    def means(self, pieces: Sequence[Sequence[Any]], *, fresh: bool) -> list[Any]:
        """Return the mean gradients, given this rank's sums. Collective.

        Args:
            pieces: the sums of the spans that are this rank's alone, in order.
            fresh: in new memory: that of the last means is in use.

        """
        found: dict[int, Any] = {}
        for bucket, kept in zip(self._buckets, self._flats, strict=True):
            flats = [self._flat(bucket) if place or fresh else kept for place in range(len(pieces))]
            for flat, piece in zip(flats, pieces, strict=True):
                for index, part in zip(bucket, self._parts(bucket, flat), strict=True):
                    view_of(part)[...] = view_of(piece[index])
            views: list[NumpyArray] = [view_of(each) for each in flats]
            self._exchange.mean(views, views[0])
            found |= zip(bucket, self._parts(bucket, flats[0]), strict=True)
        return [found[index] for index in range(len(self._trained))]

    def _flat(self, bucket: Sequence[int]) -> Any:
        size = sum(self._room(index) for index in bucket)
        return self._empty(self._likes[bucket[0]], self._exchange.padded(size))

    def _room(self, index: int) -> int:
        """Return the elements from the begin of a gradient to that of the next."""
        step: int = _LINE // self._likes[index].itemsize
        size: int = math.prod(self._shapes[index])
        return step * -(-size // step)

    def _parts(self, bucket: Sequence[int], flat: Any) -> list[Any]:
        parts, start = [], 0
        for index in bucket:
            shape = self._shapes[index]
            parts.append(flat[start : start + math.prod(shape)].reshape(shape))
            start += self._room(index)
        return parts
