"""torch's DataLoader for `shard_dataloader`: each rank loads the samples of its part of a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, final

from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from hpcdist.data.sampler import DistributedSampler
from hpcdist.data.shard_loader import Part, Place, Source, rows_of, taken
from hpcdist.errors import UsageError

_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)
"""What a DataLoader has beside its batches."""


def source_of(dataloader: DataLoader[Any], place: Place) -> Any:
    """Return what gives the parts of this rank."""
    if isinstance(dataloader.dataset, IterableDataset) or dataloader.batch_sampler is None:
        return Source(dataloader, place, rows_of)
    return _Loading(dataloader, place)


@final
class _Loading:
    """Loads the samples of this rank's part of each batch."""

    def __init__(self, dataloader: DataLoader[Any], place: Place) -> None:
        self._batches = _Batches(dataloader, place)
        kept = {name: getattr(dataloader, name) for name in _KEPT}
        self._loader = DataLoader(dataloader.dataset, batch_sampler=self._batches, **kept)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Part]:
        # Workers are sent batches ahead of their use, in order: so are the lengths kept.
        expected = self._batches.expected = deque()
        for batch in self._loader:
            rows, length = expected.popleft()
            yield Part(batch if rows else taken(batch, slice(0, 0)), length)

    def set_epoch(self, epoch: int) -> None:
        self._batches.set_epoch(epoch)


@final
class _Batches:
    """Gives the indices of this rank's part of each batch; at least one, or nothing is collated.

    Attributes:
        expected: for each batch handed out, how many of the indices count, and its length.

    """

    def __init__(self, dataloader: DataLoader[Any], place: Place) -> None:
        self._place = place
        self._given: Any = dataloader.batch_sampler
        self._sampler: DistributedSampler | None = None
        if _shuffles(dataloader.sampler):  # each rank would have an order of its own
            self._sampler = DistributedSampler(len(dataloader.sampler), num_replicas=1, rank=0)
        self.expected: deque[tuple[int, int]] = deque()

    def __len__(self) -> int:
        return len(self._given)

    def __iter__(self) -> Iterator[Sequence[int]]:
        for batch in self._whole():
            own = batch[self._place.rows(len(batch))]
            self.expected.append((len(own), len(batch)))
            yield own or batch[:1]

    def _whole(self) -> Iterator[list[int]]:
        if self._sampler is None:
            yield from map(list, self._given)
            return
        size, drops = self._given.batch_size, self._given.drop_last
        for batch in self._sampler.batches(size, drop_last=drops):
            yield batch.tolist()

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, of our sampler or the user's."""
        sampler: Any = self._sampler or getattr(self._given, "sampler", None)
        if not hasattr(sampler, "set_epoch"):
            raise UsageError(
                f"set_epoch({epoch!r}) is for a DataLoader that shuffles; this one has the order "
                f"of {sampler!r} in all epochs"
            )
        sampler.set_epoch(epoch)


def _shuffles(sampler: Any) -> bool:
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )
