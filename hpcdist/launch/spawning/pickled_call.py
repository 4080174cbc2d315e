"""A function on its way to the ranks that `spawn` starts, and their answers on the way back.

`pack` and `PickledCall.unpack` carry the call; `write_result`, `write_error` and `read_answers`
carry the answers, as files in the job's folder. Functions go by name, as in `multiprocessing`:
those of a script are found by importing the script under the name `__mp_main__`. What has no name
there (lambdas, closures, functions typed into a notebook) goes by value where cloudpickle is
installed.
"""

from __future__ import annotations

import importlib
import os
import pickle
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple

_MAIN = "__mp_main__"
_IMPORTING = "__hpcdist_importing__"  # a global of the script while a rank imports it
_CALL = "call"


class PickledCall(NamedTuple):
    """A pickled call and what a fresh interpreter needs to load it."""

    body: bytes
    main_path: str | None
    main_name: str | None
    sys_path: list[str]
    argv: list[str]

    def unpack(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Make this interpreter look like the one that packed, and return function and arguments.

        Example:
            >>> pack(max, (1, 2)).unpack()
            (<built-in function max>, (1, 2))

        """
        sys.path[:] = self.sys_path
        sys.argv[:] = self.argv
        if self.main_path or self.main_name:
            _import_main(self.main_path, self.main_name)
        function, arguments = pickle.loads(self.body)
        return function, arguments


def pack(function: Callable[..., Any], arguments: tuple[Any, ...]) -> PickledCall:
    """Return the call as a payload.

    Args:
        function: what every rank calls.
        arguments: its positional arguments.

    Raises:
        UsageError: function or arguments cannot be pickled.

    """
    path, name = _main_source()
    body, failure = b"", ""
    try:
        body = pickle.dumps((function, arguments), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # __reduce__ of any argument may raise anything
        failure = str(error)
    in_rank = _MAIN.encode()  # what a rank that was spawned calls the script's functions
    of_main = b"__main__" in body or in_rank in body
    if failure or (of_main and not (path or name)):
        failure = failure or "it belongs to a session without a file"
        body = _by_value((function, arguments), failure)
        of_main = in_rank in body  # cloudpickle takes for importable what is found there
    return PickledCall(
        body,
        path if of_main else None,
        name if of_main else None,
        # "" stands for the current folder, which a rank may have changed before it imports.
        [entry or os.getcwd() for entry in sys.path],
        list(sys.argv),
    )


def importing_main() -> bool:
    """Return whether this interpreter is a rank that is just importing the script it came from."""
    return hasattr(sys.modules.get(_MAIN), _IMPORTING)


def write_call(directory: str, payload: PickledCall) -> None:
    """Store the payload for the ranks."""
    _write(Path(directory, _CALL), pickle.dumps(tuple(payload)))


def read_call(directory: str) -> PickledCall:
    """Return the payload that `write_call` stored."""
    return PickledCall(*pickle.loads(Path(directory, _CALL).read_bytes()))


def write_result(directory: str, rank: int, result: Any) -> None:
    """Store what a rank's function returned.

    Raises:
        UsageError: the result cannot be pickled.

    """
    try:
        body = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        body = _by_value(result, str(error), what="what it returned")
    _write(Path(directory, f"{rank}.result"), body)


def write_error(directory: str, rank: int, traceback: str) -> None:
    """Store the traceback of an exception of a rank's function."""
    _write(Path(directory, f"{rank}.error"), traceback.encode(errors="replace"))


def read_answers(directory: str, size: int) -> tuple[dict[int, bytes], dict[int, str]]:
    """Return the results, still pickled, and the tracebacks that ranks have stored."""
    results, errors = {}, {}
    for rank in range(size):
        result, error = Path(directory, f"{rank}.result"), Path(directory, f"{rank}.error")
        if result.exists():
            results[rank] = result.read_bytes()
        if error.exists():
            errors[rank] = error.read_text(errors="replace")
    return results, errors


def load_result(body: bytes | None, rank: int) -> Any:
    """Return a rank's result; None where the rank ended well without one.

    Raises:
        UsageError: the result cannot be unpickled.

    """
    if body is None:
        return None
    # Classes of the script are called __mp_main__.X by the ranks.
    sys.modules.setdefault(_MAIN, sys.modules["__main__"])
    try:
        return pickle.loads(body)
    except Exception as error:  # __init__ or __setstate__ of any class may raise anything
        raise UsageError(
            f"what rank {rank} returned was pickled there, but cannot be unpickled here"
            f" ({type(error).__name__}: {error}): return plain data, or give its class a __reduce__"
            " (an exception is made again from its args alone)"
        ) from error


def _by_value(thing: Any, failure: str, what: str = "the function or its arguments") -> bytes:
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        raise UsageError(
            f"{what} cannot be sent between processes ({failure}): define functions and classes at"
            " the top level of a module or script, or pip install cloudpickle"
        ) from None
    try:
        return bytes(cloudpickle.dumps(thing))
    except Exception as error:
        raise UsageError(
            f"{what} cannot be sent between processes, not even by cloudpickle ({error}): pass"
            " plain data, and open files, locks and connections inside the function"
        ) from error


def _main_source() -> tuple[str | None, str | None]:
    """Return the file, or the module name, of the program that runs here, where there is one."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name and not spec.name.endswith("__main__"):
        return None, spec.name
    path = getattr(main, "__file__", None)
    if spec is None and path and os.path.isfile(path):
        return os.path.abspath(path), None
    return None, None


def _import_main(path: str | None, name: str | None) -> None:
    """Run the script, or the module, under a name that does not start it again."""
    module = ModuleType(_MAIN)
    mark = {_IMPORTING: True}
    if path is not None:
        content = runpy.run_path(path, mark, run_name=_MAIN)
    else:
        content = runpy.run_module(str(name), mark, run_name=_MAIN, alter_sys=True)
    vars(module).update(content)
    del vars(module)[_IMPORTING]
    sys.modules["__main__"] = sys.modules[_MAIN] = module


def _write(path: Path, body: bytes) -> None:
    new = path.with_name(path.name + ".new")
    new.write_bytes(body)
    new.rename(path)
