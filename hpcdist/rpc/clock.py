"""`Clock`: gives up what has a time limit when nobody waits for it."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, final

Task = Callable[[], Any]


@final
class Clock:
    """Runs tasks at their times (`time.monotonic`), on one thread, which ends when none is left."""

    def __init__(self, spawn: Callable[[Task], Any]) -> None:
        self._spawn = spawn
        self._due: list[tuple[float, int, Task]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._ticking = False

    def at(self, when: float, task: Task) -> None:
        """Run `task` at a time; it must be quick."""
        with self._changed:
            heapq.heappush(self._due, (when, next(self._order), task))
            if self._ticking:
                if self._due[0][0] == when:
                    self._changed.notify()
                return
            self._ticking = True
        self._spawn(self._tick)

    def stop(self) -> None:
        """Forget what is due."""
        with self._changed:
            self._due.clear()
            self._changed.notify()

    def _tick(self) -> None:
        while (task := self._next()) is not None:
            task()

    def _next(self) -> Task | None:
        """Wait for the next task; None when there is none."""
        with self._changed:
            while self._due:
                left = self._due[0][0] - time.monotonic()
                if left <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            self._ticking = False
            return None
