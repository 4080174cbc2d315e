"""`LaunchOrder`: device operations of all groups are put on the device in the order of their issue.

Groups have queues of their own, and their threads would put operations of two groups on one device
now in this order and now in that. Two NCCL kernels that wait for their peers in different orders
on different ranks can dead-lock.
"""

from __future__ import annotations

import threading
from itertools import count
from typing import Any, final

from hpcdist.transport.queue import refusal


@final
class LaunchOrder:
    """A queue of numbered turns; one instance per process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._numbers = count()
        self._now = 0
        self._passed: set[int] = set()
        self.holder: int | None = None
        """The thread whose turn it is."""

    def take(self) -> int:
        """Return the number of the next turn; whoever takes one must `turn` or `give_up`.

        Raises:
            UsageError: this thread is in the middle of a turn, after which the next would come.

        """
        if self.holder == threading.get_ident():
            raise refusal()
        return next(self._numbers)

    def turn(self, number: int) -> Turn:
        """Return a block that waits until all earlier turns are over, and ends this one."""
        return Turn(self, number)

    def begin(self, number: int) -> None:
        """Wait until all earlier turns are over."""
        if self._now != number:
            with self._changed:
                self._changed.wait_for(lambda: self._now == number)

    def give_up(self, number: int) -> None:
        """Let the turn be over, now or when it comes."""
        with self._lock:
            if number < self._now:
                return
            self._passed.add(number)
            while self._now in self._passed:
                self._passed.remove(self._now)
                self._now += 1
            self._changed.notify_all()


@final
class Turn:
    """One turn, for a ``with`` statement."""

    __slots__ = ("_number", "_turns")

    def __init__(self, turns: LaunchOrder, number: int) -> None:
        self._turns, self._number = turns, number

    def __enter__(self) -> None:
        self._turns.begin(self._number)
        self._turns.holder = threading.get_ident()

    def __exit__(self, *_: Any) -> None:
        self._turns.holder = None
        self._turns.give_up(self._number)
