"""`BatchesOf`: the batches of a dataset as tensors, for what takes torch's datasets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from torch.utils.data import IterableDataset, get_worker_info

from hpcdist.data.dataset import DatasetBase
from hpcdist.errors import UsageError


@final
class BatchesOf(IterableDataset[dict[str, Any]]):  # type: ignore[misc]
    """The batches of an `InMemoryDataset` or a `QueueDataset`, as dicts of tensors.

    For ``torch.utils.data.DataLoader(batches, batch_size=None)``, whose workers must be none: the
    batches are made in less time than a worker takes to hand them over. Iterating over it is
    collective, as the dataset's own loop.

    Args:
        dataset: it goes on to have the state (`state_dict`), and says how many batches there are.

    Raises:
        UsageError: it is no dataset of hpcdist.

    Example:
        >>> import hpcdist as dist
        >>> from hpcdist.torch.dataset import BatchesOf
        >>> batches = BatchesOf(dist.InMemoryDataset())

    """

    def __init__(self, dataset: DatasetBase) -> None:
        super().__init__()
        if not isinstance(dataset, DatasetBase):
            raise UsageError(
                "BatchesOf takes an InMemoryDataset or a QueueDataset, got a "
                f"{type(dataset).__name__}"
            )
        self.dataset = dataset

    def __len__(self) -> int:
        """Return how many batches every rank has, where the dataset knows.

        Raises:
            TypeError: it does not: it is a `QueueDataset`.

        """
        return len(self.dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if get_worker_info() is not None:
            raise UsageError(
                "a worker of a DataLoader is no rank and has no part in the dataset's order; use "
                "num_workers=0, and thread_num= for readers"
            )
        return map(tensors_of, self.dataset)


def tensors_of(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch as tensors that share its memory; of ragged slots values and offsets."""
    return {
        name: tuple(map(torch.from_numpy, each))
        if isinstance(each, tuple)
        else torch.from_numpy(each)
        for name, each in batch.items()
    }
