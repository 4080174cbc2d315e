"""`PowerSGD`: a gradient as the product of two thin matrices.

A gradient of shape (rows, ...) is a matrix M with so many rows. The ranks add up P = M Q, make its
columns orthonormal, and add up Q = M^T P; the sum of the matrices is about P Q^T. The next step
begins with this Q, so that over several steps P and Q follow the largest singular vectors (warm
start), and what P Q^T lacks of a rank's M is added to its next gradient (error feedback). Gradients
that would not become smaller, such as those of biases, travel whole.

Source: Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization, NeurIPS 2019; ``PowerSGDState`` of torch's communication hooks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm.collectives import all_reduce
from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.compressed.scheme import Kept, Scheme, Shapes
from hpcdist.parallel.compressed.steps import Steps
from hpcdist.transport.call.kinds import Kind


@final
@dataclass(frozen=True)
class PowerSGD:
    """For ``compress=`` of `DataParallel`: send each matrix as two of `rank` columns.

    A gradient of m x n travels as ``rank * (m + n)`` numbers of float32, if these are less than
    half of it, and whole otherwise. What is left out is added to the gradient of the next step.
    The ranks get the same bits where their processors and BLAS libraries are alike.

    Args:
        rank: columns, at least 1; 1 to 4 are usual.

    Raises:
        UsageError: `rank` is not such a number.

    Reference: Vogels et al., PowerSGD, NeurIPS 2019; ``PowerSGDState`` of torch, which begins with
    whole gradients for some steps, as this does not.

    Example:
        >>> import hpcdist as dist
        >>> dist.PowerSGD(rank=4)
        PowerSGD(rank=4)

    """

    rank: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise UsageError(f"rank of PowerSGD must be an integer, at least 1, got {self.rank!r}")


class Matrix(NamedTuple):
    """Where a gradient lies in a bucket, and as which matrix."""

    start: int
    rows: int
    columns: int

    def of(self, values: NumpyArray) -> NumpyArray:
        """Return the matrix in the values of the bucket."""
        stop = self.start + self.rows * self.columns
        return values[self.start : stop].reshape(self.rows, self.columns)


class Plan(NamedTuple):
    """Which gradients of a bucket travel as two matrices of `rank` columns, and which whole."""

    rank: int
    matrices: Sequence[Matrix]
    whole: Sequence[slice]

    @property
    def sizes(self) -> tuple[int, int]:
        """How many numbers the left and the right matrices have."""
        rows = sum(each.rows for each in self.matrices)
        return self.rank * rows, self.rank * sum(each.columns for each in self.matrices)

    @property
    def left_whole(self) -> int:
        """How many numbers travel whole."""
        return sum(int(part.stop) - int(part.start) for part in self.whole)

    def lefts(self, numbers: NumpyArray) -> Iterator[NumpyArray]:
        """Cut numbers into the left matrices."""
        return self._cut(numbers, [each.rows for each in self.matrices])

    def rights(self, numbers: NumpyArray) -> Iterator[NumpyArray]:
        """Cut numbers into the right matrices."""
        return self._cut(numbers, [each.columns for each in self.matrices])

    def _cut(self, numbers: NumpyArray, rows: Sequence[int]) -> Iterator[NumpyArray]:
        start = 0
        for count in rows:
            stop = start + self.rank * count
            yield numbers[start:stop].reshape(count, self.rank)
            start = stop


def plan(shapes: Shapes, rank: int) -> Plan:
    """Return which gradients of `shapes` travel as matrices of `rank` columns.

    Example:
        >>> plan([(100, 3, 30), (100,)], rank=2).matrices
        [Matrix(start=0, rows=100, columns=90)]

    """
    matrices, whole, start = [], [], 0
    for shape in shapes:
        size, rows = prod(shape), shape[0] if shape else 1
        columns = size // max(1, rows)
        if 2 * rank * (rows + columns) < size:
            matrices.append(Matrix(start, rows, columns))
        else:
            whole.append(slice(start, start + size))
        start += size
    return Plan(rank, matrices, whole)


@final
class LowRank(Scheme):
    """Sends gradients as `PowerSGD` says."""

    def __init__(self, options: PowerSGD) -> None:
        self._rank = options.rank

    def padded(self, size: int, ranks: int) -> int:
        """See `Scheme.padded`."""
        return size

    def nbytes(self, shapes: Shapes) -> int:
        """See `Scheme.nbytes`."""
        bucket = plan(shapes, self._rank)
        return 4 * (sum(bucket.sizes) + bucket.left_whole)

    def add_up(
        self, values: NumpyArray, shapes: Shapes, kept: Kept, group: Group, steps: Steps
    ) -> None:
        """See `Scheme.add_up`."""
        bucket = plan(shapes, self._rank)
        left_size, right_size = bucket.sizes
        first = np.empty(left_size + bucket.left_whole, np.float32)
        right = np.empty(right_size, np.float32)
        left, rest = first[:left_size], first[left_size:]
        steps.compute(_multiply, bucket, values, left, rest, kept)
        steps.communicate(Kind.ALL_REDUCE, group, all_reduce, first)
        steps.compute(_project, bucket, values, left, right, kept)
        steps.communicate(Kind.ALL_REDUCE, group, all_reduce, right)
        steps.compute(_expand, bucket, values, left, right, rest, kept)


def _multiply(
    bucket: Plan, values: NumpyArray, left: NumpyArray, rest: NumpyArray, kept: Kept
) -> None:
    """Add what is left of the last steps; make P = M Q, and copy what travels whole to `rest`."""
    if "error" in kept:
        values += kept["error"]
    if "right" not in kept:  # the same numbers on all ranks
        kept["right"] = np.random.default_rng(0).standard_normal(bucket.sizes[1], np.float32)
    with np.errstate(all="ignore"):
        for each, p, q in _triples(bucket, left, kept["right"]):
            np.matmul(each.of(values), q, out=p)
    if bucket.whole:
        np.concatenate([values[part] for part in bucket.whole], out=rest)


def _project(
    bucket: Plan, values: NumpyArray, left: NumpyArray, right: NumpyArray, kept: Kept
) -> None:
    """Make the columns of P orthonormal and Q = M^T P; keep what P Q^T lacks of M."""
    if not np.isfinite(left).all():  # for whoever looks for it; the next step begins anew
        left.fill(np.nan)
        right.fill(np.nan)
        return
    error = kept.setdefault("error", np.zeros_like(values))
    for each, p, q in _triples(bucket, left, right):
        p[...] = np.linalg.qr(p)[0]
        matrix = each.of(values)
        np.matmul(matrix.T, p, out=q)
        np.subtract(matrix, p @ q.T, out=each.of(error))


def _expand(
    bucket: Plan,
    values: NumpyArray,
    left: NumpyArray,
    right: NumpyArray,
    rest: NumpyArray,
    kept: Kept,
) -> None:
    """Make the sums P Q^T, and take what has travelled whole."""
    for each, p, q in _triples(bucket, left, right):
        np.matmul(p, q.T, out=each.of(values))
    start = 0
    for part in bucket.whole:
        stop = start + part.stop - part.start
        values[part] = rest[start:stop]
        start = stop
    del kept["right"]
    if np.isfinite(right).all():
        kept["right"] = right


def _triples(
    bucket: Plan, left: NumpyArray, right: NumpyArray
) -> Iterator[tuple[Matrix, NumpyArray, NumpyArray]]:
    return zip(bucket.matrices, bucket.lefts(left), bucket.rights(right), strict=True)
