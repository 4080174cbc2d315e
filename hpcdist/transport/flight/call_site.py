"""`call_site`: the line of the user's program that called into hpcdist.

The compiled recorder (`flight/native/recorder.c`) finds it in a tenth of a microsecond, for it
keeps what it has found; without it the stack is walked each time.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from types import FrameType

from hpcdist.compiled import load

compiled = load("hpcdist.transport._recorder")

_PACKAGE = os.path.abspath(os.path.join(__file__, "..", "..", "..")) + os.sep
_inside: tuple[str, ...] = ()
"""Beginnings of the names of files whose frames are passed over."""


class _Issued(threading.local):
    at: str | None = None


issued = _Issued()
"""On the thread of a queue, `issued.at` is the line that issued the operation under way."""


def pass_over(prefix: str) -> None:
    """Take frames of files whose names begin with `prefix` for hpcdist's own from now on."""
    global _inside
    if prefix not in _inside:
        _inside = (*_inside, prefix)
        if compiled is not None:
            compiled.skip(prefix)


pass_over(_PACKAGE)
pass_over(contextlib.__file__)  # context managers have one of its frames in between


def outer_frame() -> tuple[FrameType | None, int]:
    """Return the innermost frame outside hpcdist and how many frames above the caller it is."""
    frame: FrameType | None = sys._getframe(1)
    depth = 1
    while frame is not None and frame.f_code.co_filename.startswith(_inside):
        frame, depth = frame.f_back, depth + 1
    return frame, depth


def call_site() -> str:
    """Return ``file:line`` of the caller outside hpcdist, for messages."""
    if issued.at is not None:
        return issued.at
    if compiled is not None:
        return compiled.site() or _UNKNOWN
    frame, _ = outer_frame()
    if frame is None:
        return _UNKNOWN
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_UNKNOWN = "an unknown line"
