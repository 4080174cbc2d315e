"""`AgreeingScaler`: torch's loss scaler, with one verdict for all ranks."""

from __future__ import annotations

from typing import Any, final

import torch
from torch.distributed.tensor import DTensor

from hpcdist.comm.collectives import all_reduce
from hpcdist.comm.group import Group
from hpcdist.comm.session import resolve_group
from hpcdist.transport.call.reduction import ReduceOp


def agreeing(scaler: torch.amp.GradScaler, group: Group | None) -> AgreeingScaler:
    """Return a scaler like `scaler` that agrees over `group`, or over all ranks for None."""
    return AgreeingScaler(scaler, resolve_group(group))


@final
class AgreeingScaler(torch.amp.GradScaler):  # type: ignore[misc] # torch is untyped
    """Skips a step on all ranks of `group` if a gradient is inf or NaN on any of them.

    Else like the `torch.amp.GradScaler` it is made of, which every rank must have alike.
    Gradients may be sharded (`DTensor`) or not. `unscale_` and `step` are collective.

    While an optimizer gathers gradients of several passes (gradient merge) the scale stays, so that
    they add up.
    """

    def __init__(self, like: torch.amp.GradScaler, group: Group) -> None:
        super().__init__(
            like._device,
            init_scale=like.get_scale(),
            growth_factor=like.get_growth_factor(),
            backoff_factor=like.get_backoff_factor(),
            growth_interval=like.get_growth_interval(),
            enabled=like.is_enabled(),
        )
        self._group = group
        self._merging = False

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, once they are complete. Collective then."""
        if not getattr(optimizer, "is_merging", False):
            super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer, unless a gradient on any rank is inf or NaN. Collective."""
        if getattr(optimizer, "is_merging", False):
            self._merging = True
            return optimizer.step(*args, **kwargs)
        return super().step(optimizer, *args, **kwargs)

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Step, or let the optimizer know that its step is skipped."""
        skip = getattr(optimizer, "skip_step", None)
        if skip is not None and any(
            each.item() for each in optimizer_state["found_inf_per_device"].values()
        ):
            skip()
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale to how the step went, if there was one."""
        merging, self._merging = self._merging, False
        if new_scale is None and merging and not self._per_optimizer_states:
            return
        super().update(new_scale)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale what this rank has, and let all ranks know of inf and NaN."""
        settle = getattr(optimizer, "settle_gradients", None)
        if settle is not None:
            settle()
        by_dtype: dict[torch.dtype, list[Any]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None:
                    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                    by_dtype.setdefault(local.dtype, []).append(local)
        for gradients in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)
        all_reduce(found_inf, ReduceOp.MAX, self._group)
        return {found_inf.device: found_inf}
