"""`dispatch`: the only place that hands calls down to a transport and tells the listeners."""

from __future__ import annotations

import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcdist.comm.group import Group
from hpcdist.comm.session import here, resolve_group, simulated_rank, standing_for
from hpcdist.comm.tensor_lists import cannot
from hpcdist.errors import NotInGroupWarning, UsageError
from hpcdist.events import Event, Listener, Phase, listeners
from hpcdist.transport.base import DONE, Transport, Work
from hpcdist.transport.call import MESSAGES, Call, Kind, Message, locate
from hpcdist.transport.call_site import outer_frame

Describe = Callable[..., Call]


def dispatch(group: Group | None, sync_op: bool, describe: Describe, *args: Any) -> Work:
    """Describe the call, then run or start it; a non-member is warned and nothing happens."""
    if sync_op is not True:  # the hot path asks nothing more
        sync_op = as_flag(sync_op, "sync_op")
    session = here.session
    group = session.world if group is None and session is not None else resolve_group(group)
    transport = group.transport
    if transport is None:
        return not_a_member(group)
    call = described(group, describe, *args)
    if listeners:
        call = _announce(group, call)
    if not sync_op:
        return transport.start(call)
    ended = transport.run(call)
    return ended if type(call) in MESSAGES or call.device is not None else DONE


def as_flag(value: Any, what: str) -> bool:
    """Return `value` if it is a bool, Python's or NumPy's; anything else is misplaced."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise UsageError(
        f"{what} must be True or False, got {value!r}; give what follows the group by keyword "
        "(sync_op=, tag=, in_split_sizes=), because its order differs between libraries"
    )


class BatchEntry(NamedTuple):
    """One message of a batch: its group, and how it is described."""

    group: Group | None
    describe: Describe
    args: tuple[Any, ...]


def dispatch_batch(messages: Sequence[BatchEntry]) -> list[Work]:
    """Describe all messages, then start those of each group together; return a work for each."""
    works: dict[int, Work] = {}
    own: list[tuple[int, Group, Transport, Call]] = []
    for place, (given, describe, args) in enumerate(messages):
        group = resolve_group(given)
        if group.transport is None:
            works[place] = not_a_member(group)
        else:
            own.append((place, group, group.transport, described(group, describe, *args)))
    calls: defaultdict[Transport, dict[int, Any]] = defaultdict(dict)
    for place, group, transport, call in own:
        calls[transport][place] = _announce(group, call) if listeners else call
    for transport, of_group in calls.items():
        begun = transport.start_batch(list(of_group.values()))
        works.update(zip(of_group, begun, strict=True))
    return [works[place] for place in range(len(messages))]


def described(group: Group, describe: Describe, *args: Any) -> Call:
    """Describe a call and note where its arrays are."""
    try:
        call = describe(group, *args)
    except MemoryError as error:  # no room to pack an array: the others must hear of it
        reason = UsageError(f"there is no memory to pack an array that is not contiguous: {error}")
        return cannot(Kind.BARRIER, group, reason)
    if type(call) is Message:  # whose `send` and `recv` take longer
        if type(call.data) is np.ndarray:
            return call
    elif type(call.recv) in _ON_HOST and type(call.send) in _ON_HOST:
        return call
    try:
        return locate(call)
    except UsageError as error:
        return cannot(call.kind, group, error, call.root)


_ON_HOST = (np.ndarray, type(None))


def not_a_member(group: Group) -> Work:
    """Warn (once per call site, by Python's default filter) and return a completed work."""
    warnings.warn(
        f"Current global rank {group.world_rank} is not in group {group.name} (ranks "
        f"{group.ranks}); nothing was done",
        NotInGroupWarning,
        stacklevel=outer_frame()[1],
    )
    return DONE


class _Telling(threading.local):
    """What this thread is telling, from inside out."""

    to: tuple[Listener, ...] = ()
    message: str = ""


_telling = _Telling()


def _announce(group: Group, call: Call) -> Call:
    """Tell the listeners that `call` begins, and arrange that they hear of its end.

    Not the listener that issues it: it would hear of itself without end.
    """
    name = call.kind.name.lower()
    if _telling.message:
        raise UsageError(
            f"{name} was called by a listener that was being told the end of a "
            f"{_telling.message}, which holds up all messages of the group: note it there, and "
            "communicate after the message"
        )
    hearers = [listener for listener in listeners if listener not in _telling.to]
    rank, nbytes = simulated_rank(), call.nbytes

    def tell(phase: Phase, error: BaseException | None = None) -> None:
        event = Event(phase, name, group.id, nbytes, time.perf_counter_ns(), error)
        before = _telling.to, _telling.message
        if phase == "end" and type(call) in MESSAGES:
            _telling.message = name
        try:
            for listener in hearers:
                if listener in listeners:
                    _telling.to = (*before[0], listener)
                    with standing_for(rank):
                        listener(event)
        finally:
            _telling.to, _telling.message = before

    def ended(error: BaseException | None) -> None:
        tell("end", error)
        if call.ended is not None:
            call.ended(error)

    try:
        tell("begin")
    except Exception as error:
        if type(call) in MESSAGES:
            raise
        failed = UsageError(f"a listener failed when {name} was about to begin: {error!r}")
        failed.__cause__ = error
        return cannot(call.kind, group, failed, call.root)
    return call._replace(ended=ended)
