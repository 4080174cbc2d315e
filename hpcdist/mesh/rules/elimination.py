"""Elimination of one square matrix that is cut: `numpy.linalg.inv`, `det`, `slogdet`.

[Note: pivots] Rows are eliminated where they lie, some columns at a time, with pivoting. Of its
rows that are left each rank proposes those that partial pivoting takes for these columns, and of
all that are proposed partial pivoting takes the pivots (a tournament): one exchange for a block,
not one for each column. The pivot rows go to all ranks, who take them off the rows that they have
left. Nothing but these rows travels: a rank keeps its rows, in the order in which they became
pivots, and as pivots come from all ranks, all have work to the end. Right sides are columns of the
matrix.
"""

from __future__ import annotations

from typing import Any, final

import numpy as np

from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import make_layout
from hpcdist.mesh.rules.basis import make, own_box, part_number
from hpcdist.mesh.rules.matrices import (
    BLOCK,
    LinAlgError,
    by_rows,
    everywhere,
    is_cut_matrix,
    of_first,
    per_matrix,
    united,
)
from hpcdist.mesh.rules.table import rule
from hpcdist.named_tuple import NamedTuple


class SlogdetResult(NamedTuple):
    """What `slogdet` returns."""

    sign: DistArray
    logabsdet: DistArray


# ---- the rules


@rule("linalg.inv")
def inv(x: Any, /) -> Any:
    """Return the inverses of matrices."""
    if not is_cut_matrix(x):
        return per_matrix("inv", np.linalg.inv, x)
    rows = _square(x)
    first, last = own_box(rows.layout)[0]
    identity = np.eye(last - first, rows.shape[1], first, dtype=_dtype_of(rows.dtype))
    found = eliminated(rows, identity).solution()
    return make(found, make_layout(rows.layout.mesh, x.shape, rows.layout.axes, rows.layout.cuts))


@rule("linalg.slogdet")
def slogdet(x: Any, /) -> Any:
    """Return signs and logarithms of the determinants of matrices."""
    if not is_cut_matrix(x):
        return per_matrix("slogdet", np.linalg.slogdet, x)
    rows = _square(x)
    mesh, dtype = rows.layout.mesh, _dtype_of(rows.dtype)
    sign, log = eliminated(rows, np.empty((len(rows.local), 0), dtype)).determinant()
    return SlogdetResult(
        everywhere(mesh, np.array(sign, dtype)), everywhere(mesh, np.array(log, dtype).real.copy())
    )


@rule("linalg.det")
def det(x: Any, /) -> Any:
    """Return the determinants of matrices."""
    if not is_cut_matrix(x):
        return per_matrix("det", np.linalg.det, x)
    sign, log = slogdet(x)
    with np.errstate(over="ignore"):
        return sign * np.exp(log)


def _square(x: DistArray) -> DistArray:
    """Return a square matrix cut along its rows only."""
    if x.shape[0] != x.shape[1]:
        raise LinAlgError(f"Last 2 dimensions of the array must be square, got {x.shape}")
    return by_rows(x)


def _dtype_of(*dtypes: Any) -> Any:
    """Return the dtype in which matrices of these are computed."""
    return np.linalg.solve(np.ones((1, 1), dtypes[0]), np.ones((1, 1), dtypes[-1])).dtype


# ---- elimination


def eliminated(matrix: DistArray, right: Any) -> Elimination:
    """Eliminate a square matrix that is cut along its rows, beside right sides; see [Note: pivots].

    Args:
        matrix: the matrix, which stays as it is.
        right: this rank's rows of the right sides, as many as it has of the matrix.

    """
    found = Elimination(matrix, right)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        found.run()
    return found


class _Block(NamedTuple):
    """Columns `lo` to before `hi`, once they have their pivots.

    Of the pivot rows, in their order, those numbered `here` are this rank's; they are its rows from
    `start` on. `upper` is the triangle that they have in these columns.
    """

    lo: int
    hi: int
    start: int
    here: Any
    upper: Any


@final
class Elimination:
    """The rows of this rank while a matrix is eliminated, and what all know of the pivots."""

    def __init__(self, matrix: DistArray, right: Any) -> None:
        layout = self._layout = matrix.layout
        self._mesh, self._size = layout.mesh, matrix.shape[1]
        self._first, self._last = own_box(layout)[0]
        dtype = _dtype_of(matrix.dtype, right.dtype)
        if layout.mesh.coordinate is None:
            self._rows: Any = np.empty((0, self._size + right.shape[1]), dtype)
        else:
            self._rows = np.concatenate([matrix.local, right], axis=1, dtype=dtype)
        self._numbers = np.arange(self._first, self._last)
        self._blocks: list[_Block] = []
        self._order = np.empty(0, np.int64)
        self._is_singular = False

    def run(self) -> None:
        """Eliminate all columns, unless the matrix is singular. Collective over the mesh."""
        done = 0
        for lo in range(0, self._size if self._mesh.coordinate is not None else 0, BLOCK):
            hi = min(lo + BLOCK, self._size)
            pivots, packed = self._chosen(done, lo, hi)
            self._is_singular = not packed.diagonal().all()
            if self._is_singular:
                return
            self._order = np.append(self._order, pivots)
            here = self._moved_up(done, pivots)
            block = _Block(lo, hi, done, here, np.triu(packed))
            done += len(here)
            self._take_off(block, packed, done)
            self._blocks.append(block)

    def _chosen(self, done: int, lo: int, hi: int) -> tuple[Any, Any]:
        """Return the numbers of the pivot rows of some columns, and the factors of these rows."""
        layout, width = self._layout, hi - lo
        panel = self._rows[done:, lo:hi]
        own = factored(panel.copy(order="F"))[:width]
        first = part_number(layout, 0) * width
        parts = len(layout.cuts[0]) - 1
        proposed = np.zeros((parts * width, width), self._rows.dtype)
        numbers = np.zeros(parts * width, np.int64)
        proposed[first : first + len(own)] = panel[own]
        numbers[first : first + len(own)] = self._numbers[done:][own] + 1
        united(proposed, self._mesh, layout.axes[0])
        united(numbers, self._mesh, layout.axes[0])
        is_row = numbers > 0  # the others are of ranks that have fewer rows left
        numbers, packed = numbers[is_row] - 1, np.asfortranarray(proposed[is_row])
        order = factored(packed)[:width]
        pivots, packed = of_first(self._mesh, numbers[order], packed[:width])
        return pivots, packed

    def _moved_up(self, done: int, pivots: Any) -> Any:
        """Move this rank's pivot rows together, from `done` on; return which pivots they are."""
        here = np.flatnonzero((self._first <= pivots) & (pivots < self._last))
        for place, number in enumerate(pivots[here], done):
            at = place + int(np.argmax(self._numbers[place:] == number))
            for each in (self._rows, self._numbers):
                each[[place, at]] = each[[at, place]]
        return here

    def _take_off(self, block: _Block, packed: Any, done: int) -> None:
        """Finish the pivot rows of a block, and take them off the rows that are left."""
        lo, hi, start, here, upper = block
        pivot_rows = np.zeros((hi - lo, self._rows.shape[1] - hi), self._rows.dtype)
        pivot_rows[here] = self._rows[start:done, hi:]
        united(pivot_rows, self._mesh, self._layout.axes[0])
        lower = np.tril(packed, -1) + np.eye(hi - lo, dtype=packed.dtype)
        pivot_rows = np.linalg.solve(lower, pivot_rows)
        self._rows[start:done, lo:hi] = packed[here]
        self._rows[start:done, hi:] = pivot_rows[here]
        left = self._rows[done:]
        if len(left):
            # Turned over, what is lower is upper, which is solved without exchanging rows.
            turned = np.linalg.solve(upper.T[::-1, ::-1], left[:, lo:hi].T[::-1])
            factors = turned[::-1].T
            left[:, hi:] -= factors @ pivot_rows

    # ---- what follows

    def solution(self) -> Any:
        """Return this rank's rows of what solves the equations. Collective over the mesh.

        Raises:
            LinAlgError: the matrix is singular; on every rank.

        """
        if self._is_singular:
            raise LinAlgError("Singular matrix")
        size, rows = self._size, self._rows
        found = np.empty((self._last - self._first, rows.shape[1] - size), rows.dtype)
        for lo, hi, start, here, upper in reversed(self._blocks):
            right = np.zeros((hi - lo, found.shape[1]), rows.dtype)
            right[here] = rows[start : start + len(here), size:]
            x = np.linalg.solve(upper, united(right, self._mesh, self._layout.axes[0]))
            rows[:start, size:] -= rows[:start, lo:hi] @ x
            first, last = max(lo, self._first), min(hi, self._last)
            if first < last:
                found[first - self._first : last - self._first] = x[first - lo : last - lo]
        return found if self._mesh.coordinate is not None else found[:0, :0]

    def determinant(self) -> tuple[Any, Any]:
        """Return the sign of the determinant, and the logarithm of its size. Local."""
        if self._is_singular:
            return 0, -np.inf
        values = [np.ones(0, self._rows.dtype), *(each.upper.diagonal() for each in self._blocks)]
        diagonal = np.concatenate(values)
        sizes = np.abs(diagonal)
        return _parity(self._order) * np.prod(diagonal / sizes), np.log(sizes).sum()


def factored(x: Any) -> Any:
    """Factor a matrix by elimination with partial pivoting, in place; return the order of its rows.

    Afterwards it has, as its rows in this order, the factors L, whose diagonal of ones is left out,
    and U. A column of zeros stays.

    Example:
        >>> import numpy as np
        >>> x = np.array([[1.0, 2], [4, 8], [2, 0]])
        >>> factored(x).tolist(), x.tolist()
        ([1, 2, 0], [[4.0, 8.0], [0.5, -4.0], [0.25, -0.0]])

    """
    rows, columns = x.shape
    if columns <= _FEW:
        return _factored_columns(x)
    half = columns // 2
    top = min(half, rows)
    order = factored(x[:, :half])
    x[:, half:] = x[order, half:]
    lower = np.tril(x[:top, :top], -1) + np.eye(top, dtype=x.dtype)
    x[:top, half:] = np.linalg.solve(lower, x[:top, half:])
    x[top:, half:] -= x[top:, :top] @ x[:top, half:]
    below = factored(x[top:, half:])
    x[top:, :half] = x[top:, :half][below]
    order[top:] = order[top:][below]
    return order


_FEW = 8
"""Columns that are factored one after the other."""


def _factored_columns(x: Any) -> Any:
    order = np.arange(len(x))
    for place in range(min(x.shape)):
        best = place + int(np.argmax(np.abs(x[place:, place])))
        for each in (x, order):
            each[[place, best]] = each[[best, place]]
        pivot, below = x[place], x[place + 1 :]
        if pivot[place]:
            below[:, place] /= pivot[place]
            below[:, place + 1 :] -= below[:, place, None] * pivot[place + 1 :]
    return order


def _parity(order: Any) -> int:
    """Return 1 for a permutation of an even number of swaps, -1 for one of an odd number."""
    left, cycles = order.tolist(), 0
    for start in range(len(left)):
        if left[start] >= 0:
            cycles += 1
            at = start
            while left[at] >= 0:
                left[at], at = -1, left[at]
    return -1 if (len(left) - cycles) % 2 else 1
