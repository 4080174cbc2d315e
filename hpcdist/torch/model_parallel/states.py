"""`CutLayer`: a layer of whose parameters each rank of a group has a part, and its state.

Its state dict has the cut parameters as torch's `DTensor`s over the group, which know the whole, so
that a checkpoint fits any number of ranks and the ordinary layer. It takes `DTensor`s of any
placements, whole tensors, and parts of the right shape.

A cut parameter says what it is a part of: `is_distributed`, `split_axis` (the dimension that is
cut), `global_shape` and `global_offsets` (where it begins). Checkpoints give the states of an
optimizer the place of their parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor, Shard as TorchShard

from hpcdist.checkpoint.dtensor import slices_of
from hpcdist.checkpoint.local_slice import LocalSlice
from hpcdist.comm.group import Group
from hpcdist.comm.session import is_simulated
from hpcdist.mesh.placements import Shard
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.torch.mesh import from_local


class CutLayer(torch.nn.Module):  # type: ignore[misc] # torch is untyped
    """A layer that is cut over the ranks of `group`; what it computes, those below say.

    `take` cuts the parameters, and the state dict tells the whole. The first one is collective
    over the group: it makes torch's mesh of it.
    """

    cuts: ClassVar[Mapping[str, int]]
    """The parameters that are cut, and along which dimension."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def take(self, whole: torch.nn.Module) -> None:
        """Take this rank's parts of the parameters of an ordinary layer. Local."""
        for name, parameter in whole._parameters.items():
            if parameter is None:
                self.register_parameter(name, None)
                continue
            value = parameter.detach()
            if name in self.cuts:
                value = _own_part(value, self.cuts[name], self.group).clone()
            self.register_parameter(name, torch.nn.Parameter(value))
        self.mark()

    def mark(self) -> None:
        """Mark every parameter with what it is a part of, which torch drops when it copies."""
        for name, parameter in self._parameters.items():
            if parameter is None or "is_distributed" in vars(parameter):
                continue
            dim = self.cuts.get(name)
            parameter.is_distributed = False
            if self.group.nranks > 1 and dim is not None:
                parameter.is_distributed = True
                shape, offsets = self._place(tuple(parameter.shape), dim)
                parameter.split_axis = dim
                parameter.global_shape, parameter.global_offsets = shape, offsets

    def _place(
        self, shape: tuple[int, ...], dim: int | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape of the whole of which this rank has a part, and where that begins."""
        ranks, rank = self.group.nranks, self.group.rank
        whole = tuple(each * (ranks if axis == dim else 1) for axis, each in enumerate(shape))
        begin = tuple(each * rank if axis == dim else 0 for axis, each in enumerate(shape))
        return whole, begin

    def _apply(self, fn: Any, recurse: bool = True) -> CutLayer:
        super()._apply(fn, recurse)
        self.mark()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.mark()

    # ---- the state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if keep_vars or self.group.nranks == 1:  # with keep_vars the parameters are wanted
            return
        for name, dim in self.cuts.items():
            parameter = self._parameters.get(name)
            if parameter is not None:
                destination[prefix + name] = self._as_part(parameter.detach(), dim, prefix + name)

    def _as_part(self, local: Any, dim: int, name: str) -> Any:
        """Return what tells the whole of a parameter, with the memory of `local`."""
        if isinstance(local, DTensor):  # cut besides, by torch's fully_shard
            shape, begin = self._place(tuple(local.shape), dim)
            (part,) = slices_of(local, name)
            offsets = part.offsets if isinstance(part.offsets, tuple) else (0,) * len(shape)
            return LocalSlice(
                part.data, shape, [a + b for a, b in zip(begin, offsets, strict=True)]
            )
        if is_simulated():  # where torch.distributed has no ranks
            shape, begin = self._place(tuple(local.shape), dim)
            return LocalSlice(local, shape, begin)
        mesh = ProcessMesh(self.group.ranks, ["mp"])
        return from_local(local, mesh, [Shard(dim)])

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        fitted = {
            prefix + name: self._fitted(state_dict[prefix + name], parameter, self.cuts.get(name))
            for name, parameter in self._parameters.items()
            if parameter is not None and prefix + name in state_dict
        }
        super()._load_from_state_dict({**state_dict, **fitted}, prefix, local_metadata, *args)
        self.mark()

    def _fitted(self, value: Any, parameter: Any, dim: int | None) -> Any:
        """Return this rank's part of what a state has; as it is, if it does not fit."""
        if isinstance(parameter, DTensor):
            if isinstance(value, LocalSlice):
                parameter.to_local().detach().copy_(value.data)
                return parameter.detach()
            return value
        whole, begin = self._place(tuple(parameter.shape), dim)
        if isinstance(value, LocalSlice):
            return value.data if value.offsets == begin else value
        if isinstance(value, DTensor):
            value = value.to_local() if self._has_own_part(value, dim) else value.full_tensor()
        if dim is None or not isinstance(value, torch.Tensor) or tuple(value.shape) != whole:
            return value
        return _own_part(value, dim, self.group)

    def _has_own_part(self, value: Any, dim: int | None) -> bool:
        """Return whether a DTensor is cut over the ranks as the parameter is."""
        if dim is None or value.placements != (TorchShard(dim),):
            return False
        return bool(value.device_mesh.mesh.flatten().tolist() == self.group.ranks)


def is_cut(parameter: Any) -> bool:
    """Return whether a parameter is a rank's part; every tensor has a method `is_distributed`."""
    return getattr(parameter, "is_distributed", False) is True


def _own_part(whole: Any, dim: int, group: Group) -> Any:
    length = whole.shape[dim] // group.nranks
    return whole.narrow(dim, group.rank * length, length)
