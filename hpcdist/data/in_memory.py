"""`InMemoryDataset`: all samples in the memory of the ranks, in an order that all agree on."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final
from warnings import warn

from hpcdist.data.ahead import Ahead
from hpcdist.data.columns import Columns
from hpcdist.data.course import Course, Kind
from hpcdist.data.dataset import Batch, DatasetBase, Feed, batch_of, summed
from hpcdist.data.order import Order, Shuffled
from hpcdist.data.reading import Reading
from hpcdist.data.settings import IN_MEMORY
from hpcdist.data.settle import Settled, settle
from hpcdist.errors import UsageError
from hpcdist.integers import integer

_READ_AHEAD = 2
_LARGE_NBYTES = 1 << 20
"""From this size on a batch takes longer than to hand it from one thread to another."""


@final
class InMemoryDataset(DatasetBase):
    """Samples of files, loaded once, shuffled over all ranks, and handed out in batches.

    Every rank of the group makes one and calls the same methods in the same order. The ranks of one
    node keep the samples once, in memory that they share; ranks of several nodes have a part
    each, and exchange samples when the order changes.

    Until it is shuffled the order is that of the files. An order is dealt to the ranks in turn, so
    the samples of a step are the same for any number of ranks that together take as many.

    Example:
        >>> import hpcdist as dist
        >>> dataset = dist.InMemoryDataset()
        >>> dataset.init(batch_size=32, use_var=["words", "label"], seed=7)

    """

    def __init__(self) -> None:
        self._own_feed = Feed(IN_MEMORY, "InMemoryDataset")
        self._settled: Settled | None = None
        self._preload: tuple[Reading, Future[list[Columns]]] | None = None
        self._course = Course(0, 0)
        self._loops = 0
        self._ahead: Ahead[Batch] | None = None
        self._resumed = False
        self._labels: dict[str, Order] = {}
        self._slot_shuffles = 0
        self._date = ""

    @property
    def _feed(self) -> Feed:
        return self._own_feed

    def update_settings(self, **kwargs: Any) -> None:
        """Change settings after `init`. Local; the same on every rank.

        Files are read with the settings at the time of loading; `batch_size` and `tail` take effect
        at the next loop.

        Args:
            kwargs: settings of `init` by name.

        Raises:
            UsageError: there is no such setting, or it cannot have this value; nothing has changed
                then.

        """
        self._feed.set(kwargs)

    def _init_distributed_settings(self, **kwargs: Any) -> None:
        """Change settings; Paddle's other name for `update_settings`."""
        self._feed.set(kwargs)

    # ---- loading

    def load_into_memory(self, is_shuffle: bool = False) -> None:
        """Read the files: each rank its share of the bytes, in `thread_num` threads. Collective.

        Args:
            is_shuffle: go on with `local_shuffle`.

        Raises:
            UsageError: there are no files; a preload is under way.
            MismatchError: the ranks name different files, or have different settings; nothing is
                read then.
            OSError: a file cannot be read; `RemoteError` on the other ranks.

        """
        reading = self._begin()
        self._settle(reading, reading.rows)
        if is_shuffle:
            self.local_shuffle()

    def preload_into_memory(self, thread_num: int | None = None) -> None:
        """Begin to read the files, and return; end it with `wait_preload_done`. Collective.

        What has been loaded before stays in use until then.

        Args:
            thread_num: instead of the setting.

        """
        if thread_num is not None:
            self._feed.set({"thread_num": thread_num})
        reading = self._begin()
        lane = ThreadPoolExecutor(1, "hpcdist-preload")
        self._preload = reading, lane.submit(reading.rows)
        lane.shutdown(wait=False)

    def wait_preload_done(self) -> None:
        """Wait until what `preload_into_memory` has begun is in memory. Collective.

        Raises:
            UsageError: nothing has been begun.

        """
        if self._preload is None:
            raise UsageError(
                "no preload is under way: call preload_into_memory() before wait_preload_done()"
            )
        (reading, rows), self._preload = self._preload, None
        self._settle(reading, rows.result)

    def _begin(self) -> Reading:
        self._check_no_preload()
        return Reading(self._feed)

    def _settle(self, reading: Reading, rows: Any) -> None:
        ranks = self._feed.ranks
        parts: list[Columns] = []

        def take() -> None:
            read = rows()
            parts.extend(read)
            read.clear()  # so that nothing but the store keeps them

        ranks.share(take)
        self.release_memory()
        settled = settle(parts, ranks, reading.spill)
        reading.tell_left_out()
        if settled.why_parted and ranks.leads:
            warn(settled.why_parted, RuntimeWarning, stacklevel=4)
        self._settled = settled
        seed = self._feed.settings["seed"]
        self._course = Course(sum(settled.rows), seed, digest=reading.digest)
        self._arrange(self._course)

    def _check_no_preload(self) -> None:
        if self._preload is not None:
            raise UsageError(
                "a preload is under way: call wait_preload_done() first, on every rank"
            )

    def release_memory(self) -> None:
        """Free the samples; the settings and the files stay. Local."""
        self._end_loop()
        self._settled = None
        self._labels = {}
        self._course = Course(0, 0)

    # ---- orders

    def local_shuffle(self) -> None:
        """Shuffle the samples of each rank; only surplus samples move to other ranks. Collective.

        The order is a function of (seed, epoch, number of ranks). `global_shuffle` mixes better.
        """
        self._shuffle("local", None)

    def global_shuffle(
        self, fleet: Any = None, thread_num: int = 12, *, epoch: int | None = None
    ) -> None:
        """Shuffle the samples of all ranks. Collective.

        The order is a function of (seed, epoch, files) alone, the same for any number of ranks.
        Inside a node it moves nothing.

        Args:
            fleet: no effect: the ranks are those of the dataset.
            thread_num: no effect.
            epoch: whose order it is; None: the next one, at first 0, and the one at hand after
                `load_state_dict`.

        Raises:
            UsageError: nothing is loaded, or the epoch is wrong.
            MismatchError: the ranks have different epochs or settings.

        """
        self._shuffle("global", epoch)

    def _shuffle(self, kind: Kind, epoch: int | None) -> None:
        self._loaded_on_all()
        course, size = self._course, self._feed.ranks.size
        again = course.kind == kind
        if epoch is None:
            epoch = course.epoch + (again and not self._resumed)
        goes_on = again and self._resumed
        course = course.at(integer(epoch, "epoch", 0))
        if not goes_on:
            course = course._replace(kind=kind, ranks=size, begun=0, taken=0, ended=False)
        self._resumed = False
        self._arrange(course)

    def slots_shuffle(self, slots: Sequence[str]) -> None:
        """Shuffle the values of some slots among all samples, to measure how much they matter.

        Collective. Slots that were shuffled before get their own values back, so ``[]`` undoes it.

        Args:
            slots: names of slots.

        Raises:
            UsageError: nothing is loaded, or there is no such slot.

        """
        settled = self._loaded_on_all()
        names = [field.name for field in settled.schema]
        wrong = [slot for slot in slots if slot not in names]
        if isinstance(slots, str) or wrong:
            raise UsageError(f"slots must be a list of the slots {', '.join(names)}, got {slots!r}")
        self._slot_shuffles += 1
        total, seed = self._course.total, self._feed.settings["seed"]
        self._labels = {
            slot: Shuffled(total, seed << 32 | zlib.crc32(slot.encode()), self._slot_shuffles)
            for slot in dict.fromkeys(slots)
        }
        self._arrange(self._course)

    def _arrange(self, course: Course) -> None:
        """Go to `course`: bring this rank the rows of the rest that begins there."""
        self._end_loop()
        ranks, settings = self._feed.ranks, self._feed.settings
        self._feed.agree({**course.standing(), "the list of shuffled slots": [*self._labels]})
        shares = course.shares(ranks.size, settings["tail"])
        try:
            with ranks:
                self._loaded().store.arrange(course.order(), shares, self._labels)
        except BaseException:
            self.release_memory()  # some rows may have left, and never have arrived
            raise
        self._course = course

    # ---- batches

    def batches(self, epoch: int | None = None) -> Iterator[Batch]:
        """Iterate over this rank's batches of an epoch, equally many on every rank. Collective.

        After `load_state_dict` these are the rest of its epoch. A dataset that is shuffled is
        brought into the order of the epoch first. Only one loop can run at a time: to continue one
        after another loop has begun, or after a shuffle, is an error.

        Args:
            epoch: from 0; None for the one at hand.

        Returns:
            Dicts of arrays with one row for each sample, or of ``(values, offsets)`` where rows
            differ in length: row i is ``values[offsets[i]:offsets[i + 1]]``. Text is UTF-8 in
            uint8. The last batch may have fewer rows; with ``tail="keep"`` one less than that of
            another rank, or none.

        Raises:
            UsageError: nothing is loaded, or the epoch is wrong; raised before the loop begins.
            MismatchError: the ranks have different epochs or settings; likewise.

        """
        self._loaded_on_all()
        number = self._course.epoch if epoch is None else integer(epoch, "epoch", 0)
        course = self._course.at(number)
        self._resumed = False
        self._arrange(course)
        return self._hand_out(self._loops)

    def _hand_out(self, loop: int) -> Iterator[Batch]:
        self._check_goes_on(loop)
        size, length, course = self._feed.settings["batch_size"], len(self), self._course
        with self._ahead_of(self._made(size, length), size) as batches:
            for step, batch in enumerate(batches, 1):
                self._course = course.after(step, size * self._feed.ranks.size, length)
                yield batch
                if step < length:
                    self._check_goes_on(loop)

    def _made(self, size: int, length: int) -> Iterator[Batch]:
        store, rows = self._loaded().store, len(self._shares().positions(self._feed.ranks.rank))
        for step in range(length):
            first = min(step * size, rows)
            yield batch_of(store.batch(first, min(first + size, rows)))

    def _ahead_of(
        self, batches: Iterator[Batch], size: int
    ) -> AbstractContextManager[Iterator[Batch]]:
        """Return what iterates over the batches; a thread makes them where that is worth it."""
        depth, settled = self._feed.settings["read_ahead"], self._loaded()
        if depth is None:
            nbytes = settled.nbytes // max(self._course.total, 1) * size
            depth = _READ_AHEAD if settled.in_files or nbytes >= _LARGE_NBYTES else 0
        if not depth:
            return nullcontext(batches)
        self._ahead = Ahead(batches, depth, "hpcdist-batches")
        return self._ahead

    def _check_goes_on(self, loop: int) -> None:
        if self._loops != loop:
            raise UsageError(
                "this loop cannot go on: meanwhile the dataset was shuffled or released, or "
                "another loop began; finish one loop before the next"
            )

    def _end_loop(self) -> None:
        """End the loops that are under way: the rows are about to move. Local."""
        self._loops += 1
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def __len__(self) -> int:
        """Return how many batches an epoch has on every rank, or its rest after a resume."""
        settings = self._feed.settings
        return self._course.length(self._feed.ranks.size, settings["tail"], settings["batch_size"])

    def _shares(self) -> Any:
        return self._course.shares(self._feed.ranks.size, self._feed.settings["tail"])

    def to_arrow(self) -> Any:
        """Return this rank's samples of the epoch, in their order, as a ``pyarrow.Table``. Local.

        Raises:
            UsageError: nothing is loaded, or pyarrow is not installed.

        """
        from hpcdist.data.tables import table_of

        rows = len(self._shares().positions(self._feed.ranks.rank))
        return table_of(self._loaded().store.batch(0, rows))

    # ---- going on

    def state_dict(self) -> dict[str, Any]:
        """Return where all ranks stand, in plain numbers, the same on all. Local.

        It counts the batches that have been handed out, that in the loop's body included. The end
        of an epoch is the start of the next.
        """
        return self._course.standing()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was made, also on another number of ranks. Collective.

        Load the same files first. The next loop gives the rest of the epoch, sample for sample.

        Args:
            state: what `state_dict` returned; the same on every rank.

        Raises:
            UsageError: nothing is loaded; it is not a state, or one of other files or another seed.

        """
        self._loaded_on_all()
        course = self._course.resumed(state)
        self._resumed = True
        self._arrange(course)

    # ---- sizes

    def get_memory_data_size(self, fleet: Any = None) -> int:
        """Return how many samples this rank has read, or all ranks if `fleet` is given.

        Collective with `fleet`.

        Args:
            fleet: anything but None asks for the sum over all ranks.

        """
        ranks = self._feed.ranks
        own = self._settled.rows[ranks.rank] if self._settled is not None else 0
        return own if fleet is None else summed(own, ranks.group)

    def get_shuffle_data_size(self, fleet: Any = None) -> int:
        """Return how many samples the order gives to this rank, or all ranks if `fleet` is given.

        Collective with `fleet`. Samples that are repeated or left out by `tail` count once.

        Args:
            fleet: anything but None asks for the sum over all ranks.

        """
        ranks = self._feed.ranks
        own = len(range(ranks.rank, self._course.total, ranks.size))
        return own if fleet is None else summed(own, ranks.group)

    # ---- what is Paddle's alone

    def set_date(self, date: str) -> None:
        """Remember the day of the data, ``yyyymmdd``. Local; nothing here depends on it.

        Args:
            date: eight digits.

        """
        if not isinstance(date, str) or len(date) != 8 or not date.isdigit():
            raise UsageError(f"date must be a string such as '20260131', got {date!r}")
        self._date = date

    def tdm_sample(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: trees of Paddle's TDM are not read here."""
        raise UsageError(
            "tdm_sample needs the tree index of Paddle's TDM models, which hpcdist does not have; "
            "sample negatives where batches are made, in the step that trains on them"
        )

    def __repr__(self) -> str:
        course = self._course
        state = (
            f"{course.total} samples, {course.kind} order, epoch {course.epoch}"
            if self._settled is not None
            else "nothing loaded"
        )
        return f"InMemoryDataset({len(self._feed.files)} files, {state})"

    def _loaded_on_all(self) -> Settled:
        """Return what this rank has once all ranks have some: one may have been interrupted."""
        self._feed.agree(
            {
                "whether something is loaded (by load_into_memory, on every rank)": self._settled
                is not None
            }
        )
        return self._loaded()

    def _loaded(self) -> Settled:
        if self._settled is None:
            raise UsageError("nothing is loaded: call load_into_memory() first, on every rank")
        return self._settled
