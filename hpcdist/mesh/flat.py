"""`Flat`: the elements of an array one after the other, as NumPy's ``a.flat``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import numpy as np

from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.rules.basis import is_dist
from hpcdist.mesh.rules.index import getitem
from hpcdist.mesh.rules.shapes import ravel, reshape


@final
class Flat:
    """The elements of an array in C order. What is taken of it is a copy, what is written is not.

    Collective over the ranks of the mesh, as the index of an array is.
    """

    __slots__ = ("base",)
    __hash__ = None  # type: ignore[assignment]  # == compares elements

    base: DistArray
    """The array that it has the elements of."""

    def __init__(self, base: DistArray) -> None:
        self.base = base

    def __len__(self) -> int:
        return self.base.size

    def __iter__(self) -> Iterator[Any]:
        return (element(self.base, (number,)) for number in range(self.base.size))

    def __getitem__(self, key: Any) -> Any:
        return ravel(self.base)[key].copy()

    def __setitem__(self, key: Any, value: Any) -> None:
        flat = ravel(self.base).copy()
        if np.ndim(value) and not is_dist(value):  # NumPy begins again where values end
            value = np.resize(np.asarray(value), flat[key].shape)
        flat[key] = value
        self.base[...] = reshape(flat, self.base.shape)

    def __eq__(self, other: object) -> Any:
        return self.copy() == other

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.copy(), dtype)

    def copy(self) -> Any:
        """Return the elements as an array of one dimension."""
        return ravel(self.base).copy()


def flat_of(a: DistArray) -> Flat:
    """Return the elements one after the other; what is assigned to them is written to the array."""
    return Flat(a)


def write_flat(a: DistArray, value: Any) -> None:
    """Write values to the elements one after the other."""
    Flat(a)[...] = value


def element(a: DistArray, index: tuple[Any, ...]) -> Any:
    """Return an element, known to all ranks of the mesh, by its number or its indices."""
    if len(index) == 1 and a.ndim != 1:
        if not -a.size <= index[0] < a.size:
            raise IndexError(f"index {index[0]} is out of bounds for size {a.size}")
        index = np.unravel_index(index[0] % a.size, a.shape)
    if len(index) != a.ndim:
        raise ValueError(f"incorrect number of indices for an array of {a.ndim} dimensions")
    return getitem(a, tuple(map(int, index)))


def item(a: DistArray, *index: Any) -> Any:
    """Return an element as a Python number: the only one, or that at an index, on all ranks.

    Args:
        a: the array.
        index: nothing for an array of one element; the number of an element in the flat array; or
            its index in each dimension, one by one or in a tuple. All ranks of the mesh ask for it.

    """
    if not index:
        return a._one("item()").item()
    given = index[0] if len(index) == 1 and isinstance(index[0], tuple) else index
    return element(a, given).local.item()
