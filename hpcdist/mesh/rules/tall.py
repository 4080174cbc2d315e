"""Tall matrices, and wide ones: `numpy.linalg.qr`, `svd`, `pinv`, `lstsq` and their like.

[Note: tall] A tall matrix is cut along its rows. Each rank factors its rows, and the triangles, one
under the other, are factored again (TSQR): no rank sees more than them. This is done where they are
no more than the matrix, which is that each rank has at least as many rows as there are columns. A
wide matrix is the transpose of a tall one. Singular values, pseudo-inverses and least squares
follow from the triangle. Signs of rows and columns are not those of NumPy. What is small and the
same on all ranks is sent by the first, so that all have its bits.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import make_layout
from hpcdist.mesh.policy import without_rule
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.mesh.rules.basis import as_dist, combined, make, mesh_of, part_number
from hpcdist.mesh.rules.matrices import (
    LinAlgError,
    adjoint,
    by_rows,
    everywhere,
    is_cut_matrix,
    of_first,
    per_matrix,
    rows_beside,
    united,
)
from hpcdist.mesh.rules.pointwise import pointwise
from hpcdist.mesh.rules.reductions import any as exists, max as largest, sum as total
from hpcdist.mesh.rules.shapes import expand_dims, matrix_transpose
from hpcdist.mesh.rules.table import rule
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.reduction import ReduceOp

linalg: Any = np.linalg
NOT_GIVEN: Any = object()


class QRResult(NamedTuple):
    """What `qr` returns."""

    Q: DistArray
    R: DistArray


class SVDResult(NamedTuple):
    """What `svd` returns."""

    U: DistArray
    S: DistArray
    Vh: DistArray


def _is_tall(x: DistArray) -> bool:
    """Return whether each rank has as many rows of a matrix as there are columns."""
    parts = (len(x.layout.cuts[0]) - 1) * (len(x.layout.cuts[1]) - 1)
    return x.shape[0] // parts >= x.shape[1]


def _factored(x: DistArray) -> tuple[DistArray, Any]:
    """Return Q, as the rows of `x` are cut, and R, on every rank; see [Note: tall]."""
    x = by_rows(x)
    layout, mesh, columns = x.layout, x.layout.mesh, x.shape[1]
    part = x.local if mesh.coordinate is not None else np.empty((0, columns), x.dtype)
    own, triangle = np.linalg.qr(part)
    heights = [min(hi - lo, columns) for lo, hi in pairwise(layout.cuts[0])]
    first = sum(heights[: part_number(layout, 0)])
    here = slice(first, first + len(triangle))
    stacked = np.zeros((sum(heights), columns), triangle.dtype)
    stacked[here] = triangle
    inner, triangle = np.linalg.qr(united(stacked, mesh, layout.axes[0]))
    inner, triangle = of_first(mesh, inner, triangle)
    return make(_part(mesh, own @ inner[here]), layout), triangle


def _part(mesh: ProcessMesh, part: Any) -> Any:
    """Return a part of a matrix; on a rank outside the mesh it is empty."""
    return part if mesh.coordinate is not None else part[:0, :0]


def _singular(x: DistArray) -> tuple[DistArray, Any, Any]:
    """Return U, as the rows of a tall matrix are cut, and S and Vh on every rank."""
    q, triangle = _factored(x)
    u, s, vh = of_first(x.layout.mesh, *np.linalg.svd(triangle))
    return _times(q, u), s, vh


def _times(x: DistArray, small: Any) -> DistArray:
    """Return a matrix that is cut along its rows times one that every rank has."""
    mesh = x.layout.mesh
    shape = x.shape[0], small.shape[1]
    layout = make_layout(mesh, shape, x.layout.axes, (x.layout.cuts[0], None))
    part = x.local @ small if mesh.coordinate is not None else small[:0, :0]
    return make(part, layout)


_TALL = (
    "This is computed of matrices that have, on each rank, at least as many rows as columns, or "
    "the other way round, and of stacks of matrices"
)


@rule("linalg.qr")
def qr(x: Any, /, mode: str = "reduced") -> Any:
    """Return an orthonormal matrix and a triangle whose product is the matrix."""
    if not is_cut_matrix(x):
        return per_matrix("qr", lambda part: linalg.qr(part, mode), x)
    if not _is_tall(x) or mode not in ("reduced", "r"):
        return without_rule("numpy.linalg.qr", np.linalg.qr, (x, mode), {}, _TALL)
    q, triangle = _factored(x)
    found = everywhere(x.layout.mesh, triangle)
    return found if mode == "r" else QRResult(q, found)


@rule("linalg.svd")
def svd(
    x: Any, /, full_matrices: bool = True, compute_uv: bool = True, hermitian: bool = False
) -> Any:
    """Return the singular values of matrices, and their vectors."""
    if not is_cut_matrix(x):
        return per_matrix(
            "svd", lambda part: linalg.svd(part, full_matrices, compute_uv, hermitian), x
        )
    if not compute_uv:
        return svdvals(x)
    is_square = x.shape[0] == x.shape[1]
    if full_matrices and not is_square:
        return without_rule("numpy.linalg.svd", np.linalg.svd, (x,), {}, _NOT_FULL)
    if _is_tall(x):
        u, s, vh = _singular(x)
        mesh = x.layout.mesh
        return SVDResult(u, everywhere(mesh, s), everywhere(mesh, vh))
    if _is_tall(matrix_transpose(x)):
        v, s, uh = _singular(adjoint(x))
        mesh = x.layout.mesh
        return SVDResult(everywhere(mesh, uh.conj().T.copy()), everywhere(mesh, s), adjoint(v))
    options = {"full_matrices": full_matrices, "hermitian": hermitian}
    return without_rule("numpy.linalg.svd", np.linalg.svd, (x,), options, _TALL)


_NOT_FULL = "Ask for as many vectors as there are values, full_matrices=False"


def singular_values(x: DistArray, name: str) -> Any:
    """Return the singular values of matrices in descending order."""
    if not is_cut_matrix(x):
        return per_matrix(name, lambda part: np.linalg.svd(part, compute_uv=False), x)
    tall = next((each for each in (x, matrix_transpose(x)) if _is_tall(each)), None)
    if tall is None:
        function: Any = lambda part: np.linalg.svd(part, compute_uv=False)  # noqa: E731
        return without_rule(f"numpy.linalg.{name}", function, (x,), {}, _TALL)
    (found,) = of_first(x.layout.mesh, np.linalg.svd(_factored(tall)[1], compute_uv=False))
    return everywhere(x.layout.mesh, found)


@rule("linalg.svdvals")
def svdvals(x: Any, /) -> Any:
    """Return the singular values of matrices, the largest first."""
    return singular_values(x, "svdvals")


@rule("linalg.cond")
def cond(x: Any, p: Any = None) -> Any:
    """Return the condition of matrices: by default the largest singular value to the smallest."""
    if p not in (None, 2, -2):
        return per_matrix("cond", lambda part: np.linalg.cond(part, p), x)
    values = singular_values(x, "cond")
    ends = values[..., 0], values[..., -1]
    with np.errstate(all="ignore"):
        found = ends[1] / ends[0] if p == -2 else ends[0] / ends[1]
    # Zeros are as bad as can be; NaN is of NaN only.
    nothing = pointwise(np.isnan, found) & ~exists(pointwise(np.isnan, x), (-2, -1))
    return pointwise(np.where, nothing, found.dtype.type(np.inf), found)


@rule("linalg.matrix_rank")
def matrix_rank(A: Any, tol: Any = None, hermitian: bool = False, *, rtol: Any = None) -> Any:  # noqa: N803
    """Return how many singular values are larger than a tolerance; of a vector, if it is not 0."""
    if A.ndim < 2:
        return total(exists(A != 0), dtype=np.intp)
    values = singular_values(A, "matrix_rank")
    eps = np.finfo(values.dtype).eps
    if tol is None and 0 in A.shape[-2:]:
        tol = 0.0
    if tol is None:
        share = max(A.shape[-2:]) * eps if rtol is None else _for_each(rtol, A.layout.mesh)
        tol = largest(values, -1, keepdims=True) * share
    else:
        tol = _for_each(tol, A.layout.mesh)
    return total(pointwise(np.greater, values, tol), -1, np.intp)


def _for_each(value: Any, mesh: ProcessMesh) -> Any:
    """Return a number for each matrix of a stack as numbers for its singular values."""
    return expand_dims(as_dist(value, mesh), -1)


@rule("linalg.pinv")
def pinv(a: Any, rcond: Any = None, hermitian: bool = False, *, rtol: Any = NOT_GIVEN) -> Any:
    """Return the pseudo-inverse of matrices."""
    eps = np.finfo(np.result_type(a.dtype, np.float32)).eps
    if rcond is None:
        rcond = 1e-15 if rtol is NOT_GIVEN else max(a.shape[-2:]) * eps if rtol is None else rtol
    if not is_cut_matrix(a):
        return per_matrix("pinv", lambda part, own: np.linalg.pinv(part, own, hermitian), a, rcond)
    rcond = np.asarray(rcond)
    if not _is_tall(a) and _is_tall(matrix_transpose(a)):
        return matrix_transpose(pinv(matrix_transpose(a), rcond))
    if not _is_tall(a):
        return without_rule("numpy.linalg.pinv", np.linalg.pinv, (a, rcond), {}, _TALL)
    u, s, vh = _singular(a)
    return adjoint(_times(u, _inverted(s, rcond)[:, None] * vh))


def _inverted(s: Any, share: Any) -> Any:
    """Return one over the values, 0 for those that are too small a share of the largest."""
    large = s > share * s.max(initial=0)
    return np.divide(1, s, where=large, out=np.zeros_like(s))


@rule("linalg.lstsq")
def lstsq(a: Any, b: Any, rcond: Any = None) -> Any:
    """Return the x for which a x is nearest to b, with residuals, the rank and singular values."""
    mesh = mesh_of(a, b)
    a, b = as_dist(a, mesh), as_dist(b, mesh)
    if a.ndim != 2 or b.ndim not in (1, 2) or a.shape[0] != b.shape[0]:
        raise LinAlgError(f"lstsq: shapes do not fit: {a.shape} and {b.shape}")
    if not is_cut_matrix(a) or not _is_tall(a):
        return without_rule("numpy.linalg.lstsq", np.linalg.lstsq, (a, b, rcond), {}, _TALL)
    a = by_rows(a)
    right = rows_beside(a, b)
    u, s, vh = _singular(a)
    if rcond is None:
        rcond = np.finfo(s.dtype).eps * max(a.shape)
    rank = int((s > rcond * s.max(initial=0)).sum())
    axes = a.layout.axes[0]
    inner = np.zeros((a.shape[1], right.shape[1]), np.result_type(u.local, right))
    if mesh.coordinate is not None:
        inner = combined(u.local.conj().T @ right, mesh, axes, ReduceOp.SUM)
    x = vh.conj().T @ (_inverted(s, rcond)[:, None] * inner)
    apart = right - a.local @ x if mesh.coordinate is not None else right
    residuals = combined((apart * apart.conj()).real.sum(0), mesh, axes, ReduceOp.SUM)
    x, residuals = of_first(mesh, x, residuals)
    if rank < a.shape[1] or a.shape[0] <= a.shape[1]:
        residuals = residuals[:0]
    x = x if b.ndim == 2 else x[:, 0]
    return everywhere(mesh, x), everywhere(mesh, residuals), rank, everywhere(mesh, s)
