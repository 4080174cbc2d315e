"""The process environment, read at one door.

Packages outside `hpcdist.runtime` take the environment as an argument; those that must begin
somewhere ask for `snapshot()`.
"""

from __future__ import annotations

import os


def snapshot() -> dict[str, str]:
    """Return a copy of the environment variables of this process.

    Returns:
        A dictionary of its own: changing it changes nothing else.

    Example:
        >>> "PATH" in snapshot()
        True

    """
    return dict(os.environ)
