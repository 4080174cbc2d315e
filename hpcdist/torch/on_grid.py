"""What a parameter of torch tells of its place on the grid of hybrid training.

Layers mark their parameters by attributes:

- ``is_distributed``: this rank has its part, of those of its mp group, cut along ``split_axis``;
- ``sequence_parallel``: whole on each mp rank, each of which has seen a part of the sequence, so
  that gradients are summed over mp before a step;
- ``is_firstly_shared``: of a weight that several stages of a pipeline have, True where it counts.

`fleet.distributed_model` gives each parameter a `Role` besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import torch
import torch.distributed as c10d
from torch.distributed.tensor import DTensor, Replicate

from hpcdist.comm.collectives import all_reduce
from hpcdist.errors import UsageError
from hpcdist.parallel.clipping import Measured, norm_of
from hpcdist.parallel.gradient_groups import own_group
from hpcdist.parallel.hybrid import HybridCommunicateGroup, current_grid
from hpcdist.transport.call.reduction import ReduceOp

MARKS = (
    "is_distributed",
    "split_axis",
    "global_shape",
    "global_offsets",
    "sequence_parallel",
    "is_firstly_shared",
    "hpcdist_role",
)
"""Attributes that a parameter leaves to the one that takes its place."""

DATA_AXES = ("dp", "sharding", "sep", "cp")
"""Axes whose ranks have the same weights and see other samples, or other parts of them."""

MODEL_AXES = ("pp", "sharding", "mp")
"""Axes over which the ranks may have different parts of one model."""


@dataclass(frozen=True)
class Role:
    """What `fleet.distributed_model` knows of a parameter.

    Attributes:
        name: what its model calls it.
        grid: where the model is trained.
        settled: the axes over which the backward pass averages its gradient.

    """

    name: str
    grid: HybridCommunicateGroup
    settled: tuple[str, ...]

    def __reduce__(self) -> Any:
        """Pickle as None: elsewhere there is no such grid."""
        return type(None), ()


def role_of(parameter: Any) -> Role | None:
    """Return what `fleet.distributed_model` knows of a parameter; None if it has not seen it."""
    found: Role | None = getattr(parameter, "hpcdist_role", None)
    return found


def check_no_own_groups(parameters: Iterable[Any]) -> None:
    """Refuse parameters that not all ranks of a grid's data axes have, such as experts."""
    if any(own_group(each) is not None for each in parameters):
        raise UsageError(
            "the model has parameters with an hpcdist_group, for which a grid has no axis; train "
            "it with hpcdist.DataParallel, without fleet"
        )


def give_roles(
    named: Iterable[tuple[str, Any]], grid: HybridCommunicateGroup, settled: Iterable[str]
) -> None:
    """Mark parameters with their names and the axes over which backward averages gradients."""
    axes = tuple(settled)
    for name, parameter in named:
        parameter.hpcdist_role = Role(name, grid, axes)


def copy_marks(old: Any, new: Any) -> None:
    """Copy the marks of `old` to `new`."""
    for mark in MARKS:
        if mark in vars(old):  # a tensor has a method is_distributed, besides
            setattr(new, mark, vars(old)[mark])


def replace(old: Any, new: Any) -> None:
    """Note that `new` has taken the place of `old` in their model; see `latest`."""
    if new is not old:
        copy_marks(old, new)
        old.hpcdist_successor = new


def latest(parameter: Any) -> Any:
    """Return what has taken the place of a parameter since an optimizer was made of it."""
    return getattr(parameter, "hpcdist_successor", parameter)


def local_of(tensor: Any) -> torch.Tensor:
    """Return what this rank has of a tensor, as a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_cut_over_mp(parameter: Any) -> bool:
    """Return whether each rank of mp has a part of its own."""
    return bool(vars(parameter).get("is_distributed", False))


def is_sequence_parallel(parameter: Any) -> bool:
    """Return whether each rank of mp has the gradient of its part of the sequence."""
    return bool(getattr(parameter, "sequence_parallel", False))


def grid_of(parameter: Any) -> HybridCommunicateGroup:
    """Return the grid of a parameter that is cut over mp."""
    role = role_of(parameter)
    grid = current_grid() if role is None else role.grid
    if grid is None:
        raise UsageError(
            f"a parameter of shape {tuple(parameter.shape)} is cut over mp, but there is no grid; "
            "call fleet.init before the model is made"
        )
    return grid


# ---- sums over all ranks that have parts


def counts_here(parameter: Any, grid: HybridCommunicateGroup) -> bool:
    """Return whether a sum over all parts of a model takes what this rank has of a parameter.

    Of what several ranks have, the first one's is taken.
    """
    cut = {"sharding": isinstance(parameter, DTensor), "mp": is_cut_over_mp(parameter)}
    first = all(is_cut or grid.rank(axis) == 0 for axis, is_cut in cut.items())
    return first and getattr(parameter, "is_firstly_shared", True) is not False


def measure_on_grid(
    parameters: Iterable[Any], grid: HybridCommunicateGroup, norm_type: float
) -> Measured:
    """Return the norm over the gradients of all of a model, and what multiplies them.

    Collective over the axes of one model: each of its elements counts once, on however many ranks
    it is.
    """
    pairs = [(each, local_of(each.grad)) for each in parameters if each.grad is not None]
    counted = [gradient for each, gradient in pairs if counts_here(each, grid)]
    norm = float(total_norm(counted, norm_type))
    total = np.array([norm if norm_type == inf else norm**norm_type])
    op = ReduceOp.MAX if norm_type == inf else ReduceOp.SUM
    all_reduce(total, op, grid.fused(*MODEL_AXES))
    gradients = [gradient for _, gradient in pairs]

    def scale(factor: float) -> None:
        with torch.no_grad():
            for gradient in gradients:
                gradient.mul_(factor)

    return norm_of([float(total[0])], norm_type), scale


def total_norm(gradients: Sequence[Any], norm_type: float) -> Any:
    """Return the norm over gradients, computed in 32 bits at least.

    torch itself computes that of 16-bit gradients in 16 bits: it is infinite from 65504 on in
    float16, and has three digits in bfloat16.
    """
    if not is_any_narrow(gradients):
        return torch.nn.utils.get_total_norm(gradients, norm_type)
    norms = [norm_of_one(each, norm_type) for each in gradients]
    wide = torch.stack([each.to(norms[0].device, torch.float64) for each in norms])
    return torch.linalg.vector_norm(wide, norm_type)


def is_any_narrow(tensors: Iterable[Any]) -> bool:
    """Return whether there are some of 16 bits."""
    return any(each.dtype in _NARROW for each in tensors)


def norm_of_one(gradient: Any, norm_type: float) -> Any:
    """Return the norm of one gradient, in 32 bits at least."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(local_of(gradient), norm_type, dtype=wide)


_NARROW = (torch.float16, torch.bfloat16)


def check_settled(parameters: Sequence[Any]) -> None:
    """Refuse gradients of which the optimizer has yet to make those of the whole batch."""
    for each in parameters:
        role = role_of(each)
        if role is None:
            continue
        left = left_to_average(role)
        if left or (is_sequence_parallel(each) and role.grid.degree("mp") > 1):
            raise UsageError(
                f"the gradient of {role.name!r} is one of this rank alone until the optimizer has "
                f"summed it over {', '.join(left or ['mp'])}; give clip_grad_norm_ the optimizer, "
                "or set its clip_norm"
            )


def left_to_average(role: Role) -> list[str]:
    """Return the axes over which a gradient is still to be averaged after the backward pass."""
    return [axis for axis in DATA_AXES if axis not in role.settled and role.grid.degree(axis) > 1]


def sum_over_parts(values: torch.Tensor, parameters: Sequence[Any]) -> None:
    """Add to each row of `values` what the ranks have that have other parts of its parameter.

    Collective over these ranks. In place.
    """
    where: dict[tuple[Any, ...], list[int]] = {}
    for row, parameter in enumerate(parameters):
        where.setdefault(_groups_of_parts(parameter), []).append(row)
    for groups, rows in where.items():
        if groups:
            part = values[rows]
            for group in groups:
                if isinstance(group, c10d.ProcessGroup):
                    c10d.all_reduce(part, group=group)
                else:
                    all_reduce(part, group=group)
            values[rows] = part


def _groups_of_parts(parameter: Any) -> tuple[Any, ...]:
    """Return the groups, torch's or hpcdist's, whose ranks have the parts of a parameter."""
    groups: list[Any] = []
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        groups += [
            mesh.get_group(axis)
            for axis, placement in enumerate(parameter.placements)
            if not isinstance(placement, Replicate)
        ]
    if is_cut_over_mp(parameter) and grid_of(parameter).degree("mp") > 1:
        groups.append(grid_of(parameter)["mp"])
    return tuple(groups)
