"""`Reducer`: from "gradient i is ready" to "send bucket b now".

It knows numbers only. Buckets are launched strictly in order, whatever the order in which
gradients become ready, so that all ranks send the same buckets in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from hpcdist.errors import UsageError


@final
class Reducer:
    """Follows the backward passes of one model.

    Args:
        buckets: lists of gradient indices; every index from 0 on is in exactly one, as
            `plan_buckets` makes them.

    Attributes:
        launched: how many buckets have been launched in this backward pass.

    Example:
        >>> from hpcdist.parallel import Reducer
        >>> reducer = Reducer([[1, 2], [0]])
        >>> reducer.launched
        0

    """

    def __init__(self, buckets: Iterable[Sequence[int]]) -> None:
        self._buckets = [tuple(bucket) for bucket in buckets]
        indices = sorted(index for bucket in self._buckets for index in bucket)
        if indices != list(range(len(indices))):
            raise UsageError(
                f"every gradient must be in exactly one bucket, got the indices {indices}; make "
                "the buckets with plan_buckets"
            )
        self._bucket_of = [0] * len(indices)
        for number, bucket in enumerate(self._buckets):
            for index in bucket:
                self._bucket_of[index] = number
        self.restart()

    def restart(self) -> None:
        """Begin a new backward pass: nothing is ready."""
        self.launched = 0
        self._awaited = [len(bucket) for bucket in self._buckets]
        self._ready = [False] * len(self._bucket_of)

    def ready(self, index: int) -> Sequence[int]:
        """Note that gradient `index` is ready; return the buckets to launch now, in order.

        Args:
            index: of the gradient, as in the buckets.

        Raises:
            UsageError: it has been ready before in this backward pass.

        """
        if self._ready[index]:
            raise UsageError(f"gradient {index} is ready for the second time in one backward pass")
        self._ready[index] = True
        bucket = self._bucket_of[index]
        left = self._awaited[bucket] = self._awaited[bucket] - 1
        if left or bucket != self.launched:
            return ()
        return self._complete(bucket)

    def _complete(self, first: int) -> Sequence[int]:
        awaited, stop = self._awaited, first + 1
        while stop < len(awaited) and not awaited[stop]:
            stop += 1
        self.launched = stop
        return range(first, stop)

    def is_ready(self, index: int) -> bool:
        """Return whether gradient `index` has become ready in this backward pass.

        Args:
            index: of the gradient.

        """
        return self._ready[index]

    def is_launched(self, index: int) -> bool:
        """Return whether the bucket of gradient `index` has been launched.

        Args:
            index: of the gradient.

        """
        return self._bucket_of[index] < self.launched

    def bucket_of(self, index: int) -> int:
        """Return the bucket that holds gradient `index`.

        Args:
            index: of the gradient.

        """
        return self._bucket_of[index]

    def is_complete(self) -> bool:
        """Return whether every bucket has been launched."""
        return self.launched == len(self._buckets)

    def missing(self) -> list[int]:
        """Return the gradients that are not ready."""
        return [index for index, ready in enumerate(self._ready) if not ready]

    def rest(self) -> Sequence[int]:
        """Return the buckets not launched yet, in order; they count as launched then."""
        first, self.launched = self.launched, len(self._buckets)
        return range(first, self.launched)
