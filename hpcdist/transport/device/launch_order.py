"""`LaunchOrder`: device operations of all groups are put on the device in the order of their issue.

Groups have queues of their own, and their threads would put operations of two groups on one device
now in this order and now in that. Two NCCL kernels that wait for their peers in different orders
on different ranks can dead-lock.

[Note: turns] An operation takes its turn when it is issued, on the thread of its caller, and puts
itself on the device only when all earlier turns are over. So the order is that of the program,
which is the same on all ranks, and not that in which the threads of the groups come to run. Turns
that are taken must be released, even by operations that fail: the later ones wait for them. An
interrupt may come between the two, so a thread's next turn releases the one before, unless that has
been handed over to the thread of a group.
"""

from __future__ import annotations

import threading
from itertools import count
from typing import Any, final

from hpcdist.transport.waiting.queue import refusal


@final
class LaunchOrder:
    """A queue of numbered turns; one instance per process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._numbers = count()
        self._now = 0
        self._passed: set[int] = set()
        self._taken: dict[int, int] = {}
        """The last turn of each thread."""
        self.holder: int | None = None
        """The thread whose turn it is."""

    def take(self) -> int:
        """Return the number of the next turn; whoever takes one must `turn` or `release`.

        Raises:
            UsageError: this thread is in the middle of a turn, after which the next would come.

        """
        thread = threading.get_ident()
        if self.holder == thread:
            raise refusal()
        self.release(self._taken.get(thread, -1))
        self._taken.update(zip((thread,), self._numbers, strict=False))  # drawn and noted at once
        return self._taken[thread]

    def hand_over(self) -> None:
        """Note that another thread releases the last turn of this one."""
        self._taken.pop(threading.get_ident(), None)

    def turn(self, number: int) -> Turn:
        """Return a block that waits until all earlier turns are over, and ends this one."""
        return Turn(self, number)

    def begin(self, number: int) -> None:
        """Wait until all earlier turns are over."""
        if self._now < number:
            with self._changed:
                self._changed.wait_for(lambda: self._now >= number)

    def release(self, number: int) -> None:
        """End the turn, now or when it comes."""
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

    __slots__ = ("_number", "_order")

    def __init__(self, order: LaunchOrder, number: int) -> None:
        self._order, self._number = order, number

    def __enter__(self) -> None:
        self._order.begin(self._number)
        self._order.holder = threading.get_ident()

    def __exit__(self, *_: Any) -> None:
        self._order.holder = None
        self._order.release(self._number)


LAUNCH_ORDER = LaunchOrder()
"""Of this process: its device operations, whatever their groups."""
