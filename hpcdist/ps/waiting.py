"""`Waiting`: ids that have no row yet, and how often each appeared, for `CountFilterEntry`."""

from __future__ import annotations

from typing import final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.ps.slabs import Slabs, in_memory
from hpcdist.ps.slots import Slots


@final
class Waiting:
    """Counts by id. Arrays of ids are int64 and flat, those of counts int64 with one column."""

    def __init__(self) -> None:
        self._slots = Slots()
        self._counts = Slabs(1, np.dtype(np.int64), 16, in_memory)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        """Bytes of ids and counts."""
        return self._slots.nbytes + self._counts.nbytes

    def all(self) -> tuple[NumpyArray, NumpyArray]:
        """Return the ids, and how often they appeared in pushes, flat."""
        live = self._slots.live()
        return self._slots.ids_at(live), self._counts.read(live)[:, 0]

    def counted(self, ids: NumpyArray, more: NumpyArray) -> NumpyArray:
        """Return how often ids will have appeared; some may be new here."""
        counts = np.zeros((ids.size, 1), self._counts.dtype)
        self._counts.read(self._slots.find(ids), counts)
        counts += more.astype(np.int64)
        return counts

    def set(self, ids: NumpyArray, counts: NumpyArray) -> None:
        """Note how often ids appeared."""
        self._counts.reserve(self._slots.used + ids.size)
        self._counts.write(self._slots.insert(ids), counts)

    def remove(self, ids: NumpyArray) -> None:
        """Forget ids; those that are not here are passed over."""
        self._slots.remove(ids)

    def shrink(self, threshold: float | None) -> int:
        """Forget ids that appeared less than `threshold` times, None: all; return how many."""
        ids, counts = self.all()
        weak = ids if threshold is None else ids[counts < threshold]
        self.remove(weak)
        return int(weak.size)

    def clear(self) -> None:
        """Forget all ids, and give the memory back."""
        self._slots.clear()
        self._counts.clear()
