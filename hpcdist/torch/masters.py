"""Master weights: any optimizer of torch, stepping float32 copies of 16-bit parameters.

ZeroRedundancyOptimizer makes the optimizer of what a rank owns, so only that is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch

from hpcdist.torch.on_grid import copy_marks
from hpcdist.torch.optimizers import materialize_states

_NARROW = (torch.float16, torch.bfloat16)


def with_masters(kind: type[torch.optim.Optimizer]) -> Any:
    """Return a factory of `kind` optimizers with float32 master weights for 16-bit parameters."""
    return partial(_make, kind)


def _make(kind: type[torch.optim.Optimizer], groups: Any, **defaults: Any) -> torch.optim.Optimizer:
    listed = [dict(group) for group in groups]
    parameters = [each for group in listed for each in group["params"]]
    if any(each.dtype in _NARROW for each in parameters):
        return MasterOptimizer(kind, listed, defaults)
    return kind(listed, **defaults)


@final
class MasterOptimizer(torch.optim.Optimizer):  # type: ignore[misc] # torch is untyped
    """An optimizer whose parameters have 16 bits, and whose steps are taken in float32."""

    def __init__(
        self, kind: type[torch.optim.Optimizer], groups: Any, defaults: dict[str, Any]
    ) -> None:
        super().__init__(groups, defaults)
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        wide = [
            {**group, "params": [self._master(each) for each in group["params"]]}
            for group in self.param_groups
        ]
        self.inner = kind(wide, **defaults)

    def _master(self, parameter: torch.Tensor) -> torch.Tensor:
        master = torch.nn.Parameter(parameter.detach().to(torch.float32, copy=True))
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
            master.grad = None if gradient is None else gradient.to(torch.float32)
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
