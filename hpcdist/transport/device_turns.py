"""`Turns`: device operations of all groups are put on the device in the order of their issue.

Groups have queues of their own, and their threads would put operations of two groups on one device
now in this order and now in that. Two NCCL kernels that wait for their peers in different orders
on different ranks can dead-lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final


@final
class Turns:
    """A queue of numbered turns; one instance per process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken = 0
        self._now = 0
        self._passed: set[int] = set()

    def take(self) -> int:
        """Return the number of the next turn; whoever takes one must `turn` or `give_up`."""
        with self._changed:
            self._taken += 1
            return self._taken - 1

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Wait until all earlier turns are over; the turn is over at the end of the block."""
        with self._changed:
            self._changed.wait_for(lambda: self._now == number)
        try:
            yield
        finally:
            self.give_up(number)

    def give_up(self, number: int) -> None:
        """Let the turn be over, now or when it comes."""
        with self._changed:
            if number < self._now:
                return
            self._passed.add(number)
            while self._now in self._passed:
                self._passed.remove(self._now)
                self._now += 1
            self._changed.notify_all()
