"""`split` of arrays: NumPy's, which the ranks have alike, and arrays across ranks.

Each rank multiplies its parts; the result is an array of what they are: cut, or contributions.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdist.errors import UsageError
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout, layout_of, make_layout
from hpcdist.mesh.placements import Placement, ReduceType, Replicate, Shard
from hpcdist.mesh.random import Generator
from hpcdist.mesh.reshard import reshard_to
from hpcdist.parallel.split import (
    Layer,
    Place,
    check_entries,
    is_part,
    part_of_bias,
    part_of_weight,
)


def prepared(x: Any, layer: Layer, place: Place, weight: Any, bias: Any) -> Callable[[], Any]:
    """Return what computes a layer, collective over the mesh; see `split`. Local."""
    array = x if isinstance(x, DistArray) else _spread(x, layer, place)
    part = place.part(layer)
    if layer.operation == "embedding":
        ends = (array.local.min(), array.local.max()) if array.local.size else (0, 0)
        check_entries(layer, array.dtype.kind, *map(int, ends))
    elif array is x:
        is_part((*x.shape,), layer._replace(axis=1), part)
    own = _drawn(layer, place, array.dtype) if weight is None else _weight(weight, layer, part)
    added = None
    if layer.has_bias:
        given = np.zeros(layer.size[1], own.dtype) if bias is None else _local(bias)
        added = part_of_bias(given, layer, part)

    def compute() -> Any:
        found = _result(_arranged(array, layer, place.axis), own, added, layer, place)
        return found if array is x else found.local

    return compute


def _spread(x: Any, layer: Layer, place: Place) -> DistArray:
    """Return an array that the ranks have alike, or their parts of one, as one across ranks."""
    local = np.asarray(x)
    if local.dtype.kind not in "iufc":
        raise UsageError(f"split takes arrays and tensors of numbers, got {x!r}")
    if layer.operation == "linear" and is_part(local.shape, layer, place.part(layer)):
        shape = (*local.shape[:-1], layer.size[0])
        return DistArray._of(local, layout_of(place.mesh, shape, [Shard(local.ndim - 1)]))
    return DistArray._of(local, layout_of(place.mesh, local.shape, []))


def _local(value: Any) -> Any:
    return value.local if isinstance(value, DistArray) else value


def _weight(value: Any, layer: Layer, part: int) -> Any:
    if isinstance(value, DistArray) and value.shape != layer.size:
        raise UsageError(f"weight_attr must be of the shape {layer.size}, got {value.shape}")
    return part_of_weight(_local(value), layer, part)


def _drawn(layer: Layer, place: Place, dtype: Any) -> Any:
    """Return this rank's part of the weight that has the name of the layer, by Xavier's rule."""
    placements: list[Placement] = [Replicate()] * place.mesh.ndim
    if layer.parts > 1:
        placements[place.axis] = Shard(layer.axis)
    limit = (6 / sum(layer.size)) ** 0.5
    generator = Generator(zlib.crc32(layer.name.encode()))
    kind = dtype if dtype in (np.float32, np.float64) else np.float64
    drawn = generator.uniform(
        -limit, limit, layer.size, kind, mesh=place.mesh, placements=placements
    )
    return drawn.local


# ---- computing


def _arranged(x: DistArray, layer: Layer, number: int) -> DistArray:
    """Return the input as the ranks along an axis of the mesh need it: whole, or cut by inputs."""
    layout = x.layout
    moves = number if layer.parts > 1 else None
    axes = [tuple(axis for axis in each if axis != moves) for each in layout.axes]
    if layer.operation == "linear":
        axes[-1] = (number,) if layer.is_summed else ()
    cuts = [
        cut if each == before else None
        for each, before, cut in zip(axes, layout.axes, layout.cuts, strict=True)
    ]
    if layer.is_summed and layer.operation == "linear":
        cuts[-1] = None
    wanted = make_layout(layout.mesh, x.shape, axes, cuts)
    return x if layout is wanted else reshard_to(x, wanted)


def _result(x: DistArray, weight: Any, bias: Any, layer: Layer, place: Place) -> DistArray:
    if layer.operation == "embedding":
        part, kept = _entries(x.local, weight, layer, place), x.ndim
    else:
        part, kept = x.local @ weight, x.ndim - 1
    layout = _layout(x.layout, kept, layer, place.axis)
    here = place.mesh.coordinate
    assert here is not None
    if bias is not None and (not layer.is_summed or here[place.axis] == 0):
        part = part + bias
    found = DistArray._of(part, layout)
    if not layer.gathers or layer.parts == 1:
        return found
    axes, cuts = (*layout.axes[:-1], ()), (*layout.cuts[:-1], None)
    return reshard_to(found, make_layout(layout.mesh, layout.shape, axes, cuts))


def _layout(of_x: Layout, kept: int, layer: Layer, number: int) -> Layout:
    """Return the layout of a result that has the first dimensions of the input."""
    partial: list[ReduceType | None] = [None] * of_x.mesh.ndim
    if layer.is_summed:
        partial[number] = ReduceType.kRedSum
    last = (number,) if layer.cuts_outputs else ()
    return make_layout(
        of_x.mesh,
        (*of_x.shape[:kept], layer.size[1]),
        (*of_x.axes[:kept], last),
        (*of_x.cuts[:kept], None),
        partial,
    )


def _entries(numbers: Any, weight: Any, layer: Layer, place: Place) -> Any:
    """Return the rows that numbers name of this rank's part of the weight, 0 for others."""
    lo, hi = layer.bounds(place.part(layer))
    here = (lo <= numbers) & (numbers < hi)
    found = np.zeros((*numbers.shape, layer.size[1]), weight.dtype)
    found[here] = weight[numbers[here] - lo]
    return found
