"""`Failed`: what a call raised, on its way to the caller, and what is raised there.

The caller gets one exception that is a `RemoteError` and of the type that was raised: so both
``except ValueError`` and ``except RemoteError`` catch it. Where the type cannot be told (it does
not pickle, or is not known to the caller), and for what ends programs (`SystemExit`,
`KeyboardInterrupt`), it is a `RemoteError` alone.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import traceback
import types
import weakref
from typing import Any, final

from hpcdist.errors import RemoteError
from hpcdist.named_tuple import NamedTuple


class Failed(NamedTuple):
    """A description of an exception; `pickled` is None if it cannot be pickled."""

    rank: int
    where: str
    kind: str
    message: str
    text: str
    pickled: bytes | None


def describe(error: BaseException, rank: int, where: str, text: str = "") -> Failed:
    """Describe what a call raised; never fails."""
    trace = _of_callee(error.__traceback__)
    return Failed(
        rank,
        where,
        type(error).__qualname__,
        _said(error),
        text or _formatted(error, trace),
        _pickled(error) if isinstance(error, Exception) else None,
    )


def rebuild(failed: Failed) -> RemoteError:
    """Return the exception that the caller raises."""
    error = _twin(failed)
    if error is None:
        said = f"{failed.kind}: {failed.message}" if failed.message else failed.kind
        error = RemoteError(f"{failed.where} raised {said}")
    error.rank, error.traceback = failed.rank, failed.text
    error.__dict__["_failed"] = failed
    note = f"raised by {failed.where}; there it says\n\n{failed.text.rstrip()}"
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__cause__ = RemoteError(note, failed.rank)
    return error


def is_gone(error: BaseException | None) -> bool:
    """Return whether a call failed because its rank has gone, not because it raised."""
    return isinstance(error, RemoteError) and "_failed" not in vars(error)


def _twin(failed: Failed) -> RemoteError | None:
    """Return an exception like that which was raised, that is a `RemoteError` as well."""
    if failed.pickled is None:
        return None
    try:
        original = pickle.loads(failed.pickled)
        if isinstance(original, RemoteError) and type(original) is RemoteError:
            return RemoteError(str(original))
        return _copy(original)
    except Exception:  # its class is not here, or does not bear it
        return None


def _copy(original: Exception) -> RemoteError:
    twin = _bare(_both(type(original)), original)
    twin.args = original.args
    for each in type(original).__mro__:
        for name, what in vars(each).items():
            if name[0] != "_" and isinstance(what, _IN_C):
                with contextlib.suppress(Exception):
                    value = getattr(original, name)
                    if value is not None:  # a file that is None counts as one
                        setattr(twin, name, value)
    twin.__dict__.update(vars(original))
    twin.__dict__.pop("__notes__", None)
    return twin


def _bare(kind: type[RemoteError], original: Exception) -> RemoteError:
    """Return a new exception; which `__new__` knows the fields that it has in C, Python decides."""
    news: list[Any] = [type(original).__new__, *(each.__new__ for each in kind.__mro__)]
    for new in news:
        for args in (original.args, ()):
            with contextlib.suppress(Exception):
                made: RemoteError = new(kind, *args)
                return made
    raise TypeError(f"there is no {kind.__name__} without its __init__")


_IN_C = types.MemberDescriptorType, types.GetSetDescriptorType
"""What `OSError.errno` and the like are."""


def _both(kind: type[Exception]) -> type[RemoteError]:
    """Return the class that is both types; one for each, so that they compare."""
    if issubclass(kind, RemoteError):
        return kind
    if kind not in _twins:
        told = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce__": _reduce}
        _twins[kind] = type(kind.__name__, (RemoteError, kind), told)
    return _twins[kind]


_twins: weakref.WeakKeyDictionary[type[Exception], type[RemoteError]] = weakref.WeakKeyDictionary()


def _reduce(error: Any) -> tuple[Any, ...]:
    return rebuild, (error.__dict__["_failed"],)


def _of_callee(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without what runs calls, which it begins with."""
    while trace is not None and trace.tb_frame.f_globals.get("__package__") == __package__:
        trace = trace.tb_next
    return trace


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:
        return f"(its message fails with {type(failure).__name__})"


def _formatted(error: BaseException, trace: types.TracebackType | None) -> str:
    try:
        return "".join(traceback.format_exception(type(error), error, trace))
    except Exception:
        return f"{type(error).__qualname__}: {_said(error)}"


def _pickled(error: Exception) -> bytes | None:
    for each in (error, _Parts(error)):
        with contextlib.suppress(Exception):
            raw = pickle.dumps(each, 5)
            pickle.loads(raw)  # many a class of exceptions pickles, but cannot be rebuilt
            return raw
    return None


@final
class _Parts:
    """Pickles an exception whose `__init__` does not take its `args`, as its parts."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_parts, (type(self._error), self._error.args, vars(self._error))


def _of_parts(kind: type[Exception], args: tuple[Any, ...], fields: dict[str, Any]) -> Exception:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error
