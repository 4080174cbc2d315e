"""`parallelize` for torch modules: tensor parallelism by plans, data parallelism and sharding.

Along the axis ``"mp"`` the module runs on DTensors, which cut layers as the plans say; all other
axes cut the batch: each of their ranks trains on its own part, and gradients are averaged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hpcdist.errors import UsageError
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.layer_plans import (
    ColWiseParallel,
    LayerPlan,
    PrepareLayerInput,
    PrepareLayerOutput,
    RowWiseParallel,
    SequenceParallelBegin,
    SequenceParallelDisable,
    SequenceParallelEnable,
    SequenceParallelEnd,
)
from hpcdist.text import an
from hpcdist.torch.layers import device_of, make_equal, on_mesh_in_the_end
from hpcdist.torch.mesh import cut, device_mesh_of
from hpcdist.torch.on_mesh import replicated, run_on, settle_gradients

AXIS = "mp"


class Chosen(NamedTuple):
    """A layer, its plans, and which of its parameters they are for; none means all."""

    layer: torch.nn.Module
    name: str
    plans: Sequence[LayerPlan]
    parameters: Sequence[str]


class Where(NamedTuple):
    """The mesh of the user, and torch's mesh of its axis ``"mp"``."""

    mesh: ProcessMesh
    axis: DeviceMesh


def tensor_parallel(
    model: torch.nn.Module, mesh: ProcessMesh, plans: Mapping[str, Sequence[LayerPlan]]
) -> None:
    """Cut layers as the plans of their names say. Collective over the mesh.

    Raises:
        UsageError: a plan is for no layer, or for one that it cannot cut.

    """
    chosen = choose(model, plans)
    make_equal(model, mesh.group)
    axis = device_mesh_of(mesh, device_of(model))[AXIS]
    where = Where(mesh, axis)
    with on_mesh_in_the_end(model, axis):
        for each in chosen:
            for plan in each.plans:
                _APPLY[type(plan)](plan, each, where)
    settle_gradients(model.parameters())


def run_on_axis(model: torch.nn.Module, mesh: ProcessMesh) -> None:
    """Make a model that has been cut take and return ordinary tensors, whole along the axis.

    Local, and the last thing done to it: what shards parameters is to see the outputs before.
    """
    axis = device_mesh_of(mesh, device_of(model))[AXIS]
    run_on(model, axis, lambda tensor: _enter(tensor, axis), lambda tensor: _is_on(tensor, axis))


def choose(model: torch.nn.Module, plans: Mapping[str, Sequence[LayerPlan]]) -> list[Chosen]:
    """Return what each plan is for: its key is the name of a layer or parameter, or a pattern."""
    chosen = []
    for key, listed in plans.items():
        found = [
            Chosen(layer, name, listed, parameters)
            for name, layer in model.named_modules()
            if name and (parameters := _parameters_at(key, name, layer)) is not None
        ]
        if not found:
            names = [name for name, _ in model.named_modules() if name]
            raise UsageError(
                f"the plan {key!r} is for no layer; the layers are {', '.join(names[:12])}"
                f"{' ...' if len(names) > 12 else ''}"
            )
        chosen += found
    for each in chosen:
        if any(isinstance(plan, (ColWiseParallel, RowWiseParallel)) for plan in each.plans):
            _check_layer(each)
    return chosen


def _parameters_at(key: str, name: str, layer: torch.nn.Module) -> Sequence[str] | None:
    if key == name or re.fullmatch(key, name):
        return ()
    own = [each for each in layer._parameters if re.fullmatch(key, f"{name}.{each}") is not None]
    return own or None


def _check_layer(chosen: Chosen) -> None:
    if not isinstance(chosen.layer, (torch.nn.Linear, torch.nn.Embedding)):
        raise UsageError(
            f"{chosen.name} is {an(type(chosen.layer).__name__)}; ColWiseParallel and "
            "RowWiseParallel cut Linear and Embedding. Plan its sub-layers, or use shard_layer "
            "with a shard_fn"
        )


# ---- the plans


def _column_wise(plan: ColWiseParallel, chosen: Chosen, where: Where) -> None:
    is_linear = isinstance(chosen.layer, torch.nn.Linear)
    _cut_parameters(chosen, where, lambda tensor: 0 if is_linear else tensor.ndim - 1)
    _before(chosen.layer, lambda x: _placed(x, Replicate()))
    last = Replicate() if plan.gather_output else None
    _after(chosen.layer, lambda x: _placed(x, last or Shard(x.ndim - 1)))


def _row_wise(plan: RowWiseParallel, chosen: Chosen, where: Where) -> None:
    is_linear = isinstance(chosen.layer, torch.nn.Linear)
    _cut_parameters(chosen, where, lambda tensor: is_linear if tensor.ndim > 1 else None)
    # An input that is whole is cut here, whatever `is_input_parallel` says: a DTensor knows.
    _before(chosen.layer, lambda x: _placed(x, Shard(x.ndim - 1) if is_linear else Replicate()))
    begins = any(isinstance(each, SequenceParallelBegin) for each in chosen.plans)
    if not is_linear:
        _after(chosen.layer, lambda x: _looked_up(x, where.axis))
    elif not begins:  # that one makes parts of the sums without making them whole first
        _after(chosen.layer, lambda x: _placed(x, Replicate()))


def _cut_parameters(chosen: Chosen, where: Where, dim_of: Callable[[Any], int | None]) -> None:
    layer = chosen.layer
    for name, tensor in list(layer._parameters.items()):
        if tensor is None or (chosen.parameters and name not in chosen.parameters):
            continue
        dim = dim_of(tensor)
        if dim is not None and not isinstance(tensor, DTensor):
            layer._parameters[name] = cut(tensor, where.axis, [Shard(int(dim))])


def _prepare_input(plan: PrepareLayerInput, chosen: Chosen, where: Where) -> None:
    assert plan.fn is not None
    chosen.layer.register_forward_pre_hook(plan.fn(process_mesh=where.mesh))


def _prepare_output(plan: PrepareLayerOutput, chosen: Chosen, where: Where) -> None:
    assert plan.fn is not None
    chosen.layer.register_forward_hook(plan.fn(process_mesh=where.mesh))


def _sequence_begin(plan: SequenceParallelBegin, chosen: Chosen, where: Where) -> None:
    _after(chosen.layer, lambda x: _split_sequence(x, plan.need_transpose))


def _sequence_end(plan: SequenceParallelEnd, chosen: Chosen, where: Where) -> None:
    _before(chosen.layer, lambda x: _gather_sequence(x, plan.need_transpose))


def _sequence_enable(plan: SequenceParallelEnable, chosen: Chosen, where: Where) -> None:
    _before(chosen.layer, lambda x: _split_sequence(x, True))
    _after(chosen.layer, lambda x: _gather_sequence(x, True))


def _sequence_disable(plan: SequenceParallelDisable, chosen: Chosen, where: Where) -> None:
    _before(chosen.layer, lambda x: _gather_sequence(x, plan.need_transpose))
    _after(chosen.layer, lambda x: _split_sequence(x, plan.need_transpose))


_APPLY: dict[type[LayerPlan], Callable[[Any, Chosen, Where], None]] = {
    ColWiseParallel: _column_wise,
    RowWiseParallel: _row_wise,
    PrepareLayerInput: _prepare_input,
    PrepareLayerOutput: _prepare_output,
    SequenceParallelBegin: _sequence_begin,
    SequenceParallelEnd: _sequence_end,
    SequenceParallelEnable: _sequence_enable,
    SequenceParallelDisable: _sequence_disable,
}


# ---- tensors on the axis


def _placed(x: Any, placement: Any) -> Any:
    return x if x.placements == (placement,) else x.redistribute(placements=[placement])


def _split_sequence(x: Any, turns: bool) -> Any:
    """Return a sequence cut in parts: ``[sequence, batch, ...]``."""
    x = _turned(x) if turns else x
    length, ranks = x.shape[0], x.device_mesh.size()
    if length % ranks:  # torch's linear layers cannot go backward through uneven parts
        raise UsageError(
            f"a sequence of {length} does not go evenly into the {ranks} ranks of axis {AXIS!r}; "
            "pad it to a multiple of them"
        )
    return _placed(x, Shard(0))


def _gather_sequence(x: Any, turns: bool) -> Any:
    """Return a sequence that was cut in parts as a whole."""
    x = _placed(x, Replicate())
    return _turned(x) if turns else x


def _turned(x: Any) -> Any:
    return _Packed.apply(_Packed.apply(x).transpose(0, 1))


@final
class _Packed(torch.autograd.Function):  # type: ignore[misc] # torch is untyped
    """A copy in C order, and so is its gradient: torch takes the parts of DTensors for such."""

    @staticmethod
    def forward(_: Any, x: Any) -> Any:
        """Return the copy."""
        return x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(_: Any, gradient: Any) -> Any:
        """Return a copy of the gradient."""
        return gradient.clone(memory_format=torch.contiguous_format)


def _looked_up(x: Any, axis: DeviceMesh) -> Any:
    """Return the rows that ranks have looked up in their part of an embedding as whole ones.

    Their gradient must be whole, too, before it goes back to the parts: torch cannot do both at
    once, so it goes through an ordinary tensor.
    """
    return replicated(_placed(x, Replicate()).to_local(), axis)


def _before(layer: torch.nn.Module, change: Callable[[Any], Any]) -> None:
    """Change the first argument of a layer."""

    def hook(_: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (change(inputs[0]), *inputs[1:])

    layer.register_forward_pre_hook(hook)


def _after(layer: torch.nn.Module, change: Callable[[Any], Any]) -> None:
    """Change the output of a layer, or the first of several."""

    def hook(_: torch.nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    layer.register_forward_hook(hook)


def _is_on(tensor: torch.Tensor, axis: DeviceMesh) -> bool:
    return isinstance(tensor, DTensor) and tensor.device_mesh == axis


def _enter(tensor: torch.Tensor, axis: DeviceMesh) -> Any:
    """Return an argument of the model on the axis, where all ranks have it whole."""
    if _is_on(tensor, axis):
        return tensor
    return replicated(own_part(tensor), axis)


def own_part(tensor: Any) -> Any:
    """Return this rank's part of a batch that is on a mesh; others as they are.

    Raises:
        UsageError: the parts are not of equal length, and gradients are wanted, of which the ranks
            take the mean.

    """
    if not isinstance(tensor, DTensor):
        return tensor
    wanted = own_placements(tensor)
    if torch.is_grad_enabled():
        _check_parts(tensor, wanted)
    return tensor.redistribute(placements=wanted).to_local()


def own_placements(tensor: DTensor) -> list[Any]:
    """Return how ranks compute their parts of a batch: it is not cut over those of a layer."""
    names = tensor.device_mesh.mesh_dim_names or ()
    return [
        Replicate() if name == AXIS else each
        for name, each in zip(names, tensor.placements, strict=True)
    ]


def _check_parts(tensor: DTensor, placements: Sequence[Any]) -> None:
    for placement, size in zip(placements, tensor.device_mesh.shape, strict=True):
        if placement.is_shard() and tensor.shape[placement.dim] % size:
            raise UsageError(
                f"a batch of {tensor.shape[placement.dim]} has no equal parts for {size} ranks, "
                "whose gradients would count alike; leave out the last batch of the loader "
                "(drop_last=True), or choose a batch size that all batches can have"
            )
