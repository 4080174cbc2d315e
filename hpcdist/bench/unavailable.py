"""`Unavailable`: why something cannot be measured, agreed by all ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any


class Unavailable(Exception):
    """A library cannot take part; the message says why."""


def complaint(call: Callable[[], Any]) -> str:
    """Call a function; return the first line of its exception, or "" if it raises none."""
    try:
        call()
    except Exception as error:  # a library may raise anything where it lacks an operation
        return (str(error).splitlines() or [type(error).__name__])[0]
    return ""


def require_module(comm: Any, module: str) -> None:
    """Raise `Unavailable` on all ranks where one of them has no such module. Collective."""
    agree(comm, "" if importlib.util.find_spec(module) else f"{module} is not installed")


def agree(comm: Any, reason: str) -> None:
    """Raise `Unavailable` on all ranks if one of them has a reason. Collective."""
    reasons = [each for each in comm.allgather(reason) if each]
    if reasons:
        raise Unavailable(reasons[0])
