"""`Options`: what a table is made of, and how ranks find that they mean the same."""

from __future__ import annotations

import functools
from hashlib import blake2b
from typing import Any, Literal

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.named_tuple import NamedTuple
from hpcdist.ps.modes import Async, Mode, Ssp, Sync
from hpcdist.ps.rows import RowStore
from hpcdist.ps.shared import new_owned


class Options(NamedTuple):
    """What a table is made of; see `SparseTable`."""

    dim: int
    dtype: str = "float32"
    optimizer: Any = "adagrad"
    initializer: Any = ("uniform", 0.01)
    entry: Any = None
    max_rows: int | None = None
    store: Literal["memory", "ssd"] = "memory"
    folder: str | None = None
    seed: int = 0
    mode: Mode = Sync()
    check_finite: bool = False

    def new_store(self, *, shared: bool = False) -> RowStore:
        """Return an empty store of such rows; `shared`: that others of the node can read."""
        by_calls = isinstance(self.mode, (Async, Ssp)) and self.store == "memory"
        owned = new_owned() if shared and by_calls else None
        return RowStore(
            self.dim,
            dtype=self.dtype,
            optimizer=self.optimizer,
            initializer=self.initializer,
            entry=self.entry,
            max_rows=self.max_rows,
            store=self.store,
            folder=self.folder,
            seed=self.seed,
            owned=owned,
        )

    def nothing(self) -> tuple[NumpyArray, ...]:
        """Return ids, gradients and marks of no rows."""
        marks = 0 if self.entry is None else 2
        return (
            np.empty(0, np.int64),
            np.empty((0, self.dim), self.dtype),
            np.empty((0, marks), np.float32),
        )

    def words(self) -> tuple[str, ...]:
        """Return what ranks compare."""
        return tuple(f"{name}={_in_words(value)}" for name, value in self._asdict().items())


def _in_words(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return blake2b(value.tobytes(), digest_size=8).hexdigest()
    if isinstance(value, functools.partial):
        return " ".join(map(_in_words, (value.func, *value.args)))
    name = getattr(value, "__qualname__", None)
    if name is not None:
        return f"{value.__module__}.{name}"
    plain = isinstance(value, (str, int, float, tuple, type(None)))
    return repr(value) if plain else f"{type(value).__name__}{sorted(_fields(value).items())!r}"


def _fields(value: Any) -> dict[str, str]:
    given = vars(value) if hasattr(value, "__dict__") else {}
    return {name: repr(each) for name, each in given.items() if isinstance(each, _PLAIN)}


_PLAIN = (str, int, float, bool, type(None))
