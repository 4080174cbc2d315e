"""Alarms: what a signal handler of the program raises, an `Exception` maybe, wherever that falls.

Code that calls back into the program, and makes a `UsageError` of whatever that raises, must not
make one of an alarm: the program waits for its own exception.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FrameType
from typing import Any

from hpcdist.comm.dispatch import decline
from hpcdist.comm.members import Members
from hpcdist.errors import UsageError, add_note
from hpcdist.transport.call.kinds import Kind


def is_alarm(error: BaseException) -> bool:
    """Return whether a signal handler raised `error`: it alone is given a frame, see `signal`."""
    trace = error.__traceback__
    while trace is not None:
        if any(isinstance(each, FrameType) for each in _arguments(trace.tb_frame)):
            return True
        trace = trace.tb_next
    return False


def raise_alarm(group: Members, kind: Kind, error: UsageError) -> None:
    """Where `error` comes of an alarm, raise that; the other ranks get `RemoteError` for `error`.

    Args:
        group: the ranks that wait in the operation.
        kind: of the operation.
        error: why this rank cannot take part.

    """
    alarm = error.__cause__
    if alarm is None or not is_alarm(alarm):
        return
    try:
        decline(group, kind, error)
    except Exception as failure:
        if failure.__cause__ is not alarm:
            add_note(alarm, f"the other ranks may not know of it: {failure}")
    raise alarm


def _arguments(frame: FrameType) -> Iterator[Any]:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    for name in code.co_varnames[:count]:
        value = frame.f_locals.get(name)
        yield from value if type(value) is tuple else (value,)
