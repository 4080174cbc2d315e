"""`QueueDataset`: one pass over files, which are read while batches are used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm.collectives import all_reduce
from hpcdist.comm.together import Together
from hpcdist.data.ahead import Ahead
from hpcdist.data.columns import Columns
from hpcdist.data.dataset import Batch, DatasetBase, Feed, batch_of
from hpcdist.data.reading import Reading
from hpcdist.data.settings import QUEUE
from hpcdist.errors import UsageError
from hpcdist.transport.reduction import ReduceOp

_DEPTH = 4
"""Blocks of rows that wait for each reader."""


@final
class QueueDataset(DatasetBase):
    """Samples of files in one pass, in batches, while threads read on.

    Each rank reads its share of the bytes with `thread_num` readers, who wait when `queue_num`
    blocks of rows wait for the loop (-1: a few). The order is that of the files, reader by reader
    in turn: the same in every pass with as many ranks and readers.

    Example:
        >>> import hpcdist as dist
        >>> dataset = dist.QueueDataset()
        >>> dataset.init(batch_size=32, thread_num=2, use_var=["words", "label"])

    """

    def __init__(self) -> None:
        self._own_feed = Feed(QUEUE, "QueueDataset")

    @property
    def _feed(self) -> Feed:
        return self._own_feed

    def batches(self) -> Iterator[Batch]:
        """Iterate over the batches of this rank, once through the files. Collective, as is a step.

        Every rank has equally many. With ``tail="pad"`` a rank that has come to its end repeats
        its first rows, and with "drop" all end with the first of them, and have equally many rows
        in every batch; with "keep" each row comes once, and batches of the others may be empty.

        Raises:
            UsageError: there are no files; with ``tail="drop"`` a rank has no row at all.
            MismatchError: ranks have other settings, or name other files.
            OSError: a file cannot be read; `RemoteError` on the other ranks.

        """
        reading, settings = Reading(self._feed), self._feed.settings
        depth = settings["queue_num"] if settings["queue_num"] > 0 else _DEPTH
        stream = _Stream(reading, depth)
        steps = _Steps(self._feed.ranks, settings["tail"], settings["batch_size"])
        return _hand_out(stream, steps)

    def __repr__(self) -> str:
        return f"QueueDataset({len(self._feed.files)} files)"


def _hand_out(stream: _Stream, steps: _Steps) -> Iterator[Batch]:
    with stream:
        while (rows := steps.next(stream)) is not None:
            yield batch_of(rows)
    stream.reading.tell_left_out()


# ---- one rank


@final
class _Stream:
    """The rows of this rank's readers, in an order that does not depend on who is faster."""

    def __init__(self, reading: Reading, depth: int) -> None:
        self.reading = reading
        lanes = [lane for lane in reading.lanes if lane.pieces]
        self._readers = [Ahead(iter(lane), depth, "hpcdist-queue") for lane in lanes]
        self._left = list(self._readers)
        self._turn = 0
        self._waiting: list[Columns] = []

    def __enter__(self) -> _Stream:
        for reader in self._readers:
            reader.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers:
            reader.close(wait=False)  # it may be in a read that takes long

    def take(self, rows: int) -> Columns | None:
        """Return the next so many rows, or fewer at the end; None if there are none left."""
        while sum(map(len, self._waiting)) < rows and self._left:
            block = next(self._left[self._turn], None)
            if block is None:
                del self._left[self._turn]
            else:
                self._waiting += [block] * bool(len(block))
                self._turn += 1
            self._turn %= max(len(self._left), 1)
        taken, left = [], rows
        while self._waiting and left:
            first = self._waiting.pop(0)
            taken.append(first.slice(0, min(left, len(first))))
            if len(first) > left:
                self._waiting.insert(0, first.slice(left, len(first)))
            left -= len(taken[-1])
        return Columns.concat(taken) if taken else None


# ---- all ranks


@final
class _Steps:
    """Steps that all ranks take, or none."""

    def __init__(self, ranks: Together, tail: str, batch_size: int) -> None:
        self._ranks, self._tail, self._batch_size = ranks, tail, batch_size
        self._first: Columns | None = None
        self._begun = False

    def next(self, stream: _Stream) -> Columns | None:
        """Return the rows of this rank's next batch; None at the end of all ranks. Collective."""
        rows, error = None, None
        try:
            rows = stream.take(self._batch_size)
        except BaseException as reason:
            error = reason
        most, least = self._agreed(rows, error)
        if not most:
            return None
        if not self._begun:
            self._begin(rows, least)
        if self._tail == "drop":
            return None if rows is None or not least else rows.slice(0, least)
        if rows is None:
            rows = self._first.slice(0, 0) if self._first is not None else Columns({})
        return _padded(rows, most, self._first) if self._tail == "pad" else rows

    def _agreed(self, rows: Columns | None, error: BaseException | None) -> tuple[int, int]:
        """Return the most and the fewest rows of a rank, or raise everywhere what failed."""
        own = 0 if rows is None else len(rows)
        told: NumpyArray = np.array([own, -own, error is not None])
        if self._ranks.group is not None and self._ranks.size > 1:
            all_reduce(told, ReduceOp.MAX, self._ranks.group)
        if told[2]:
            self._ranks.share(lambda: _raise(error))
        return int(told[0]), -int(told[1])

    def _begin(self, rows: Columns | None, least: int) -> None:
        """Keep the rows that are repeated at the end; those of another rank if there are none."""
        self._begun, self._first = True, rows
        if least:
            return
        if self._tail == "drop":
            raise UsageError(
                'a rank has no rows at all, so with tail="drop" there is no batch for any rank; '
                'use tail="pad" or "keep", fewer ranks, or files that can be cut'
            )
        told = self._ranks.share(lambda: None if rows is None else rows.take([0]))
        self._first = rows or next(each for each in told if each is not None)


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _padded(rows: Columns, size: int, first: Columns | None) -> Columns:
    if len(rows) == size or first is None:
        return rows
    more = np.arange(size - len(rows)) % len(first)
    return Columns.concat([*[rows] * bool(len(rows)), first.take(more)])
