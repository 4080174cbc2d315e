"""`Telling`: what listeners hear of a call of a function: its begin and its end."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, final

from hpcdist.comm.announcement import event_ids, hearers, tell
from hpcdist.comm.session import simulated_rank
from hpcdist.events import Event
from hpcdist.rpc.future import refusing
from hpcdist.transport.flight.call_site import call_site


@final
class Telling:
    """The events of one call; a block, or what a `Future` tells its end."""

    __slots__ = ("_begin", "_hearers", "_rank")

    def __init__(self, name: str, group: Any, nbytes: int, peer: int) -> None:
        self._hearers, self._rank = hearers(), simulated_rank()
        self._begin = Event(
            "begin",
            name,
            group.id,
            nbytes,
            time.perf_counter_ns(),
            id=next(event_ids),
            ranks=tuple(group.ranks),
            peer=peer,
            call_site=call_site(),
        )

    def begin(self) -> Telling:
        """Announce the beginning; raise what a listener raises, which calls it off."""
        failure = tell(self._begin, self._hearers, self._rank)
        if failure is not None:
            self.end(failure)
            raise failure
        return self

    def end(self, error: BaseException | None) -> BaseException | None:
        """Announce the end; return what a listener raises."""
        event = self._begin._replace(phase="end", time_ns=time.perf_counter_ns(), error=error)
        with refusing("a listener that is told the end of a call"):
            return tell(event, self._hearers, self._rank)

    def __enter__(self) -> Telling:
        """Announce the beginning."""
        return self.begin()

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        """Announce the end; raise what a listener raises, unless the call itself failed."""
        failure = self.end(error)
        if failure is not None and error is None:
            raise failure
