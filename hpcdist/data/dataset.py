"""`DatasetBase`: what the datasets have in common: settings, files, and a loop over batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm.collectives import all_reduce
from hpcdist.comm.group import Group
from hpcdist.comm.states import differing
from hpcdist.comm.together import Together, together
from hpcdist.data.columns import Columns, Ragged
from hpcdist.data.settings import Setting, defaults, read_settings
from hpcdist.errors import MismatchError, UsageError

Batch = dict[str, Any]
"""By slot: an array, or values and offsets."""


@final
class Feed:
    """What a dataset reads, and how: its settings and its files."""

    def __init__(self, table: Mapping[str, Setting], what: str) -> None:
        self._table, self._what = table, what
        self.settings = defaults(table)
        self.files: list[str] = []

    def set(self, wanted: Mapping[str, Any]) -> None:
        """Change settings; none of them if one is wrong."""
        self.settings |= read_settings(self._table, wanted, self._what)

    def set_files(self, filelist: Iterable[str]) -> None:
        """Name the files."""
        if isinstance(filelist, (str, bytes)) or not isinstance(filelist, Iterable):
            raise UsageError(f"the list of files must be a list of paths, got {filelist!r}")
        files = list(filelist)
        wrong = [each for each in files if not isinstance(each, str)]
        if wrong:
            raise UsageError(f"the list of files must be a list of paths, got {wrong[0]!r} in it")
        prefix = self.settings["fs_name"].rstrip("/")
        self.files = [
            f"{prefix}/{each.lstrip('/')}" if prefix and "://" not in each else each
            for each in files
        ]

    @property
    def ranks(self) -> Together:
        """The ranks that share the dataset."""
        return together(self.settings["group"])

    def agree(self, also: Mapping[str, Any] | None = None) -> None:
        """See that all ranks have the same settings, and say the same in `also`. Collective.

        Raises:
            MismatchError: they do not; it says who has what.

        """
        settings = {name: row.told(self.settings[name]) for name, row in self._table.items()}
        agree(self.ranks, {"the dataset": self._what, **settings, **(also or {})})


class DatasetBase(ABC):
    """What `InMemoryDataset` and `QueueDataset` have in common; it is not created itself.

    Every rank of the group calls the same methods in the same order.
    """

    @property
    @abstractmethod
    def _feed(self) -> Feed:
        """The settings and the files."""

    @abstractmethod
    def batches(self, epoch: int | None = None) -> Iterator[Batch]:
        """Iterate over the batches of this rank; every rank has equally many. Collective.

        Args:
            epoch: from 0; None for the one at hand.

        """

    def init(self, **kwargs: Any) -> None:
        """Set what is read, and how. Local; the same on every rank.

        Args:
            kwargs: settings by name; the page on datasets has them all. What is not named keeps its
                value, or its default.

        Raises:
            UsageError: there is no such setting, or it cannot have this value; nothing has changed
                then.

        """
        self._feed.set(kwargs)

    def set_filelist(self, filelist: list[str]) -> None:
        """Name the files, paths or URLs, in the order of their samples. Local.

        Raises:
            UsageError: it is not a list of paths.

        """
        self._feed.set_files(filelist)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the batches, as `batches` does."""
        return self.batches()

    def train(self, step: Callable[[Batch], Any], *, progress: bool | None = None) -> int:
        """Call `step` with every batch of one pass; return how many there were. Collective.

        Args:
            step: trains on a batch: ``{slot: array}``, or ``(values, offsets)`` for a slot whose
                rows differ in length.
            progress: show a bar on rank 0; None: where standard error is a terminal.

        """
        from hpcdist.data.progress import shown  # rich takes its time to import

        taken = 0
        length = len(self) if hasattr(self, "__len__") else None
        for batch in shown(self.batches(), length, self._feed.ranks.leads, progress):
            step(batch)
            taken += 1
        return taken


def batch_of(rows: Columns) -> Batch:
    """Return rows as arrays by their names; values and offsets where they differ in length."""
    found: Batch = {}
    for name in rows.names:
        column = rows[name]
        found[name] = column.values
        if isinstance(column, Ragged):  # perhaps some rows of a block
            start, stop = int(column.offsets[0]), int(column.offsets[-1])
            found[name] = column.values[start:stop], column.offsets - start
    return found


def agree(ranks: Together, told: Mapping[str, Any]) -> None:
    """See that all ranks tell the same, which each of them goes by. Collective.

    Raises:
        MismatchError: they do not; it says who tells what.

    """
    words = tuple((name, repr(value)) for name, value in told.items())
    everyone = None if ranks.group is None else differing(words, ranks.group)
    if everyone is None:
        return
    first, *others = map(dict, everyone)
    for rank, other in zip(ranks.ranks[1:], others, strict=True):
        for name in (*first, *other):
            here, there = (each.get(name, "not there") for each in (other, first))
            if here != there:
                raise MismatchError(
                    f"{name} is {here} on rank {rank}, but {there} on rank {ranks.ranks[0]}; give "
                    "it the same value on every rank, or ranks would miss samples, or have "
                    "different numbers of batches"
                )


def summed(value: int, group: Group | None) -> int:
    """Return the sum over the ranks. Collective."""
    total: NumpyArray = np.array([value])
    if group is not None and group.nranks > 1:
        all_reduce(total, group=group)
    return int(total[0])
