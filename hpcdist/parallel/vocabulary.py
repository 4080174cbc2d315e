"""`known`: names that a user wrote, looked up among those there are."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from hpcdist.errors import UsageError


def known(name: Any, names: Iterable[str], words: str, kind: type[UsageError] = UsageError) -> str:
    """Return `name`; if it is none of `names`, raise a `UsageError` that has the nearest one.

    Example:
        >>> known("stag", ["stage", "degree"], "section 'sharding' has no key")
        Traceback (most recent call last):
        ...
        hpcdist.errors.UsageError: section 'sharding' has no key 'stag'; did you mean 'stage'?

    """
    names = list(names)
    if isinstance(name, str) and name in names:
        return name
    near = get_close_matches(str(name), names, 1)
    advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
    raise kind(f"{words} {name!r}; {advice}")
