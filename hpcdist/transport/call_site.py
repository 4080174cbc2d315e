"""`call_site`: the line of the user's program that called into hpcdist."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from types import FrameType

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INSIDE = _PACKAGE, contextlib.__file__
"""Where frames of hpcdist's own come from; context managers have one of `contextlib` in between."""


class _Issued(threading.local):
    at: str | None = None


issued = _Issued()
"""On the thread of a queue, `issued.at` is the line that issued the operation under way."""


def outer_frame() -> tuple[FrameType | None, int]:
    """Return the innermost frame outside hpcdist and how many frames above the caller it is."""
    frame: FrameType | None = sys._getframe(1)
    depth = 1
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, depth = frame.f_back, depth + 1
    return frame, depth


def call_site() -> str:
    """Return ``file:line`` of the caller outside hpcdist, for messages."""
    if issued.at is not None:
        return issued.at
    frame, _ = outer_frame()
    if frame is None:
        return "an unknown line"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
