"""What callers of a `RowStore` give: checked, and as contiguous arrays on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcdist.arrays.dtypes import dtype_row
from hpcdist.arrays.libraries import NumpyArray, view_of
from hpcdist.arrays.transfer import on_host
from hpcdist.errors import UsageError
from hpcdist.integers import integer
from hpcdist.ps.entries import Entry


def check_settings(
    dim: Any, entry: Any, max_rows: Any, store: Any, folder: Any, seed: Any, slab: Any
) -> None:
    """Refuse arguments of a store that are wrong."""
    integer(dim, "dim", 1)
    integer(1 if max_rows is None else max_rows, "max_rows", 1)
    integer(seed, "seed", 0)
    if entry is not None and not isinstance(entry, Entry):
        raise UsageError(
            f"entry={entry!r} is not an entry: pass ProbabilityEntry, CountFilterEntry "
            "or ShowClickEntry"
        )
    if store not in ("memory", "ssd"):
        raise UsageError(f"store={store!r} must be 'memory' or 'ssd'")
    if folder is not None and store != "ssd":
        raise UsageError(f"folder={folder!r} is for store='ssd' only; pass that, too")
    if slab is not None and store == "ssd":
        raise UsageError("store='ssd' and slab= are two places for the rows; pass one of them")


def check_shrink(threshold: Any, decay: Any, unseen: Any, scored: bool) -> None:
    """Refuse arguments of `shrink` that are wrong, or of rows that are counted."""
    number = (int, float, np.integer, np.floating)
    if threshold is not None and not isinstance(threshold, number):
        raise UsageError(
            f"threshold must be a number, or None for the usual one, got {threshold!r}"
        )
    if not isinstance(decay, number) or not 0 <= decay <= 1:
        raise UsageError(f"decay must be a number from 0 to 1, got {decay!r}")
    integer(0 if unseen is None else unseen, "unseen", 0)
    if not scored and (decay != 1 or unseen is not None):
        raise UsageError(
            f"decay={decay!r} and unseen={unseen!r} are for rows whose shows and clicks are "
            "counted; make the table with entry=ShowClickEntry(...)"
        )


def gradients_of(grads: Any, ids: NumpyArray, dim: int) -> NumpyArray:
    """Return gradients as an array of a row for each id, of their own dtype, or raise."""
    given = _on_host(grads)
    if dtype_row(given.dtype).family != "float":
        raise UsageError(
            f"gradients must be real floating-point numbers, got dtype {given.dtype}; convert them"
        )
    return rows_of(given, ids, dim, given.dtype.newbyteorder("="), "grads")


def rows_of(given: Any, ids: NumpyArray, width: int, dtype: np.dtype, name: str) -> NumpyArray:
    """Return `given` as a contiguous array of a row for each id, or raise."""
    array = _on_host(given)
    if array.size and dtype_row(array.dtype).family not in ("float", "int"):
        raise UsageError(f"{name} must be real numbers, got dtype {array.dtype}; convert them")
    if array.size != ids.size * width or (array.shape[-1:] != (width,) and array.size):
        raise UsageError(
            f"{name} has shape {array.shape} for {ids.size} ids; pass a row of {width} numbers "
            "for each id"
        )
    return np.ascontiguousarray(array.reshape(ids.size, width), dtype)


def tally_of(given: Any, ids: NumpyArray, each: int, name: str) -> NumpyArray:
    """Return a column of numbers, one for each id."""
    if given is None:
        return np.full((ids.size, 1), each, np.float64)
    numbers = np.asarray(_on_host(given), np.float64).reshape(-1, 1)
    if numbers.size != ids.size:
        raise UsageError(f"{name} has {numbers.size} numbers for {ids.size} ids; pass one for each")
    return numbers


def check_all_finite(ids: NumpyArray, grads: NumpyArray) -> None:
    """Raise `UsageError`, which names an id, if there is NaN or infinity in the gradients."""
    bad = np.flatnonzero(~np.isfinite(grads).all(axis=1))
    if bad.size:
        raise UsageError(
            f"the gradients of {bad.size} ids are not finite, the first that of id {ids[bad[0]]}; "
            "nothing was applied"
        )


def _on_host(given: Any) -> NumpyArray:
    if type(given) is np.ndarray:
        return given
    if isinstance(given, (list, tuple, int, float)):
        return np.asarray(given)
    view = view_of(given)
    return view if isinstance(view, np.ndarray) else on_host(view)
