"""`dispatch`: the only place that hands calls down to a transport and tells the listeners."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from hpcdist.comm.announcement import Announcement
from hpcdist.comm.members import Members
from hpcdist.comm.session import here, resolve_group
from hpcdist.comm.tensor_lists import cannot
from hpcdist.errors import NotInGroupWarning, UsageError
from hpcdist.events import listeners
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.call import MESSAGES, Call, Message, ObjectMessage, locate
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.flight.call_site import issued, outer_frame
from hpcdist.transport.flight.recorder import STARTED, begin, end, fail
from hpcdist.transport.waiting.work import DONE, Work

Describe = Callable[..., Call]


def dispatch(group: Members | None, sync_op: bool, describe: Describe, *args: Any) -> Work:
    """Describe the call, then run or start it; a non-member is warned and nothing happens."""
    if sync_op is not True and type(sync_op) is not bool:  # the hot path asks nothing more
        sync_op, describe = _with_flag(sync_op, describe)
    session = here.session
    group = session.world if group is None and session is not None else resolve_group(group)
    transport = group.transport
    if transport is None:
        return not_a_member(group)
    call = described(group, describe, *args)
    number, is_message = None, type(call) is Message or type(call) is ObjectMessage
    if not is_message and issued.at is None:  # else its place in the order is left to chance
        group.issued = number = group.issued + 1 + missed(transport)
    mark = begin(call, group.flight, number, 0 if sync_op else STARTED)
    try:
        if listeners:
            runs = sync_op and call.device is None
            with Announcement(group, call, number, runs=runs) as told:
                ended = transport.run(told) if sync_op else transport.start(told)
        else:
            ended = transport.run(call) if sync_op else transport.start(call)
    except BaseException as error:
        fail(mark)
        if number is not None and is_refused(error):
            group.issued -= 1  # the other ranks know nothing of this call
        raise
    if sync_op:
        end(mark)
    else:
        _hand_over(ended, mark, call)
    return ended if is_message or not sync_op or call.device is not None else DONE


def _with_flag(sync_op: Any, describe: Describe) -> tuple[bool, Describe]:
    """Return the flag; where it is none, the other ranks of a collective hear of that."""
    try:
        return as_flag(sync_op, "sync_op"), describe
    except UsageError as error:
        reason = error

    def refusing(group: Members, *args: Any) -> Call:
        call = describe(group, *args)
        if isinstance(call, MESSAGES):  # of which nobody hears before it is sent
            raise reason
        return cannot(call.kind, group, reason, call.root)

    return True, refusing


def missed(transport: Any) -> int:
    """Return how many operations only other ranks have begun, and count them from now on."""
    tally = getattr(transport, "hot", None)
    if tally is None or not tally.missed:
        return 0
    count: int = tally.missed
    tally.missed = 0
    return count


def _hand_over(work: Work, mark: int, call: Call) -> None:
    """Let a work know its record, and that `call` has somebody who hears of its end."""
    if mark:
        work.recorded(mark)
    if call.ended is not None:
        work.detach()


def decline(group: Members, kind: Kind, error: UsageError, *, sync_op: bool = True) -> Work:
    """Raise `error` in place of an operation, and `RemoteError` on the ranks that are in it."""
    return dispatch(group, sync_op, lambda group: cannot(kind, group, error))


def is_refused(error: BaseException) -> bool:
    """Return whether a call ended with `error` because it was nested, before it began."""
    return isinstance(error, UsageError) and error.nested and not (error.held or error.inside)


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

    group: Members | None
    describe: Describe
    args: tuple[Any, ...]


def dispatch_batch(messages: Sequence[BatchEntry]) -> list[Work]:
    """Describe all messages, then start those of each group together; return a work for each."""
    works: dict[int, Work] = {}
    calls: defaultdict[Members, dict[int, Call]] = defaultdict(dict)
    for place, (given, describe, args) in enumerate(messages):
        group = resolve_group(given)
        if group.transport is None:
            works[place] = not_a_member(group)
        else:
            calls[group][place] = described(group, describe, *args)
    for group, of_group in calls.items():
        works.update(zip(of_group, _start_batch(group, [*of_group.values()]), strict=True))
    return [works[place] for place in range(len(messages))]


def _start_batch(group: Members, given: Sequence[Any]) -> list[Work]:
    assert group.transport is not None
    calls = given
    with ExitStack() as stack:
        if listeners:
            calls = [stack.enter_context(Announcement(group, call, None)) for call in calls]
        marks = [begin(call, group.flight, None, STARTED) for call in calls]
        try:
            works = group.transport.start_batch(calls)
        except BaseException:
            for mark in marks:
                fail(mark)
            raise
        for each in zip(works, marks, given, strict=True):
            _hand_over(*each)
        return works


def described(group: Members, describe: Describe, *args: Any) -> Call:
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


def not_a_member(group: Members) -> Work:
    """Warn (once per call site, by Python's default filter) and return a completed work."""
    warnings.warn(
        f"Current global rank {group.world_rank} is not in group {group.name} (ranks "
        f"{group.ranks}); nothing was done",
        NotInGroupWarning,
        stacklevel=outer_frame()[1],
    )
    return DONE
