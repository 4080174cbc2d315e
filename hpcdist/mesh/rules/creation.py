"""Functions that make arrays: each rank makes its part.

`mesh` is that of `get_mesh` if not given, or else all ranks; `placements` are those of
`array_policy` if not given, or else `Replicate`. What is made like another array lies where that
does. The first array starts hpcdist, if the program has not.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcdist.boxes import Box
from hpcdist.comm.environment import init_parallel_env
from hpcdist.errors import UsageError
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout, layout_of, make_layout
from hpcdist.mesh.placements import Placement
from hpcdist.mesh.policy import usual_placements
from hpcdist.mesh.process_mesh import ProcessMesh, get_mesh
from hpcdist.mesh.rules.basis import (
    as_dist,
    broadcast,
    cutting,
    is_dist,
    make,
    mesh_of,
    own_box,
    own_slices,
    resharded,
    settled,
    uncut,
)
from hpcdist.mesh.rules.pointwise import aligned, part_of
from hpcdist.mesh.rules.shapes import broadcast_to, expand_dims, ravel, stack
from hpcdist.mesh.rules.table import rule
from hpcdist.text import an

Placements = Sequence[Placement]


def current_mesh() -> ProcessMesh:
    """Return the mesh of new arrays: that of `get_mesh`, or all ranks."""
    ranks = init_parallel_env().ranks
    return get_mesh() or ProcessMesh(ranks)


def new_layout(shape: Any, mesh: ProcessMesh | None, placements: Placements | None) -> Layout:
    """Return the layout of a new array."""
    lengths = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if any(length < 0 for length in lengths):
        raise ValueError(f"negative dimensions are not allowed: {shape}")
    mesh = mesh or current_mesh()
    if placements is None:
        placements = usual_placements(len(lengths), mesh.ndim)
    layout = layout_of(mesh, [*map(operator.index, lengths)], placements)
    if layout.is_partial:
        raise UsageError(f"a new array has values, not contributions: {placements} has a Partial")
    return layout


def check_device(device: Any) -> None:
    """Raise `UsageError` for a device on which no arrays are made."""
    if device not in (None, "cpu"):
        raise UsageError(f"arrays are made in host memory, device='cpu', got {device!r}")


def _made(layout: Layout, part: Callable[[Box], Any]) -> DistArray:
    return make(part(own_box(layout)), layout)


def _shape_of(box: Box) -> tuple[int, ...]:
    return tuple([hi - lo for lo, hi in box])


# ---- of one value


def zeros(
    shape: Any,
    dtype: Any = float,
    *,
    device: Any = None,
    mesh: ProcessMesh | None = None,
    placements: Placements | None = None,
) -> DistArray:
    """Return a new array of zeros."""
    check_device(device)
    layout = new_layout(shape, mesh, placements)
    return _made(layout, lambda box: np.zeros(_shape_of(box), dtype))


def ones(
    shape: Any,
    dtype: Any = float,
    *,
    device: Any = None,
    mesh: ProcessMesh | None = None,
    placements: Placements | None = None,
) -> DistArray:
    """Return a new array of ones."""
    check_device(device)
    layout = new_layout(shape, mesh, placements)
    return _made(layout, lambda box: np.ones(_shape_of(box), dtype))


def empty(
    shape: Any,
    dtype: Any = float,
    *,
    device: Any = None,
    mesh: ProcessMesh | None = None,
    placements: Placements | None = None,
) -> DistArray:
    """Return a new array of any values."""
    check_device(device)
    layout = new_layout(shape, mesh, placements)
    return _made(layout, lambda box: np.empty(_shape_of(box), dtype))


def full(
    shape: Any,
    fill_value: Any,
    dtype: Any = None,
    *,
    device: Any = None,
    mesh: ProcessMesh | None = None,
    placements: Placements | None = None,
) -> DistArray:
    """Return a new array of one value."""
    check_device(device)
    layout = new_layout(shape, mesh, placements)
    if not is_dist(fill_value):
        # With the error that ranks without elements would not have.
        fill_value = np.full(np.shape(fill_value), fill_value, dtype)
    _, (value,) = aligned((fill_value,), layout)
    return _made(layout, lambda box: np.full(_shape_of(box), value, dtype))


def _like(function: Callable[..., Any]) -> Callable[..., Any]:
    def made(
        x: Any, /, dtype: Any = None, *, device: Any = None, shape: Any = None, **_: Any
    ) -> DistArray:
        check_device(device)
        dtype = x.dtype if dtype is None else dtype
        if shape is not None and tuple(np.atleast_1d(shape)) != x.shape:
            mesh, placements = x.layout.mesh, x.layout.placements
            return function(shape, dtype, mesh=mesh, placements=placements)  # type: ignore[no-any-return]
        layout = uncut(x.layout, ())
        return make(getattr(np, function.__name__)(x.local.shape, dtype), layout)

    made.__name__ = f"{function.__name__}_like"
    made.__doc__ = f"Return what `{function.__name__}` makes, in the shape and layout of `x`."
    return made


zeros_like = rule("zeros_like")(_like(zeros))
ones_like = rule("ones_like")(_like(ones))
empty_like = rule("empty_like")(_like(empty))


@rule("full_like")
def full_like(
    x: Any, /, fill_value: Any, dtype: Any = None, *, device: Any = None, **_: Any
) -> DistArray:
    """Return a new array of one value, in the shape and layout of `x`."""
    check_device(device)
    layout = uncut(x.layout, ())
    (value,) = aligned((fill_value,), layout)[1]
    return make(np.full(x.local.shape, value, x.dtype if dtype is None else dtype), layout)


# ---- of their places


def arange(
    start: Any,
    /,
    stop: Any = None,
    step: Any = 1,
    *,
    dtype: Any = None,
    device: Any = None,
    mesh: ProcessMesh | None = None,
    placements: Placements | None = None,
) -> DistArray:
    """Return numbers from `start` to before `stop`, by `step`."""
    check_device(device)
    if stop is None:
        start, stop = 0, start
    kind = np.dtype(dtype) if dtype is not None else _of_numbers(start, stop, step)
    length = max(math.ceil((stop - start) / step), 0)
    if length and kind.kind in "iu" and isinstance(start, int):
        np.array(start, kind)  # raises NumPy's error, if it does not fit
    layout = new_layout((length,), mesh, placements)

    def part(box: Box) -> Any:
        ((lo, hi),) = box
        if kind.kind in "iu" and all(isinstance(each, int) for each in (start, step)):
            return _counted(start + lo * step, hi - lo, step, kind)
        # NumPy takes the first two numbers, and goes on by their difference.
        one, two = (np.asarray(each).astype(kind) for each in (start, start + step))
        if kind.kind in "iu":
            return (one + np.arange(lo, hi) * (two - one)).astype(kind)
        return one + np.arange(lo, hi, dtype=kind) * (two - one)

    return _made(layout, part)


def _counted(first: int, count: int, step: int, kind: Any) -> Any:
    """Return integers from the first one on; numbers without a sign wrap, so that all fit."""
    unsigned = np.dtype(f"u{kind.itemsize}")
    start, by = (np.array(each % 256**kind.itemsize, unsigned) for each in (first, step))
    return (np.arange(count).astype(unsigned) * by + start).view(kind)


def _of_numbers(*numbers: Any) -> Any:
    """Return the dtype of a range of Python's numbers."""
    return np.result_type(*[each if hasattr(each, "dtype") else type(each) for each in numbers])


def linspace(
    start: Any,
    stop: Any,
    /,
    num: int = 50,
    *,
    dtype: Any = None,
    device: Any = None,
    endpoint: bool = True,
    mesh: ProcessMesh | None = None,
    placements: Placements | None = None,
) -> DistArray:
    """Return `num` numbers at equal distances, from `start` to `stop`."""
    check_device(device)
    if num < 0:
        raise ValueError(f"Number of samples, {num}, must be non-negative.")
    layout = new_layout((num,), mesh, placements)
    kind = np.result_type(start, stop, float(num))
    one, two = np.asarray(start).astype(kind), np.asarray(stop).astype(kind)
    gaps = num - 1 if endpoint else num
    step = (two - one) / gaps if gaps > 0 else two - one

    def part(box: Box) -> Any:
        ((lo, hi),) = box
        places = np.arange(lo, hi).astype(step.real.dtype)
        values = places * step if step != 0 or gaps <= 0 else places / gaps * (two - one)
        values = values + one
        if endpoint and num > 1 and hi == num and lo < hi:
            values[-1] = two
        integral = dtype is not None and np.dtype(dtype).kind in "iu"
        return (np.floor(values) if integral else values).astype(dtype or kind, copy=False)

    return _made(layout, part)


def fftfreq(
    n: int,
    /,
    *,
    d: float = 1.0,
    dtype: Any = None,
    device: Any = None,
    mesh: ProcessMesh | None = None,
    placements: Placements | None = None,
) -> DistArray:
    """Return the frequencies of a Fourier transform of `n` elements at distances of `d`."""
    return _frequencies(n, (n, n), d, dtype, device, mesh, placements)


def rfftfreq(
    n: int,
    /,
    *,
    d: float = 1.0,
    dtype: Any = None,
    device: Any = None,
    mesh: ProcessMesh | None = None,
    placements: Placements | None = None,
) -> DistArray:
    """Return the frequencies, from 0 on, of a Fourier transform of `n` real elements."""
    return _frequencies(n, (n // 2 + 1, 2 * n), d, dtype, device, mesh, placements)


def _frequencies(
    n: int,
    places: tuple[int, int],
    d: float,
    dtype: Any,
    device: Any,
    mesh: ProcessMesh | None,
    placements: Placements | None,
) -> DistArray:
    """Return ``places[0]`` frequencies; from half of ``places[1]`` on they are negative."""
    check_device(device)
    length, period = places
    layout = new_layout((length,), mesh, placements)

    def part(box: Box) -> Any:
        ((lo, hi),) = box
        numbers = np.arange(lo, hi)
        numbers = np.where(numbers < (period + 1) // 2, numbers, numbers - period)
        return (numbers * (1.0 / (n * d))).astype(dtype or float, copy=False)

    return _made(layout, part)


def eye(
    n_rows: int,
    n_cols: int | None = None,
    /,
    *,
    k: int = 0,
    dtype: Any = float,
    device: Any = None,
    mesh: ProcessMesh | None = None,
    placements: Placements | None = None,
) -> DistArray:
    """Return a matrix with ones on a diagonal, else zeros."""
    check_device(device)
    layout = new_layout((n_rows, n_rows if n_cols is None else n_cols), mesh, placements)
    return make(diagonal_mask(layout, k).astype(dtype), layout)


def diagonal_mask(layout: Layout, k: int) -> Any:
    """Return where this rank's parts of matrices are on a diagonal."""
    (row, rows), (col, cols) = own_box(layout)[-2:]
    return np.eye(rows - row, cols - col, _shifted(k, row, col), dtype=bool)


def _shifted(k: int, row: int, col: int) -> int:
    return k + row - col


def _triangle(name: str) -> Callable[..., Any]:
    numpys = getattr(np, name)

    def part_of(x: Any, /, k: int = 0) -> DistArray:
        if x.ndim < 1:
            raise ValueError(f"{name} is for matrices, but this array has no dimensions")
        x = broadcast_to(x, x.shape * 2) if x.ndim == 1 else settled(x)
        (row, _), (col, _) = own_box(x.layout)[-2:]
        return make(numpys(x.local, _shifted(k, row, col)), x.layout)

    part_of.__name__, part_of.__doc__ = name, f"Return the {_SIDES[name]} triangle, else zeros."
    return rule(name)(part_of)


_SIDES = {"tril": "lower", "triu": "upper"}
tril, triu = _triangle("tril"), _triangle("triu")


# ---- of others


def asarray(
    obj: Any,
    /,
    dtype: Any = None,
    *,
    device: Any = None,
    copy: bool | None = None,
    mesh: ProcessMesh | None = None,
    placements: Placements | None = None,
) -> DistArray:
    """Return `obj` as a DistArray: of an ordinary array, the same on every rank, each its part."""
    check_device(device)
    if isinstance(obj, (list, tuple)):
        if copy is False:
            raise ValueError(f"an array of {an(type(obj).__name__)} needs a copy")
        obj = _stack_nested(obj)
    if is_dist(obj):
        if mesh is not None or placements is not None:
            mesh = mesh or obj.layout.mesh
            obj = resharded(obj, layout_of(mesh, obj.shape, placements))
        if dtype is not None and np.dtype(dtype) != obj.dtype:
            if copy is False:
                raise ValueError(f"an array of {dtype} needs a copy of the one of {obj.dtype}")
            return make(obj.local.astype(dtype), obj.layout)
        return make(obj.local.copy(), obj.layout) if copy else obj
    whole = np.asarray(obj, dtype)
    if copy is False and whole.size and not np.may_share_memory(whole, np.asarray(obj)):
        raise ValueError("an array of this object needs a copy")
    layout = new_layout(whole.shape, mesh, placements)
    here: Any = (*own_slices(layout), ...)
    part = whole[here]
    # A view of a part keeps the whole, so it is made only where it is asked for.
    shared = not copy and (copy is False or (layout.is_replicated and part.ndim > 0))
    return make(part if shared else np.array(part), layout)


def _stack_nested(tree: Any) -> Any:
    """Return nested lists with the DistArrays in them stacked, and those of one number as that."""
    if is_dist(tree):
        return tree if tree.ndim else np.asarray(tree)
    if not isinstance(tree, (list, tuple)):
        return tree
    items = [_stack_nested(each) for each in tree]
    return stack(items) if any(map(is_dist, items)) else items


def from_dlpack(
    x: Any,
    /,
    *,
    device: Any = None,
    copy: bool | None = None,
    mesh: ProcessMesh | None = None,
    placements: Placements | None = None,
) -> DistArray:
    """Return an array of another library, the same on every rank, as a DistArray."""
    array = x if is_dist(x) else np.from_dlpack(x)
    return asarray(array, device=device, copy=copy, mesh=mesh, placements=placements)


@rule("meshgrid")
def meshgrid(*arrays: Any, indexing: str = "xy", sparse: bool = False, copy: bool = True) -> Any:
    """Return the coordinates of a grid: of arrays of one dimension, as many of all."""
    if indexing not in ("xy", "ij"):
        raise ValueError("Valid values for `indexing` are 'xy' and 'ij'.")
    mesh = mesh_of(*arrays) if any(map(is_dist, arrays)) else current_mesh()
    given = [as_dist(each, mesh) for each in arrays]
    given = [ravel(each) if each.ndim > 1 else each for each in given]
    count = len(given)
    places = [*range(count)]
    if indexing == "xy" and count > 1:
        places[:2] = [1, 0]
    taken: set[int] = set()
    open_grid = []
    for each, place in zip(given, places, strict=True):
        if taken.intersection(cutting(each.layout, (0,) if each.ndim else ())):
            each = resharded(each, uncut(each.layout))
        taken.update(cutting(each.layout, range(each.ndim)))
        each = each if each.ndim else expand_dims(each, 0)
        open_grid.append(expand_dims(each, [dim for dim in range(count) if dim != place]))
    if sparse:
        return tuple(make(x.local.copy(), x.layout) if copy else x for x in open_grid)
    return tuple(_filled(open_grid, x) for x in open_grid)


def _filled(grid: list[DistArray], x: DistArray) -> DistArray:
    """Return an array of an open grid, repeated along the dimensions of the others."""
    shape = broadcast(*[each.shape for each in grid])
    cut = [
        next((each.layout for each in grid if each.layout.axes[dim]), None)
        for dim in range(len(shape))
    ]
    layout = make_layout(
        x.layout.mesh,
        shape,
        [() if each is None else each.axes[dim] for dim, each in enumerate(cut)],
        [None if each is None else each.cuts[dim] for dim, each in enumerate(cut)],
    )
    part = resharded(x, part_of(layout, x.shape)).local
    here = layout.mesh.coordinate
    wanted = part.shape if here is None else layout.local_shape(here)
    return make(np.broadcast_to(part, wanted).copy(), layout)
