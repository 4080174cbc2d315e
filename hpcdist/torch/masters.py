"""Master weights: any optimizer of torch, stepping float32 copies of 16-bit parameters.

ZeroRedundancyOptimizer makes the optimizer of what a rank owns, so only that is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch

from hpcdist.torch.on_grid import copy_marks
from hpcdist.torch.optimizers import materialize_states

_NARROW = (torch.float16, torch.bfloat16)


def with_masters(kind: type[torch.optim.Optimizer], groups: Sequence[dict[str, Any]]) -> Any:
    """Return what makes `kind` optimizers of some parameters of `groups`.

    They have float32 master weights if any of `groups` has 16 bits: on all ranks, whatever they own
    now or get later.
    """
    if any(each.dtype in _NARROW for group in groups for each in group["params"]):
        return partial(_make, kind)
    return kind


def _make(kind: type[torch.optim.Optimizer], groups: Any, **defaults: Any) -> torch.optim.Optimizer:
    return MasterOptimizer(kind, [dict(group) for group in groups], defaults)


@final
class MasterOptimizer(torch.optim.Optimizer):  # type: ignore[misc] # torch is untyped
    """An optimizer whose parameters have 16 bits, and whose steps are taken in float32."""

    inner: Any = None

    def __init__(
        self, kind: type[torch.optim.Optimizer], groups: Any, defaults: dict[str, Any]
    ) -> None:
        super().__init__(groups, defaults)
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.inner = kind([self._wide(group) for group in self.param_groups], **defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Step other parameters, too. Local."""
        super().add_param_group(param_group)
        if self.inner is not None:
            self.inner.add_param_group(self._wide(param_group))

    def _wide(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [self._master(each) for each in group["params"]]}

    def _master(self, parameter: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(parameter.dtype, torch.float32)
        master = torch.nn.Parameter(parameter.detach().to(wide, copy=True))
        copy_marks(parameter, master)
        self._pairs.append((parameter, master))
        return master

    def _init_group(self, group: dict[str, Any]) -> None:
        """Give parameters of a group the states that they have before a step."""
        materialize_states(self.inner)
        own = {id(each) for each in group["params"]}
        for parameter, master in self._pairs:
            if id(parameter) in own and parameter.requires_grad:
                self._tell(parameter, master)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the masters, and round them to the parameters. Local."""
        for mine, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs.update({key: value for key, value in mine.items() if key != "params"})
        for parameter, master in self._pairs:
            self._take_loaded(parameter, master)
            _take_changes(parameter, master)
            gradient = parameter.grad
            master.grad = None if gradient is None else gradient.to(master.dtype)
        loss = self.inner.step(closure) if closure is not None else self.inner.step()
        for parameter, master in self._pairs:
            parameter.detach().copy_(master.detach())
            master.grad = None
            self._tell(parameter, master)
        return loss

    def _tell(self, parameter: torch.Tensor, master: torch.Tensor) -> None:
        self.state[parameter] = {**self.inner.state[master], "master": master.detach()}

    def _take_loaded(self, parameter: torch.Tensor, master: torch.Tensor) -> None:
        """Go on from a state that has been put in the place of ours, by loading."""
        given = self.state.get(parameter)
        if given and given["master"].data_ptr() != master.data_ptr():
            master.detach().copy_(given["master"])
            self.inner.state[master] = {k: v for k, v in given.items() if k != "master"}


def _take_changes(parameter: torch.Tensor, master: torch.Tensor) -> None:
    """Copy to a master what its parameter got since the last step, by loading or by hand."""
    mine, theirs = parameter.detach(), master.detach()
    moved = mine != theirs.to(mine.dtype)
    theirs.copy_(torch.where(moved, mine.to(theirs.dtype), theirs))
