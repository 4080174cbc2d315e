"""`Announcement`: what listeners hear of one operation: its begin and, exactly once, its end."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any, final

from hpcdist.comm.members import Members
from hpcdist.comm.session import simulated_rank, standing_for
from hpcdist.comm.tensor_lists import cannot
from hpcdist.errors import UsageError
from hpcdist.events import Event, Listener, listeners
from hpcdist.transport.call.call import ANY_SOURCE, MESSAGES, Call, name_of
from hpcdist.transport.call.kinds import ROOTED
from hpcdist.transport.flight.call_site import call_site


class _Telling(threading.local):
    """What this thread is telling, from inside out."""

    to: tuple[Listener, ...] = ()
    message: str = ""


_telling = _Telling()
event_ids = itertools.count(1)
"""What `Event.id` is taken from."""
_HERE = nullcontext()


@final
class Announcement:
    """The begin and the end of `call`, the collective number `sequence` of `group`, or a message.

    A block in which the call is handed to the transport, ``with Announcement(...) as call:``. The
    operation begins with the block. It ends with the block if that `runs` it, or raises; else when
    the transport tells its end. Not told is the listener that issues it: it would hear of itself
    without end.
    """

    __slots__ = ("_begin", "_call", "_group", "_hearers", "_rank", "_runs")

    def __init__(
        self, group: Members, call: Call, sequence: int | None, *, runs: bool = False
    ) -> None:
        name, root = name_of(call), call.root
        if _telling.message:
            if sequence is not None:
                group.issued -= 1  # nothing is issued
            raise UsageError(
                f"{name} was called by a listener that was being told of the end of a "
                f"{_telling.message}, which holds up all messages of the group: note it there, and "
                "communicate after the message"
            )
        has_peer = isinstance(call, MESSAGES) or call.kind in ROOTED
        self._group, self._call, self._runs = group, call, runs
        self._hearers = hearers()
        self._rank = simulated_rank()
        self._begin = Event(
            "begin",
            name,
            group.id,
            call.nbytes,
            time.perf_counter_ns(),
            None,
            next(event_ids),
            sequence,
            tuple(group.ranks),
            _own_shape(call, group),
            None if call.dtype is None else call.dtype.name,
            group.ranks[root] if has_peer and root != ANY_SOURCE else None,
            call_site(),
        )

    def __enter__(self) -> Call:
        """Announce the beginning; return the call to hand down, or one called off by a listener."""
        call = self._call
        self._group.announced[self._begin.id] = self.end
        failure = self._tell(self._begin)
        if failure is not None:
            if isinstance(call, MESSAGES) or not isinstance(failure, Exception):
                self.end(failure)
                raise failure
            name = self._begin.name
            reason = UsageError(f"a listener failed when {name} was about to begin: {failure!r}")
            reason.__cause__ = failure
            call = cannot(call.kind, self._group, reason, call.root)
        return call if self._runs else call._replace(ended=self._ended)

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        """Announce the end of a call that has ended, or has not reached the transport."""
        if self._runs or error is not None:
            self.end(error)

    def end(self, error: BaseException | None) -> None:
        """Announce the end once; raise what a listener raises, unless the operation failed."""
        if self._group.announced.pop(self._begin.id, None) is None:
            return
        now = time.perf_counter_ns()
        failure = self._tell(self._begin._replace(phase="end", time_ns=now, error=error))
        if failure is not None and error is None:
            raise failure

    def _ended(self, error: BaseException | None) -> None:
        """Note that the operation has ended: the `ended` of its call."""
        try:
            self.end(error)
        finally:
            if self._call.ended is not None:
                self._call.ended(error)

    def _tell(self, event: Event) -> BaseException | None:
        holding = event.phase == "end" and isinstance(self._call, MESSAGES)
        return tell(event, self._hearers, self._rank, event.name if holding else "")


def hearers() -> list[Listener]:
    """Return the listeners for an operation that begins now: not those that are being called."""
    return [listener for listener in listeners if listener not in _telling.to]


def tell(
    event: Event, hearers: Sequence[Listener], rank: dict[str, Any], message: str = ""
) -> BaseException | None:
    """Call all hearers that still listen; return the first exception of one of them.

    Args:
        event: what is told.
        hearers: who is told.
        rank: the `simulated_rank` that the event is of.
        message: the message whose end this is, which holds up the others of its group.

    """
    failure: BaseException | None = None
    before = _telling.to, _telling.message
    if message:
        _telling.message = message
    try:
        for listener in hearers:
            if listener in listeners:
                _telling.to = (*before[0], listener)
                try:
                    with standing_for(rank) if rank else _HERE:
                        listener(event)
                except BaseException as error:
                    failure = failure or error
    finally:
        _telling.to, _telling.message = before
    return failure


def _own_shape(call: Call, group: Members) -> tuple[int, ...]:
    """Return the shape of this rank's array; an uneven reduce_scatter has those of all blocks."""
    shape = call.shape
    return shape[group.rank] if shape and isinstance(shape[0], tuple) else shape


def end_all(group: Members) -> None:
    """Announce the end of all operations still under way in a group that is closed."""
    for end in tuple(group.announced.values()):
        end(UsageError(f"group {group.name} was closed before this operation had ended"))
