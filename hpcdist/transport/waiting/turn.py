"""`Turn`: the right of one operation of a group to run, and who is in the middle of one.

`take(False)` takes it for this thread if it is free, and says so; `give_back()` ends that. Both are
compiled, here too, so that a signal handler finds the turn either taken, and by whom, or free; see
[Note: given back] in `polling`. A thread that is inside has it, and does not ask for it again.

The thread of a group waits for the turn: `serve(job)`. Only what `call(job, *args)` runs counts as
the middle of an operation there: a listener, told by the same thread, may use the group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hpcdist.compiled import load

_OwnedLock: Any = type(threading.RLock())


class PythonTurn(_OwnedLock):  # type: ignore[misc]
    """What `shm/native/turn.c` is, made of the lock that knows its owner."""

    take = _OwnedLock.acquire
    give_back = _OwnedLock.release
    _is_served = False
    """Whether its owner is outside of any operation."""

    def serve(self, job: Callable[[], Any]) -> None:
        """Wait for the turn and run `job` in it; on a thread that runs no signal handlers."""
        self.acquire()
        self._is_served = True
        try:
            job()
        finally:
            self._is_served = False
            self.release()

    def call(self, job: Callable[..., Any], *args: Any) -> Any:
        """Return ``job(*args)``, which is a part of the operation that has the turn."""
        before, self._is_served = self._is_served, False
        try:
            return job(*args)
        finally:
            self._is_served = before

    def is_inside(self) -> bool:
        """Return whether this thread is in the middle of an operation."""
        return self._is_owned() and not self._is_served


_compiled = load("hpcdist.transport._kernel")
Turn: Any = PythonTurn if _compiled is None else _compiled.Turn
