"""What rules of linear algebra are written with: stacks, rows, and what all ranks have alike.

[Note: stacks] Of a stack of matrices each rank computes some; what cuts the matrices is moved to
the stack. If one rank fails, all raise the error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import make_layout
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.mesh.rules.along import along, pencils
from hpcdist.mesh.rules.basis import combined, cutting, make, resharded, settled, whole_on
from hpcdist.mesh.rules.pointwise import aligned
from hpcdist.mesh.rules.shapes import matrix_transpose
from hpcdist.transport.call.reduction import ReduceOp

LinAlgError = np.linalg.LinAlgError
BLOCK = 128
"""Rows of a matrix that are worked on at a time."""


# ---- the same on every rank


def united(part: Any, mesh: ProcessMesh, axes: Any) -> Any:
    """Return an array of which each element is 0 on all ranks but those that have it."""
    combined(part.reshape(-1).view(np.uint8), mesh, axes, ReduceOp.BOR)
    return part


def of_first(mesh: ProcessMesh, *arrays: Any) -> list[Any]:
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


def everywhere(mesh: ProcessMesh, value: Any) -> DistArray:
    """Return an array that every rank of the mesh has."""
    if mesh.coordinate is None:
        return make(np.empty((0,) * max(1, value.ndim), value.dtype), whole_on(mesh, value.shape))
    return make(value, whole_on(mesh, value.shape))


def on_any(flags: list[Any], mesh: ProcessMesh, axes: Any) -> list[bool]:
    """Return which of some statements hold on any of the ranks along axes of the mesh."""
    found: list[bool] = (combined(np.array(flags, np.uint8), mesh, axes, ReduceOp.MAX) > 0).tolist()
    return found


# ---- stacks


def per_matrix(name: str, function: Callable[..., Any], x: DistArray, *beside: Any) -> Any:
    """Return `function` of each matrix of a stack, and of numbers for each, see [Note: stacks]."""
    if x.ndim < 2:
        raise LinAlgError(f"{name} is for matrices, but the array has {x.ndim} dimensions")
    dims = (x.ndim - 2, x.ndim - 1)
    mesh, layout = x.layout.mesh, pencils(x.layout, dims)
    axes = () if layout is None else cutting(layout, range(x.ndim))
    if beside and layout is not None:
        stack = make_layout(mesh, x.shape[:-2], layout.axes[:-2], layout.cuts[:-2])
        beside = tuple(aligned(beside, stack)[1])
    return along(
        f"numpy.linalg.{name}",
        lambda part: alike(lambda own: function(own, *beside), part, mesh, axes),
        x,
        dims,
        stacked=True,
        hint="A single matrix is computed on one rank; stacks of them may be cut along the stack",
    )


def alike(function: Callable[..., Any], part: Any, mesh: ProcessMesh, axes: Any) -> Any:
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
    failed, is_complex = on_any([error is not None, is_complex], mesh, axes)
    if failed:
        raise error or LinAlgError("a matrix of another rank is singular, or does not converge")
    if not is_complex or np.iscomplexobj(first):
        return result
    if isinstance(result, tuple):  # eigenvalues and vectors; those of others are complex
        make = getattr(type(result), "_make", tuple)  # before NumPy 1.25, a plain tuple
        return make([each + 0j for each in result])
    return result + 0j


# ---- one matrix that is cut


def is_cut_matrix(x: Any) -> bool:
    """Return whether `x` is a single matrix, of which no rank may have all."""
    return x.ndim == 2 and any(x.layout.axes)


def by_rows(x: DistArray) -> DistArray:
    """Return a matrix cut along its rows only."""
    layout = x.layout
    if layout.axes[1]:
        axes = cutting(layout, (0, 1))
        return resharded(x, make_layout(layout.mesh, x.shape, (axes, ())))
    return settled(x)


def adjoint(x: Any) -> Any:
    """Return the conjugate transpose of an array across ranks."""
    return np.conj(matrix_transpose(x))


def rows_beside(a: DistArray, b: DistArray) -> Any:
    """Return this rank's rows of `b`, those that it has of `a`, as a matrix."""
    if a.layout.mesh.coordinate is None:
        return np.empty((0, 1 if b.ndim == 1 else b.shape[1]), b.dtype)
    beside = make_layout(
        a.layout.mesh,
        b.shape,
        (a.layout.axes[0], ())[: b.ndim],
        (a.layout.cuts[0], None)[: b.ndim],
    )
    part = resharded(b, beside).local
    return part if b.ndim == 2 else part[:, None]
