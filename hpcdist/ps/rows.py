"""`RowStore`: the rows of a table that one rank has, by id, with the state of their optimizer.

Every operation checks its arguments, and has the memory it needs, before it changes anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.ps.accessors import accessor_of
from hpcdist.ps.entries import Entry, Terms, scores
from hpcdist.ps.given import (
    check_all_finite,
    check_settings,
    check_shrink,
    gradients_of,
    rows_of,
    tally_of,
)
from hpcdist.ps.ids import as_ids
from hpcdist.ps.initializers import initializer_of
from hpcdist.ps.merging import group, segment_add, unique
from hpcdist.ps.shared import Owned, read_own
from hpcdist.ps.slabs import Allocate, SlabFile, Slabs, in_memory, slab_shift
from hpcdist.ps.slots import Slots
from hpcdist.ps.waiting import Waiting

_COUNTER = np.dtype(np.float32)
_AT_A_TIME = 1 << 12
"""Rows that are moved at a time."""

SHRINK_BELOW = 0.8
"""The score below which `shrink` removes a row, as in Paddle."""


class Chunk(NamedTuple):
    """Some rows as `RowStore.chunks` gives and `RowStore.restore` takes them.

    `rows` is (n, dim), `state` (n, `Accessor.state_width`), `counters` (n, 0), or (n, 3) with
    `ShowClickEntry`: shows, clicks, and the `period` of the last push.
    """

    ids: NumpyArray
    rows: NumpyArray
    state: NumpyArray
    counters: NumpyArray


@final
class RowStore:
    """Rows of numbers, found by integer ids and changed by gradients. Local.

    An id is any 64-bit integer. It gets its row, with an initial value that is a function of
    `seed`, id and `dim` alone, as `entry` says: usually when it is first pulled. Not thread-safe.

    Args:
        dim: the length of rows.
        dtype: a real floating dtype; with 16 bits, the state has the rows in float32.
        optimizer: how gradients change rows; see `accessor_of`.
        initializer: ``("uniform", bound)``, ``("normal", deviation)``, ``("constant", value)``, or
            a function of ids (int64) and `dim` that returns a row for each.
        entry: which ids get a row: `ProbabilityEntry`, `CountFilterEntry`, `ShowClickEntry`; all do
            without.
        max_rows: how many rows there may be. With `ShowClickEntry` those of the lowest score make
            room, at least a 64th at once; without, more are an error.
        store: "memory", or "ssd": in a file without name, mapped into memory.
        folder: where that file is; ``$SLURM_TMPDIR``, or the folder for temporary files.
        seed: what initial values and coins start from.
        slab: a function of shape and dtype that returns the memory for rows and their state.
        check_finite: refuse gradients with NaN or infinity, instead of applying them as an
            optimizer of `hpcdist.optim` does.
        owned: memory for the rows that other processes of the node can read; instead of `slab`.

    Attributes:
        period: how often `shrink` has been called.
        on_removal: is called with the ids whose rows have been removed: evicted, shrunk or removed.

    Raises:
        UsageError: an argument is wrong.
        ExecuteError: the file cannot be made, or its disk is full.

    Example:
        >>> import numpy as np
        >>> from hpcdist.ps import RowStore
        >>> store = RowStore(2, optimizer=("sgd", {"learning_rate": 0.5}),
        ...                  initializer=("constant", 1.0))
        >>> store.push([7], np.ones((1, 2), np.float32))
        >>> store.pull([7, -3])
        array([[0.5, 0.5],
               [1. , 1. ]], dtype=float32)

    """

    def __init__(
        self,
        dim: int,
        *,
        dtype: Any = "float32",
        optimizer: Any = "adagrad",
        initializer: Any = ("uniform", 0.01),
        entry: Entry | None = None,
        max_rows: int | None = None,
        store: Literal["memory", "ssd"] = "memory",
        folder: str | None = None,
        seed: int = 0,
        slab: Allocate | None = None,
        check_finite: bool = False,
        owned: Owned | None = None,
    ) -> None:
        check_settings(dim, entry, max_rows, store, folder, seed, slab)
        self.dim = dim
        self.accessor = accessor_of(optimizer, dtype)
        self.dtype = self.accessor.dtype
        self.entry = entry
        self._terms = Terms() if entry is None else entry.terms
        self.max_rows = max_rows
        self._most = sys.maxsize if max_rows is None else int(max_rows)
        self.seed = seed
        self.check_finite = check_finite
        self._initial = initializer_of(initializer, seed, self.dtype)
        self._file = SlabFile(folder) if store == "ssd" else None
        allocate = slab or (in_memory if self._file is None else self._file.allocate)
        width, columns = self.accessor.state_width(dim), self._terms.counters
        row_bytes = max(dim * self.dtype.itemsize, width * self.accessor.state_dtype.itemsize)
        shift = slab_shift(row_bytes)
        self.owned = owned
        self.slots = Slots(None if owned is None else owned.make)
        self.rows = Slabs(dim, self.dtype, shift, allocate if owned is None else owned.slab)
        self.state = Slabs(width, self.accessor.state_dtype, shift, allocate)
        self.counters = Slabs(columns, _COUNTER, shift, in_memory)
        self.on_removal: Callable[[NumpyArray], object] = lambda ids: None
        self._waiting = Waiting()
        self._evicted = self.period = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self.slots)

    def __repr__(self) -> str:
        entry = f", {self.entry}" if self.entry else ""
        return f"RowStore({len(self)} rows of {self.dim} {self.dtype}{entry})"

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next pushes; it can be assigned."""
        return float(self.accessor.options["learning_rate"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.accessor.set_learning_rate(value)

    def pull(self, ids: Any, *, create: bool = True) -> NumpyArray:
        """Return a copy of the rows of `ids`, of shape ``(*ids.shape, dim)``.

        Ids without a row get one as the entry says, or give their initial value.

        Args:
            ids: integers of up to 64 bits, of any shape.
            create: False: no id gets a row, as for evaluation.

        """
        self._check_open()
        flat, shape = as_ids(ids)
        out = np.empty((flat.size, self.dim), self.dtype)
        if not read_own(self.slots, self.rows, flat, out):
            self._begin(flat, out, create=create)
        return out.reshape(*shape, self.dim)

    def _begin(self, ids: NumpyArray, out: NumpyArray, *, create: bool) -> None:
        """Put initial values into the rows of absent ids, and keep those that the entry admits."""
        slots = self.slots.find(ids)
        missing = _absent(slots)
        fresh, inverse = unique(ids[missing])
        first = self._initial(fresh, self.dim)
        if create and not self._terms.appearances:
            admitted = self._terms.admit(fresh, self.seed)
            self._create(fresh[admitted], first[admitted], keep=slots)
        out[missing] = first[inverse]

    def lacks(self, ids: NumpyArray) -> bool:
        """Return whether any of these ids has no row.

        Args:
            ids: int64, of any shape.

        """
        return bool((self.slots.find(np.ascontiguousarray(ids)) < 0).any())

    def push(self, ids: Any, grads: Any, *, counts: Any = None, clicks: Any = None) -> None:
        """Apply a gradient to the row of each id; gradients of equal ids are summed first.

        Args:
            ids: integers, of any shape.
            grads: a row for each, of any floating dtype.
            counts: how many gradients were added up in each row (`Merged.counts`): how often its id
                was shown. 1 by default.
            clicks: how often it was clicked, for `ShowClickEntry`. 0 by default.

        Raises:
            UsageError: the gradients do not fit; nothing has changed.

        """
        self._check_open()
        flat, given, tallies = self._summed(ids, grads, counts, clicks)
        slots = self._reached(flat, tallies)
        self.accessor.update_in(self.rows, self.state, slots, given)

    def add(self, ids: Any, changes: Any, *, counts: Any = None, clicks: Any = None) -> None:
        """Add to the row of each id, past the optimizer; ids get their rows as by `push`.

        Args:
            ids: integers, of any shape.
            changes: a row for each, of any floating dtype; those of equal ids are added up first.
            counts: as of `push`.
            clicks: as of `push`.

        """
        self._check_open()
        flat, given, tallies = self._summed(ids, changes, counts, clicks)
        slots = self._reached(flat, tallies)
        held = slots >= 0
        rows = self.rows.read(slots[held])
        rows += given[held].astype(self.dtype, copy=False)
        self._put(flat[held], rows, None, None)

    def assign(self, ids: Any, rows: Any) -> None:
        """Set the rows of `ids`; new ids get a row whatever the entry says.

        What the optimizer remembers of a row stays. Of equal ids, the last one counts.

        Args:
            ids: integers, of any shape.
            rows: of shape ``(*ids.shape, dim)``.

        """
        self._check_open()
        flat, _ = as_ids(ids)
        given = rows_of(rows, flat, self.dim, self.dtype, "rows")
        distinct, order, starts = group(flat)
        last = order[starts[1:] - 1]
        self._put(distinct, given[last], None, None)

    def chunks(self, rows: int = 65536) -> Iterator[Chunk]:
        """Give all rows, in the order of their slots, at most `rows` at a time, as copies.

        Args:
            rows: the largest number of rows in a chunk.

        """
        self._check_open()
        live = self.slots.live()
        for start in range(0, live.size, rows):
            yield self._chunk(live[start : start + rows])

    def content(self, ids: Any = None) -> Chunk:
        """Return all rows, or those of `ids` that have one, as copies.

        Args:
            ids: integers, each there once; None for all.

        """
        self._check_open()
        if ids is None:
            return self._chunk(self.slots.live())
        slots = self.slots.find(as_ids(ids)[0])
        return self._chunk(slots[slots >= 0])

    def _chunk(self, slots: NumpyArray) -> Chunk:
        kinds = (self.rows, self.state, self.counters)
        return Chunk(self.slots.ids_at(slots), *(each.read(slots) for each in kinds))

    def restore(self, ids: Any, rows: Any, state: Any = None, counters: Any = None) -> None:
        """Put back rows from `chunks`; without its state the optimizer starts anew.

        Args:
            ids: integers, of any shape.
            rows: of shape ``(*ids.shape, dim)``.
            state: what the optimizer remembers of each row; None to start anew.
            counters: what the entry has counted of each row; None for zeros.

        """
        self._check_open()
        flat, _ = as_ids(ids)
        accessor, width = self.accessor, self.state.width
        given = rows_of(rows, flat, self.dim, self.dtype, "rows")
        if state is not None:
            state = rows_of(state, flat, width, accessor.state_dtype, "state")
        else:
            state = accessor.start(given)
        if counters is not None:
            counters = rows_of(counters, flat, self.counters.width, _COUNTER, "counters")
        else:
            counters = self._new_counters(flat.size)
        distinct, order, starts = group(flat)
        last = order[starts[1:] - 1]
        self._put(distinct, given[last], state[last], counters[last])

    def remove(self, ids: Any) -> None:
        """Remove the rows of ids, and the counts of ids that have no row yet.

        Args:
            ids: integers, of any shape; those that have no row are passed over.

        """
        self._check_open()
        flat, _ = as_ids(ids)
        slots = self.slots.find(unique(flat)[0])
        self._remove(slots[slots >= 0])
        self._waiting.remove(flat)

    def waiting(self) -> tuple[NumpyArray, NumpyArray]:
        """Return the ids that have no row yet, and how often they appeared in pushes.

        `CountFilterEntry` keeps them; `restore_waiting` takes them.
        """
        self._check_open()
        return self._waiting.all()

    def restore_waiting(self, ids: Any, counts: Any) -> None:
        """Set how often ids that have no row appeared in pushes.

        Args:
            ids: integers, as `waiting` returned them.
            counts: one number for each id.

        """
        self._check_open()
        flat, _ = as_ids(ids)
        numbers = rows_of(np.asarray(counts)[:, None], flat, 1, np.dtype(np.int64), "counts")
        distinct, order, starts = group(flat)
        fresh = self.slots.find(distinct) < 0
        self._waiting.set(distinct[fresh], numbers[order[starts[1:] - 1]][fresh])

    def shrink(
        self, threshold: float | None = None, *, decay: float = 1.0, unseen: int | None = None
    ) -> int:
        """Remove the rows whose score is below `threshold`, and return their number.

        With `CountFilterEntry` the ids that have no row yet are forgotten, those that appeared
        less than `threshold` times if it is given. Rows of other entries have no score, and stay.

        Args:
            threshold: a score, or how often an id appeared; None for a score of 0.8, and for all
                ids that have no row.
            decay: shows and clicks are multiplied by it before, for `ShowClickEntry`.
            unseen: remove rows, too, that were not pushed since so many calls of this before, for
                `ShowClickEntry`; None: never.

        Raises:
            UsageError: an argument is out of its range, or of an entry that the store has not.

        """
        self._check_open()
        check_shrink(threshold, decay, unseen, self._terms.scored)
        self.period += 1
        if len(self._waiting):
            return self._waiting.shrink(threshold)
        if not self._terms.scored:
            return 0
        below = SHRINK_BELOW if threshold is None else threshold
        live = self.slots.live()
        counters = self.counters.read(live)
        if decay != 1:
            counters[:, :2] *= _COUNTER.type(decay)
            self.counters.write(live, counters)
        weak = scores(counters) < below
        if unseen is not None:
            weak |= self.period - counters[:, 2] > unseen
        weak = live[weak]
        removed = int(weak.size)
        self._remove(weak)
        if self.slots.used > 2 * len(self) and self._file is None:
            self._compact()
        return removed

    def stats(self) -> dict[str, Any]:
        """Return statistics: rows, bytes of each kind, ids without rows, evicted rows."""
        slabs = (self.rows, self.state, self.counters)
        return {
            "rows": len(self),
            "capacity": self.rows.capacity,
            "bytes": sum(each.nbytes for each in slabs) + self.slots.nbytes + self._waiting.nbytes,
            "row_bytes": self.rows.nbytes,
            "state_bytes": self.state.nbytes,
            "index_bytes": self.slots.nbytes,
            "waiting": len(self._waiting),
            "evicted": self._evicted,
        }

    def close(self) -> None:
        """Give memory and disk back. Later calls raise `UsageError`."""
        if self._closed:
            return
        if self.owned is not None:
            self.owned.close()
        self._clear_rows()
        self._waiting.clear()
        if self._file is not None:
            self._file.close()
        self._closed = True

    # ---- which ids have rows

    def _summed(
        self, ids: Any, grads: Any, counts: Any, clicks: Any
    ) -> tuple[NumpyArray, NumpyArray, list[NumpyArray]]:
        """Return distinct ids, and the sums of their gradients, shows and clicks; or raise."""
        flat, _ = as_ids(ids)
        given = gradients_of(grads, flat, self.dim)
        if self.check_finite:
            check_all_finite(flat, given)
        tallies = [tally_of(counts, flat, 1, "counts"), tally_of(clicks, flat, 0, "clicks")]
        if flat.size > 1 and not bool((flat[1:] > flat[:-1]).all()):
            flat, order, starts = group(flat)
            given = _added(given, order, starts)
            tallies = [_added(each, order, starts) for each in tallies]
        return flat, given, tallies

    def _reached(self, ids: NumpyArray, tallies: Sequence[NumpyArray]) -> NumpyArray:
        """Return the slots of ids once they have been shown and clicked; -1: no row yet."""
        slots = self.slots.find(ids)
        missing = _absent(slots)
        counters = self._counted(slots, tallies)
        if missing.size:
            self._admit(ids, slots, missing, tallies[0])
        self.counters.write(slots, counters)
        return slots

    def _admit(
        self, ids: NumpyArray, slots: NumpyArray, missing: NumpyArray, shows: NumpyArray
    ) -> None:
        """Give rows to absent ids as the entry says, and write their slots into `slots`."""
        fresh = ids[missing]
        admitted = self._terms.admit(fresh, self.seed)
        counts = None
        if self._terms.appearances > 1:
            counts = self._waiting.counted(fresh, shows[missing])
            admitted = counts[:, 0] >= self._terms.appearances
        new = fresh[admitted]
        slots[missing[admitted]] = self._create(new, self._initial(new, self.dim), keep=slots)
        if counts is not None:
            self._waiting.set(fresh[~admitted], counts[~admitted])
            self._waiting.remove(new)

    def _create(self, ids: NumpyArray, rows: NumpyArray, keep: NumpyArray) -> NumpyArray:
        """Return the slots of new rows, for absent and distinct ids; `keep` is not evicted."""
        if not ids.size:
            return np.empty(0, np.intp)
        self._check_room(ids.size, keep)
        last = max(min(len(self) + ids.size, self._most), self.slots.used)
        for each in (self.rows, self.state, self.counters):
            each.reserve(last)
        self.slots.reserve(ids.size)
        state = self.accessor.start(rows)
        counters = self._new_counters(ids.size)
        self._make_room(ids.size, keep)
        slots = self.slots.add(ids)
        self.rows.write(slots, rows)
        self.state.write(slots, state)
        self.counters.write(slots, counters)
        return slots

    def _put(
        self,
        ids: NumpyArray,
        rows: NumpyArray,
        state: NumpyArray | None,
        counters: NumpyArray | None,
    ) -> None:
        """Write rows of distinct ids; what is None stays, or starts anew with a new row."""
        slots = self.slots.find(ids)
        missing = _absent(slots)
        if missing.size:
            slots[missing] = self._create(ids[missing], rows[missing], keep=slots)
            self._waiting.remove(ids[missing])
        self.rows.write(slots, rows)
        if state is not None:
            self.state.write(slots, state)
        elif self.accessor.has_master:
            kept = self.state.read(slots)
            self.accessor.adopt(rows, kept)
            self.state.write(slots, kept)
        if counters is not None:
            self.counters.write(slots, counters)

    def _check_room(self, count: int, keep: NumpyArray) -> None:
        """Refuse more rows than there may be, where too few can be evicted."""
        if len(self) + count <= self._most:
            return
        if not self._terms.scored:
            raise UsageError(
                f"{count} more rows, beside the {len(self)} there are, would exceed "
                f"max_rows={self.max_rows}; raise it, shrink the table, or let rows make room "
                "with entry=ShowClickEntry(...)"
            )
        used = np.unique(keep[keep >= 0]).size
        if used + count > self._most:
            raise UsageError(
                f"one call needs {count} new rows besides {used} that it uses, which exceeds "
                f"max_rows={self.max_rows}; raise it, or pass fewer ids at once"
            )

    def _make_room(self, count: int, keep: NumpyArray) -> None:
        """Evict rows of the lowest scores if there would be too many; never those in `keep`."""
        needed = len(self) + count - self._most
        if needed <= 0:
            return
        evictable = np.setdiff1d(self.slots.live(), keep)
        leaving = min(max(needed, self._most // 64), evictable.size)
        score = scores(self.counters.read(evictable))
        self._drop(evictable[np.argsort(score, kind="stable")[:leaving]])
        self._evicted += leaving

    def _drop(self, slots: NumpyArray) -> None:
        ids = self.slots.ids_at(slots)
        self.slots.remove(ids)
        self.on_removal(ids)

    def _remove(self, slots: NumpyArray) -> None:
        self._drop(slots)
        if not len(self):
            self._clear_rows()

    def _compact(self) -> None:
        """Move rows to free slots before them, and give the slabs behind them back.

        No row is written over: until `slots` knows of the new places, the old ones hold. Without
        the memory for it, the rows keep what they have.
        """
        kinds = (self.rows, self.state, self.counters)
        with suppress(MemoryError, OSError):
            old, new = self.slots.moves()
            for start in range(0, old.size, _AT_A_TIME):
                part = slice(start, start + _AT_A_TIME)
                for each in kinds:
                    each.write(new[part], each.read(old[part]))
            self.slots.compact(old, new)
        for each in kinds:
            each.release(self.slots.used)
        if self.owned is not None:
            self.owned.release(len(self.rows.slabs))

    def _clear_rows(self) -> None:
        """Give the memory of all rows back."""
        self.slots.clear()
        for each in (self.rows, self.state, self.counters):
            each.clear()
        if self._file is not None:
            self._file.clear()
        if self.owned is not None:
            self.owned.release(0)

    # ---- rows and gradients

    def _counted(self, slots: NumpyArray, more: Sequence[NumpyArray]) -> NumpyArray:
        """Return the counters of slots, and what is added; new slots may have none yet."""
        counters = self._new_counters(slots.size)
        if self._terms.scored:
            self.counters.read(slots, counters)
            counters[:, :2] += np.hstack(more)
            counters[:, 2] = self.period
        return counters

    def _new_counters(self, count: int) -> NumpyArray:
        """Return the counters of new rows."""
        counters = np.zeros((count, self.counters.width), _COUNTER)
        counters[:, 2:] = self.period
        return counters

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the store has been closed; make a new one")


def _absent(slots: NumpyArray) -> NumpyArray:
    return np.flatnonzero(slots < 0)


def _added(grads: NumpyArray, order: NumpyArray, starts: NumpyArray) -> NumpyArray:
    if grads.dtype.itemsize == 2:
        return segment_add(grads.astype(np.float32), order, starts).astype(grads.dtype)
    return segment_add(grads, order, starts)
