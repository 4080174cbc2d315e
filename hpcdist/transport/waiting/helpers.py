"""`Helpers`: threads that do a part of an operation which no signal handler may interrupt."""

from __future__ import annotations

import _thread
import queue
from collections.abc import Callable
from typing import final

Job = Callable[[], None]


@final
class Helpers:
    """As many threads as there are jobs at a time; they stay, as making one takes 50 us."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._idle: list[None] = []

    def run(self, job: Job) -> None:
        """Have a thread run `job`, which raises nothing. An interrupted caller may ask again."""
        try:
            self._idle.pop()
        except IndexError:
            _thread.start_new_thread(self._serve, (job,))
        else:
            self._jobs.put(job)

    def _serve(self, job: Job) -> None:
        while True:
            job()
            del job  # what it holds is the caller's again
            self._idle.append(None)
            job = self._jobs.get()


HELPERS = Helpers()
"""Of this process."""
