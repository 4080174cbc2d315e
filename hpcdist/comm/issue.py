"""`issue`: the only place that hands calls down to a transport and tells the listeners."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

from hpcdist.comm.group import Group
from hpcdist.comm.session import group_at_hand, here
from hpcdist.errors import NotInGroupWarning
from hpcdist.events import Event, Phase, listeners
from hpcdist.transport.base import DONE, Work
from hpcdist.transport.call import MESSAGES, Call
from hpcdist.transport.call_site import outer_frame

Describe = Callable[..., Call]


def issue(group: Group | None, sync_op: bool, describe: Describe, *args: Any) -> Work:
    """Describe the call, then run or start it; a non-member is warned and nothing happens."""
    session = here.session
    group = session.world if group is None and session is not None else group_at_hand(group)
    transport = group.transport
    if transport is None:
        return not_a_member(group)
    call = describe(group, *args)
    if listeners:
        call = _announce(group, call)
    if not sync_op:
        return transport.start(call)
    ended = transport.run(call)
    return ended if call.kind >= MESSAGES else DONE


def not_a_member(group: Group) -> Work:
    """Warn (once per call site, by Python's default filter) and return a completed work."""
    warnings.warn(
        f"Current global rank {group.world_rank} is not in group {group.name} (ranks "
        f"{group.ranks}); nothing was done",
        NotInGroupWarning,
        stacklevel=outer_frame()[1],
    )
    return DONE


def _announce(group: Group, call: Call) -> Call:
    """Tell the listeners that `call` begins, and arrange that they hear of its end."""
    data = call.send if call.send is not None else call.recv
    nbytes = data.nbytes if data is not None else sum(each.nbytes for each in call.parcels)
    name = call.kind.name.lower()

    def tell(phase: Phase, error: BaseException | None = None) -> None:
        event = Event(phase, name, group.id, nbytes, time.perf_counter_ns(), error)
        for listener in tuple(listeners):
            listener(event)

    def ended(error: BaseException | None) -> None:
        tell("end", error)
        if call.ended is not None:
            call.ended(error)

    tell("begin")
    return call._replace(ended=ended)
