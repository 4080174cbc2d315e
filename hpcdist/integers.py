"""Integers that users give: what counts as one, and how anything else is refused."""

from __future__ import annotations

import operator
from typing import Any

from hpcdist.errors import UsageError


def as_integer(value: Any) -> int:
    """Return `value` as an int; `TypeError` for what is no integer, and for True and False."""
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def integer(value: Any, what: str, least: int | None = None) -> int:
    """Return `value` as an int.

    Args:
        value: what was given.
        what: its name in the message.
        least: the smallest there may be; None for any.

    Raises:
        UsageError: it is no integer, or too small.

    """
    try:
        number = as_integer(value)
        if least is None or number >= least:
            return number
    except TypeError:
        pass
    wanted = "" if least is None else f" of at least {least}"
    raise UsageError(f"{what} must be an integer{wanted}, got {value!r}")
