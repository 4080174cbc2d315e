"""The different elements of an array.

Each rank finds those of its part; only these travel, each to the rank that has its place in the
order, which tells back where it is in the whole. The result is in ascending order, and lies as the
flat array; how many elements a rank has is as it was found.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.policy import without_rule
from hpcdist.mesh.rules.basis import as_dist, is_dist, make, mesh_of, own_box, settled, whole_on
from hpcdist.mesh.rules.dividing import between, near, told, traded
from hpcdist.mesh.rules.masks import counted
from hpcdist.mesh.rules.pointwise import astype, pointwise
from hpcdist.mesh.rules.searching import searchsorted
from hpcdist.mesh.rules.shapes import concat, ravel, reshape
from hpcdist.mesh.rules.sorting import sort
from hpcdist.mesh.rules.table import rule
from hpcdist.mesh.rules.taking import take
from hpcdist.named_tuple import NamedTuple

_SHAPED = np.unique(np.zeros((1, 1)), return_inverse=True)[1].ndim == 2
"""Whether NumPy gives the inverse the shape of the array: since 2.0."""


class UniqueAll(NamedTuple):
    """The different elements, where each is first, where each element is among them, how many."""

    values: Any
    indices: Any
    inverse_indices: Any
    counts: Any


class UniqueInverse(NamedTuple):
    """The different elements, and where each element is among them."""

    values: Any
    inverse_indices: Any


class UniqueCounts(NamedTuple):
    """The different elements, and how many there are of each."""

    values: Any
    counts: Any


@rule("unique")
def unique(
    ar: Any,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: int | None = None,
    *,
    equal_nan: bool = True,
    sorted: bool = True,
) -> Any:
    """Return the different elements in ascending order, and what else is asked for."""
    wanted = (return_index, return_inverse, return_counts)
    if axis is not None and ar.ndim != 1:
        options = dict(zip(_OPTIONS, wanted, strict=True), axis=axis, equal_nan=equal_nan)
        return without_rule("numpy.unique along a dimension", np.unique, (ar,), options)
    values, index, inverse, counts = _distinct(ar, wanted, equal_nan)
    if return_inverse and _SHAPED:
        inverse = reshape(inverse, ar.shape)
    asked = [each for each in (index, inverse, counts) if each is not None]
    return (values, *asked) if asked else values


_OPTIONS = ("return_index", "return_inverse", "return_counts")


@rule("unique_values")
def unique_values(x: Any, /) -> Any:
    """Return the different elements in ascending order; each NaN is one."""
    return _distinct(x, (False, False, False), False)[0]


@rule("unique_counts")
def unique_counts(x: Any, /) -> Any:
    """Return the different elements, and how many there are of each."""
    values, _, _, counts = _distinct(x, (False, False, True), False)
    return UniqueCounts(values, counts)


@rule("unique_inverse")
def unique_inverse(x: Any, /) -> Any:
    """Return the different elements, and where each element is among them."""
    values, _, inverse, _ = _distinct(x, (False, True, False), False)
    return UniqueInverse(values, reshape(inverse, x.shape))


@rule("unique_all")
def unique_all(x: Any, /) -> Any:
    """Return the different elements, where they are first, where each is, and how many."""
    values, index, inverse, counts = _distinct(x, (True, True, True), False)
    return UniqueAll(values, index, reshape(inverse, x.shape), counts)


@rule("isin")
def isin(
    element: Any,
    test_elements: Any,
    assume_unique: bool = False,
    invert: bool = False,
    *,
    kind: Any = None,
) -> Any:
    """Return which elements are among others."""
    options = {"assume_unique": assume_unique, "invert": invert, "kind": kind}
    if not is_dist(test_elements) or test_elements.layout.is_replicated:
        found = test_elements.local if is_dist(test_elements) else test_elements
        if is_dist(element):
            if not _can_be_equal(element.dtype, np.asarray(found).dtype):
                return pointwise(lambda part: np.full(part.shape, bool(invert)), element)
            return pointwise(lambda part: np.isin(part, found, **options), element)
    mesh = mesh_of(element, test_elements)
    both = [as_dist(each, mesh) for each in (element, test_elements)]
    kind = np.result_type(*[each.dtype for each in both])
    x, table = (pointwise(lambda part: part.astype(kind), each) for each in both)
    table = sort(ravel(table))
    found = searchsorted(table, x, "right") > searchsorted(table, x, "left")
    found &= x == x  # NaN is equal to nothing
    return ~found if invert else found


@rule("union1d")
def union1d(ar1: Any, ar2: Any) -> Any:
    """Return the different elements of two arrays, in ascending order."""
    return unique(concat([ar1, ar2], None))


@rule("intersect1d")
def intersect1d(
    ar1: Any, ar2: Any, assume_unique: bool = False, return_indices: bool = False
) -> Any:
    """Return the different elements that are in both arrays, in ascending order."""
    one, two, kind = _flat(ar1, ar2)
    values, first, _, _ = _distinct(one, (return_indices, False, False), True)
    both = isin(values, two)
    found = astype(values[both], kind, copy=False)
    if not return_indices:
        return found
    others, places, _, _ = _distinct(two, (True, False, False), True)
    return found, first[both], take(places, searchsorted(others, found))


@rule("setdiff1d")
def setdiff1d(ar1: Any, ar2: Any, assume_unique: bool = False) -> Any:
    """Return the different elements of the first array that are not in the second one."""
    one, two, _ = _flat(ar1, ar2)
    values = one if assume_unique else unique(one)
    return values[isin(values, two, invert=True)]


@rule("setxor1d")
def setxor1d(ar1: Any, ar2: Any, assume_unique: bool = False) -> Any:
    """Return the different elements that are in one array only, in ascending order."""
    one, two, _ = _flat(ar1, ar2)
    return sort(concat([setdiff1d(one, two), setdiff1d(two, one)]))


def _flat(ar1: Any, ar2: Any) -> tuple[DistArray, DistArray, Any]:
    """Return two arrays as flat ones, and the dtype that both have."""
    mesh = mesh_of(ar1, ar2)
    one, two = (ravel(as_dist(each, mesh)) for each in (ar1, ar2))
    return one, two, np.result_type(one.dtype, two.dtype)


def _can_be_equal(one: Any, other: Any) -> bool:
    """Return whether elements of two dtypes can be compared; NumPy asks it of some lengths only."""
    try:
        np.equal(np.empty(0, one), np.empty(0, other))
    except TypeError:
        return False
    return True


def _distinct(x: Any, wanted: tuple[bool, bool, bool], equal_nan: bool) -> list[Any]:
    """Return the different elements, and three arrays or None, as they are wanted."""
    x = settled(ravel(x))
    layout, (index, inverse, counts) = x.layout, wanted
    own = _Unique.of(x.local, index, inverse, counts, equal_nan)
    if not layout.axes[0]:
        asked = (True, *wanted)
        return [
            make(each, whole_on(layout.mesh, each.shape)) if ask else None
            for each, ask in zip(own, asked, strict=True)
        ]
    lengths = told(np.array([own.values.size]), layout)[:, 0]
    even = np.arange(1, len(lengths)) * lengths.sum() // len(lengths)
    chosen = near(own.values, layout, even, lengths)
    # Equal elements meet on one rank: they are all after the boundary.
    ends = between(told(np.searchsorted(own.values, chosen), layout), lengths)
    sent = np.diff(ends)
    # What is counted is merged by where it is.
    received = traded(own.values, sent, layout)
    merged = _Unique.of(received, index, inverse or counts, False, equal_nan)
    result = counted(layout, 1, merged.values.size)
    ((lo, _),), ((start, _),) = own_box(layout), own_box(result)
    found: list[Any] = [make(merged.values, result), None, None, None]
    if index:
        found[1] = make(traded(own.first + lo, sent, layout)[merged.first], result)
    if inverse:
        places = traded(merged.inverse + start, sent.T, layout)
        found[2] = make(places[own.inverse], layout)
    if counts:
        total = np.zeros(merged.values.size, own.counts.dtype)
        np.add.at(total, merged.inverse, traded(own.counts, sent, layout))
        found[3] = make(total, result)
    return found


class _Unique(NamedTuple):
    """What is different in a part."""

    values: Any
    first: Any
    inverse: Any
    counts: Any

    @classmethod
    def of(cls, part: Any, index: bool, inverse: bool, counts: bool, equal_nan: bool) -> _Unique:
        # With indices NumPy sorts stably, so that each of several NaN has its place.
        stably = index or inverse
        found: Any = np.unique(part, stably, inverse, counts, equal_nan=equal_nan)  # type: ignore[call-overload]
        given = iter(found if isinstance(found, tuple) else (found,))
        return cls(
            next(given),
            next(given) if stably else None,
            next(given).reshape(-1) if inverse else None,
            next(given) if counts else None,
        )
