"""`shard_optimizer` and its stages: what an optimizer keeps is cut over an axis of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from hpcdist.arrays.libraries import row_of
from hpcdist.comm.group import Group
from hpcdist.errors import UsageAssertionError, UsageError
from hpcdist.integers import integer
from hpcdist.lazy import load
from hpcdist.mesh.process_mesh import ProcessMesh, get_mesh
from hpcdist.optim.optimizer import Optimizer
from hpcdist.parallel.scaler import GradScaler
from hpcdist.parallel.sharding.engine import LEVELS
from hpcdist.parallel.sharding.group_sharded import group_sharded_parallel


class ShardingStage:
    """Base of the stages that `shard_optimizer` takes as `shard_fn`; create a subclass.

    Attributes:
        axis: the name or number of the axis of the mesh that cuts.
        mesh: the mesh; None for the current one.

    """

    stage = 0

    def __init__(self, sharding_mesh_dim: int | str, mesh: ProcessMesh | None = None) -> None:
        if isinstance(sharding_mesh_dim, bool) or not isinstance(sharding_mesh_dim, (int, str)):
            raise UsageError(
                f"sharding_mesh_dim must be the name or number of an axis of the mesh, got "
                f"{sharding_mesh_dim!r}"
            )
        if mesh is not None and not isinstance(mesh, ProcessMesh):
            raise UsageError(f"mesh must be a ProcessMesh or None, got {mesh!r}")
        self.axis, self.mesh = sharding_mesh_dim, mesh

    def place(self) -> tuple[ProcessMesh, int]:
        """Return the mesh and the number of its axis that cuts."""
        mesh = get_mesh() if self.mesh is None else self.mesh
        if mesh is None:
            raise UsageError(f"{self!r} has no mesh; give it one, or call set_mesh first")
        return mesh, mesh.axis(self.axis)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.axis!r}, {self.mesh!r})"


@final
class ShardingStage1(ShardingStage):
    """Cut the optimizer's state over an axis of a mesh: each rank keeps and updates its part.

    Args:
        sharding_mesh_dim: the name or number of the axis.
        mesh: the mesh; None for the current one when `shard_optimizer` is called.

    Example:
        >>> import torch, hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> mesh = dist.ProcessMesh(list(range(world.nranks)), dim_names=["dp"])
        >>> model = dist.shard_layer(torch.nn.Linear(8, 1), mesh)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> optimizer = dist.shard_optimizer(optimizer, dist.ShardingStage1("dp", mesh))

    """

    stage = 1


@final
class ShardingStage2(ShardingStage):
    """Cut gradients, too, as soon as they are complete.

    Args:
        sharding_mesh_dim: the name or number of the axis.
        mesh: the mesh; None for the current one when `shard_optimizer` is called.

    Example:
        >>> import hpcdist as dist
        >>> stage = dist.ShardingStage2("dp")  # for `shard_optimizer`

    """

    stage = 2


@final
class ShardingStage3(ShardingStage):
    """Cut parameters, too: they are gathered where they are used.

    Args:
        sharding_mesh_dim: the name or number of the axis.
        mesh: the mesh; None for the current one when `shard_optimizer` is called.

    Example:
        >>> import hpcdist as dist
        >>> stage = dist.ShardingStage3("dp")  # for `shard_optimizer`

    """

    stage = 3


def shard_optimizer(
    optimizer: Any,
    shard_fn: ShardingStage | Callable[[str, Any, Any], Any] | None = None,
    gradient_accumulation_steps: int = 1,
) -> Any:
    """Cut the state of an optimizer over the ranks of a mesh.

    Use what is returned in place of what was given. Collective over the mesh.

    Args:
        optimizer: any one of torch.optim, of DTensors as `shard_layer` leaves them (stages 1 and 2
            also take ordinary parameters that all ranks have alike, with equal gradients), or one
            of `hpcdist.optim`, whose parameters and gradients are then sharded as by
            `group_sharded_parallel`. Fresh: it has taken no step.
        shard_fn: `ShardingStage1`, `ShardingStage2` or `ShardingStage3`; or, for torch, a function
            ``shard_fn(name, parameter, state)`` that returns a state tensor as it should be kept;
            None keeps the state as the parameters are.
        gradient_accumulation_steps: the number of backward passes before each step: gradients of
            DTensors are made complete in the last of them only.

    Returns:
        The optimizer.

    Raises:
        UsageError: a wrong argument; a parameter is cut over the axis of the stage already.

    Example:
        >>> import torch, hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> mesh = dist.ProcessMesh(list(range(world.nranks)), dim_names=["dp"])
        >>> model = dist.shard_layer(torch.nn.Linear(8, 1), mesh)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> optimizer = dist.shard_optimizer(optimizer, dist.ShardingStage1("dp", mesh))

    """
    steps = integer(gradient_accumulation_steps, "gradient_accumulation_steps", 1)
    if not (shard_fn is None or isinstance(shard_fn, ShardingStage) or callable(shard_fn)):
        raise UsageError(
            "shard_fn must be ShardingStage1, ShardingStage2 or ShardingStage3 of an axis, a "
            f"function or None, got {shard_fn!r}"
        )
    if isinstance(optimizer, Optimizer):
        return _shard_arrays(optimizer, shard_fn)
    row = row_of(type(optimizer), _TORCH_OPTIMIZER)
    if row is None:
        raise UsageAssertionError(
            f"shard_optimizer takes an optimizer of torch.optim or hpcdist.optim, got {optimizer!r}"
        )
    return load(row)(optimizer, shard_fn, steps)


def shard_scaler(scaler: Any) -> Any:
    """Make a loss scaler skip a step on all ranks if a gradient is inf or NaN on any of them.

    Args:
        scaler: a `torch.amp.GradScaler`, the same on all ranks; or an `hpcdist.GradScaler`, which
            does so already.

    Returns:
        The scaler to use; its ``unscale_`` and ``step`` are collective over the current mesh, or
        over all ranks if there is none.

    Example:
        >>> import torch, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> scaler = dist.shard_scaler(torch.amp.GradScaler("cpu"))

    """
    if isinstance(scaler, GradScaler):
        return scaler
    row = row_of(type(scaler), _TORCH_SCALER)
    if row is None:
        raise UsageError(
            f"shard_scaler takes a torch.amp.GradScaler or an hpcdist.GradScaler, got {scaler!r}"
        )
    mesh = get_mesh()
    return load(row)(scaler, None if mesh is None else mesh.group)


_TORCH_OPTIMIZER = {("torch", "Optimizer"): "hpcdist.torch.mesh_optimizer:shard_torch_optimizer"}
_TORCH_SCALER = {("torch", "GradScaler"): "hpcdist.torch.scaler:agreeing"}


# ---- optimizers of arrays


class _Parameters:
    """The parameters of an optimizer as a model, which computes nothing."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._named = [
            (slot.label(index), slot.parameter) for index, slot in enumerate(optimizer.slots)
        ]

    def named_parameters(self) -> list[tuple[str, Any]]:
        return self._named


def _shard_arrays(optimizer: Optimizer, shard_fn: Any) -> Any:
    if shard_fn is None:
        return optimizer
    if not isinstance(shard_fn, ShardingStage):
        raise UsageError(
            "the state of an optimizer of arrays is cut by ShardingStage1, ShardingStage2 or "
            f"ShardingStage3, got {shard_fn!r}"
        )
    mesh, axis = shard_fn.place()
    model, sharded, _ = group_sharded_parallel(
        _Parameters(optimizer),
        optimizer,
        LEVELS[shard_fn.stage - 1],
        group=mesh.get_group(mesh.names[axis]),
        dp_group=_beside(mesh, axis),
    )
    sharded.model = model  # which receives the gradients as long as it lives
    return sharded


def _beside(mesh: ProcessMesh, axis: int) -> Group | None:
    """Return the group of the other axis, over which gradients are averaged as well."""
    others = [each for each in range(mesh.ndim) if each != axis and mesh.sizes[each] > 1]
    if len(others) > 1:
        raise UsageError(
            f"arrays are sharded over one axis and averaged over one more, but {mesh!r} has "
            f"{len(others)} besides; take a part of the mesh"
        )
    return mesh.get_group(mesh.names[others[0]]) if others else None
