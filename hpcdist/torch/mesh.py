"""Meshes and placements of hpcdist as those of torch's DTensor, and back.

A `DeviceMesh` made here has process groups of hpcdist along its axes. Torch's own constructor
would take all ranks of the world to make one; here only those along each axis do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial as TorchPartial,
    Replicate as TorchReplicate,
    Shard as TorchShard,
    distribute_tensor,
)

from hpcdist.arrays.torch import LIBRARY
from hpcdist.boxes import strides_of
from hpcdist.errors import UsageError
from hpcdist.mesh.api import of_part
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import layout_of
from hpcdist.mesh.placements import Partial, Placement, ReduceType, Replicate, Shard
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.text import an
from hpcdist.torch.backend import process_group_of
from hpcdist.torch.losses import mend_losses
from hpcdist.torch.process_group import HpcdistProcessGroup

_REDUCTIONS = {
    ReduceType.kRedSum: "sum",
    ReduceType.kRedMax: "max",
    ReduceType.kRedMin: "min",
    ReduceType.kRedProd: "product",
    ReduceType.kRedAvg: "avg",
}
_NAMES = {name: kind for kind, name in _REDUCTIONS.items()}

_made: dict[tuple[ProcessMesh, str], tuple[DeviceMesh, list[HpcdistProcessGroup]]] = {}
"""By mesh and kind of device, with the groups. A process is one rank, as in torch.distributed."""


def device_mesh_of(mesh: ProcessMesh, device_type: str = "cpu") -> DeviceMesh:
    """Return torch's mesh of the same ranks, shape and names; made when first asked.

    Collective over the ranks of the mesh when it is made. Equal meshes have one.

    Args:
        mesh: the mesh; this rank is part of it.
        device_type: where the tensors are, ``"cpu"`` or ``"cuda"``.

    Example:
        >>> import hpcdist as dist
        >>> from hpcdist.torch.mesh import device_mesh_of
        >>> world = dist.init_parallel_env()
        >>> device_mesh_of(dist.ProcessMesh(list(range(world.nranks)), ["dp"])).mesh_dim_names
        ('dp',)

    """
    if not isinstance(mesh, ProcessMesh):
        raise UsageError(f"a DeviceMesh is made of a ProcessMesh, got {mesh!r}")
    known = _made.get((mesh, device_type))
    if known is None or any(each.group.is_closed for each in known[1]):
        groups = [_group_along(mesh, axis) for axis in range(mesh.ndim)]
        ranks = torch.tensor(mesh.ranks, dtype=torch.int).reshape(mesh.sizes)
        made = DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=mesh.names)
        known = _made[mesh, device_type] = made, groups
    return known[0]


def _group_along(mesh: ProcessMesh, axis: int) -> HpcdistProcessGroup:
    """Return the process group along an axis; its ranks are in the order of the mesh."""
    group = mesh.get_group(mesh.names[axis])
    place = mesh.coordinate
    assert place is not None  # get_group refuses ranks outside
    line = [
        mesh.rank_at((*place[:axis], each, *place[axis + 1 :])) for each in range(mesh.sizes[axis])
    ]
    in_order = group if line == list(group.ranks) else group.split(0, key=place[axis])
    return process_group_of(in_order)


def process_mesh_of(device_mesh: DeviceMesh) -> ProcessMesh:
    """Return the mesh of the same ranks, shape and names. Local.

    Args:
        device_mesh: torch's mesh.

    Example:
        >>> import hpcdist as dist
        >>> from hpcdist.torch.mesh import device_mesh_of, process_mesh_of
        >>> world = dist.init_parallel_env()
        >>> mesh = dist.ProcessMesh(list(range(world.nranks)), ["dp"])
        >>> process_mesh_of(device_mesh_of(mesh)) == mesh
        True

    """
    return ProcessMesh(device_mesh.mesh.tolist(), device_mesh.mesh_dim_names)


def torch_placements(placements: Sequence[Placement], mesh: ProcessMesh) -> list[Any]:
    """Return placements as torch's, one for each axis of `mesh`; missing ones are Replicate. Local.

    Args:
        placements: those of hpcdist.
        mesh: the mesh whose axes they are for.

    Raises:
        UsageError: torch has no such placement.

    Example:
        >>> import hpcdist as dist
        >>> from hpcdist.torch.mesh import torch_placements
        >>> torch_placements([dist.Shard(0)], dist.ProcessMesh([[0, 1], [2, 3]]))
        [Shard(dim=0), Replicate()]

    """
    if len(placements) > mesh.ndim:
        raise UsageError(f"{mesh!r} has {mesh.ndim} axes, but there are placements {placements}")
    padded = [*placements, *[Replicate()] * (mesh.ndim - len(placements))]
    return [torch_placement(each) for each in padded]


def torch_placement(placement: Any) -> Any:
    """Return a placement as torch's, which may be one already."""
    if isinstance(placement, Shard):
        if placement.get_co_shard_order() or placement.get_split_factor() > 1:
            raise UsageError(
                f"a DTensor is cut in the order of the axes of its mesh, but got {placement!r}; "
                "reshard to Shard without an order first"
            )
        return TorchShard(placement.dim)
    if isinstance(placement, Replicate):
        return TorchReplicate()
    if isinstance(placement, Partial) and placement.reduce_type in _REDUCTIONS:
        return TorchPartial(_REDUCTIONS[placement.reduce_type])
    if isinstance(placement, (TorchShard, TorchReplicate, TorchPartial)):
        return placement
    raise UsageError(f"torch has no placement {placement!r}; reshard to Shard or Replicate first")


def placements_of(placements: Sequence[Any]) -> list[Placement]:
    """Return torch's placements as hpcdist's. Local.

    Args:
        placements: those of torch, one for each axis of a mesh.

    Raises:
        UsageError: there is no such placement here.

    Example:
        >>> import torch
        >>> from hpcdist.torch.mesh import placements_of
        >>> placements_of([torch.distributed.tensor.Shard(0)])
        [Shard(0)]

    """
    return [_as_ours(each) for each in placements]


def _as_ours(placement: Any) -> Placement:
    if type(placement) is TorchShard:
        return Shard(placement.dim)
    if isinstance(placement, TorchReplicate):
        return Replicate()
    if isinstance(placement, TorchPartial) and placement.reduce_op in _NAMES:
        return Partial(_NAMES[placement.reduce_op])
    raise UsageError(
        f"there is no counterpart of torch's {placement!r}; redistribute the DTensor to Shard or "
        "Replicate first"
    )


def shard(
    tensor: torch.Tensor,
    mesh: ProcessMesh,
    placements: Sequence[Placement],
    dtype: Any = None,
    place: Any = None,
) -> Any:
    """Return a parameter that all ranks have alike as a DTensor, which is a parameter, too.

    Every rank keeps its part of its own value: nothing is communicated. A DTensor is
    redistributed. This is `shard_tensor` of torch's own.
    """
    if dtype is not None or place not in (None, tensor.device.type):
        raise UsageError(
            f"{an(type(tensor).__name__)} of torch keeps its dtype and device, but got "
            f"dtype={dtype!r}, place={place!r}; convert it by .to() before"
        )
    if isinstance(tensor, DTensor):
        return redistribute(tensor, mesh, placements)
    device_mesh = device_mesh_of(mesh, tensor.device.type)
    return cut(tensor, device_mesh, torch_placements(placements, mesh))


def redistribute(
    tensor: Any,
    mesh: ProcessMesh | None,
    placements: Sequence[Placement],
    out: Any = None,
    async_op: bool = False,
) -> Any:
    """Return a DTensor with other placements: `reshard` of torch's own. Collective.

    Raises:
        UsageError: another mesh, or a tensor that is not on one.

    """
    if not isinstance(tensor, DTensor):
        raise UsageError("this parameter is on no mesh yet; shard_tensor makes a DTensor of it")
    own = process_mesh_of(tensor.device_mesh)
    if (mesh is not None and mesh != own) or out is not None or async_op:
        raise UsageError(
            f"a DTensor is redistributed on its own mesh, {own!r}, and into new memory; got mesh="
            f"{mesh!r}, out={out!r}, async_op={async_op!r}. from_dtensor(t) makes an array of it, "
            "which can be resharded in all ways"
        )
    return tensor.redistribute(placements=torch_placements(placements, own))


def local_of(
    tensor: Any, mesh: ProcessMesh | None = None, placements: Sequence[Placement] | None = None
) -> Any:
    """Return this rank's part of a DTensor: `dtensor_to_local` of torch's own."""
    if placements is not None or not isinstance(tensor, DTensor):
        tensor = redistribute(tensor, mesh, placements or ())
    return tensor.to_local()


def cut(tensor: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[Any]) -> Any:
    """Return a tensor that all ranks have alike as a DTensor; a parameter stays a parameter."""
    if isinstance(tensor, torch.nn.Parameter):
        part = cut(tensor.detach(), device_mesh, placements)
        return torch.nn.Parameter(part, requires_grad=tensor.requires_grad)
    return distribute_tensor(tensor, device_mesh, placements, src_data_rank=None)


def from_local(
    local: torch.Tensor,
    mesh: ProcessMesh,
    placements: Sequence[Placement],
    *,
    shape: Sequence[int] | None = None,
) -> Any:
    """Return the DTensor of which this rank has `local`. Local.

    Args:
        local: this rank's part, whose memory is kept.
        mesh: the ranks.
        placements: what each axis of the mesh does.
        shape: of the whole; None if all parts are equally long.

    """
    sizes: dict[str, Any] = {}
    if shape is not None:
        sizes = {"shape": torch.Size(shape), "stride": strides_of(shape)}
    device_mesh = device_mesh_of(mesh, local.device.type)
    wanted = torch_placements(placements, mesh)
    return DTensor.from_local(local, device_mesh, wanted, run_check=False, **sizes)


# ---- arrays


def to_dtensor(array: DistArray) -> Any:
    """Return a DTensor with the memory of an array; see `hpcdist.to_dtensor`. Local."""
    layout = array.layout
    if layout.mesh.coordinate is None:
        raise UsageError(f"this rank is not part of {layout.mesh!r}, so it has no DTensor of it")
    if layout is not layout_of(layout.mesh, layout.shape, layout.placements):
        raise UsageError(
            f"a DTensor has equal parts, but this array is cut as {layout!r}; reshard it to "
            f"{list(layout.placements)} first"
        )
    local = LIBRARY.wrap(array.local)
    return from_local(local, layout.mesh, array.placements, shape=layout.shape)


def from_dtensor(tensor: Any) -> DistArray:
    """Return an array with the memory of a DTensor; see `hpcdist.from_dtensor`. Local."""
    if not isinstance(tensor, DTensor):
        raise UsageError(f"from_dtensor takes a DTensor, got {an(type(tensor).__name__)}")
    mesh = process_mesh_of(tensor.device_mesh)
    layout = layout_of(mesh, tuple(tensor.shape), placements_of(tensor.placements))
    local = tensor.detach().to_local().contiguous()
    return of_part(LIBRARY.view(local), mesh, layout.placements, layout.shape)


mend_losses()
