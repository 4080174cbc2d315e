"""`ProgressThread`: lets messages proceed while the caller computes."""

from __future__ import annotations

import queue
import threading
import time
from typing import final

from mpi4py import MPI

from hpcdist.transport.mpi.early import keep_for_ever
from hpcdist.transport.waiting.work import Work

_IDLE_S = 1e-3
_GOODBYE_S = 1.0


@final
class ProgressThread:
    """That of one group; it starts when the first work comes. The list of works is under `lock`."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._busy: list[Work] = []
        self._thread: threading.Thread | None = None
        # an event has a lock that an interrupt of the one who sets it can keep for ever
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._may_run = MPI.Query_thread() >= MPI.THREAD_MULTIPLE

    def keep(self, work: Work) -> None:
        """Keep a work until it has ended, and let it proceed where there may be a thread for it."""
        with self._lock:
            if any(work is each for each in self._busy):
                return
            self._busy.append(work)
            # an interrupt may have kept it from starting
            if self._may_run and not (self._thread and self._thread.is_alive()):
                self._thread = threading.Thread(
                    target=self._move, name="hpcdist-messages", daemon=True
                )
                self._thread.start()
        self._woken.put(None)

    def stop(self) -> list[Work]:
        """End the thread, leave its works to MPI, which may use their memory, and return them."""
        thread, self._thread = self._thread, None
        with self._lock:
            left = [work for work in self._busy if not _ended(work)]
            keep_for_ever(left)
            self._busy.clear()
        if thread is not None and thread.is_alive():
            self._woken.put(None)
            thread.join(_GOODBYE_S)
        return left

    def _move(self) -> None:
        while self._thread is threading.current_thread():
            self._woken.get()
            while self._busy:
                time.sleep(_IDLE_S)
                ended = {id(work) for work in tuple(self._busy) if _ended(work)}
                with self._lock:
                    self._busy = [work for work in self._busy if id(work) not in ended]


def _ended(work: Work) -> bool:
    try:
        return work.is_completed()
    except Exception:
        return True  # its owner gets the exception from wait()
