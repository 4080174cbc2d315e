"""Events: anyone may see each operation begin and end, without the operations knowing whom.

Timelines, recorders and counters subscribe here. With no listener an operation pays one test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

Phase = Literal["begin", "end"]


class Event(NamedTuple):
    """What a listener gets, twice per operation."""

    phase: Phase
    name: str
    """The operation, for example ``"all_reduce"``."""
    group_id: int
    nbytes: int
    """Bytes this rank hands in, or receives where it hands in nothing."""
    time_ns: int
    """`time.perf_counter_ns` at the moment of the event."""
    error: BaseException | None = None
    """What the operation raised, on its ``"end"``."""


Listener = Callable[[Event], None]

listeners: list[Listener] = []
"""The current listeners; use `subscribe`."""


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call `listener(event)` when an operation of this process begins and ends.

    Local. The listener runs on the thread of the operation and must be quick. Asynchronous
    operations end on their own thread. It may communicate where the listeners of all ranks
    do, except at the end of a message; what it issues itself it does not hear of. If it fails when
    a collective is about to begin, that is called off on all ranks.

    Returns:
        A function that ends the subscription.

    Example:
        >>> import hpcdist as dist
        >>> seen = []
        >>> stop = dist.subscribe(seen.append)
        >>> stop()

    """
    listeners.append(listener)

    def unsubscribe() -> None:
        if listener in listeners:
            listeners.remove(listener)

    return unsubscribe
