"""What users call: arrays are spread over a mesh, spread in another way, and made whole again.

Every rank of the mesh calls them, in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Literal, overload

import numpy as np

from hpcdist.arrays.device import device_runtime_of
from hpcdist.arrays.dtypes import dtype_row
from hpcdist.arrays.libraries import view_of
from hpcdist.boxes import slices
from hpcdist.comm.dispatch import as_flag
from hpcdist.comm.group import Group
from hpcdist.comm.objects import tell_all
from hpcdist.errors import MismatchError, UsageError
from hpcdist.mesh.agreement import agree, heard, refuse
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout, layout_of, make_layout
from hpcdist.mesh.placements import Placement
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.mesh.reducing import check_reducible, has_the_value, neutral_of
from hpcdist.mesh.reshard import reshard_to, start_reshard
from hpcdist.mesh.room import room_for
from hpcdist.mesh.routes import joint_mesh
from hpcdist.mesh.torchs import torchs_own
from hpcdist.text import an
from hpcdist.transport.waiting.work import Work

Placements = Sequence[Placement]


def shard_tensor(
    data: Any,
    mesh: ProcessMesh,
    placements: Placements,
    dtype: Any = None,
    place: Any = None,
    stop_gradient: bool | None = None,
) -> DistArray:
    """Spread an array that every rank has; keep a copy of this rank's part.

    Nothing but an agreement on shape and dtype is communicated: that the values are equal is up
    to the caller. A `Partial` array has the value on the first rank along the axis, and the neutral
    element on the others; where it is averaged, all of them have the value.

    Args:
        data: the whole array, nested lists or a number; the same on every rank.
        mesh: the ranks.
        placements: what each axis of the mesh does; those left out are `Replicate`.
        dtype: of the result; None for that of the data.
        place: "cpu" or the name of a device, as `DistArray.device`; where the data must be.
        stop_gradient: None or True, as these arrays have no gradients.

    Returns:
        The array. A parameter or DTensor of torch becomes a DTensor.

    Raises:
        UsageError: the placements do not fit; `RemoteError` on the other ranks.
        MismatchError: shape, dtype, mesh or placements differ between ranks.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> mesh = dist.ProcessMesh(world.ranks)
        >>> a = dist.shard_tensor([[1, 2], [3, 4]], mesh, [dist.Shard(0)], dtype="float32")
        >>> a.shape, a.dtype, a.placements
        ((2, 2), dtype('float32'), [Shard(0)])

    """
    if torch := torchs_own(data):
        check_mesh(mesh)
        sharded: DistArray = torch.shard(data, mesh, placements, dtype, place)
        return sharded
    if isinstance(data, DistArray):
        return _spread_again(data, mesh, placements, dtype)
    try:
        check_mesh(mesh)
        _check_gradient(stop_gradient)
        whole = _as_array(data)
        kind = _as_dtype(whole.dtype if dtype is None else dtype)
        _check_place(whole, place)
        layout = _layout(mesh, whole.shape, placements, kind)
    except UsageError as error:
        raise refuse(mesh, error) from None
    agree(mesh, f"spread {layout!r}", kind)
    return DistArray._of(_cut(whole, layout, kind), layout)


def _spread_again(data: DistArray, mesh: Any, placements: Any, dtype: Any) -> DistArray:
    """Return a copy of an array, spread in another way and of another dtype."""
    try:
        kind = data.dtype if dtype is None else _as_dtype(dtype)
    except UsageError as error:
        raise _refused(data, mesh, error) from None
    if kind != data.dtype:  # of values, not of contributions
        return reshard(data.astype(kind), mesh, placements)
    spread = reshard(data, mesh, placements)
    return spread.copy() if spread is data else spread


def dtensor_from_fn(
    fn: Callable[..., Any],
    mesh: ProcessMesh,
    placements: Placements,
    *args: Any,
    **kwargs: Any,
) -> DistArray:
    """Spread the array that ``fn(*args, **kwargs)`` returns.

    The functions `zeros`, `ones`, `empty` and `full` of NumPy, CuPy and hpcdist make only this
    rank's part. Any other function makes the whole array on every rank, and it must be the same
    one: random numbers come from equal seeds.

    Args:
        fn: what makes the array.
        mesh: the ranks.
        placements: what each axis of the mesh does; those left out are `Replicate`.
        args: arguments of `fn`.
        kwargs: keyword arguments of `fn`.

    Raises:
        Exception: what `fn` raises; `RemoteError` on the other ranks.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> mesh = dist.ProcessMesh(world.ranks)
        >>> dist.dtensor_from_fn(np.full, mesh, [dist.Shard(1)], (2, 3), 0.5).local
        array([[0.5, 0.5, 0.5],
               [0.5, 0.5, 0.5]])

    """
    if not _makes_any_part(fn, args, kwargs):
        return shard_tensor(heard(mesh, lambda: fn(*args, **kwargs)), mesh, placements)
    shape, rest = (args[0], args[1:]) if args else (kwargs.pop("shape"), ())
    value = heard(mesh, lambda: fn((), *rest, **kwargs))
    try:
        check_mesh(mesh)
        kind = _as_dtype(value.dtype)
        layout = _layout(mesh, _as_shape(shape), placements, kind)
    except UsageError as error:
        raise refuse(mesh, error) from None
    agree(mesh, f"spread {layout!r}", kind)
    here, local = mesh.coordinate, room_for(layout, value, kind, _agreeing(mesh))
    if here is not None:
        local[...] = value if has_the_value(layout, here) else neutral_of(layout, kind)
    return DistArray._of(local, layout)


def _makes_any_part(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function fills an array of any shape with one number."""
    package = (getattr(fn, "__module__", None) or "").partition(".")[0]
    name = getattr(fn, "__name__", "")
    if package not in _PACKAGES or name not in _CREATORS or not (args or "shape" in kwargs):
        return False
    value: Any = args[1] if len(args) > 1 else kwargs.get("fill_value")
    return name != "full" or np.ndim(value) == 0


_PACKAGES = ("numpy", "cupy", "hpcdist")
_CREATORS = ("zeros", "ones", "empty", "full")


def dtensor_from_local(
    local_tensor: Any,
    mesh: ProcessMesh,
    placements: Placements,
    *,
    shape: Sequence[int] | None = None,
) -> DistArray:
    """Join the parts of all ranks into an array, in the memory of the parts.

    Args:
        local_tensor: this rank's part. That ranks along a `Replicate` axis have the same is up to
            the caller.
        mesh: the ranks.
        placements: what each axis of the mesh does; those left out are `Replicate`.
        shape: of the whole array, cut as `Shard` says; the ranks agree on it, and a rank outside
            the mesh needs it. With None the ranks tell each other the shapes of their parts,
            which along dimensions that are cut may have any lengths.

    Raises:
        UsageError: this rank's part does not fit the shape; `RemoteError` on the other ranks.
        MismatchError: the parts do not fit together; on every rank.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> mesh = dist.ProcessMesh(world.ranks)
        >>> part = np.zeros((world.rank + 1, 2))
        >>> dist.dtensor_from_local(part, mesh, [dist.Shard(0)]).shape
        (1, 2)

    """
    if shape is None:
        return _array_of_parts(local_tensor, mesh, placements)
    try:
        check_mesh(mesh)
        array = of_part(_as_local(local_tensor), mesh, placements, _as_shape(shape))
    except UsageError as error:
        raise refuse(mesh, error) from None
    agree(mesh, f"join parts as {array.layout!r}", array.dtype)
    return array


def of_part(
    local: Any, mesh: ProcessMesh, placements: Placements, shape: tuple[int, ...]
) -> DistArray:
    """Return an array of a shape in the memory of this rank's part. Local.

    Raises:
        UsageError: the part does not fit.

    """
    layout, here = _layout(mesh, shape, placements, local.dtype), mesh.coordinate
    if here is None:
        return DistArray._of(room_for(layout, local), layout)
    if local.shape != layout.local_shape(here):
        raise UsageError(
            f"this rank's part has the shape {local.shape}, but in {layout!r} it is "
            f"{layout.local_shape(here)}; leave shape= out where the parts are cut otherwise"
        )
    return DistArray._of(local, layout)


def _array_of_parts(local_tensor: Any, mesh: ProcessMesh, placements: Placements) -> DistArray:
    """Exchange the shapes of all parts within the mesh; return the array that they make up."""
    try:
        check_mesh(mesh)
    except UsageError as error:
        raise refuse(mesh, error) from None
    if mesh.coordinate is None:
        raise UsageError(
            f"this rank is not part of {mesh!r}, and does not know the shape of the array; give "
            "shape=, or let the ranks of the mesh alone call dtensor_from_local"
        )
    try:
        local = _as_local(local_tensor)
        own = _layout(mesh, local.shape, placements, local.dtype)
    except UsageError as error:
        raise refuse(mesh, error) from None
    how = f"{local.ndim} dimensions, {local.dtype}, {[*own.placements]} on {mesh!r}"
    own_words = local.shape, (how, mesh.unique_id)
    told = tell_all("dtensor_from_local", own_words, mesh.group)
    ranks = mesh.group.ranks
    for rank, (_, other) in zip(ranks, told, strict=True):
        if other != told[0][1]:
            raise MismatchError(
                f"the parts are not of one array: rank {ranks[0]} has one of {told[0][1][0]}, but "
                f"rank {rank} has one of {other[0]}. Give parts of one dtype, and the same mesh "
                "and placements, on every rank"
            )
    shapes = {rank: shape for rank, (shape, _) in zip(ranks, told, strict=True)}
    cuts = tuple(_cuts_along(dim, mesh, axes, shapes) for dim, axes in enumerate(own.axes))
    shape = tuple(each[-1] for each in cuts)
    return DistArray._of(local, make_layout(mesh, shape, own.axes, cuts, own.partial))


def _cuts_along(
    dim: int, mesh: ProcessMesh, axes: tuple[int, ...], shapes: dict[int, tuple[int, ...]]
) -> tuple[int, ...]:
    """Return the boundaries of parts along a dimension, from the shapes that the ranks have."""
    owners: dict[tuple[int, ...], int] = {}
    for rank, shape in shapes.items():
        place = mesh.coordinate_of(rank) or ()
        first = owners.setdefault(tuple([place[axis] for axis in axes]), rank)
        if shapes[first][dim] != shape[dim]:
            raise MismatchError(
                f"the parts do not fit together: ranks {first} and {rank} have the same part of "
                f"dimension {dim}, but of the shapes {shapes[first]} and {shape}; parts that are "
                "not on one boundary cannot be one array"
            )
    in_order = np.ndindex(*(mesh.sizes[axis] for axis in axes))
    return (0, *accumulate(shapes[owners[part]][dim] for part in in_order))


def dtensor_to_local(
    dist_tensor: DistArray, mesh: ProcessMesh | None = None, placements: Placements | None = None
) -> Any:
    """Return this rank's part, the memory of the array itself.

    Args:
        dist_tensor: the array.
        mesh: if given, with `placements`: how the array is spread; another way is that of
            `reshard`, whose part is returned.
        placements: see `mesh`.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def part():
        ...     mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
        ...     a = dist.shard_tensor(np.arange(4), mesh, [dist.Shard(0)])
        ...     return dist.dtensor_to_local(a).tolist()
        >>> dist.simulate(2, part)
        [[0, 1], [2, 3]]

    """
    if torch := torchs_own(dist_tensor):
        return torch.local_of(dist_tensor, mesh, placements)
    _check_array(dist_tensor)
    if mesh is None and placements is None:
        return dist_tensor.local
    given = dist_tensor.placements if placements is None else placements
    return reshard(dist_tensor, mesh or dist_tensor.process_mesh, given).local


@overload
def reshard(
    dist_tensor: DistArray,
    mesh: ProcessMesh,
    placements: Placements,
    *,
    out: DistArray | None = None,
    async_op: Literal[False] = False,
) -> DistArray: ...
@overload
def reshard(
    dist_tensor: DistArray,
    mesh: ProcessMesh,
    placements: Placements,
    *,
    out: DistArray | None = None,
    async_op: Literal[True],
) -> Work: ...
def reshard(
    dist_tensor: DistArray,
    mesh: ProcessMesh,
    placements: Placements,
    *,
    out: DistArray | None = None,
    async_op: bool = False,
) -> DistArray | Work:
    """Spread an array in another way, over the same mesh or another one.

    Collective over the ranks of both meshes, unless every rank already has what it needs. On one
    node each rank takes what it lacks out of the memory of the others, in one step.

    Args:
        dist_tensor: the array; it stays as it is.
        mesh: the ranks that will have it, possibly others than before.
        placements: what each axis of the mesh does; those left out are `Replicate`.
        out: an array spread in just this way, which is filled and returned.
        async_op: return a `Work` at once, whose `result()` is the array. Until then the memory of
            `dist_tensor` must be left alone.

    Returns:
        The array; where nothing changes, `dist_tensor` itself.

    Raises:
        MismatchError: the ranks pass different arrays or placements.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> mesh = dist.ProcessMesh(world.ranks)
        >>> rows = dist.shard_tensor(np.eye(4), mesh, [dist.Shard(0)])
        >>> columns = dist.reshard(rows, mesh, [dist.Shard(1)])
        >>> columns.placements
        [Shard(1)]

    """
    if type(dist_tensor) is not DistArray and (torch := torchs_own(dist_tensor)):
        redistributed: DistArray = torch.redistribute(dist_tensor, mesh, placements, out, async_op)
        return redistributed
    try:
        _check_array(dist_tensor)
        layout = _layout(mesh, dist_tensor.layout.shape, placements, dist_tensor.local.dtype)
        begins = async_op is not False and as_flag(async_op, "async_op")
    except UsageError as error:
        raise _refused(dist_tensor, mesh, error) from None
    make = start_reshard if begins else reshard_to
    return make(dist_tensor, layout, out=out)


def _refused(array: Any, mesh: Any, error: UsageError) -> UsageError:
    """Report an error to the ranks that reshard an array; return what to raise here.

    Where each has the whole array already, nobody waits for another one.
    """
    if not isinstance(array, DistArray):
        return refuse(mesh, error)
    own = array.process_mesh
    wanted = mesh if isinstance(mesh, ProcessMesh) else own
    if array.layout.is_replicated and wanted == own:
        return error
    return refuse(joint_mesh(own, wanted), error)


def unshard_dtensor(dist_tensor: DistArray) -> Any:
    """Return a copy of the whole array, on every rank of its mesh. Collective over the mesh.

    Args:
        dist_tensor: an array across ranks; it stays as it is.

    Raises:
        UsageError: this rank is outside the mesh.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> mesh = dist.ProcessMesh(world.ranks)
        >>> dist.unshard_dtensor(dist.shard_tensor(np.arange(3), mesh, [dist.Shard(0)]))
        array([0, 1, 2])

    """
    if torch := torchs_own(dist_tensor):
        return torch.redistribute(dist_tensor, None, ()).to_local()
    _check_array(dist_tensor)
    mesh = dist_tensor.process_mesh
    if mesh.coordinate is None:
        raise UsageError(
            f"this rank is not part of {mesh!r}, so it gets no whole array of it; reshard the "
            "array onto a mesh of all ranks, with Replicate(), and take its .local"
        )
    whole = reshard_to(dist_tensor, layout_of(mesh, dist_tensor.shape, ()))
    return whole.local.copy() if whole is dist_tensor else whole.local


# ---- arguments


def check_mesh(mesh: Any) -> None:
    """Raise `UsageError` for what is no mesh."""
    if not isinstance(mesh, ProcessMesh):
        raise UsageError(f"the mesh must be a ProcessMesh, got {mesh!r}")


def _check_array(array: Any) -> None:
    if not isinstance(array, DistArray):
        raise UsageError(
            f"a DistArray is needed, got {an(type(array).__name__)}; shard_tensor makes one of an "
            "array that every rank has, dtensor_from_local of the parts that the ranks have"
        )


def _check_gradient(stop_gradient: Any) -> None:
    if stop_gradient is not None and not as_flag(stop_gradient, "stop_gradient"):
        raise UsageError(
            "stop_gradient=False asks for gradients, which arrays do not have; give torch's "
            "tensors to torch's own DTensor, on the backend of hpcdist.torch"
        )


def _check_place(whole: Any, place: Any) -> None:
    engine = device_runtime_of(whole)
    there = "cpu" if engine is None else engine.name
    if place is not None and str(place) != there:
        raise UsageError(
            f"place={place!r}, but the data are on {there}; move them first, for example by "
            "cupy.asarray(x) or cupy.asnumpy(x)"
        )


def _layout(mesh: ProcessMesh, shape: tuple[int, ...], placements: Any, dtype: Any) -> Layout:
    layout = layout_of(mesh, shape, placements)
    if layout.is_partial:
        check_reducible(layout, dtype)
    return layout


def _as_array(data: Any) -> Any:
    """Show an array, nested lists or a number as an array of the host or of a device."""
    if type(data) is np.ndarray:
        return data
    if isinstance(data, _NUMBERS):
        try:
            return np.asarray(data)
        except ValueError as error:
            raise UsageError(f"the nested lists do not form an array: {error}") from None
    return view_of(data)


_NUMBERS = (bool, int, float, complex, np.generic, list, tuple)


def _as_dtype(dtype: Any) -> np.dtype:
    """Return a dtype of fixed size in native byte order."""
    try:
        kind = np.dtype(dtype)
    except TypeError:
        raise UsageError(
            f"dtype={dtype!r} is not a dtype of NumPy; give a name such as 'float32'"
        ) from None
    return dtype_row(kind.newbyteorder("=")).numpy


def _as_local(array: Any) -> Any:
    """Show this rank's part as the array that a DistArray keeps."""
    local = _as_array(array)
    kind = _as_dtype(local.dtype)
    return local if local.dtype == kind else local.astype(kind)


def _as_shape(shape: Any) -> tuple[int, ...]:
    given = shape if isinstance(shape, (tuple, list)) else (shape,)
    try:
        lengths = tuple(operator.index(length) for length in given)
    except TypeError:
        raise UsageError(f"shape must be integers, got {shape!r}") from None
    if min(lengths, default=0) < 0:
        raise UsageError(f"shape must not have negative lengths, got {shape!r}")
    return lengths


def _agreeing(mesh: ProcessMesh) -> Group | None:
    """Return the group whose ranks have agreed before; None for all where there is none."""
    return None if mesh.coordinate is None or mesh.size == 1 else mesh.group


def _cut(whole: Any, layout: Layout, dtype: np.dtype) -> Any:
    """Return a copy of this rank's part of an array that it has as a whole."""
    mesh = layout.mesh
    room, here = room_for(layout, whole, dtype, _agreeing(mesh)), mesh.coordinate
    if here is None:
        return room
    if has_the_value(layout, here):
        room[...] = whole[slices(layout.box(here))]
    else:
        room[...] = neutral_of(layout, dtype)
    return room
