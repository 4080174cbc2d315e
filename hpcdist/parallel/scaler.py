"""`GradScaler`: a factor that keeps 16-bit gradients in range, and drops a step that overflows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.arrays.transfer import host_numbers
from hpcdist.comm.collectives import all_reduce
from hpcdist.errors import UsageError
from hpcdist.parallel.gradient_groups import own_group
from hpcdist.transport.call.reduction import ReduceOp


@final
class GradScaler:
    """Scales the loss, and lets all ranks skip a step in which any of them has inf or NaN.

    The factor is divided by two after such a step, and doubled after many steps without one.

    Args:
        enable: False lets everything pass unchanged.
        init_loss_scaling: the first factor.
        incr_ratio: what it is multiplied by after `incr_every_n_steps` good steps.
        decr_ratio: what it is multiplied by after `decr_every_n_nan_or_inf` bad ones in a row.
        incr_every_n_steps: see `incr_ratio`.
        decr_every_n_nan_or_inf: see `decr_ratio`.
        use_dynamic_loss_scaling: False keeps the factor.

    Raises:
        UsageError: a ratio is on the wrong side of 1.

    Reference: Micikevicius et al., Mixed Precision Training, ICLR 2018; Paddle's
    ``paddle.amp.GradScaler``.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> w = dist.Parameter(np.ones(2))
        >>> optimizer, scaler = dist.optim.SGD([w], 0.5), dist.GradScaler(init_loss_scaling=8.0)
        >>> w.grad = scaler.scale(1.0) * np.ones(2)
        >>> scaler.step(optimizer)
        True
        >>> scaler.update()
        >>> w.data
        array([0.5, 0.5])

    """

    def __init__(
        self,
        enable: bool = True,
        init_loss_scaling: float = 65536.0,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        incr_every_n_steps: int = 2000,
        decr_every_n_nan_or_inf: int = 1,
        use_dynamic_loss_scaling: bool = True,
    ) -> None:
        if incr_ratio <= 1 or not 0 < decr_ratio < 1 or init_loss_scaling <= 0:
            raise UsageError(
                "a GradScaler needs incr_ratio above 1, decr_ratio between 0 and 1 and a positive "
                f"factor, got {incr_ratio}, {decr_ratio} and {init_loss_scaling}"
            )
        self._enabled, self._dynamic = enable, use_dynamic_loss_scaling
        self._scale = float(init_loss_scaling)
        self._ratios = incr_ratio, decr_ratio
        self._limits = incr_every_n_steps, decr_every_n_nan_or_inf
        self._good = self._bad = 0
        self._finite: bool | None = None

    def scale(self, loss: Any) -> Any:
        """Return `loss` (or the slope it gives) times the factor.

        Args:
            loss: a number, an array or a tensor.

        """
        return loss * self.get_scale()

    def get_scale(self) -> float:
        """Return the factor; 1 if the scaler is not enabled."""
        return self._scale if self._enabled else 1.0

    def unscale_(self, optimizer: Any) -> bool:
        """Divide the gradients by the factor, for example before clipping them.

        Collective where the optimizer is sharded, or its model has parameters in groups of their
        own. Return whether they are finite on all ranks. While the optimizer gathers gradients of
        several passes (gradient merge) nothing is done.

        Args:
            optimizer: whose parameters have the gradients.

        """
        if getattr(optimizer, "is_merging", False):
            return True
        if self._finite is not None:
            raise UsageError("the gradients are unscaled already; call update() after each step")
        self._finite = True
        if self._enabled:
            own = getattr(optimizer, "unscale_", None)
            if own is not None:
                self._finite = bool(own(self._scale))
            elif hasattr(optimizer, "slots"):
                self._finite = _everywhere(unscale(_gradients(optimizer), self._scale), optimizer)
            else:
                self._finite = _unscale_tensors(_tensors(optimizer), self._scale)
        return self._finite

    def step(self, optimizer: Any) -> bool:
        """Step the optimizer, unless a gradient on any rank is inf or NaN; return whether it did.

        Collective where `unscale_` is. While the optimizer gathers gradients of several passes
        (gradient merge) nothing is unscaled, and the factor stays.

        Args:
            optimizer: what is stepped; its gradients are unscaled before, if `unscale_` has not
                done it.

        """
        if getattr(optimizer, "is_merging", False):
            optimizer.step()
            return False
        if self._finite is None:
            self.unscale_(optimizer)
        if not self._finite:
            clear = getattr(optimizer, "clear_grad", None) or optimizer.zero_grad
            clear()
            return False
        optimizer.step()
        return True

    def update(self) -> None:
        """Adapt the factor to how the step went."""
        finite, self._finite = self._finite, None
        if finite is None or not (self._enabled and self._dynamic):
            return
        self._good, self._bad = (self._good + 1, 0) if finite else (0, self._bad + 1)
        up, down = self._ratios
        if self._good >= self._limits[0]:
            self._scale, self._good = self._scale * up, 0
        elif self._bad >= self._limits[1]:
            self._scale, self._bad = max(1.0, self._scale * down), 0

    def minimize(self, optimizer: Any, *_: Any) -> None:
        """Call `step` and `update` (Paddle's name).

        Args:
            optimizer: what is stepped.
            _: the loss and the like: accepted, not used.

        """
        self.step(optimizer)
        self.update()

    def state_dict(self) -> dict[str, float]:
        """Return the factor, and how many good and bad steps there have been since it changed."""
        return {"scale": self._scale, "good": self._good, "bad": self._bad}

    def __repr__(self) -> str:
        return f"GradScaler({self._scale:g}{'' if self._enabled else ', not enabled'})"

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Load what `state_dict` returned.

        Args:
            state: with ``"scale"``, ``"good"`` and ``"bad"``.

        """
        self._scale = float(state["scale"])
        self._good, self._bad = int(state["good"]), int(state["bad"])


def unscale(gradients: Sequence[NumpyArray], scale: float) -> bool:
    """Divide gradients by `scale` in place; return whether all of them are finite. Local."""
    finite = []
    for gradient in gradients:
        np.multiply(gradient, 1 / scale, out=gradient, casting="unsafe")
        finite.append(np.isfinite(gradient).all())
    return all(host_numbers(finite))


def _gradients(optimizer: Any) -> list[NumpyArray]:
    """Return the gradients of an optimizer that is not sharded."""
    memories = [slot.parameter.memory() for slot in optimizer.slots]
    return [memory for memory in memories if memory is not None]


def _tensors(optimizer: Any) -> list[Any]:
    """Return the gradients of an optimizer of torch.

    Raises:
        UsageError: it is none, or its gradients are cut, so that ranks would skip other steps.

    """
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        raise UsageError(
            "a GradScaler unscales gradients of an optimizer of hpcdist.optim or torch.optim, got "
            f"{optimizer!r}"
        )
    found = [each for group in groups for each in group["params"] if each.grad is not None]
    if any(hasattr(each.grad, "to_local") or own_group(each) is not None for each in found):
        raise UsageError(
            "the ranks have different gradients of this optimizer and would skip different steps; "
            "use a torch.amp.GradScaler that hpcdist.shard_scaler or fleet.distributed_scaler has "
            "made to agree"
        )
    return [each.grad for each in found]


def _unscale_tensors(gradients: Sequence[Any], scale: float) -> bool:
    """Divide tensors by `scale` in place; return whether all of them are finite. Local.

    Those that `DataParallel` has averaged are the same on all ranks.
    """
    for each in gradients:
        each.mul_(1 / scale)
    return all(bool(each.isfinite().all()) for each in gradients)


def _everywhere(finite: bool, optimizer: Any) -> bool:
    """Return whether gradients are finite on all ranks, of which some may have other parameters."""
    of_slots: list[Any] = [
        getattr(slot.parameter, "owner", lambda: None)() for slot in optimizer.slots
    ]
    for owner in {id(each): each for each in of_slots}.values():
        if getattr(owner, "norm_is_collective", False):
            flags = np.array([finite], np.uint8)
            all_reduce(flags, ReduceOp.MIN, owner.group)
            finite = bool(flags[0])
    return finite
