"""Events: anyone may see each operation begin and end, without the operations knowing whom.

Timelines, recorders and counters subscribe here. With no listener an operation pays one test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from hpcdist.named_tuple import NamedTuple

Phase = Literal["begin", "end"]


class Event(NamedTuple):
    """The beginning or the end of an operation; a listener gets exactly one of each.

    The two have the same `id`. On different ranks the events of one collective have the same
    `ranks`, `group_id` and `sequence`.
    """

    phase: Phase
    name: str
    """The operation, for example ``"all_reduce"``."""
    group_id: int
    """`Group.id`; groups that have no rank in common may have the same."""
    nbytes: int
    """Bytes this rank hands in, or receives where it hands in nothing."""
    time_ns: int
    """`time.perf_counter_ns` at the moment of the event."""
    error: BaseException | None = None
    """What the operation raised, on its ``"end"``."""
    id: int = 0
    """A number that no other operation of this process has."""
    sequence: int | None = None
    """The number of a collective in its group, from 1 on, whether anyone listened or not.

    It is the same on all ranks, which issue their collectives in one order. None for messages, and
    for what is issued on the thread of an asynchronous operation: by a listener at its end, for
    example. The place of these among the collectives of the program is left to chance.
    """
    ranks: tuple[int, ...] = ()
    """The world ranks of the group."""
    shape: tuple[int, ...] = ()
    """The shape of this rank's array; of objects, how many there are where ranks compare that."""
    dtype: str | None = None
    """The name of its dtype; None where there is no array."""
    peer: int | None = None
    """The world rank of the root, or at the other end of a message; None: there is none, or any."""
    call_site: str = ""
    """The line of the program that called the operation, as ``file:line``."""


Listener = Callable[[Event], None]

listeners: list[Listener] = []
"""The current listeners; use `subscribe`."""


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call `listener(event)` when an operation of this process begins and ends.

    Local. The listener runs on the thread of the operation and must be quick. Asynchronous
    operations end on their own thread. It may communicate where the listeners of all ranks
    do, except at the end of a message; what it issues itself it does not hear of. If it fails when
    a collective is about to begin, that is called off on all ranks. Where others listen, too, they
    hear of the operation all the same.

    Args:
        listener: called with each `Event` of this process.

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
