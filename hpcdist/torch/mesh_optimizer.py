"""`shard_optimizer` for any optimizer of torch: its state becomes DTensors, cut over an axis.

Stages 1 and 2 let an optimizer of the same class step parts of the parameters, and give all ranks
the new weights afterwards; stage 3 cuts the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hpcdist.errors import UsageError
from hpcdist.parallel.stages import ShardingStage
from hpcdist.torch.mesh import device_mesh_of
from hpcdist.torch.on_mesh import replicated, settle_all, settling
from hpcdist.torch.optimizers import (
    check_fresh,
    initial_state,
    loss_of,
    made_like,
    materialize_states,
    needs_closure,
)


def shard_torch_optimizer(
    optimizer: torch.optim.Optimizer,
    shard_fn: ShardingStage | Callable[[str, Any, Any], Any] | None,
    steps: int,
) -> torch.optim.Optimizer:
    """Cut what an optimizer keeps; see `shard_optimizer`."""
    check_fresh(optimizer, "shard_optimizer")
    if shard_fn is not None and needs_closure(optimizer):
        raise UsageError(
            f"{type(optimizer).__name__} asks for losses at other weights in each step, of all "
            "parameters as one vector, which cannot be cut; call shard_optimizer without a "
            "shard_fn, or use an optimizer of single parameters, such as SGD or Adam"
        )
    parameters = list(_parameters(optimizer))
    if isinstance(shard_fn, ShardingStage):
        optimizer = _by_stage(optimizer, parameters, shard_fn)
    elif shard_fn is not None:
        optimizer = _by_function(optimizer, parameters, shard_fn)
    for each in parameters:
        if isinstance(each, DTensor) and each.requires_grad:
            settling(each).every = steps
    if steps > 1:  # a parameter may not have been used in all passes
        optimizer.register_step_pre_hook(lambda *_: settle_all(parameters))
    return optimizer


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _by_function(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Any], shard_fn: Callable[..., Any]
) -> torch.optim.Optimizer:
    """Place every state as `shard_fn` says; a parameter is stepped where its states are."""
    materialize_states(optimizer)
    meshes: list[DeviceMesh] = []
    cuts = []
    for parameter in parameters:
        state = optimizer.state[parameter]
        names = [
            name
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape
        ]
        for name in names:
            state[name] = _kept(shard_fn(name, parameter, state[name]), name, parameter)
        placed = {state[name].placements for name in names}
        if len(placed) > 1:
            raise UsageError(
                f"the states {', '.join(names)} of one parameter must have the same placements, "
                f"got {', '.join(map(str, placed))}"
            )
        meshes += [state[name].device_mesh for name in names]
        cuts.append(placed.pop() if placed else None)
    if not meshes:  # an optimizer without a state
        return optimizer
    whole = (Replicate(),) * meshes[0].ndim
    made = MeshOptimizer(optimizer, meshes[0], [cut or whole for cut in cuts])
    made.state.update(optimizer.state)
    return made


def _kept(state: Any, name: str, parameter: torch.Tensor) -> Any:
    if not isinstance(state, DTensor) or state.shape != parameter.shape:
        raise UsageError(
            f"shard_fn must return the state {name!r} as a DTensor of the shape "
            f"{tuple(parameter.shape)}, for example by shard_tensor(state, mesh, placements), got "
            f"{state!r}"
        )
    return state


# ---- stages


def _by_stage(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Any], stage: ShardingStage
) -> torch.optim.Optimizer:
    mesh, axis = stage.place()
    device_mesh = device_mesh_of(mesh, parameters[0].device.type)
    cuts = [_cut_over(each, device_mesh, axis) for each in parameters]
    if stage.stage == 3:
        for parameter in parameters:
            _check_on_mesh(parameter)
        for parameter, cut in zip(parameters, cuts, strict=True):
            _cut_in_place(parameter, cut)
        if optimizer.state:  # of parameters as they were
            optimizer.state = initial_state(optimizer)
        return optimizer
    if stage.stage == 2:
        for parameter, cut in zip(parameters, cuts, strict=True):
            if isinstance(parameter, DTensor) and parameter.requires_grad:
                settling(parameter).placements = cut
    return MeshOptimizer(optimizer, device_mesh, cuts)


def _cut_over(parameter: Any, mesh: DeviceMesh, axis: int) -> tuple[Any, ...]:
    """Return the placements of a parameter that is also cut over an axis, where it can be."""
    placements = [Replicate()] * mesh.ndim
    if isinstance(parameter, DTensor):
        if parameter.device_mesh != mesh:
            raise UsageError(
                f"a parameter of shape {tuple(parameter.shape)} is on {parameter.device_mesh}, but "
                f"the stage is of {mesh}; use the same mesh"
            )
        placements = list(parameter.placements)
    if not isinstance(placements[axis], Replicate):
        raise UsageError(
            "The parameter can't be shard twice with sharding strategy: one of shape "
            f"{tuple(parameter.shape)} is {placements[axis]} on axis {axis} of {mesh} already; "
            "use another axis of the mesh"
        )
    taken = {each.dim % parameter.ndim for each in placements if isinstance(each, Shard)}
    free = [dim for dim in range(parameter.ndim) if dim not in taken]
    fits = [dim for dim in free if parameter.shape[dim] >= mesh.size(axis)]
    for dim in (fits or free)[:1]:
        placements[axis] = Shard(dim)
    return tuple(placements)


def _check_on_mesh(parameter: Any) -> None:
    if not isinstance(parameter, DTensor):
        raise UsageError(
            "ShardingStage3 cuts parameters that are DTensors; call shard_layer(model, mesh) "
            "before the optimizer is made, or use fully_shard or group_sharded_parallel"
        )


def _cut_in_place(parameter: Any, placements: tuple[Any, ...]) -> None:
    """Cut a DTensor and its gradient to their part in place; the module still has it."""
    with torch.no_grad():
        cut = parameter.detach().redistribute(placements=placements)
    parameter._local_tensor, parameter._spec = cut._local_tensor.clone(), cut._spec
    if parameter.requires_grad:
        settling(parameter).placements = placements


@final
class MeshOptimizer(torch.optim.Optimizer):  # type: ignore[misc] # torch is untyped
    """An optimizer whose parameters are whole, and which keeps and steps parts of them.

    Its state has DTensors. `step` is collective over the mesh.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mesh: DeviceMesh,
        cuts: Sequence[tuple[Any, ...]],
    ) -> None:
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        self._mesh = mesh
        parameters = list(_parameters(optimizer))
        self._cuts = dict(zip(parameters, cuts, strict=True))
        self._parts = {
            each: torch.nn.Parameter(self._part(each.detach(), cut).clone())
            for each, cut in self._cuts.items()
        }
        groups = [
            {**group, "params": [self._parts[each] for each in group["params"]]}
            for group in self.param_groups
        ]
        self.inner = made_like(optimizer, groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse more parameters than the optimizer was made of."""
        if hasattr(self, "inner"):
            raise UsageError(
                "an optimizer that has been sharded keeps the parameters that it was made of; "
                "add_param_group before shard_optimizer"
            )
        super().add_param_group(param_group)

    def _part(self, tensor: Any, placements: tuple[Any, ...]) -> Any:
        """Return the parts of a parameter or gradient. Collective, if it is not complete."""
        if not isinstance(tensor, DTensor):
            tensor = replicated(tensor, self._mesh)
        return tensor.redistribute(placements=placements)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the parts, and let all ranks have the new weights. Collective."""
        loss = loss_of(closure)
        for mine, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs.update({key: value for key, value in mine.items() if key != "params"})
        for parameter, part in self._parts.items():
            part.copy_(self._part(parameter.detach(), self._cuts[parameter]))
            gradient = parameter.grad
            part.grad = None if gradient is None else self._part(gradient, self._cuts[parameter])
            if parameter in self.state:
                self.inner.state[part] = self.state[parameter]
        self.inner.step()
        for parameter, part in self._parts.items():
            self._publish(parameter, part)
            part.grad = None
            if part in self.inner.state:
                self.state[parameter] = self.inner.state[part]
        return loss

    def _publish(self, parameter: Any, part: Any) -> None:
        if isinstance(parameter, DTensor):
            parameter.copy_(part.detach().redistribute(placements=parameter.placements))
        else:
            parameter.copy_(part.detach().full_tensor())
