"""`Deaths`: which ranks of the world have died, as this process knows; no module here knows MPI.

There is one for all groups of a world. A group that meets a failure asks it who has died, and says
so in a `RankFailure`; whoever finds a dead process by other means notes it here. `can_ask` looks
into MPI, which learns of a death after 10 to 150 ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import final
from weakref import WeakSet

from hpcdist.errors import RankFailure
from hpcdist.runtime.survival import can_recover
from hpcdist.transport.flight.call_site import call_site
from hpcdist.transport.presence.membership import Membership

_PATIENCE_S = 0.25
"""How long a rank that is told of no death waits for the name of the dead."""
_PAUSE_S = 2e-3


def _nobody() -> Iterable[int]:
    return ()


@final
class Deaths:
    """Those of one world; `ask` returns the world ranks that MPI holds for dead, at once."""

    def __init__(self, ask: Callable[[], Iterable[int]] = _nobody) -> None:
        self._ask = [ask]
        self._noted: set[int] = set()
        self._memberships: WeakSet[Membership] = WeakSet()
        self._waited = False

    def __repr__(self) -> str:
        return f"<Deaths: ranks {sorted(self._noted)}>"

    def concern(self, membership: Membership) -> None:
        """Note in `membership`, too, who has died."""
        self._memberships.add(membership)

    def note(self, ranks: Iterable[int]) -> None:
        """Note that world ranks have died."""
        new = set(ranks) - self._noted
        if not new:
            return
        self._noted |= new
        for membership in tuple(self._memberships):
            for rank in sorted(new.intersection(membership.members)):
                membership.note(rank, "died")

    def ask_too(self, ask: Callable[[], Iterable[int]]) -> None:
        """Find out from `ask`, too, who has died: it returns world ranks, at once."""
        self._ask.append(ask)

    def known(self) -> tuple[int, ...]:
        """Return who has died, as far as MPI or this process knows by now."""
        for ask in self._ask:
            self.note(ask())
        return tuple(sorted(self._noted))

    def awaited(self, patience_s: float) -> tuple[int, ...]:
        """Return who has died, and wait so many seconds for the first that is known of."""
        until = time.monotonic() + patience_s
        while not (ranks := self.known()) and time.monotonic() < until:
            time.sleep(_PAUSE_S)
        return ranks

    def found(self) -> tuple[int, ...]:
        """Return who has died, and wait a moment, once, for the name if there is none."""
        ranks = self.awaited(0.0 if self._waited else _PATIENCE_S)
        self._waited = True
        return ranks

    def failure(self, what: str) -> RankFailure:
        """Return what is raised in the operation `what`, which a death has ended."""
        return rank_failure(self.found(), what)


def rank_failure(ranks: tuple[int, ...], what: str) -> RankFailure:
    """Return the error of the operation `what`, during which `ranks` of the world have died."""
    plural = "s" if len(ranks) > 1 else ""
    who = f"rank{plural} {', '.join(map(str, ranks))} died"
    if not ranks:
        who = "another rank has died, or has given up the operation because of that"
    remedy = "look for the last words of that rank above, and end the job"
    if can_recover():
        remedy = "call dist.recover() on all ranks that are left"
    return RankFailure(f"{who} during {what}, called at {call_site()}; {remedy}", ranks)
