"""`LARS`: SGD with momentum, and for each layer a learning rate in proportion to its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from hpcdist.errors import UsageError
from hpcdist.torch.on_grid import local_of
from hpcdist.torch.optimizers import loss_of
from hpcdist.torch.trust import locals_of, norms_of_pairs, with_gradients


@final
class LARS(torch.optim.Optimizer):  # type: ignore[misc] # torch is untyped
    """v = momentum v + lr ratio (g + weight_decay w); w -= v.

    The ratio is trust_coefficient |w| / (|g| + weight_decay |w| + eps), taken over each whole
    parameter, also where it is cut over mp or sharded, and 1 where a norm is 0. `step` is then
    collective.

    Args:
        params: parameters, pairs of a name and a parameter, or groups of them.
        lr: the learning rate.
        momentum: see above.
        weight_decay: see above.
        trust_coefficient: see above (Paddle's `lars_coeff`).
        eps: see above.
        exclude_from_weight_decay: words; what has one of them in its name has no weight decay.

    Raises:
        UsageError: an option is out of its range.

    Reference: You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks, 2017.

    Example:
        >>> import torch, hpcdist.torch
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = hpcdist.torch.LARS([w], lr=1.0, trust_coefficient=0.1, weight_decay=0.0)
        >>> w.grad = torch.tensor([0.0, 2.0])
        >>> _ = optimizer.step()
        >>> w.tolist()
        [3.0, 3.5]

    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0005,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        exclude_from_weight_decay: Sequence[str] = (),
    ) -> None:
        given = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
        }
        for name, value in given.items():
            if not value >= 0 or (name == "momentum" and value >= 1):
                raise UsageError(
                    f"{name} must be at least 0{' and below 1' * (name == 'momentum')}, got "
                    f"{value!r}"
                )
        words = tuple(exclude_from_weight_decay)
        super().__init__(params, {**given, "exclude_from_weight_decay": words})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change all parameters that have gradients; see above.

        Args:
            closure: computes the loss and its gradients, and returns it; called once.

        """
        loss = loss_of(closure)
        moved = [
            (parameter, decay, group)
            for group in self.param_groups
            for parameter, decay in with_gradients(group)
        ]
        parameters = [parameter for parameter, _, _ in moved]
        norms = norms_of_pairs(parameters, [locals_of(each) for each in parameters])
        for (parameter, decay, group), (weights, slope) in zip(moved, norms, strict=True):
            ratio = 1.0
            if weights > 0 and slope > 0:
                below = slope + decay * weights + group["eps"]
                ratio = group["trust_coefficient"] * weights / below
            self._move(parameter, decay, group, group["lr"] * ratio)
        return loss

    def _move(self, parameter: Any, decay: float, group: dict[str, Any], rate: float) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        weights, gradient = locals_of(parameter)
        speed = local_of(state["momentum_buffer"])
        speed.mul_(group["momentum"]).add_(gradient, alpha=rate).add_(weights, alpha=rate * decay)
        weights.sub_(speed)
