"""`local_map`: a function of the parts that each rank has, as a function of arrays across ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from hpcdist.comm.dispatch import as_flag
from hpcdist.errors import UsageError
from hpcdist.mesh.agreement import heard, refuse
from hpcdist.mesh.api import check_mesh, dtensor_from_local
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout, layout_of
from hpcdist.mesh.placements import Placement
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.mesh.reshard import reshard_to
from hpcdist.text import an

Placements = Sequence[Placement]


def local_map(
    func: Callable[..., Any],
    out_placements: Sequence[Placements | None] | Placements,
    in_placements: Sequence[Placements | None] | None = None,
    process_mesh: ProcessMesh | None = None,
    reshard_inputs: bool = False,
) -> Callable[..., Any]:
    """Return a function of `DistArray` that calls `func` on this rank's parts.

    What `func` returns are the parts of the results. The call is collective over the ranks of the
    mesh, which tell each other the shapes of these parts; inside `func` there is nothing but
    ordinary arrays, and any library may compute.

    Args:
        func: takes the parts in place of the arrays, all other arguments as they are; returns an
            array, or a tuple or list of arrays and other values.
        out_placements: for each result how its parts are spread, None for what is not an array. One
            list of placements will do for a single result.
        in_placements: for each positional argument how it has to be spread, None for what is not a
            DistArray. With None arrays are taken as they are spread.
        process_mesh: the ranks; None for the mesh of the first DistArray.
        reshard_inputs: whether arguments that are spread in another way are spread as
            `in_placements` say; otherwise they are errors.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> mesh = dist.ProcessMesh(world.ranks)
        >>> rows = [dist.Shard(0)]
        >>> ordered = dist.local_map(np.sort, out_placements=[rows], in_placements=[rows])
        >>> a = dist.shard_tensor([[3, 1], [2, 4]], mesh, rows)
        >>> dist.unshard_dtensor(ordered(a))
        array([[1, 3],
               [2, 4]])

    """
    wanted = _of_results(out_placements)
    reshards = as_flag(reshard_inputs, "reshard_inputs")
    if process_mesh is not None:
        check_mesh(process_mesh)

    @wraps(func)
    def on_parts(*args: Any, **kwargs: Any) -> Any:
        mesh = process_mesh or _mesh_of([*args, *kwargs.values()])
        given = _arranged(args, in_placements, mesh, reshards=reshards)
        named = {name: _own_part(value) for name, value in kwargs.items()}

        def compute() -> Any:
            return func(*map(_own_part, given), **named)

        nobody_waits = all(each is None for each in wanted)
        result = compute() if nobody_waits else heard(mesh, compute)
        return _wrap_outputs(result, wanted, mesh)

    return on_parts


def _own_part(value: Any) -> Any:
    return value.local if isinstance(value, DistArray) else value


def _mesh_of(values: list[Any]) -> ProcessMesh:
    for value in values:
        if isinstance(value, DistArray):
            return value.layout.mesh
    raise UsageError("none of the arguments is a DistArray; give local_map a process_mesh=")


# ---- arguments


def _arranged(
    args: tuple[Any, ...],
    in_placements: Sequence[Placements | None] | None,
    mesh: ProcessMesh,
    *,
    reshards: bool,
) -> list[Any]:
    """Return the arguments, with arrays spread as they have to be."""
    if in_placements is None:
        return [*args]
    if len(in_placements) != len(args):
        raise UsageError(
            f"in_placements has {len(in_placements)} items for {len(args)} arguments; give one "
            "for each, None for an argument that is not a DistArray"
        )
    wanted = [
        _wanted(number, value, placements, mesh)
        for number, (value, placements) in enumerate(zip(args, in_placements, strict=True))
    ]
    if not reshards:
        for number, (value, layout) in enumerate(zip(args, wanted, strict=True)):
            if layout is not None and not _is_spread(value, layout):
                raise UsageError(
                    f"argument {number} is spread as {value.layout!r}, but has to be as {layout!r};"
                    " reshard it before, or give local_map reshard_inputs=True"
                )
    return [
        value if layout is None or _is_spread(value, layout) else reshard_to(value, layout)
        for value, layout in zip(args, wanted, strict=True)
    ]


def _wanted(
    number: int, value: Any, placements: Placements | None, mesh: ProcessMesh
) -> Layout | None:
    if isinstance(value, DistArray) and placements is not None:
        return layout_of(mesh, value.shape, placements)
    if not isinstance(value, DistArray) and placements is None:
        return None
    said = "None" if placements is None else f"{[*placements]}"
    raise UsageError(
        f"argument {number} is {an(type(value).__name__)}, but in_placements has {said} for it; "
        "give placements for each DistArray, and None for everything else"
    )


def _is_spread(value: DistArray, layout: Layout) -> bool:
    """Return whether an array has the placements of a layout; its parts may have other lengths."""
    own = value.layout
    return own.mesh == layout.mesh and (own.axes, own.partial) == (layout.axes, layout.partial)


# ---- results


def _of_results(out_placements: Any) -> list[Placements | None]:
    if not isinstance(out_placements, Sequence):
        raise UsageError(
            "out_placements must be a list with placements for each result, None for what is not "
            f"an array, got {out_placements!r}"
        )
    given = [*out_placements]
    if given and all(isinstance(each, Placement) for each in given):
        return [given]
    if not all(each is None or isinstance(each, Sequence) for each in given):
        raise UsageError(
            "out_placements must be a list with placements for each result, None for what is not "
            f"an array, got {out_placements!r}"
        )
    return given


def _wrap_outputs(result: Any, wanted: list[Placements | None], mesh: ProcessMesh) -> Any:
    """Return the results with arrays made of the parts that the ranks have."""
    several = isinstance(result, (tuple, list))
    parts = [*result] if several else [result]
    if len(parts) != len(wanted):
        error = UsageError(
            f"the function returned {len(parts)} results, but out_placements is for {len(wanted)}"
        )
        raise error if all(each is None for each in wanted) else refuse(mesh, error)
    made = [
        part if placements is None else dtensor_from_local(part, mesh, placements)
        for part, placements in zip(parts, wanted, strict=True)
    ]
    if not several:
        return made[0]
    return type(result)(*made) if hasattr(result, "_fields") else type(result)(made)
