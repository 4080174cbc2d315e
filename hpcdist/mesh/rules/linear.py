"""Linear algebra: `numpy.linalg`.

[Note: stacks] Of a stack of matrices each rank computes some; what cuts the matrices is moved to
the stack. If one rank fails, all raise the error.

[Note: tall] A tall matrix is cut along its rows. Each rank factors its rows, and the triangles, one
under the other, are factored again (TSQR): no rank sees more than them. This is done where they are
no more than the matrix, which is that each rank has at least as many rows as there are columns. A
wide matrix is the transpose of a tall one. Singular values, pseudo-inverses and least squares
follow from the triangle. Signs of rows and columns are not those of NumPy.

[Note: rows] A positive definite matrix is factored where its rows lie, block by block: the rows of
a block that are done go to all, who take them off their own rows below. So are triangular systems
solved. What is small and the same on all ranks is sent by the first, so that all have its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout, make_layout
from hpcdist.mesh.policy import without_rule
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.mesh.rules.along import along, pencils
from hpcdist.mesh.rules.basis import (
    as_dist,
    combined,
    cutting,
    make,
    mesh_of,
    own_box,
    part_number,
    resharded,
    settled,
    uncut,
    whole_on,
)
from hpcdist.mesh.rules.creation import diagonal_mask
from hpcdist.mesh.rules.pointwise import part_of, pointwise
from hpcdist.mesh.rules.products import matmul
from hpcdist.mesh.rules.reductions import max as largest, sum as total
from hpcdist.mesh.rules.shapes import matrix_transpose
from hpcdist.mesh.rules.table import rule
from hpcdist.transport.reduction import ReduceOp

linalg: Any = np.linalg
LinAlgError = np.linalg.LinAlgError
NOT_GIVEN: Any = object()
BLOCK = 128
"""Rows that are factored at a time."""


class QRResult(NamedTuple):
    """What `qr` returns."""

    Q: DistArray
    R: DistArray


class SVDResult(NamedTuple):
    """What `svd` returns."""

    U: DistArray
    S: DistArray
    Vh: DistArray


# ---- the same on every rank


def united(part: Any, mesh: ProcessMesh, axes: Any) -> Any:
    """Return an array of which each element is 0 on all ranks but those that have it."""
    combined(part.reshape(-1).view(np.uint8), mesh, axes, ReduceOp.BOR)
    return part


def _of_first(mesh: ProcessMesh, *arrays: Any) -> list[Any]:
    """Return arrays as the first rank of the mesh has them."""
    parts = [np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in arrays]
    packed = np.concatenate(parts)
    if any(mesh.coordinate or ()):
        packed[:] = 0
    combined(packed, mesh, range(mesh.ndim), ReduceOp.BOR)
    ends = np.cumsum([each.size for each in parts])[:-1]
    return [
        each.view(array.dtype).reshape(array.shape)
        for each, array in zip(np.split(packed, ends), arrays, strict=True)
    ]


def _whole(mesh: ProcessMesh, value: Any) -> DistArray:
    """Return an array that every rank of the mesh has."""
    layout = whole_on(mesh, value.shape)
    return make(value if mesh.coordinate is not None else value[(slice(0),) * value.ndim], layout)


def _told(flags: list[Any], mesh: ProcessMesh, axes: Any) -> list[bool]:
    """Return which of some statements hold on any of the ranks along axes of the mesh."""
    return combined(np.array(flags, np.uint8), mesh, axes, ReduceOp.MAX).astype(bool).tolist()  # type: ignore[no-any-return]


# ---- stacks


def _stacked(name: str, function: Callable[..., Any], x: DistArray) -> Any:
    """Return `function` of each matrix of a stack, see [Note: stacks]."""
    if x.ndim < 2:
        raise LinAlgError(f"{name} is of matrices, but the array has {x.ndim} dimensions")
    dims = (x.ndim - 2, x.ndim - 1)
    mesh, layout = x.layout.mesh, pencils(x.layout, dims)
    axes = () if layout is None else cutting(layout, range(x.ndim))
    return along(
        f"numpy.linalg.{name}",
        lambda part: _alike(function, part, mesh, axes),
        x,
        dims,
        stacked=True,
        hint="A single matrix is computed on one rank; stacks of them may be cut along the stack",
    )


def _alike(function: Callable[..., Any], part: Any, mesh: ProcessMesh, axes: Any) -> Any:
    """Return `function` of this rank's part, of a dtype and with an error common to all ranks."""
    if mesh.coordinate is None:  # of what there is nothing here, but no error either
        part = part + np.eye(*part.shape[-2:], dtype=part.dtype)
    error: LinAlgError | None = None
    result: Any = None
    try:
        result = function(part)
    except LinAlgError as raised:
        error = raised
    first = result[0] if isinstance(result, tuple) else result
    is_complex = first is not None and np.iscomplexobj(first)
    failed, is_complex = _told([error is not None, is_complex], mesh, axes)
    if failed:
        raise error or LinAlgError("a matrix of another rank is singular, or does not converge")
    if not is_complex or np.iscomplexobj(first):
        return result
    if isinstance(result, tuple):  # eigenvalues and vectors; those of others are complex
        return type(result)(*[each + 0j for each in result])
    return result + 0j


def _of_stacks(name: str) -> Callable[..., Any]:
    numpys = getattr(np.linalg, name)

    def computed(x: Any, /, *args: Any, **options: Any) -> Any:
        return _stacked(name, lambda part: numpys(part, *args, **options), x)

    computed.__name__, computed.__doc__ = name, f"Return what `numpy.linalg.{name}` does."
    return rule(f"linalg.{name}")(computed)


inv = _of_stacks("inv")
for _name in ("det", "slogdet", "eigh", "eigvalsh", "eig", "eigvals"):
    _of_stacks(_name)


@rule("linalg.matrix_power")
def matrix_power(x: Any, n: int, /) -> Any:
    """Return the product of a matrix with itself, `n` times."""
    if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        raise LinAlgError(f"a power is of square matrices, not of an array of shape {x.shape}")
    if n < 0:
        return matrix_power(inv(x), -n)
    x = settled(x)
    if n == 0:
        mask = np.broadcast_to(diagonal_mask(x.layout, 0), x.local.shape)
        return make(mask.astype(x.dtype), x.layout)
    result = None
    while n:
        if n % 2:
            result = x if result is None else matmul(result, x)
        n //= 2
        x = matmul(x, x) if n else x
    return result


# ---- tall matrices


def _is_cut_matrix(x: Any) -> bool:
    return x.ndim == 2 and any(x.layout.axes)


def _by_rows(x: DistArray) -> DistArray:
    """Return a matrix cut along its rows only."""
    layout = x.layout
    if layout.axes[1]:
        axes = cutting(layout, (0, 1))
        return resharded(x, make_layout(layout.mesh, x.shape, (axes, ())))
    return settled(x)


def _is_tall(x: DistArray) -> bool:
    """Return whether each rank has as many rows of a matrix as there are columns."""
    parts = (len(x.layout.cuts[0]) - 1) * (len(x.layout.cuts[1]) - 1)
    return x.shape[0] // parts >= x.shape[1]


def _adjoint(x: Any) -> Any:
    return np.conj(matrix_transpose(x))


def _factored(x: DistArray) -> tuple[DistArray, Any]:
    """Return Q, as the rows of `x` are cut, and R, on every rank; see [Note: tall]."""
    x = _by_rows(x)
    layout, mesh, columns = x.layout, x.layout.mesh, x.shape[1]
    part = x.local if mesh.coordinate is not None else np.empty((0, columns), x.dtype)
    own, triangle = np.linalg.qr(part)
    heights = [min(hi - lo, columns) for lo, hi in pairwise(layout.cuts[0])]
    first = sum(heights[: part_number(layout, 0)])
    here = slice(first, first + len(triangle))
    stacked = np.zeros((sum(heights), columns), triangle.dtype)
    stacked[here] = triangle
    inner, triangle = np.linalg.qr(united(stacked, mesh, layout.axes[0]))
    inner, triangle = _of_first(mesh, inner, triangle)
    return make(_part(mesh, own @ inner[here]), layout), triangle


def _part(mesh: ProcessMesh, part: Any) -> Any:
    """Return a part of a matrix; on a rank outside the mesh it is empty."""
    return part if mesh.coordinate is not None else part[:0, :0]


def _singular(x: DistArray) -> tuple[DistArray, Any, Any]:
    """Return U, as the rows of a tall matrix are cut, and S and Vh on every rank."""
    q, triangle = _factored(x)
    u, s, vh = _of_first(x.layout.mesh, *np.linalg.svd(triangle))
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
    if not _is_cut_matrix(x):
        return _stacked("qr", lambda part: linalg.qr(part, mode), x)
    if not _is_tall(x) or mode not in ("reduced", "r"):
        return without_rule("numpy.linalg.qr", np.linalg.qr, (x, mode), {}, _TALL)
    q, triangle = _factored(x)
    found = _whole(x.layout.mesh, triangle)
    return found if mode == "r" else QRResult(q, found)


@rule("linalg.svd")
def svd(
    x: Any, /, full_matrices: bool = True, compute_uv: bool = True, hermitian: bool = False
) -> Any:
    """Return the singular values of matrices, and their vectors."""
    if not _is_cut_matrix(x):
        return _stacked(
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
        return SVDResult(u, _whole(mesh, s), _whole(mesh, vh))
    if _is_tall(matrix_transpose(x)):
        v, s, uh = _singular(_adjoint(x))
        mesh = x.layout.mesh
        return SVDResult(_whole(mesh, uh.conj().T.copy()), _whole(mesh, s), _adjoint(v))
    options = {"full_matrices": full_matrices, "hermitian": hermitian}
    return without_rule("numpy.linalg.svd", np.linalg.svd, (x,), options, _TALL)


_NOT_FULL = "Ask for as many vectors as there are values, full_matrices=False"


def singular_values(x: DistArray, name: str) -> Any:
    """Return the singular values of matrices in descending order."""
    if not _is_cut_matrix(x):
        return _stacked(name, lambda part: np.linalg.svd(part, compute_uv=False), x)
    tall = next((each for each in (x, matrix_transpose(x)) if _is_tall(each)), None)
    if tall is None:
        function: Any = lambda part: np.linalg.svd(part, compute_uv=False)  # noqa: E731
        return without_rule(f"numpy.linalg.{name}", function, (x,), {}, _TALL)
    (found,) = _of_first(x.layout.mesh, np.linalg.svd(_factored(tall)[1], compute_uv=False))
    return _whole(x.layout.mesh, found)


@rule("linalg.svdvals")
def svdvals(x: Any, /) -> Any:
    """Return the singular values of matrices, the largest first."""
    return singular_values(x, "svdvals")


@rule("linalg.cond")
def cond(x: Any, p: Any = None) -> Any:
    """Return the condition of matrices: by default the largest singular value to the smallest."""
    if p not in (None, 2, -2):
        return _stacked("cond", lambda part: np.linalg.cond(part, p), x)
    values = singular_values(x, "cond")
    ends = values[..., 0], values[..., -1]
    return ends[1] / ends[0] if p == -2 else ends[0] / ends[1]


@rule("linalg.matrix_rank")
def matrix_rank(A: Any, tol: Any = None, hermitian: bool = False, *, rtol: Any = None) -> Any:  # noqa: N803
    """Return how many singular values are larger than a tolerance."""
    values = singular_values(A, "matrix_rank")
    eps = np.finfo(values.dtype).eps
    if tol is None:
        share = max(A.shape[-2:]) * eps if rtol is None else np.asarray(rtol)[..., None]
        tol = largest(values, -1, keepdims=True) * share
    else:
        tol = np.asarray(tol)[..., None]
    return total(pointwise(np.greater, values, tol), -1, np.intp)


@rule("linalg.pinv")
def pinv(a: Any, rcond: Any = None, hermitian: bool = False, *, rtol: Any = NOT_GIVEN) -> Any:
    """Return the pseudo-inverse of matrices."""
    eps = np.finfo(np.result_type(a.dtype, np.float32)).eps
    if rcond is None:
        rcond = 1e-15 if rtol is NOT_GIVEN else max(a.shape[-2:]) * eps if rtol is None else rtol
    if not _is_cut_matrix(a):
        return _stacked("pinv", lambda part: np.linalg.pinv(part, rcond, hermitian), a)
    if not _is_tall(a) and _is_tall(matrix_transpose(a)):
        return matrix_transpose(pinv(matrix_transpose(a), rcond))
    if not _is_tall(a):
        return without_rule("numpy.linalg.pinv", np.linalg.pinv, (a, rcond), {}, _TALL)
    u, s, vh = _singular(a)
    return _adjoint(_times(u, _inverted(s, rcond)[:, None] * vh))


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
    if not _is_cut_matrix(a) or not _is_tall(a):
        return without_rule("numpy.linalg.lstsq", np.linalg.lstsq, (a, b, rcond), {}, _TALL)
    a = _by_rows(a)
    right = _beside(a, b)
    u, s, vh = _singular(a)
    if rcond is None:
        rcond = np.finfo(s.dtype).eps * max(a.shape)
    rank = int((s > rcond * s.max(initial=0)).sum())
    axes = a.layout.axes[0]
    inner = combined(u.local.conj().T @ right, mesh, axes, ReduceOp.SUM)
    x = vh.conj().T @ (_inverted(s, rcond)[:, None] * inner)
    apart = right - a.local @ x if mesh.coordinate is not None else right
    residuals = combined((apart * apart.conj()).real.sum(0), mesh, axes, ReduceOp.SUM)
    x, residuals = _of_first(mesh, x, residuals)
    if rank < a.shape[1] or a.shape[0] <= a.shape[1]:
        residuals = residuals[:0]
    x = x if b.ndim == 2 else x[:, 0]
    return _whole(mesh, x), _whole(mesh, residuals), rank, _whole(mesh, s)


def _beside(a: DistArray, b: DistArray) -> Any:
    """Return this rank's rows of `b`, those that it has of `a`, as a matrix."""
    if a.layout.mesh.coordinate is None:
        return np.empty((0, 0), b.dtype)
    beside = make_layout(
        a.layout.mesh,
        b.shape,
        (a.layout.axes[0], ())[: b.ndim],
        (a.layout.cuts[0], None)[: b.ndim],
    )
    part = resharded(b, beside).local
    return part if b.ndim == 2 else part[:, None]


# ---- positive definite and triangular matrices


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
    if not _is_cut_matrix(a):
        function = np.linalg.cholesky
        if not upper:
            return _stacked("cholesky", function, a)
        return _adjoint(_stacked("cholesky", lambda part: function(_adjoint_of(part)), a))
    if a.shape[0] != a.shape[1]:
        raise LinAlgError(f"Last 2 dimensions of the array must be square, got {a.shape}")
    if upper:
        return _adjoint(cholesky(_adjoint(a)))
    a = _by_rows(a)
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
        raise LinAlgError(f"solve is of square matrices, got shapes {a.shape} and {b.shape}")
    if a.shape[-1] != b.shape[-1 if b.ndim == 1 else -2]:
        raise ValueError(f"solve: shapes do not fit: {a.shape} and {b.shape}")
    if not _is_cut_matrix(a):
        return _solve_stacks(a, b)
    refused: Callable[[], Any] = lambda: without_rule(  # noqa: E731
        "numpy.linalg.solve", np.linalg.solve, (a, b), {}, _SOLVED
    )
    if b.ndim > 2:
        return refused()
    rows = _by_rows(a)
    is_lower, is_upper = _is_triangular(rows)
    right = _beside(rows, b)
    if is_lower or is_upper:
        found = _substituted(rows, right, backward=not is_lower)
    else:
        adjoint = resharded(_adjoint(rows), rows.layout)
        differs = _differ(rows, adjoint)
        if differs:
            return refused()
        try:
            lower = cholesky(rows)
        except LinAlgError:
            return refused()
        upper = resharded(_adjoint(lower), rows.layout)
        found = _substituted(upper, _substituted(lower, right, backward=False), backward=True)
    layout = rows.layout
    cuts = layout.cuts[0]
    final = make_layout(mesh, b.shape, (layout.axes[0], ())[: b.ndim], (cuts, None)[: b.ndim])
    return make(found if b.ndim == 2 else found[:, 0], final)


_SOLVED = (
    "A cut matrix is solved if it is triangular, or Hermitian and positive definite; "
    "np.linalg.lstsq solves tall ones"
)


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
    above, below, is_singular = _told(flags, x.layout.mesh, range(x.layout.mesh.ndim))
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
            right[here] = found[...] = np.linalg.solve(own[here, lo:hi], right[here])
        united(found, layout.mesh, layout.axes[0])
        rest = slice(max(lo - first, 0)) if backward else slice(max(hi - first, 0), None)
        if len(right[rest]):
            right[rest] -= own[rest, lo:hi] @ found
    return right


def _solve_stacks(a: DistArray, b: DistArray) -> Any:
    """Return the solutions of a stack of systems, each computed by one rank."""
    if a.ndim == 2:  # every rank has the matrix: the right sides are divided
        dim = b.ndim - (1 if b.ndim == 1 else 2)
        layout = pencils(b.layout, (dim,)) or uncut(b.layout)
        b = resharded(b, layout)
        part = _alike(
            lambda part: np.linalg.solve(a.local, part),
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
    part = _alike(
        lambda part: np.linalg.solve(part, right), a.local, mesh, cutting(home, range(count))
    )
    return make(part, make_layout(mesh, shape, axes, cuts[: count + last]))
