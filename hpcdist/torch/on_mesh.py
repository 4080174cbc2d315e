"""Modules whose tensors are DTensors: what goes in is made one, what comes out is ordinary again.

[Note: ordinary tensors] A DTensor cannot be added to an ordinary tensor, but a module makes
ordinary ones on its way: masks, positions. While it runs, those that meet a DTensor are taken for
values that all ranks have alike. This happens before autograd sees them, so that the backward pass
meets DTensors only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_map

Convert = Callable[[torch.Tensor], Any]


def run_on(module: torch.nn.Module, mesh: DeviceMesh, convert: Convert, is_on: Convert) -> None:
    """Make `module` run on `mesh`, by hooks.

    Ordinary tensors among its arguments are converted. If no argument was of the mesh already, the
    outputs are ordinary, too, and whole.

    Args:
        module: its parameters are DTensors.
        mesh: where they are.
        convert: makes a tensor of the arguments one of the mesh.
        is_on: tells whether a tensor is one already.

    """
    crossing = _Crossing(mesh, convert, is_on)
    module.register_forward_pre_hook(crossing.enter, with_kwargs=True)
    module.register_forward_hook(crossing.leave, always_call=True)


def replicated(tensor: torch.Tensor, mesh: DeviceMesh) -> Any:
    """Return a tensor that all ranks have alike as a DTensor. Local."""
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


@final
class _Crossing:
    """The hooks of one module."""

    def __init__(self, mesh: DeviceMesh, convert: Convert, is_on: Convert) -> None:
        self._mesh, self._convert, self._is_on = mesh, convert, is_on
        self._stack: list[tuple[Joining, bool]] = []

    def enter(self, _: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Convert the arguments."""
        stays = tree_any(lambda each: _is_tensor(each) and self._is_on(each), (args, kwargs))
        converted = tree_map(
            lambda each: self._convert(each) if _is_tensor(each) else each, (args, kwargs)
        )
        mode = Joining(self._mesh)
        mode.__enter__()
        self._stack.append((mode, stays))
        return converted  # type: ignore[no-any-return]

    def leave(self, _: torch.nn.Module, __: Any, output: Any) -> Any:
        """Make the outputs ordinary, if the arguments were."""
        if not self._stack:  # another hook has failed before ours was called
            return output
        mode, stays = self._stack.pop()
        mode.__exit__(None, None, None)
        return output if stays else tree_map(whole, output)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def whole(value: Any) -> Any:
    """Return a DTensor as an ordinary tensor of its whole value, others as they are."""
    return value.full_tensor() if isinstance(value, DTensor) else value


@final
class Joining(TorchFunctionMode):  # type: ignore[misc] # torch is untyped
    """Lets ordinary tensors meet DTensors; see [Note: ordinary tensors]."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._mesh = mesh

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        kinds = {isinstance(each, DTensor) for each in _tensors((*args, *kwargs.values()))}
        if len(kinds) == 2:
            args, kwargs = tree_map(self._join, (tuple(args), kwargs))
        return func(*args, **kwargs)

    def _join(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            return replicated(value, self._mesh)
        return value


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


# ---- gradients


@final
class Settling:
    """Gives the gradient of a parameter its placements, as soon as it is complete.

    A parameter that all ranks have, used on parts of a batch, gets contributions to its gradient.

    Attributes:
        placements: those of the gradient.
        every: backward passes that make one gradient; it is settled at the last.

    """

    def __init__(self, placements: Sequence[Any]) -> None:
        self.placements, self.every, self._passes = tuple(placements), 1, 0

    def __call__(self, parameter: torch.Tensor) -> None:
        """Settle the gradient, after the last of its backward passes."""
        self._passes += 1
        if self._passes % self.every == 0:
            self.settle(parameter)

    def settle(self, parameter: torch.Tensor) -> Any:
        """Settle the gradient now. Collective, where it has other placements."""
        gradient: Any = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != self.placements:
            gradient = gradient.redistribute(placements=self.placements)
            parameter.grad = gradient
        return gradient


def settle_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Give gradients the placements of their parameters, in every backward pass."""
    for parameter in parameters:
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            settling(parameter)


def settle_all(parameters: Iterable[torch.Tensor]) -> None:
    """Settle all gradients that are not complete yet. Collective where there are any."""
    for parameter in parameters:
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            settling(parameter).settle(parameter)


def settling(parameter: Any) -> Settling:
    """Return what settles the gradient of a parameter; it is registered when first asked for."""
    known = getattr(parameter, _ATTRIBUTE, None)
    if not isinstance(known, Settling):
        known = Settling(parameter.placements)
        setattr(parameter, _ATTRIBUTE, known)
        parameter.register_post_accumulate_grad_hook(known)
    return known


_ATTRIBUTE = "_hpcdist_settling"
