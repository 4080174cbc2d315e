"""`Shard`: the rows of a table that one rank keeps, and what others call of it."""

from __future__ import annotations

import math
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.ps.hot import Hot
from hpcdist.ps.rows import RowStore
from hpcdist.ps.shared import Layout, Window

_MANY = 1 << 20
"""So many ids are noted as changed before those that are there twice are taken out."""


@final
class Changes:
    """Which ids were changed or removed since the last save; nobody asks before the first one.

    Attributes:
        saved_to: the path and the token of the save that a delta would go on; None: only a whole
            one can.

    """

    def __init__(self) -> None:
        self.forget(None)

    def forget(self, saved_to: tuple[str, str] | None) -> None:
        """Begin anew, after a save or with other rows."""
        self.saved_to = saved_to
        self._ids: list[NumpyArray] = []
        self._noted = 0

    def note(self, ids: NumpyArray) -> None:
        """Note ids that have changed; some may occur twice."""
        if self.saved_to is None:
            return
        self._ids.append(np.array(ids))
        self._noted += len(ids)
        if self._noted > _MANY:
            self.all()

    def all(self) -> NumpyArray:
        """Return the ids, ascending."""
        ids = np.unique(np.concatenate([np.empty(0, np.int64), *self._ids]))
        self._ids, self._noted = [ids], 0
        return ids


@final
class Shard:
    """Rows, one thread at a time; it notes which of them have changed since the last save.

    Attributes:
        store: the rows.
        lock: held by whoever looks at the store.
        clocks: how often each worker has pushed; infinity where it has stopped.
        hot: which ids are pulled and pushed most often.
        changes: which ids a delta would have.

    """

    def __init__(self, store: RowStore, workers: int) -> None:
        self.store, self.lock = store, threading.Lock()
        self.clocks, self.hot = np.zeros(workers), Hot()
        self.changes = Changes()
        store.on_removal = self.changes.note

    def pull(self, ids: NumpyArray, create: bool = True) -> NumpyArray:
        """Return the rows of `ids`; some may occur twice."""
        with self.lock:
            return self._pull(ids, create)

    def fetch(self, ids: NumpyArray) -> NumpyArray:
        """Return what `pull` does, and one more column: 1 where there is a row."""
        with self.lock:
            self._pull(ids)
            return self._shown(ids)

    def _pull(self, ids: NumpyArray, create: bool = True) -> NumpyArray:
        self.hot.note(ids)
        before = len(self.store)
        makes = create and self.store.owned is not None and self.store.lacks(ids)
        with self._changing() if makes else nullcontext():
            rows = self.store.pull(ids, create=create)
        if len(self.store) != before:  # pulling makes rows
            self.changes.note(ids)
        return rows

    def _shown(self, ids: NumpyArray) -> NumpyArray:
        has_row = self.store.slots.find(ids) >= 0
        return np.column_stack(
            [self.store.pull(ids, create=False), has_row.astype(self.store.dtype)]
        )

    def push(self, ids: NumpyArray, grads: NumpyArray, marks: NumpyArray) -> None:
        """Apply gradients to rows by the optimizer; those of one id are summed in their order.

        `marks` has for each id how often it was shown and clicked, if the entry wants to know.
        """
        if not len(ids):
            return
        with self.lock, self._changing():
            self.hot.note(ids)
            self.store.push(ids, grads, **_told(marks))
            self.changes.note(ids)

    def add(self, ids: NumpyArray, changes: NumpyArray, marks: NumpyArray) -> NumpyArray:
        """Add to rows, past the optimizer, and return what `fetch` does; each id is there once."""
        with self.lock, self._changing():
            self.hot.note(ids)
            self.store.add(ids, changes, **_told(marks))
            self.changes.note(ids)
            return self._shown(ids)

    def tick(self, worker: int, clock: float) -> None:
        """Note how often a worker has pushed."""
        self.clocks[worker] = clock

    def behind(self, clock: float) -> list[int]:
        """Return which workers have pushed less often than `clock` says."""
        return [int(each) for each in np.flatnonzero(self.clocks < clock)]

    def shrink(self, threshold: Any, decay: Any = 1.0, unseen: Any = None) -> int:
        """Remove what the store finds worthless; return how many rows."""
        with self.lock, self._changing():
            removed: int = self.store.shrink(threshold, decay=decay, unseen=unseen)
            if decay != 1:
                self.changes.note(self.store.slots.ids())
        return removed

    def replace(self, store: RowStore) -> None:
        """Keep other rows from now on."""
        with self.lock:
            self.store.close()
            self.store, store.on_removal = store, self.changes.note
            self.changes.forget(None)

    def layout(self) -> Layout | None:
        """Return where others of the node can read the rows; None if they cannot."""
        with self.lock:
            owned = self.store.owned
            return None if owned is None else owned.layout(self.store.slots, self.store.rows)

    def window(self) -> Window | None:
        """Return a window on the rows for this process; None if they are not to be shared."""
        with self.lock:
            owned = self.store.owned
            if owned is None:
                return None
            return Window(owned.layout(self.store.slots, self.store.rows), owned.mapped)

    def _changing(self) -> AbstractContextManager[None]:
        return nullcontext() if self.store.owned is None else self.store.owned.changing()


def _told(marks: NumpyArray) -> dict[str, NumpyArray]:
    """Return how often ids were shown and clicked, as `RowStore.push` takes it."""
    return dict(zip(("counts", "clicks"), marks.T, strict=False))


STOPPED = math.inf
"""The clock of a worker that has stopped: nobody waits for it."""
