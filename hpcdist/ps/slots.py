"""`Slots`: which slot each id has; an open-addressing hash table, vectorised.

The table (`_index`) holds numbers of slots only, and the ids lie in an array by slot: 8 bytes for
an id and from 7 to 14 for the table, which is built anew from the ids when it grows, with no old
table beside it. Probing is linear. Where an id begins is a hash under a random key of each table,
so that nobody can choose ids that collide; the key changes nothing that a caller sees.

The bits of a number above those of the slot are a tag, more bits of the hash: the ids of hardly any
slots but the right one are looked at, each of which would be a miss of the cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.compiled import load
from hpcdist.ps.ids import mixed

Make = Callable[[str, int, Any], NumpyArray]
"""Returns the memory for one of the arrays of a table, by name, elements and dtype."""

_FREE, _REMOVED = -1, -2
_SMALLEST = 64
_FULL = 0.6
"""Part of the table that may be taken, by ids and by those removed; then it is built anew."""

_ROOMY = 0.5
"""Part of a new table that ids may take; else it is twice as large as the old one."""

_AT_A_TIME = 1 << 14
"""Ids that NumPy looks up at a time: their arrays stay in the cache."""

_LARGE_INDEX = 1 << 31
"""So many slots do not fit into a table of 32-bit numbers."""

_compiled = load("hpcdist.ps._native")
_find = getattr(_compiled, "find_slots", None)
_place = getattr(_compiled, "place_slots", None)


@final
class Slots:
    """Numbers from 0 on for int64 ids: new ids take the slots that were freed last, then new ones.

    Arrays of ids are flat and contiguous (`ids.as_ids`). Which slot an id gets depends on the
    calls before alone.

    Args:
        make: what returns the memory for its two arrays, "index" and "ids"; None for ordinary one.

    Attributes:
        used: slots that have ever been taken; all slots are below.

    """

    def __init__(self, make: Make | None = None) -> None:
        self._make = make
        self._key = np.uint64(int.from_bytes(os.urandom(8), "little") | 1)
        self.clear()

    def clear(self) -> None:
        """Forget all ids."""
        index = self._made("index", _SMALLEST, np.int32)
        index.fill(_FREE)  # before the ids go: who reads past the owner finds nothing
        self._ids = self._made("ids", _SMALLEST, np.int64)
        self._index, self._removed = index, 0
        self.used, self._freed = 0, np.empty(0, np.int64)

    @property
    def key(self) -> int:
        """By what the hashes of ids are multiplied: odd."""
        return int(self._key)

    @property
    def arrays(self) -> tuple[NumpyArray, NumpyArray]:
        """The table of numbers, and the ids by slot; both may be others after any change."""
        return self._index, self._ids

    @property
    def index_item(self) -> int:
        """Bytes of a number in the table."""
        return self._index.itemsize

    def __len__(self) -> int:
        return self.used - self._freed.size

    @property
    def nbytes(self) -> int:
        """Bytes of the table and the ids."""
        return self._index.nbytes + self._ids.nbytes + self._freed.nbytes

    def find(self, ids: NumpyArray) -> NumpyArray:
        """Return the slot of each id, -1 where it is absent."""
        if _find is None:
            return self.find_in_python(ids)
        found = np.empty(ids.size, np.intp)
        _find(self._index.itemsize, self._index, self._ids, ids, found, int(self._key))
        return found

    def find_in_python(self, ids: NumpyArray) -> NumpyArray:
        """Return what `find` returns, without compiled loops."""
        found = np.empty(ids.size, np.intp)
        for start in range(0, ids.size, _AT_A_TIME):
            part = slice(start, start + _AT_A_TIME)
            found[part] = self._probe(ids[part])[0]
        return found

    def insert(self, ids: NumpyArray) -> NumpyArray:
        """Return the slot of each id; absent ids get one, in the order they first appear."""
        slots = self.find(ids)
        absent = np.flatnonzero(slots < 0)
        if absent.size:
            fresh, first = np.unique(ids[absent], return_index=True)
            self.add(fresh[np.argsort(first)])
            slots[absent] = self.find(ids[absent])
        return slots

    def add(self, ids: NumpyArray) -> NumpyArray:
        """Return new slots for ids that are absent and distinct."""
        self.reserve(ids.size)
        slots = self._take(ids.size)
        self._ids[slots] = ids
        self._settle(slots)
        return slots

    def reserve(self, count: int) -> None:
        """Have the memory for so many more ids, or raise before anything changes."""
        ids = len(self) + count
        used = max(self.used, ids)
        if used > self._ids.size:
            self._lengthen(max(used, self._ids.size * 5 // 4))
        full = ids + self._removed > _FULL * self._index.size
        if full or self._index.dtype != _index_type(used):
            self._rebuild(self._index.size, ids, used, self.live())

    def remove(self, ids: NumpyArray) -> NumpyArray:
        """Free the slots of ids, and return those slots; absent ids are passed over."""
        slots, places = self._probe(ids)
        there = slots >= 0
        places, first = np.unique(places[there], return_index=True)
        slots = slots[there][np.sort(first)]
        self._freed = np.concatenate([self._freed, slots[::-1]])
        self._index[places] = _REMOVED
        self._removed += places.size
        if not len(self):
            self.clear()
        return slots

    def moves(self) -> tuple[NumpyArray, NumpyArray]:
        """Return the slots behind the first `len(self)` that are taken, and free ones before."""
        live, count = self.live(), len(self)
        return live[live >= count], np.sort(self._freed[self._freed < count])

    def compact(self, old: NumpyArray, new: NumpyArray) -> None:
        """Give ids the slots that `moves` has found, and memory back; without any nothing changes.

        Whatever belongs to the old slots has to be in the new ones already.
        """
        count = len(self)
        self._ids[new] = self._ids[old]  # free slots: nobody looks there yet
        self._rebuild(_SMALLEST, count, count, np.arange(count))
        self.used, self._freed = count, self._freed[:0].copy()
        ids = self._made("ids", max(_SMALLEST, count), np.int64)
        ids[:count] = self._ids[:count]
        self._ids = ids

    def live(self) -> NumpyArray:
        """Return the slots that are taken, ascending."""
        taken = np.ones(self.used, bool)
        taken[self._freed] = False
        return np.flatnonzero(taken)

    def ids(self) -> NumpyArray:
        """Return all ids, in the order of their slots."""
        return self._ids[self.live()] if self._freed.size else self._ids[: self.used].copy()

    def ids_at(self, slots: NumpyArray) -> NumpyArray:
        """Return the ids of taken slots."""
        found: NumpyArray = self._ids[slots]
        return found

    def _take(self, count: int) -> NumpyArray:
        """Take slots that there is room for: freed ones, the last first, then new ones."""
        reused = min(count, self._freed.size)
        slots = np.empty(count, np.int64)
        slots[:reused] = self._freed[self._freed.size - reused :][::-1]
        slots[reused:] = np.arange(self.used, self.used + count - reused)
        self._freed = self._freed[: self._freed.size - reused]
        self.used += count - reused
        return slots

    def _lengthen(self, size: int) -> None:
        """Make room for `size` ids."""
        if self._make is None:
            # in place where the allocator can: nobody else holds this array
            self._ids.resize(size, refcheck=False)
            return
        before, self._ids = self._ids, self._make("ids", size, np.int64)
        self._ids[: before.size] = before

    def _made(self, name: str, count: int, dtype: Any) -> NumpyArray:
        return np.empty(count, dtype) if self._make is None else self._make(name, count, dtype)

    def _rebuild(self, size: int, ids: int, used: int, live: NumpyArray) -> None:
        """Enter live slots into a new index, of at least `size`, for so many ids and slots."""
        while ids > _ROOMY * size:
            size *= 2
        index = self._made("index", size, _index_type(used))
        self._index = index  # the old one goes before the new one takes its pages
        self._index.fill(_FREE)
        self._removed = 0
        for start in range(0, live.size, 1 << 20):
            self._settle(live[start : start + (1 << 20)])

    @property
    def _bits(self) -> tuple[int, int]:
        """The bits of a place in a hash, and those of a number of the table without its sign."""
        return self._index.size.bit_length() - 1, 8 * self._index.itemsize - 1

    def _home(self, ids: NumpyArray) -> tuple[NumpyArray, NumpyArray]:
        """Return the places where the search for ids begins, and the tags of their numbers."""
        bits, most = self._bits
        keyed = mixed(ids) * self._key
        places = (keyed >> np.uint64(64 - bits)).view(np.int64)
        tags = (keyed >> np.uint64(64 - most)) << np.uint64(bits) & np.uint64((1 << most) - 1)
        return places, tags.view(np.int64)

    def _slot_of(self, numbers: NumpyArray) -> NumpyArray:
        """Return the slots of numbers of the table: what is no number stays."""
        slots = numbers & ((1 << min(self._bits)) - 1)
        return np.where(numbers < 0, numbers, slots).astype(np.intp, copy=False)

    def _probe(self, ids: NumpyArray) -> tuple[NumpyArray, NumpyArray]:
        """Return slots and places in the table; the slot is -1 where an id is absent."""
        index, mask = self._index, self._index.size - 1
        places, _ = self._home(ids)
        slots = self._slot_of(index[places])
        missed = (slots < 0) | (self._ids[slots] != ids)
        todo = np.flatnonzero(missed & (slots != _FREE))
        while todo.size:
            next_places = (places[todo] + 1) & mask
            places[todo] = next_places
            here = self._slot_of(index[next_places])
            slots[todo] = here
            going = (here != _FREE) & ((here < 0) | (self._ids[here] != ids[todo]))
            todo = todo[going]
        return slots, places

    def _settle(self, slots: NumpyArray) -> None:
        """Enter slots, whose ids are absent and distinct, into the table."""
        if _place is None:
            self.settle_in_python(slots)
        else:
            _place(self._index.itemsize, self._index, self._ids, slots, int(self._key))

    def settle_in_python(self, slots: NumpyArray) -> None:
        """Enter slots into the index, as `place_slots` of the compiled loops does."""
        index, mask = self._index, self._index.size - 1
        places, tags = self._home(self._ids[slots])
        numbers = slots | tags
        while numbers.size:
            free = index[places] == _FREE
            index[places[free]] = numbers[free]
            lost = index[places] != numbers  # the place was taken, or another one came, too
            numbers, places = numbers[lost], (places[lost] + 1) & mask


def _index_type(used: int) -> np.dtype:
    """Return the dtype of a table of so many slots."""
    return np.dtype(np.int32 if used < _LARGE_INDEX else np.int64)
