"""`QueueDataset`: one pass over files, which are read while batches are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm.collectives import all_reduce
from hpcdist.comm.together import Together
from hpcdist.data.columns import Columns
from hpcdist.data.dataset import Batch, DatasetBase, Feed, batch_of
from hpcdist.data.order import Shuffled
from hpcdist.data.reading import Lane, Reading
from hpcdist.data.settings import QUEUE
from hpcdist.data.stream import Leg, Stream
from hpcdist.errors import UsageError
from hpcdist.integers import integer
from hpcdist.transport.call.reduction import ReduceOp

_DEPTH = 4
"""Blocks of rows that wait for each reader."""


@final
class QueueDataset(DatasetBase):
    """Samples of files in one pass, in batches, while threads read on.

    Each rank reads its share of the bytes with `thread_num` readers, which wait when `queue_num`
    blocks of rows wait for the loop (-1: a few). The order is that of the files, reader by reader
    in turn: the same in every pass with the same numbers of ranks and readers. With a
    `shuffle_buffer` the files come in another order in each epoch, and that many rows of each rank
    are mixed.

    Example:
        >>> import hpcdist as dist
        >>> dataset = dist.QueueDataset()
        >>> dataset.init(batch_size=32, thread_num=2, use_var=["words", "label"])

    """

    def __init__(self) -> None:
        self._own_feed = Feed(QUEUE, "QueueDataset")
        self._epoch = 0
        self._begun: tuple[Leg, ...] = ()
        self._leg: Leg | None = None
        self._stream: Stream | None = None
        self._extent = (0, 0, 0)

    @property
    def _feed(self) -> Feed:
        return self._own_feed

    def batches(self, epoch: int | None = None) -> Iterator[Batch]:
        """Iterate over the batches of this rank, once through the files. Collective.

        So is each step. Every rank has equally many. With ``tail="pad"`` a rank that has come to
        its end repeats its first rows, and with "drop" all end when the first of them does, and
        have equally many rows in every batch; with "keep" each row comes once, and batches of the
        others may be empty. After `load_state_dict` these are the rest of its epoch.

        Args:
            epoch: from 0; None for the one at hand: the next one, if the latest loop has ended.

        Raises:
            UsageError: there are no files; the epoch is wrong; with ``tail="drop"`` a rank has no
                row at all; the state that was loaded is of other files.
            MismatchError: the ranks have different settings or epochs, or name different files.
            OSError: a file cannot be read; `RemoteError` on the other ranks.

        """
        if epoch is not None and integer(epoch, "epoch", 0) != self._epoch:
            self._go_to(int(epoch))
        reading, settings = Reading(self._feed, self._standing()), self._feed.settings
        self._check_files(reading)
        ranks, shuffle = self._feed.ranks, settings["shuffle_buffer"]
        numbers = settings["seed"], self._epoch
        files = len(reading.files)
        order = Shuffled(files, *numbers).samples(np.arange(files)).tolist() if shuffle else None

        def lanes(rank: int, leg: Leg) -> Sequence[Lane]:
            return reading.lanes(rank, leg.ranks, leg.readers, order)

        self._leg = Leg(ranks.size, settings["thread_num"])
        depth = settings["queue_num"] if settings["queue_num"] > 0 else _DEPTH
        legs = self._leg.then(self._begun)
        self._stream = stream = Stream(legs, ranks.rank, lanes, depth, (shuffle, *numbers))
        steps = _Steps(ranks, settings["tail"], settings["batch_size"])
        return self._hand_out(reading, stream, steps)

    def _hand_out(self, reading: Reading, stream: Stream, steps: _Steps) -> Iterator[Batch]:
        with stream:
            while (rows := steps.next(stream)) is not None:
                if self._stream is stream and self._leg is not None:
                    self._leg = self._leg._replace(rows=self._leg.rows + steps.batch_size)
                yield batch_of(rows)
        reading.tell_left_out()
        if self._stream is stream:
            self._go_to(self._epoch + 1)

    def _go_to(self, epoch: int, begun: tuple[Leg, ...] = ()) -> None:
        """Let the next loop begin there; what an earlier one does is of no account any more."""
        self._epoch, self._begun, self._leg, self._stream = epoch, begun, None, None

    # ---- going on

    def state_dict(self) -> dict[str, Any]:
        """Return where all ranks stand, in plain numbers, the same on all. Local.

        It counts the batches that have been handed out, that in the loop's body included. The end
        of a loop is the start of the next epoch.
        """
        return {**self._standing(self._leg), **dict(zip(_EXTENT, self._extent, strict=True))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was made, also on another number of ranks. Local.

        The next loop gives the rest of the epoch, sample for sample: it reads the epoch from its
        beginning, and leaves out what was handed out. Fewer ranks go on with the rest of several
        each, more ranks share it.

        Args:
            state: what `state_dict` returned; the same on every rank.

        Raises:
            UsageError: it is not a state, or one with another `seed` or `shuffle_buffer`. If it is
                of other files, the next loop raises an error.

        """
        names = {*self.state_dict()}
        if not isinstance(state, Mapping) or not names <= {*state} or not _is_sound(state):
            raise UsageError(
                f"this is not a state of a QueueDataset: {state!r}; pass what state_dict() returned"
            )
        for name in ("seed", "shuffle_buffer"):
            if state[name] != self._feed.settings[name]:
                raise UsageError(
                    f"this state was made with {name}={state[name]}, but here it is "
                    f"{self._feed.settings[name]}, so the rest of the epoch would be another one"
                )
        self._go_to(state["epoch"], tuple(Leg(*each) for each in state["taken"]))
        self._extent = state["files"], state["nbytes"], state["digest"]

    def _standing(self, leg: Leg | None = None) -> dict[str, Any]:
        legs = self._begun if leg is None or not leg.rows else leg.then(self._begun)
        order = {name: self._feed.settings[name] for name in ("seed", "shuffle_buffer")}
        return {"epoch": self._epoch, "taken": [list(each) for each in legs], **order}

    def _check_files(self, reading: Reading) -> None:
        nbytes = sum(file.size for file in reading.files)
        extent = len(reading.files), nbytes, reading.digest
        if self._begun and extent != self._extent:
            (files, nbytes, _), (here, nbytes_here, _) = self._extent, extent
            raise UsageError(
                f"this state was made with {files} files of {nbytes} bytes, but here are {here} "
                f"of {nbytes_here}, or of other names, or in another order, so the rest of the "
                "epoch would be another one"
            )
        self._extent = extent

    def __repr__(self) -> str:
        return f"QueueDataset({len(self._feed.files)} files)"


_EXTENT = "files", "nbytes", "digest"
"""What a state tells of the files: how many, their bytes, and `Reading.digest`."""


def _is_sound(state: Mapping[str, Any]) -> bool:
    numbers = [state[name] for name in ("epoch", *_EXTENT)]
    try:
        legs = [Leg(*each) for each in state["taken"]]
    except TypeError:
        return False
    numbers += [number for leg in legs for number in leg]
    whole = all(isinstance(each, int) and not isinstance(each, bool) for each in numbers)
    return whole and min(numbers) >= 0 and all(leg.ranks > 0 and leg.readers > 0 for leg in legs)


# ---- all ranks


@final
class _Steps:
    """Steps that all ranks take, or none."""

    def __init__(self, ranks: Together, tail: str, batch_size: int) -> None:
        self._ranks, self._tail, self.batch_size = ranks, tail, batch_size
        self._first: Columns | None = None
        self._begun = False

    def next(self, stream: Stream) -> Columns | None:
        """Return the rows of this rank's next batch; None at the end of all ranks. Collective."""
        rows, error = None, None
        try:
            rows = stream.take(self.batch_size)
        except BaseException as reason:
            error = reason
        most, least = self._agreed(rows, error)
        if not most:
            return None
        if not self._begun:
            self._begin(rows, least, stream.goes_on)
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

    def _begin(self, rows: Columns | None, least: int, goes_on: bool) -> None:
        """Keep the rows that are repeated at the end; those of another rank if there are none."""
        self._begun, self._first = True, rows
        if least:
            return
        if self._tail == "drop" and goes_on:
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
