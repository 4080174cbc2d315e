"""What the checks of all families share: the arrays that they use, and how they are run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hpcdist as dist

OPS: dict[str, Callable[..., Any]] = {
    "SUM": np.sum,
    "PROD": np.prod,
    "MAX": np.max,
    "MIN": np.min,
}
NUMBERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]


def contribution(rank: int, dtype: str, shape: tuple[int, ...] = (3, 4)) -> Any:
    """Return an array that differs between ranks and is exact in every dtype."""
    count = int(np.prod(shape))
    return (np.arange(count).reshape(shape) % 3 + rank + 1).astype(dtype)


def ragged(number: int, count: int, giver: int = 0) -> Any:
    """Return an array whose shape depends on `number`: 0-d, empty, or of one to three axes."""
    shape = [(), (0, 3), (count,), (2, count), (count, 1, 2)][number % 5]
    values = np.arange(int(np.prod(shape)), dtype=float) % 97 + number + 100 * giver
    return values.reshape(shape)


def assert_equal(found: Any, expected: Any) -> None:
    """Compare lists of arrays: shapes, dtypes and contents."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def as_pair(outs: Any, given: Any) -> tuple[Any, Any]:
    """Return what an alltoall takes: two lists or two arrays."""
    if isinstance(outs, list):
        return outs, given
    return outs.reshape(-1), given.reshape(-1)


class Contract:
    """Checks of one family; `TransportContract` has them all."""

    def run(self, check: Callable[[], Any]) -> list[Any]:
        """Call `check` once per rank and return the results this process can see."""
        raise NotImplementedError

    def warned(self) -> Any:
        """Expect a warning; ranks that are threads share Python's warning filters."""
        return pytest.warns(dist.NotInGroupWarning)
