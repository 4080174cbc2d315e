"""The watchdog: a rank that has waited for long says once who waits for whom.

It has no thread: whoever waits does errands ([Note: errands] in `polling`), and this is one. On
each node the lowest of the ranks that wait speaks for all of them.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, final

from hpcdist.transport.flight import recorder
from hpcdist.transport.flight.neighbours import explanation
from hpcdist.transport.waiting import activity
from hpcdist.transport.waiting.polling import add_errand

if TYPE_CHECKING:
    from hpcdist.transport.flight.analysis import Explanation, Stand

_AGAIN_S = 5.0
"""So long after a look that led to nothing comes the next one."""


@final
class Watchdog:
    """That of this process; `limit_s` is the wait after which it speaks, None for never."""

    def __init__(self) -> None:
        self.limit_s: float | None = None
        self._look_at = 0.0
        self._told: object = None

    def attend(self, waited_s: float) -> None:
        """Speak if a wait of this rank has become long, and nobody else is to."""
        if self.limit_s is None or waited_s < self.limit_s or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _AGAIN_S
        found, own = explanation(), recorder.rank()
        key, words = _what_to_say(found, own, self.limit_s)
        if words and key != self._told:
            self._told = key
            sys.stderr.write(f"[rank {own}] {words}\n")
            sys.stderr.flush()


def _what_to_say(found: Explanation | None, own: int, limit_s: float) -> tuple[object, str]:
    """Return what tells a wait apart from others, and what this rank is to say of it."""
    if found is None or own not in found.stands:
        return activity.told().partition(", for ")[0], f"hpcdist has waited long: {activity.told()}"
    now_ns = time.time_ns()
    waiting = [rank for rank, each in found.stands.items() if _waited_s(each, now_ns) >= limit_s]
    if not waiting or own != min(waiting) or not found.verdict:
        return None, ""
    stand = found.stands[own]
    key = stand.inside.number if stand.inside is not None else stand.wait
    long = f"{_waited_s(stand, now_ns):.0f} s"
    return key, f"hpcdist has waited for {long}: " + "; ".join(found.verdict)


def _waited_s(stand: Stand, now_ns: int) -> float:
    """Return for how many seconds a rank waits; 0 if it does not."""
    since = [stand.inside.begin_ns] if stand.inside is not None else []
    since += [stand.wait.since_ns] if stand.wait is not None else []
    return (now_ns - min(since)) / 1e9 if since and stand.subject.condition == "running" else 0.0


watchdog = Watchdog()


def watch(limit_s: float | None) -> None:
    """Have this rank speak after `limit_s` seconds of waiting; None: never."""
    if watchdog.limit_s is None and limit_s is not None:
        add_errand(watchdog.attend)
    if limit_s is not None:
        watchdog.limit_s = limit_s
