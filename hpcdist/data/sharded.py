"""`ShardedDataset`: this rank's share of a dataset, as samples and batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

from hpcdist.comm.group import Group
from hpcdist.data.sampler import DistributedSampler
from hpcdist.data.shares import Tail
from hpcdist.data.sources import Source, source_of
from hpcdist.integers import integer


def shard_dataset(
    dataset: Any,
    *,
    shuffle: bool = True,
    seed: int = 0,
    tail: Tail = "pad",
    group: Group | None = None,
) -> ShardedDataset:
    """Give this rank its share of `dataset`, which every rank has or can open. Local.

    Every rank of the group calls it, with the same arguments; nothing is communicated or copied.

    Args:
        dataset: an array with one row per sample (NumPy, torch, whatever has a shape and can be
            indexed by rows in any order); a tuple, list or dict of such arrays, equally long; or
            any other object with ``len()`` and ``[i]``, such as a torch dataset or a list of
            samples.
        shuffle: another order in every epoch; False for the natural order in all.
        seed: an integer of at least 0.
        tail: what to do if the ranks do not divide the samples evenly: ``"pad"``, ``"drop"``
            or ``"keep"``, as in `DistributedSampler`.
        group: the ranks that share the samples; None for all.

    Raises:
        UsageError: a wrong argument; arrays of different lengths; this rank is not in `group`.

    Example:
        >>> import numpy as np
        >>> import hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> images, labels = np.zeros((6, 28, 28)), np.arange(6)
        >>> sharded = dist.shard_dataset((images, labels), shuffle=False)
        >>> for image, label in sharded.batches(4):
        ...     print(image.shape, label)
        (4, 28, 28) [0 1 2 3]
        (2, 28, 28) [4 5]

    """
    return ShardedDataset(dataset, shuffle=shuffle, seed=seed, tail=tail, group=group)


@final
class ShardedDataset:
    """The share of a dataset that is this rank's. Made by `shard_dataset`.

    Iterate over it for samples, over `batches` for batches. This loop starts, and after
    `load_state_dict` goes on in the middle of an epoch, on any number of ranks::

        for epoch in range(sharded.epoch, epochs):
            sharded.set_epoch(epoch)
            for batch in sharded.batches(32):
                ...

    Attributes:
        sampler: the `DistributedSampler` behind it, for
            ``torch.utils.data.DataLoader(dataset, sampler=sharded.sampler)``. There is one
            position: iterate over either at a time.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def share():
        ...     return list(dist.shard_dataset(np.arange(6), shuffle=False))
        >>> [len(samples) for samples in dist.simulate(3, share)]
        [2, 2, 2]

    """

    def __init__(
        self, dataset: Any, *, shuffle: bool, seed: int, tail: Tail, group: Group | None
    ) -> None:
        self._source = source_of(dataset)
        self.sampler = DistributedSampler(
            self._source.length, shuffle=shuffle, seed=seed, tail=tail, group=group
        )

    @property
    def epoch(self) -> int:
        """The current epoch, from 0; set by `set_epoch` and `load_state_dict`."""
        return self.sampler.epoch

    def __len__(self) -> int:
        """Return how many samples this rank has in this epoch, or in its rest after a resume."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return map(self._source.sample, self.sampler)

    def batches(self, batch_size: int, *, drop_last: bool = False) -> Batches:
        """Return this rank's samples in batches, which have a length; iterate as often as you like.

        Arrays give arrays of the same library, in the same tuple, list or dict; other datasets
        give lists of samples. Every rank has equally many batches, unless ``tail="keep"``.

        Args:
            batch_size: samples per batch of this rank; all ranks together take ``size`` times as
                many per step.
            drop_last: leave out a last batch with fewer.

        Raises:
            UsageError: `batch_size` is not an integer of at least 1.

        """
        return Batches(self._source, self.sampler, integer(batch_size, "batch_size", 1), drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; the epoch at hand stays. See `DistributedSampler`.

        Args:
            epoch: its number, from 0.

        """
        self.sampler.set_epoch(epoch)

    def state_dict(self, consumed: int | None = None) -> dict[str, int]:
        """Return where all ranks stand, in plain numbers. See `DistributedSampler`.

        Args:
            consumed: the samples that this rank has really worked on; None: those handed out.

        """
        return self.sampler.state_dict(consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was made, on any number of ranks. See `DistributedSampler`.

        Args:
            state: what `state_dict` returned; the same on every rank.

        """
        self.sampler.load_state_dict(state)

    def __repr__(self) -> str:
        return f"ShardedDataset({self.sampler.in_words()})"


@final
class Batches:
    """The batches of this rank in the epoch at hand, or in its rest after a resume."""

    def __init__(
        self, source: Source, sampler: DistributedSampler, batch_size: int, drop_last: bool
    ) -> None:
        self._source = source
        self._sampler = sampler
        self._size = batch_size
        self._drop_last = drop_last
        self._begun: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Return how many there are on this rank."""
        samples = len(self._sampler)
        return samples // self._size if self._drop_last else -(-samples // self._size)

    def __iter__(self) -> Iterator[Any]:
        batches = self._sampler.batches(self._size, drop_last=self._drop_last)
        return map(self._source.batch, batches)

    def __next__(self) -> Any:
        """Return the next batch of an iteration of its own."""
        if self._begun is None:
            self._begun = iter(self)
        return next(self._begun)
