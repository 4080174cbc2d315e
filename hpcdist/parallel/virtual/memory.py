"""`FlatMemory` and `OwnedMemory`: where the gradients of virtual ranks lie when they travel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, final

from hpcdist.arrays.libraries import NumpyArray, view_of
from hpcdist.parallel.buckets import plan_buckets
from hpcdist.parallel.virtual.exchange import Exchange
from hpcdist.parallel.virtual.owners import plan_owned_buckets

_LINE = 64


Empty = Callable[[Any, int], Any]
"""Returns new memory like an array, of so many elements."""


class FlatMemory:
    """Flat arrays of gradients, bucket by bucket.

    [Note: aligned gradients] Each begins at a multiple of 64 bytes, so that norms and optimizers
    find it at the same places of vectors, in whatever bucket it is.

    Args:
        trained: the parameters, in order.
        likes: for each an array of no elements, of the dtype in which it is summed, where it is.
        exchange: what averages.
        limit: bytes of a bucket.
        empty: returns new memory like one of `likes`.

    Attributes:
        nbytes: of each gradient.

    """

    def __init__(
        self,
        trained: Sequence[Any],
        likes: Sequence[Any],
        exchange: Exchange,
        limit: int,
        empty: Empty,
    ) -> None:
        self._trained, self._likes = [*trained], likes
        self._exchange, self._empty = exchange, empty
        self._shapes = [tuple(each.shape) for each in trained]
        self.nbytes = [
            math.prod(shape) * like.itemsize
            for shape, like in zip(self._shapes, likes, strict=True)
        ]
        kinds = [(f"{each.dtype}", f"{getattr(each, 'device', None)}") for each in likes]
        self._buckets = self._plan(self.nbytes, kinds, limit)
        self._kept: list[Any] = []

    def _plan(self, nbytes: list[int], kinds: list[Any], limit: int) -> list[list[int]]:
        return plan_buckets(nbytes, kinds, [limit])

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
        self._kept = self._kept or [self._flat(bucket) for bucket in self._buckets]
        found: dict[int, Any] = {}
        for bucket, kept in zip(self._buckets, self._kept, strict=True):
            flats = [self._flat(bucket) if place or fresh else kept for place in range(len(pieces))]
            views = self._filled(bucket, flats, pieces)
            self._exchange.mean(views, views[0])
            found |= zip(bucket, self._parts(bucket, flats[0]), strict=True)
        return [found[index] for index in range(len(self._trained))]

    def _filled(
        self, bucket: Sequence[int], flats: Sequence[Any], pieces: Sequence[Sequence[Any]]
    ) -> list[NumpyArray]:
        """Copy what the pieces have of a bucket to flat memory, and return views of that."""
        for flat, piece in zip(flats, pieces, strict=True):
            for index, part in zip(bucket, self._parts(bucket, flat), strict=True):
                view_of(part)[...] = view_of(piece[index])
        return [view_of(each) for each in flats]

    def _flat(self, bucket: Sequence[int]) -> Any:
        return self._empty(self._likes[bucket[0]], self._exchange.padded(self._size(bucket)))

    def _size(self, bucket: Sequence[int]) -> int:
        """Return the elements of a bucket."""
        return sum(self._room(index) for index in bucket)

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


@final
class OwnedMemory(FlatMemory):
    """Memory for travelling gradients whose mean each rank keeps of what it owns, and no more.

    Args:
        given: as to `FlatMemory`.
        owners: the rank in the group that owns each parameter.

    """

    def __init__(self, *given: Any, owners: Sequence[int]) -> None:
        self._owners = owners  # before buckets are planned
        super().__init__(*given)

    def _plan(self, nbytes: list[int], kinds: list[Any], limit: int) -> list[list[int]]:
        return plan_owned_buckets(nbytes, kinds, self._owners, self._exchange.ranks, limit)

    def means(self, pieces: Sequence[Sequence[Any]], *, fresh: bool) -> list[Any]:
        """Return the mean gradients of what is owned here, None for the others. Collective.

        Args:
            pieces: see `FlatMemory.means`; their memory may go meanwhile.
            fresh: of no effect: memory is new every time.

        """
        found: list[Any] = [None] * len(self._trained)
        for bucket in self._buckets:
            like, size = self._likes[bucket[0]], self._size(bucket)
            flats = [self._empty(like, size) for _ in pieces]
            views = self._filled(bucket, flats, pieces)
            of_rank = [
                [index for index in bucket if self._owners[index] == rank]
                for rank in range(self._exchange.ranks)
            ]
            mine, shares = of_rank[self._exchange.rank], [self._size(each) for each in of_rank]
            own = self._empty(like, self._size(mine))
            self._exchange.mean_of_share(views, shares, view_of(own))
            for index, part in zip(mine, self._parts(mine, own), strict=True):
                found[index] = part
        return found
