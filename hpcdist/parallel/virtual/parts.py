"""`Part`: what one virtual rank has of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.text import an


class Part(NamedTuple):
    """The samples of one virtual rank in a step.

    Attributes:
        rank: of the virtual ranks, from 0. With JAX, ``jax.random.fold_in(key, part.rank)`` is the
            key of this one.
        batch: like the whole batch, with the rows of this virtual rank; None if there was none.

    """

    rank: int
    batch: Any

    @property
    def inputs(self) -> Any:
        """The first of the two that the batch consists of."""
        return self._pair()[0]

    @property
    def targets(self) -> Any:
        """The second of the two that the batch consists of."""
        return self._pair()[1]

    def _pair(self) -> Any:
        if not isinstance(self.batch, (tuple, list)) or len(self.batch) != 2:
            raise UsageError(
                "inputs and targets are those of a batch of two; this batch is "
                f"{an(type(self.batch).__name__)}: take part.batch"
            )
        return self.batch


def dealt(batch: Any, place: int, count: int) -> Any:
    """Return a copy of the rows of a batch that are dealt to one of `count` virtual ranks.

    A copy, because what a library computes can depend on where in memory an array begins.

    Args:
        batch: arrays, also in dicts, tuples and lists. Numbers and None are for all.
        place: of the virtual rank among those of this real rank, from 0.
        count: how many these are.

    Raises:
        UsageError: there are not equally many rows for each, or something has no rows.

    """
    if isinstance(batch, Mapping):
        return {key: dealt(value, place, count) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        items = [dealt(value, place, count) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if batch is None or isinstance(batch, (bool, int, float)):
        return batch
    shape = getattr(batch, "shape", None)
    if not shape:
        raise UsageError(
            f"a batch has {an(type(batch).__name__)} without rows, of which virtual ranks cannot "
            "get some; call parts() without a batch, and take the samples by part.rank"
        )
    if shape[0] % count:
        raise UsageError(
            f"a batch of {shape[0]} rows cannot be dealt to {count} virtual ranks; let the loader "
            "take batch_size=samples_of_one * len(model.virtual_ranks), with "
            "DistributedSampler(..., virtual_ranks=V)"
        )
    rows = batch[place::count]
    return rows.clone() if hasattr(rows, "clone") else rows.copy()
