"""`Source`: how samples and batches are taken from arrays and datasets.

No array library is imported here: what has a shape is an array, and is indexed like one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hpcdist.data.shares import IndexArray
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.text import an


class Source(NamedTuple):
    """`sample` takes one, `batch` those of an array of indices, out of `length`."""

    length: int
    sample: Callable[[int], Any]
    batch: Callable[[IndexArray], Any]


def source_of(dataset: Any) -> Source:
    """Return how to take samples from `dataset`: an array, arrays, or a map-style dataset.

    Raises:
        UsageError: it is neither; its arrays differ in length.

    """
    if _is_array(dataset):
        return Source(dataset.shape[0], partial(_take, dataset), partial(_take, dataset))
    if isinstance(dataset, (tuple, list, dict)) and _holds_arrays(dataset):
        return _columns(dataset)
    return _samples(dataset)


def _is_array(value: Any) -> bool:
    return bool(getattr(value, "shape", ()))  # zero-dimensional: a number, not an array


# ---- one array, and several


def _take(array: Any, index: Any) -> Any:
    return getattr(array, "iloc", array)[index]  # a pandas table has its rows there


def _columns(arrays: Any) -> Source:
    lengths = {name: array.shape[0] for name, array in _named(arrays)}
    if len(set(lengths.values())) > 1:
        raise UsageError(
            f"the arrays of a dataset must be equally long, got lengths {_shortened(lengths)}; "
            "where each array is one sample, pass an object whose len() is the number of samples "
            "and whose [i] is sample i"
        )
    take = partial(_take_each, arrays)
    return Source(next(iter(lengths.values())), take, take)


def _take_each(arrays: Any, index: Any) -> Any:
    taken = {name: _take(array, index) for name, array in _named(arrays)}
    if isinstance(arrays, dict):
        return taken
    make = getattr(arrays, "_make", type(arrays))  # a namedtuple takes one argument per field
    return make(taken.values())


def _holds_arrays(several: tuple[Any, ...] | list[Any] | dict[Any, Any]) -> bool:
    """Return whether these are columns; if not, a list is one of samples, and a dict is nothing."""
    others = {name: type(each).__name__ for name, each in _named(several) if not _is_array(each)}
    if others and (isinstance(several, dict) or len(others) < len(several)):
        raise UsageError(
            f"a dataset of several arrays must hold nothing else, got {_shortened(others)}; make "
            "them arrays (numpy.asarray), of one row per sample"
        )
    return len(several) > len(others)


def _named(several: Any) -> list[tuple[Any, Any]]:
    return list(several.items() if isinstance(several, dict) else enumerate(several))


def _shortened(found: dict[Any, Any]) -> str:
    shown = [f"{name!r}: {what}" for name, what in list(found.items())[:8]]
    return ", ".join(shown + ["..."] * (len(found) > len(shown)))


# ---- map-style datasets


def _samples(dataset: Any) -> Source:
    try:
        length = len(dataset)
    except TypeError:
        length = None
    if length is None or isinstance(dataset, dict) or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"{an(type(dataset).__name__)} cannot be shared among ranks: pass an array, a tuple, "
            "list or dict of arrays, or a dataset with len() and [i]; what can only be iterated "
            "is split where it is made, by rank"
        )
    return Source(length, dataset.__getitem__, partial(_list_of, dataset))


def _list_of(dataset: Any, indices: IndexArray) -> list[Any]:
    return [dataset[index] for index in indices.tolist()]
