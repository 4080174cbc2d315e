"""What the rules are written with: layouts made of layouts, and results combined over ranks."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from hpcdist.arrays.dtypes import dtype_row
from hpcdist.boxes import Box, slices
from hpcdist.comm.collectives import all_reduce
from hpcdist.errors import UsageError
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout, make_layout
from hpcdist.mesh.process_mesh import Coordinate, ProcessMesh
from hpcdist.mesh.reshard import reshard_to
from hpcdist.transport.call.reduction import ReduceOp, rule_for

make = DistArray._of
AxisError = getattr(np, "exceptions", np).AxisError  # `np.exceptions` is of NumPy 1.25


def is_dist(value: Any) -> bool:
    """Return whether `value` is a `DistArray`."""
    return value.__class__ is DistArray


def arrays_in(tree: Any) -> Iterator[DistArray]:
    """Yield the DistArrays in lists, tuples and dicts of anything."""
    if is_dist(tree):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for each in tree:
            yield from arrays_in(each)
    elif isinstance(tree, dict):
        yield from arrays_in([*tree.values()])


def result_array(value: Any) -> Any:
    """Return what a function gave as an array: NumPy gives scalars where others give 0-d arrays."""
    return np.asarray(value) if isinstance(value, (np.generic, int, float, complex)) else value


# ---- layouts


def whole_on(mesh: ProcessMesh, shape: Sequence[int]) -> Layout:
    """Return the layout in which every rank has all of the array."""
    return make_layout(mesh, shape, ((),) * len(shape))


def uncut(layout: Layout, dims: Iterable[int] | None = None) -> Layout:
    """Return the layout without cuts along `dims` (None: along all), and without contributions."""
    key = "uncut", None if dims is None else tuple(dims)
    found = layout.memo.get(key)
    if found is None:
        free = range(len(layout.shape)) if key[1] is None else key[1]
        axes = [() if dim in free else cutting for dim, cutting in enumerate(layout.axes)]
        cuts = [None if dim in free else cut for dim, cut in enumerate(layout.cuts)]
        found = layout.remember(key, make_layout(layout.mesh, layout.shape, axes, cuts))
    return found


def arranged(layout: Layout, dims: Sequence[int | None]) -> Layout:
    """Return the layout of an array whose dimensions are `dims` of another; None is a new one."""
    return make_layout(
        layout.mesh,
        [1 if dim is None else layout.shape[dim] for dim in dims],
        [() if dim is None else layout.axes[dim] for dim in dims],
        [None if dim is None else layout.cuts[dim] for dim in dims],
    )


def replaced(layout: Layout, dim: int, cuts: Sequence[int]) -> Layout:
    """Return the layout with other boundaries along one dimension."""
    shape, all_cuts = [*layout.shape], [*layout.cuts]
    shape[dim], all_cuts[dim] = cuts[-1], tuple(cuts)
    return make_layout(layout.mesh, shape, layout.axes, all_cuts)


def cutting(layout: Layout, dims: Iterable[int]) -> tuple[int, ...]:
    """Return the axes of the mesh that cut any of `dims`."""
    return tuple(axis for dim in dims for axis in layout.axes[dim])


def own_box(layout: Layout) -> Box:
    """Return what this rank has; an empty box outside the mesh."""
    here = layout.mesh.coordinate
    return ((0, 0),) * len(layout.shape) if here is None else layout.box(here)


def own_slices(layout: Layout) -> tuple[slice, ...]:
    """Return where this rank's part is in the whole array."""
    return slices(own_box(layout))


# ---- arrays


def resharded(array: DistArray, layout: Layout) -> DistArray:
    """Return the array in a layout; itself if it is in that."""
    return array if array.layout is layout else reshard_to(array, layout)


def settled(array: DistArray) -> DistArray:
    """Return the array with its contributions combined, if it has any."""
    return resharded(array, uncut(array.layout, ())) if array.layout.is_partial else array


def as_dist(value: Any, mesh: ProcessMesh) -> DistArray:
    """Return `value` as a DistArray; an ordinary array is taken to be the same on every rank."""
    if is_dist(value):
        return settled(value)
    whole = np.asarray(value)
    layout = whole_on(mesh, whole.shape)
    if mesh.coordinate is None:  # outside there is nothing
        whole = np.empty((0,) * max(1, whole.ndim), whole.dtype)
    return make(whole, layout)


def mesh_of(*values: Any) -> ProcessMesh:
    """Return the mesh of the arrays and layouts among `values`; refuse several meshes."""
    found: Layout | None = None
    for value in values:
        if value.__class__ is not DistArray and value.__class__ is not Layout:
            continue
        layout = value.layout if isinstance(value, DistArray) else value
        if found is None:
            found = layout
        elif found.mesh is not layout.mesh and found.mesh != layout.mesh:
            raise UsageError(
                f"the arrays are on different meshes, {found!r} and {layout!r}; move one of them "
                "first, for example by dist.reshard(b, a.process_mesh, a.placements)"
            )
    if found is None:
        raise UsageError("none of the arguments is a DistArray; dist.shard_tensor makes them")
    return found.mesh


# ---- views, and what stands for them
#
# [Note: moved views] Where NumPy's result is a view, and elements had to be moved for it, what is
# written to the result would not reach the array that it was taken of. So it is read-only as long
# as that array, or a view of it, is in use on any rank. `np.arange(6).reshape(2, 3)` can be written
# to: nobody else sees those elements. All ranks know which arrays are of this kind, so that they
# ask each other when one is written to first.


def detached(array: Any, source: DistArray) -> Any:
    """Return arrays that were moved as read-only ones, see [Note: moved views]."""
    if isinstance(array, tuple):
        return tuple([detached(each, source) for each in array])
    part = array.local
    if part.__class__ is not np.ndarray:
        return array
    if np.may_share_memory(part, source.local):
        if max(array.layout.mesh.sizes) == 1:
            return view_of(source, part, array.layout)
        part = part.copy()
    part = part.view()
    part.flags.writeable = False
    made = make(part, array.layout)
    root = _root(source)
    earlier = [each for each in getattr(root, "sources", ()) if each() is not None]
    made.sources = (weakref.ref(root), *earlier)
    return made


def view_of(x: DistArray, part: Any, layout: Layout) -> DistArray:
    """Return an array that shows elements of another one, which it keeps in use."""
    made = make(part, layout)
    made.base = x
    return made


def _root(array: DistArray) -> DistArray:
    """Return the array that others, which this may be one of, show elements of."""
    while hasattr(array, "base"):
        array = array.base
    return array


def check_writable(array: DistArray) -> None:
    """Refuse to write to what is read-only, on all ranks; collective for [Note: moved views]."""
    part = array.local
    if part.__class__ is not np.ndarray or part.flags.writeable:
        return
    mesh, sources = array.layout.mesh, getattr(_root(array), "sources", ())
    if sources:
        used = np.array([any(each() is not None for each in sources)], np.uint8)
        if not combined(used, mesh, range(mesh.ndim), ReduceOp.MAX)[0]:
            part.flags.writeable = True
            return
    raise UsageError(
        f"the array of {array.layout!r} is read-only: its elements are repeated, or are copies "
        "from other ranks, so a write would not reach the array they come from; write to that "
        "array, or to a copy, a.copy()"
    )


def delivered(result: DistArray, out: Any, casting: Any = "same_kind") -> DistArray:
    """Return `result`, or `out` with it written into.

    NumPy's reductions write to any dtype, as ``casting="unsafe"`` does.
    """
    if isinstance(out, tuple):
        (out,) = out
    if out is None:
        return result
    if not is_dist(out) or out.shape != result.shape or out.layout.is_partial:
        raise UsageError(
            f"out must be a DistArray of shape {result.shape} without Partial placements, got "
            f"{out!r}"
        )
    mesh_of(out, result)
    check_writable(out)
    if not np.can_cast(result.dtype, out.dtype, casting):
        raise UsageError(f"a result of {result.dtype} cannot be written to an out of {out.dtype}")
    out.local[...] = resharded(result, out.layout).local
    return out  # type: ignore[no-any-return]


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape to which arrays of these shapes are broadcast."""
    ndim = max(map(len, shapes))
    lengths = [1] * ndim
    for shape in shapes:
        for dim, length in enumerate(shape, ndim - len(shape)):
            if lengths[dim] == 1:
                lengths[dim] = length
            elif length not in (1, lengths[dim]):
                told = " ".join(map(str, map(tuple, shapes)))
                raise ValueError(f"operands could not be broadcast together with shapes {told}")
    return tuple(lengths)


def along(dim: int, *items: Any) -> tuple[Any, ...]:
    """Return the index that is `items` from dimension `dim` on, and everything before."""
    return (slice(None),) * dim + items


def dimensions(axis: Any, ndim: int) -> tuple[int, ...]:
    """Return the dimensions that `axis` means, ascending; None means all."""
    if axis is None:
        return tuple(range(ndim))
    given = axis if isinstance(axis, (tuple, list)) else (axis,)
    found = tuple(dimension(each, ndim) for each in given)
    if len({*found}) < len(found):
        raise ValueError("duplicate value in 'axis'")
    return tuple(sorted(found))


def dimension(axis: Any, ndim: int) -> int:
    """Return the dimension that `axis` means."""
    number = operator.index(axis)
    if not -ndim <= number < ndim:
        raise AxisError(number, ndim)
    return number % ndim


def integer(axis: Any) -> int:
    """Return an axis as a number, for functions of which NumPy's take no truth value for one."""
    if isinstance(axis, bool):
        raise TypeError(f"an integer is required for the axis, got {axis}")
    return operator.index(axis)


def as_axis(axis: Any) -> int | tuple[int, ...]:
    """Return what is given as an axis in integers; 1.0 and True, which equal 1, are none."""
    return tuple(map(integer, axis)) if isinstance(axis, tuple) else integer(axis)


def combined(part: Any, mesh: ProcessMesh, axes: Iterable[int], op: ReduceOp) -> Any:
    """Reduce an array of this rank over axes of the mesh, in place, and return it.

    What has no such operator is refused by ranks without elements, too.
    """
    axes = [axis for axis in axes if mesh.sizes[axis] > 1]
    if not axes:
        return part
    own = _OWN.get((part.dtype.kind, op))
    if own is None and part.__class__ is np.ndarray:
        rule_for(op, dtype_row(part.dtype))
    if not part.size or mesh.coordinate is None:
        return part
    if own is not None:
        return own(part, mesh, axes, op)
    if len(axes) == sum(length > 1 for length in mesh.sizes):
        all_reduce(part, op, mesh.group)
        return part
    for axis in axes:
        all_reduce(part, op, mesh.get_group(mesh.names[axis]))
    return part


def _sum_of_durations(part: Any, mesh: ProcessMesh, axes: Sequence[int], _: ReduceOp) -> Any:
    """Add durations as integers, in place; with NaT anything is NaT."""
    missing = np.isnat(part)
    numbers = np.where(missing, 0, part.view(np.int64))
    total, count = combined(np.stack([numbers, missing]), mesh, axes, ReduceOp.SUM)
    part[...] = np.where(count > 0, np.iinfo(np.int64).min, total).view(part.dtype)
    return part


def _extreme(part: Any, mesh: ProcessMesh, axes: Sequence[int], op: ReduceOp) -> Any:
    """Find the extremes of what only NumPy orders, in place: of equal ones the first; NaN, if any.

    The ranks' parts are compared in the order of the ranks, the axis that changes fastest first.
    """
    locate = np.argmax if op is ReduceOp.MAX else np.argmin
    for axis in reversed(axes):
        told = np.zeros((mesh.sizes[axis], *part.shape), part.dtype)
        told[mesh.coordinate[axis]] = part  # type: ignore[index]
        _shared(told, mesh, (axis,))
        part[...] = np.take_along_axis(told, locate(told, 0)[None], 0)[0]
    return part


_OWN: dict[tuple[str, ReduceOp], Callable[[Any, ProcessMesh, Sequence[int], ReduceOp], Any]] = {
    ("m", ReduceOp.SUM): _sum_of_durations,
    **{(kind, op): _extreme for kind in "cSU" for op in (ReduceOp.MAX, ReduceOp.MIN)},
}
"""What the operators of the transports do not know, by the kind of a dtype."""


def _shared(told: Any, mesh: ProcessMesh, axes: Iterable[int]) -> None:
    """Fill in what the others know of an array in which each rank has written its row."""
    # Only one rank has other than 0 in a row; of bits, -0.0 stays what it is.
    combined(told.reshape(-1).view(np.uint8), mesh, axes, ReduceOp.BOR)


def failing_alike(
    compute: Callable[[], Any], mesh: ProcessMesh, axes: Iterable[int], otherwise: Exception
) -> Any:
    """Return what `compute` gives on this rank; where it fails on any rank, fail on all of them.

    Collective over the axes of the mesh: one small reduction more. It is for what may fail because
    of values that only some ranks have.

    Args:
        compute: what may fail.
        mesh: the ranks.
        axes: along which other ranks have other values.
        otherwise: the error of ranks whose own values are fine.

    """
    result: Any = None
    error: Exception | None = None
    try:
        result = compute()
    except Exception as raised:  # whatever it is, the others are told
        error = raised
    if combined(np.array([error is not None], np.uint8), mesh, axes, ReduceOp.MAX)[0]:
        raise error or otherwise
    return result


def part_number(layout: Layout, dim: int, place: Coordinate | None = None) -> int:
    """Return which of the parts along a dimension this rank, or that at a place, has.

    It is 0 outside the mesh.
    """
    number, here = 0, layout.mesh.coordinate if place is None else place
    for axis in layout.axes[dim] if here is not None else ():
        number = number * layout.mesh.sizes[axis] + here[axis]  # type: ignore[index]
    return number


def of_all_parts(part: Any, layout: Layout, dim: int) -> Any:
    """Return what each part along a dimension has to tell: arrays of one shape, stacked."""
    told = np.zeros((len(layout.cuts[dim]) - 1, *part.shape), part.dtype)
    told[part_number(layout, dim)] = part
    _shared(told, layout.mesh, layout.axes[dim])
    return told


def line_of(layout: Layout, dim: int) -> list[int]:
    """Return which ranks of the mesh's group have the parts along a dimension beside this one's."""
    mesh, axes = layout.mesh, layout.axes[dim]
    here, ranks = mesh.coordinate, sorted(mesh.process_ids)
    line = []
    for digits in np.ndindex(*[mesh.shape[axis] for axis in axes]):
        place = list(here or ())
        for axis, digit in zip(axes, digits, strict=True):
            place[axis] = digit
        line.append(ranks.index(mesh.rank_at(tuple(place))))
    return line


def shapes_of(layout: Layout) -> list[tuple[int, ...]]:
    """Return the shapes of the parts of the ranks of the mesh's group."""
    places = map(layout.mesh.coordinate_of, sorted(layout.mesh.process_ids))
    return [layout.local_shape(place) for place in places if place is not None]
