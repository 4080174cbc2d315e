"""Systems of equations: `numpy.linalg.solve` and `cholesky`.

[Note: rows] A positive definite matrix is factored where its rows lie, block by block: the rows of
a block that are done go to all, who take them off their own rows below. So are triangular systems
solved. What is neither is solved by `elimination`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout, make_layout
from hpcdist.mesh.policy import without_rule
from hpcdist.mesh.rules.along import pencils
from hpcdist.mesh.rules.basis import (
    as_dist,
    combined,
    cutting,
    make,
    mesh_of,
    own_box,
    part_number,
    resharded,
    uncut,
)
from hpcdist.mesh.rules.elimination import eliminated
from hpcdist.mesh.rules.matrices import (
    BLOCK,
    LinAlgError,
    adjoint,
    alike,
    by_rows,
    is_cut_matrix,
    on_any,
    per_matrix,
    rows_beside,
    united,
)
from hpcdist.mesh.rules.pointwise import part_of
from hpcdist.mesh.rules.table import rule
from hpcdist.transport.call.reduction import ReduceOp


def _blocks(layout: Layout) -> Iterator[tuple[bool, int, int]]:
    """Return the blocks of rows of a matrix, and whether this rank has them."""
    inside = layout.mesh.coordinate is not None
    own = part_number(layout, 0)
    for part, (first, last) in enumerate(pairwise(layout.cuts[0])):
        for lo in range(first, last, BLOCK):
            yield inside and part == own, lo, min(lo + BLOCK, last)


@rule("linalg.cholesky")
def cholesky(a: Any, /, *, upper: bool = False) -> Any:
    """Return the triangle whose product with its adjoint is the matrix."""
    if not is_cut_matrix(a):
        function = np.linalg.cholesky
        if not upper:
            return per_matrix("cholesky", function, a)
        return adjoint(per_matrix("cholesky", lambda part: function(_adjoint_of(part)), a))
    if a.shape[0] != a.shape[1]:
        raise LinAlgError(f"Last 2 dimensions of the array must be square, got {a.shape}")
    if upper:
        return adjoint(cholesky(adjoint(a)))
    a = by_rows(a)
    layout = a.layout
    first = own_box(layout)[0][0]
    dtype = np.linalg.cholesky(np.ones((1, 1), a.dtype)).dtype
    own = a.local.astype(dtype)
    for mine, lo, hi in _blocks(layout):
        rows = np.zeros((hi - lo, hi), dtype)
        if mine:
            block = own[lo - first : hi - first]
            left = rows[:, :lo] = block[:, :lo]
            rows[:, lo:] = _triangle(block[:, lo:hi] - left @ left.conj().T)
            block[:, lo:hi] = rows[:, lo:]
        united(rows, layout.mesh, layout.axes[0])
        if np.isnan(rows[-1, -1]):
            raise LinAlgError("Matrix is not positive definite")
        below = own[max(hi - first, 0) :]
        if len(below):
            rest = below[:, lo:hi] - below[:, :lo] @ rows[:, :lo].conj().T
            below[:, lo:hi] = _adjoint_of(np.linalg.solve(rows[:, lo:], _adjoint_of(rest)))
    return make(np.tril(own, first), layout)


def _adjoint_of(part: Any) -> Any:
    return part.swapaxes(-1, -2).conj()


def _triangle(block: Any) -> Any:
    """Return the Cholesky factor of a block, NaN if there is none."""
    try:
        return np.linalg.cholesky(block)
    except LinAlgError:
        return np.full_like(block, np.nan)


@rule("linalg.solve")
def solve(a: Any, b: Any, /) -> Any:
    """Return the x for which a x is b."""
    mesh = mesh_of(a, b)
    a, b = as_dist(a, mesh), as_dist(b, mesh)
    if a.ndim < 2 or a.shape[-1] != a.shape[-2] or not b.ndim:
        raise LinAlgError(f"solve takes square matrices, got shapes {a.shape} and {b.shape}")
    if a.shape[-1] != b.shape[-1 if b.ndim == 1 else -2]:
        raise ValueError(f"solve: shapes do not fit: {a.shape} and {b.shape}")
    if not is_cut_matrix(a):
        return _solve_stacks(a, b)
    if b.ndim > 2:
        return without_rule("numpy.linalg.solve", np.linalg.solve, (a, b), {}, _SOLVED)
    rows = by_rows(a)
    right = rows_beside(rows, b)
    found = _triangular(rows, right)
    if found is None:
        found = _definite(rows, right)
    if found is None:
        found = eliminated(rows, right).solution()
    layout = rows.layout
    cuts = layout.cuts[0]
    final = make_layout(mesh, b.shape, (layout.axes[0], ())[: b.ndim], (cuts, None)[: b.ndim])
    return make(found if b.ndim == 2 else found[:, 0], final)


_SOLVED = "A cut matrix is solved for one right side or a matrix of them, and stacks for stacks"


def _triangular(rows: DistArray, right: Any) -> Any:
    """Return this rank's rows of the solution, if the matrix is a triangle, else None."""
    is_lower, is_upper = _is_triangular(rows)
    if not is_lower and not is_upper:
        return None
    return _substituted(rows, right, backward=not is_lower)


def _definite(rows: DistArray, right: Any) -> Any:
    """Return this rank's rows of the solution, if the matrix is positive definite, else None."""
    if _differ(rows, resharded(adjoint(rows), rows.layout)):
        return None
    try:
        lower = cholesky(rows)
    except LinAlgError:
        return None
    upper = resharded(adjoint(lower), rows.layout)
    return _substituted(upper, _substituted(lower, right, backward=False), backward=True)


def _differ(x: DistArray, y: DistArray) -> bool:
    """Return whether two matrices differ by more than the rounding errors of what is solved."""
    largest_of = [np.abs(each).max(initial=0) for each in (x.local - y.local, x.local)]
    mesh = x.layout.mesh
    apart, size = combined(np.array(largest_of, float), mesh, range(mesh.ndim), ReduceOp.MAX)
    eps = np.finfo(np.result_type(x.dtype, np.float32)).eps
    return not apart <= x.shape[0] * eps * size


def _is_triangular(x: DistArray) -> tuple[bool, bool]:
    """Return whether a square matrix is lower, and upper, triangular."""
    first, part = own_box(x.layout)[0][0], x.local
    flags = [
        np.triu(part, first + 1).any(),
        np.tril(part, first - 1).any(),
        (np.diagonal(part, first) == 0).any(),
    ]
    above, below, is_singular = on_any(flags, x.layout.mesh, range(x.layout.mesh.ndim))
    if is_singular and not (above and below):
        raise LinAlgError("Singular matrix")
    return not above, not below


def _substituted(matrix: DistArray, right: Any, *, backward: bool) -> Any:
    """Return this rank's rows of the solution of a triangular system."""
    layout, own = matrix.layout, matrix.local
    first = own_box(layout)[0][0]
    dtype = np.linalg.solve(np.ones((1, 1), own.dtype), np.ones((1, 1), right.dtype)).dtype
    right = right.astype(dtype)
    blocks = [*_blocks(layout)]
    for mine, lo, hi in reversed(blocks) if backward else blocks:
        here = slice(lo - first, hi - first)
        found = np.zeros((hi - lo, right.shape[1]), dtype)
        if mine:
            # Turned over, what is lower is upper, which is solved without exchanging rows.
            turn = slice(None) if backward else slice(None, None, -1)
            solved = np.linalg.solve(own[here, lo:hi][turn, turn], right[here][turn])
            right[here] = found[...] = solved[turn]
        united(found, layout.mesh, layout.axes[0])
        rest = slice(max(lo - first, 0)) if backward else slice(max(hi - first, 0), None)
        if len(right[rest]):
            right[rest] -= own[rest, lo:hi] @ found
    return right


def _solved(a: Any, b: Any) -> Any:
    """Solve as NumPy 2 does, to which only what has one dimension is a vector."""
    columns = b[:, None] if b.ndim == 1 else b
    found = np.linalg.solve(a, columns[(None,) * (a.ndim - columns.ndim)])
    return found[..., 0] if b.ndim == 1 else found


def _solve_stacks(a: DistArray, b: DistArray) -> Any:
    """Return the solutions of a stack of systems, each computed by one rank."""
    if a.ndim == 2:  # every rank has the matrix: the right sides are divided
        dim = b.ndim - (1 if b.ndim == 1 else 2)
        layout = pencils(b.layout, (dim,)) or uncut(b.layout)
        b = resharded(b, layout)
        part = alike(
            lambda part: _solved(a.local, part),
            b.local,
            layout.mesh,
            cutting(layout, range(b.ndim)),
        )
        return make(part, layout)
    count = a.ndim - 2
    home = pencils(a.layout, (count, count + 1))
    fits = b.ndim == 1 or b.shape[:-2] == a.shape[a.ndim - b.ndim : -2]
    if home is None or b.ndim > a.ndim or not fits:
        return without_rule("numpy.linalg.solve", np.linalg.solve, (a, b), {}, _SOLVED)
    a = resharded(a, home)
    mesh = home.mesh
    if b.ndim == 1:
        b, shape, last = resharded(b, uncut(b.layout)), a.shape[:-1], 1
    else:
        stack_of = make_layout(mesh, a.shape[:-2], home.axes[:-2], home.cuts[:-2])
        own = part_of(stack_of, b.shape[:-2])
        b = resharded(b, make_layout(mesh, b.shape, (*own.axes, (), ()), (*own.cuts, None, None)))
        shape, last = (*a.shape[:-1], b.shape[-1]), 2
    axes, cuts = (*home.axes[:-2], (), ())[: count + last], (*home.cuts[:-2], None, None)
    right = b.local
    part = alike(lambda part: _solved(part, right), a.local, mesh, cutting(home, range(count)))
    return make(part, make_layout(mesh, shape, axes, cuts[: count + last]))
