"""`pack`, `unpack`: what is called and returned, as a `Parcel`.

Pickle does it where it can. What it cannot (a lambda, a function inside a function) cloudpickle
takes by value; what both can name is named, so that a class is the same class on both sides.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import sys
import types
from typing import Any

from hpcdist.arrays.pickled import out_of_band
from hpcdist.rpc.frames import Parcel


def pack(obj: Any) -> Parcel:
    """Pickle `obj`; large arrays stay beside the pickle, where they are.

    Raises:
        Exception: what pickle raised, if cloudpickle cannot do it either, or is not installed.

    """
    large: list[memoryview] = []
    beside = out_of_band(large)
    try:
        table = _tensors()
        if table is None:
            return Parcel(pickle.dumps(obj, 5, buffer_callback=beside), large)
        target = io.BytesIO()
        pickler = pickle.Pickler(target, 5, buffer_callback=beside)
        pickler.dispatch_table = table
        pickler.dump(obj)
        return Parcel(target.getvalue(), large)
    except Exception as error:
        by_value = _by_value()
        if by_value is None:
            raise _without_cloudpickle(error) from error
        large.clear()
        target = io.BytesIO()
        by_value(target, 5, buffer_callback=beside).dump(obj)
        return Parcel(target.getvalue(), large)


def unpack(parcel: Parcel) -> Any:
    """Rebuild the object; arrays in it own the received buffers and are writable."""
    return pickle.loads(parcel.pickle, buffers=parcel.buffers)


def _tensors() -> dict[type, Any] | None:
    """Return what else pickles tensors of torch than torch, which copies them; None without it."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    if kind is None:
        return None
    if kind not in _table:
        from hpcdist.arrays.torch import reduce_tensor

        _table.update(copyreg.dispatch_table)
        _table[kind] = reduce_tensor
    return _table


_table: dict[type, Any] = {}


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
