"""`shard_layer` for torch modules: their parameters become DTensors on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from hpcdist.comm.group import Group
from hpcdist.comm.states import verifying
from hpcdist.errors import UsageError
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.parallel.module_state import broadcast_states
from hpcdist.torch.backend import process_group_of
from hpcdist.torch.mesh import cut, device_mesh_of
from hpcdist.torch.module_state import states_of
from hpcdist.torch.on_mesh import replicated, run_on, settle_gradients


def shard_module(
    layer: torch.nn.Module,
    mesh: ProcessMesh,
    shard_fn: Callable[[str, torch.nn.Module, ProcessMesh], None] | None,
    input_fn: Callable[[Any, ProcessMesh], Any] | None,
    output_fn: Callable[[Any, ProcessMesh], Any] | None,
) -> torch.nn.Module:
    """Make the parameters of a module DTensors; see `shard_layer`. Collective."""
    make_equal(layer, mesh.group)
    device_mesh = device_mesh_of(mesh, device_of(layer))
    with on_mesh_in_the_end(layer, device_mesh):
        for name, part in list(layer.named_modules()):
            if shard_fn is not None:
                shard_fn(name, part, mesh)
    settle_gradients(layer.parameters())
    if input_fn is None:
        convert = partial(_as_replicated, mesh=device_mesh)
        run_on(layer, device_mesh, convert, is_on=_is_dtensor)
    else:
        layer.register_forward_pre_hook(lambda _, inputs: _as_tuple(input_fn(inputs, mesh)))
        run_on(layer, device_mesh, _unchanged, is_on=_is_dtensor)
    if output_fn is not None:
        layer.register_forward_hook(lambda _, inputs, outputs: output_fn(outputs, mesh))
    return layer


def make_equal(layer: torch.nn.Module, group: Group) -> None:
    """Check that the ranks have the same module, and give them the first one's values. Collective.

    DTensors stay as they are.
    """
    named = [*layer.named_parameters(), *layer.named_buffers()]
    with verifying(group) as alike:
        lazy = [name for name, each in named if torch.nn.parameter.is_lazy(each)]
        if lazy:
            raise UsageError(f"{', '.join(lazy)} have no shape yet; call the model once before")
        alike += states_of(named)
    plain = [each.detach() for _, each in named if not isinstance(each, DTensor)]
    on_host = [each for each in plain if each.device.type == "cpu"]
    broadcast_states(on_host, group, group.ranks[0])
    for each in plain:
        if each.device.type != "cpu":
            process_group_of(group).broadcast(each, torch.distributed.BroadcastOptions()).wait()


@contextmanager
def on_mesh_in_the_end(layer: torch.nn.Module, mesh: DeviceMesh) -> Iterator[None]:
    """Replicate over `mesh` what the block has not cut. Layers that share a tensor still do.

    Local. It is in the order of the module that tensors are replaced.
    """
    before = [
        (table, name, tensor)
        for part in layer.modules()
        for table in (part._parameters, part._buffers)
        for name, tensor in table.items()
        if tensor is not None and not isinstance(tensor, DTensor)
    ]
    yield
    made: dict[int, Any] = {
        id(tensor): table[name]
        for table, name, tensor in before
        if isinstance(table[name], DTensor)
    }
    for table, name, tensor in before:
        if id(tensor) not in made:
            made[id(tensor)] = cut(tensor, mesh, [Replicate()] * mesh.ndim)
        table[name] = made[id(tensor)]


def device_of(module: torch.nn.Module) -> str:
    """Return the kind of device that a module is on."""
    for tensor in (*module.parameters(), *module.buffers()):
        return str(tensor.device.type)
    return "cpu"


def _as_replicated(tensor: torch.Tensor, mesh: Any) -> Any:
    return tensor if isinstance(tensor, DTensor) else replicated(tensor, mesh)


def _unchanged(tensor: torch.Tensor) -> Any:
    return tensor


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor)


def _as_tuple(inputs: Any) -> Any:
    return tuple(inputs) if isinstance(inputs, list) else inputs
