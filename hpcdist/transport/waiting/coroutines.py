"""Wait for a work in a coroutine, whose event loop goes on."""

from __future__ import annotations

import time
from typing import Any, TypeVar

from hpcdist.errors import CollectiveTimeout
from hpcdist.transport.flight.call_site import call_site
from hpcdist.transport.waiting.polling import ERRAND_AFTER_S, do_errands

W = TypeVar("W", bound=Any)

ATTEND_EVERY_S = 0.05
"""So often a long wait for works looks whether they can still end."""

_LONGEST_PAUSE_S = 5e-3
_SHARE = 0.05


async def until_ended(work: W) -> W:
    """Return `work` when its operation has ended, or raise what it raised.

    Looks now and then, so that the event loop runs on and no core is kept busy; in between it
    does what every wait does for other ranks ([Note: errands] in `polling`).
    """
    import asyncio  # slow to import, and at hand where a coroutine runs

    began, attend_at = time.monotonic(), ATTEND_EVERY_S
    while not work.is_completed():
        waited = time.monotonic() - began
        if waited >= work.limit_s:
            raise too_late("awaited", work.limit_s, "await")
        if waited >= ERRAND_AFTER_S:
            do_errands(waited)
        if waited >= attend_at:
            attend_at = 2 * waited  # of many works that are awaited, each does this for itself
            work.attend(waited)
        await asyncio.sleep(min(_LONGEST_PAUSE_S, waited * _SHARE))
    work.wait()
    return work


def too_late(which: str, limit: float, wait: str) -> CollectiveTimeout:
    """Return the error of operations that have not ended in time, and go on."""
    return CollectiveTimeout(
        f"{which} operations have not ended within {limit:g} s of {wait}; they go on, and can be "
        f"waited for again. Called at {call_site()}"
    )
