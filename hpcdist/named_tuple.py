"""`NamedTuple`: as ``typing.NamedTuple``, whose classes take a tenth of the time to be made.

Python compiles the annotation of each field and the constructor of each class when it is defined,
a quarter of a millisecond together, of which every start of every rank would pay some sixty. Here
annotations are not looked at, and the constructor is compiled when the first one is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:
    try:
        from _collections import _tuplegetter as _field
    except ImportError:  # not CPython

        def _field(place: int, _: str) -> property:
            return property(itemgetter(place))

    class _Fields(type):
        """Makes a class that names `NamedTuple` as its base one with fields."""

        def __new__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> type:
            if bases[0] is not tuple and not hasattr(bases[0], "_fields"):
                if not _UNREAD.isdisjoint(space):
                    raise TypeError(f"{name} needs from __future__ import annotations")
                names = tuple(space.get("__annotations__", ()))
                space["_field_defaults"] = {each: space[each] for each in names if each in space}
                space["_fields"] = space["__match_args__"] = names
                space |= {each: _field(place, "") for place, each in enumerate(names)}
                space["__slots__"] = ()
            return super().__new__(cls, name, bases, space)

    _UNREAD = {"__annotate__", "__annotate_func__"}
    """Where classes of Python 3.14 have annotations that are not text."""

    class NamedTuple(tuple, metaclass=_Fields):
        """See ``typing.NamedTuple``; its module has ``from __future__ import annotations``."""

        __slots__ = ()

        def __new__(cls, /, *args: Any, **kwargs: Any) -> Any:
            """Compile what makes them, and have it make this one, and those that follow."""
            owner = next(each for each in cls.__mro__ if "_fields" in vars(each))
            given, taken = "".join(f", {each}" for each in owner._fields), ", ".join(owner._fields)
            taken += "," * (len(owner._fields) == 1)
            made = eval(f"lambda _cls{given}: _new(_cls, ({taken}))", {"_new": tuple.__new__})
            made.__defaults__ = tuple(owner._field_defaults.values())
            made.__name__, made.__qualname__ = "__new__", f"{owner.__qualname__}.__new__"
            owner.__new__ = staticmethod(made)
            return made(cls, *args, **kwargs)

        @classmethod
        def _make(cls, values: Iterable[Any]) -> Any:
            made = tuple.__new__(cls, values)
            if len(made) != len(cls._fields):
                raise TypeError(f"{cls.__name__} has {len(cls._fields)} fields, got {len(made)}")
            return made

        def _asdict(self) -> dict[str, Any]:
            return dict(zip(self._fields, self, strict=True))

        def _replace(self, /, **changes: Any) -> Any:
            made = self._make(map(changes.pop, self._fields, self))
            if changes:
                raise TypeError(f"{type(self).__name__} has no field {', '.join(changes)}")
            return made

        __replace__ = _replace

        def __getnewargs__(self) -> tuple[Any, ...]:
            return tuple(self)

        def __repr__(self) -> str:
            fields = ", ".join(f"{name}={value!r}" for name, value in self._asdict().items())
            return f"{type(self).__name__}({fields})"
