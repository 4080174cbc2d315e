"""`pack`, `unpack`: what is called and returned, as a `Parcel`.

Pickle does it where it can; see [Note: pieces of a pickle]. What it cannot (a lambda, a function
inside a function) cloudpickle takes by value; what both can name is named, so that a class is the
same class on both sides.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

from hpcdist.comm.pieces import from_pieces, in_pieces
from hpcdist.rpc.frames import Parcel


def pack(obj: Any) -> Parcel:
    """Pickle `obj`; large values stay beside the pickle, where they are.

    Raises:
        Exception: what pickle raised, if cloudpickle cannot do it either, or is not installed.

    """
    try:
        return Parcel(*in_pieces(obj))
    except Exception as error:
        by_value = _by_value()
        if by_value is None:
            raise _without_cloudpickle(error) from error
        return Parcel(*in_pieces(obj, by_value))


def unpack(parcel: Parcel) -> Any:
    """Rebuild the object; arrays in it own the received buffers and are writable."""
    return from_pieces(*parcel)


def _without_cloudpickle(error: Exception) -> Exception:
    return type(error)(
        f"{error}; functions and classes that have no name in a module need cloudpickle: "
        "pip install 'hpcdist[rpc]'"
    )


@functools.cache
def _by_value() -> Any:
    """Return the pickler of what has no name, or None."""
    try:
        import cloudpickle
    except ModuleNotFoundError:
        return None

    class ByValue(cloudpickle.Pickler):  # type: ignore[misc]
        """Takes by value only what has no name, also in the program's own module."""

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, (type, types.FunctionType)) and _has_name(obj):
                return NotImplemented
            return super().reducer_override(obj)

    return ByValue


def _has_name(obj: Any) -> bool:
    """Return whether a function or a class is one of the program itself, by its name there."""
    if getattr(obj, "__module__", None) != "__main__":
        return False
    found: Any = sys.modules.get("__main__")
    for part in obj.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is obj
