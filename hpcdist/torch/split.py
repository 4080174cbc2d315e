"""`split` of tensors: ordinary ones, which the ranks have alike, and DTensors.

Each rank multiplies its parts; what travels, forward and backward, is up to torch's DTensor, as
which a result is put together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hpcdist.boxes import strides_of
from hpcdist.errors import UsageError
from hpcdist.parallel.split import (
    Layer,
    Place,
    check_entries,
    is_part,
    part_of_bias,
    part_of_weight,
)
from hpcdist.torch.mesh import device_mesh_of, process_mesh_of


def prepared(
    x: torch.Tensor, layer: Layer, place: Place, weight: Any, bias: Any
) -> Callable[[], Any]:
    """Return what computes a layer, collective over the mesh; see `split`. Local."""
    part, is_plain = place.part(layer), not isinstance(x, DTensor)
    local = x if is_plain else x.to_local()
    comes_in_parts = False
    if layer.operation == "embedding":
        ends = torch.aminmax(local.detach()) if local.numel() else (0, 0)
        check_entries(layer, "f" if x.is_floating_point() else "i", *map(int, ends))
    else:
        seen = layer if is_plain else layer._replace(axis=1)
        comes_in_parts = is_part(tuple(x.shape), seen, part)
    own = _weight(weight, layer, place, x)
    added = _bias(bias, layer, place, own) if layer.has_bias else None

    def compute() -> Any:
        mesh = device_mesh_of(place.mesh, x.device.type) if is_plain else x.device_mesh
        given = _arranged(x, layer, mesh, place.axis, comes_in_parts)
        found = _result(given, own, added, layer, place)
        return found.to_local() if is_plain else found

    return compute


def _weight(value: Any, layer: Layer, place: Place, x: torch.Tensor) -> Any:
    part = place.part(layer)
    if value is None:
        kind = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        drawn = torch.nn.init.xavier_uniform_(torch.empty(layer.size, dtype=kind, device="cpu"))
        return part_of_weight(drawn.to(x.device), layer, part).clone().requires_grad_()
    if isinstance(value, DTensor):
        return _on_mesh("weight_attr", value, layer.size, place)
    return part_of_weight(value, layer, part)


def _bias(value: Any, layer: Layer, place: Place, weight: Any) -> Any:
    part = place.part(layer)
    if value is None:
        zeros = torch.zeros(layer.size[1], dtype=weight.dtype, device=weight.device)
        return part_of_bias(zeros, layer, part).clone().requires_grad_()
    if isinstance(value, DTensor):
        return _on_mesh("bias_attr", value, layer.size[1:], place)
    return part_of_bias(value, layer, part)


def _on_mesh(what: str, value: Any, shape: tuple[int, ...], place: Place) -> Any:
    mesh = process_mesh_of(value.device_mesh)
    if tuple(value.shape) != shape or mesh != place.mesh:
        raise UsageError(
            f"{what} must be of the shape {shape} on {place.mesh!r}, got a DTensor of the shape "
            f"{tuple(value.shape)} on {mesh!r}"
        )
    return value


# ---- computing


def _arranged(x: Any, layer: Layer, mesh: DeviceMesh, number: int, comes_in_parts: bool) -> DTensor:
    """Return the input as the ranks along an axis of the mesh need it: whole, or cut by inputs."""
    last, is_linear = x.ndim - 1, layer.operation == "linear"
    if not isinstance(x, DTensor):
        if comes_in_parts:
            return _from_parts(x, mesh, [Shard(last)], (*x.shape[:-1], layer.size[0]))
        x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    wanted = [
        Replicate() if each.is_partial() or (is_linear and each.is_shard(last)) else each
        for each in x.placements
    ]
    if layer.parts > 1:
        wanted[number] = Shard(last) if layer.is_summed and is_linear else Replicate()
    return x.redistribute(placements=wanted)


def _result(x: DTensor, weight: Any, bias: Any, layer: Layer, place: Place) -> DTensor:
    mesh, number = x.device_mesh, place.axis
    gradients = list(x.placements)
    if layer.cuts_outputs:  # each part of the outputs gives a contribution
        gradients[number] = Partial()
    local = x.to_local(grad_placements=gradients)
    own = _local(weight, x, layer, number, layer.axis if layer.parts > 1 else None)
    in_parts = 0 if layer.cuts_outputs else None
    added = None if bias is None else _local(bias, x, layer, number, in_parts)
    embeds = layer.operation == "embedding"
    found = _entries(local, own, layer, place) if embeds else local @ own
    gathers = layer.gathers and layer.parts > 1
    counts_once = not layer.is_summed or (not gathers and place.part(layer) == 0)
    if added is not None and counts_once:
        found = found + added
    placements = list(x.placements)
    if layer.is_summed:
        placements[number] = Partial()
    elif layer.cuts_outputs:
        placements[number] = Shard(found.ndim - 1)
    lead = x.shape if embeds else x.shape[:-1]
    shape = (*lead, layer.size[1])
    made = _from_parts(found, mesh, placements, shape)
    if not gathers:
        return made
    placements[number] = Replicate()
    made = made.redistribute(placements=placements)
    if added is None or not layer.is_summed:
        return made
    return _from_parts(made.to_local() + added, mesh, placements, shape)


def _local(value: Any, x: DTensor, layer: Layer, number: int, dim: int | None) -> Any:
    """Return this rank's part of a weight, whose gradient is summed over parts of the batch."""
    if not isinstance(value, DTensor):
        return value
    placements: list[Any] = [Replicate()] * value.device_mesh.ndim
    gradients = [Partial() if each.is_shard() else Replicate() for each in x.placements]
    if layer.parts > 1:
        gradients[number] = placements[number] = Replicate() if dim is None else Shard(dim)
    return value.redistribute(placements=placements).to_local(grad_placements=gradients)


def _entries(numbers: Any, weight: Any, layer: Layer, place: Place) -> Any:
    """Return the rows that numbers name of this rank's part of the weight, 0 for others."""
    lo, hi = layer.bounds(place.part(layer))
    if hi == lo:
        return numbers.new_zeros((*numbers.shape, layer.size[1]), dtype=weight.dtype)
    here = (lo <= numbers) & (numbers < hi)
    rows = torch.nn.functional.embedding(torch.where(here, numbers - lo, 0), weight)
    return torch.where(here[..., None], rows, 0)


def _from_parts(local: Any, mesh: DeviceMesh, placements: Any, shape: tuple[int, ...]) -> DTensor:
    strides = strides_of(shape)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )
