"""States of models and optimizers on a grid, for checkpoints: what is cut as `LocalSlice`s.

Names are those of the parameters in their model, so a checkpoint fits every other grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hpcdist.checkpoint.local_slice import LocalSlice
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.torch.on_grid import grid_of, is_cut_over_mp, local_of
from hpcdist.torch.sharded_state import unknown

State = dict[str, Any]


class Part(NamedTuple):
    """What this rank has of a tensor: a box of it, or all of it."""

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    def for_checkpoints(self) -> Any:
        """Return the tensor, where it is whole, or the slice that it is. A view."""
        if tuple(self.tensor.shape) == self.shape:
            return self.tensor
        return LocalSlice(self.tensor, self.shape, self.offsets)

    def find_in(self, given: Any) -> Any:
        """Return the elements of this part in a tensor, an array or a slice.

        Raises:
            UsageError: they are not all there, or it is of another shape.

        """
        whole = given.full_tensor() if isinstance(given, DTensor) else given
        data, shape, offsets = whole, tuple(getattr(whole, "shape", ())), (0,) * len(self.shape)
        if isinstance(given, LocalSlice):
            data, shape = given.data, tuple(given.global_shape)
            offsets = given.offsets if isinstance(given.offsets, tuple) else (given.offsets,)
        if shape != self.shape:
            raise UsageError(
                f"the state's {self.name!r} has shape {shape}, but here it is {self.shape}; load a "
                "state of the same model"
            )
        starts = [mine - theirs for mine, theirs in zip(self.offsets, offsets, strict=False)]
        stops = [start + n for start, n in zip(starts, self.tensor.shape, strict=False)]
        if len(offsets) != len(self.shape) or not all(
            start >= 0 and stop <= n
            for start, stop, n in zip(starts, stops, data.shape, strict=True)
        ):
            raise UsageError(
                f"the state has {given!r} of {self.name!r}, but this rank needs "
                f"{self.for_checkpoints()!r}; load the state with hpcdist.checkpoint, which brings "
                "each rank what it needs"
            )
        return data[tuple(map(slice, starts, stops))]


def part_of(name: str, parameter: Any, tensor: Any) -> Part:
    """Return what this rank has of `tensor`, which lies on the ranks as `parameter` does."""
    tensor = tensor.detach()
    shape, offsets = [*tensor.shape], [0] * tensor.ndim
    if isinstance(tensor, DTensor):
        _, first = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        offsets = [*first]
    if is_cut_over_mp(parameter):
        grid, axis = grid_of(parameter), getattr(parameter, "split_axis", None)
        if axis is None:
            raise UsageError(
                f"parameter {name!r} is cut over mp (is_distributed), but has no split_axis, which "
                "says along which dimension; set it"
            )
        offsets[axis] += grid.rank("mp") * shape[axis]
        shape[axis] *= grid.degree("mp")
    return Part(name, local_of(tensor), tuple(shape), tuple(offsets))


def as_state(parts: Iterable[Part]) -> State:
    """Return parts as a state, which are views of the tensors; what has no elements is left out."""
    return {part.name: part.for_checkpoints() for part in parts if part.tensor.numel()}


def fill(parts: Iterable[Part], state: Mapping[str, Any]) -> None:
    """Copy what the parts need out of a state of slices or whole tensors. All or nothing.

    Raises:
        UsageError: a name is missing, or something that is needed.

    """
    found = []
    for part in parts:
        if not part.tensor.numel():
            continue
        if part.name not in state:
            raise UsageError(
                f"the state has no {part.name!r}; load one of the same model and optimizer (it has "
                f"{', '.join(map(str, list(state)[:8]))})"
            )
        found.append((part.tensor, part.find_in(state[part.name])))
    with torch.no_grad():
        for mine, given in found:
            mine.copy_(torch.as_tensor(given))


class Number(NamedTuple):
    """A state that is one number, and where it is kept."""

    name: str
    kept: dict[str, Any]
    key: str

    def read(self) -> float:
        """Return it."""
        return float(self.kept[self.key])

    def write(self, value: Any) -> None:
        """Replace it."""
        if isinstance(self.kept[self.key], torch.Tensor):
            self.kept[self.key].fill_(float(value))
        else:
            self.kept[self.key] = type(self.kept[self.key])(value)


def states_in(optimizer: Any, names: Mapping[int, str]) -> Iterator[Part | Number]:
    """Give what an optimizer keeps of its parameters, which are named by their ``id``."""
    for parameter, states in optimizer.state.items():
        for key, value in states.items():
            name = f"{names[id(parameter)]}.{key}"
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                yield part_of(name, parameter, value)
            elif (isinstance(value, torch.Tensor) and value.numel() == 1) or (
                isinstance(value, (int, float)) and not isinstance(value, bool)
            ):
                yield Number(name, states, key)
            elif (problem := unknown(name, value)) is not None:
                raise problem
