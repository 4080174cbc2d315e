"""`LAMB`: Adam, and for each layer a step as long as its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any, final

import torch

from hpcdist.errors import UsageError
from hpcdist.torch.on_grid import local_of
from hpcdist.torch.optimizers import loss_of
from hpcdist.torch.trust import locals_of, norms_of_pairs, with_gradients


@final
class LAMB(torch.optim.Optimizer):  # type: ignore[misc] # torch is untyped
    """W -= lr |w| / |u| u, with u Adam's direction plus weight_decay w.

    Norms are taken over each whole parameter, also where it is cut over mp or sharded; the ratio is
    1 where a norm is 0. `step` is collective where parameters are cut.

    Args:
        params: parameters, pairs of a name and a parameter, or groups of them.
        lr: the learning rate.
        betas: what the averages of gradients and of their squares keep at each step.
        eps: added to the root of the average of squares.
        weight_decay: see above.
        exclude_from_weight_decay: words; what has one of them in its name has no weight decay.

    Raises:
        UsageError: an option is out of its range.

    Reference: You et al., Large Batch Optimization for Deep Learning, ICLR 2020.

    Example:
        >>> import torch, hpcdist.torch
        >>> w = torch.nn.Parameter(torch.ones(4))
        >>> optimizer = hpcdist.torch.LAMB([w], lr=0.5, eps=0.0, weight_decay=0.0)
        >>> w.grad = torch.full((4,), 3.0)
        >>> _ = optimizer.step()
        >>> [round(value, 3) for value in w.tolist()]
        [0.5, 0.5, 0.5, 0.5]

    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        exclude_from_weight_decay: Sequence[str] = (),
    ) -> None:
        given = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        for name, value in given.items():
            if not value >= 0:
                raise UsageError(f"{name} must be at least 0, got {value!r}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise UsageError(f"betas must be two numbers from 0 to below 1, got {betas!r}")
        words = tuple(exclude_from_weight_decay)
        super().__init__(params, {**given, "betas": betas, "exclude_from_weight_decay": words})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change all parameters that have gradients; see above.

        Args:
            closure: computes the loss and its gradients, and returns it; called once.

        """
        loss = loss_of(closure)
        moved = [
            (parameter, self._direction(parameter, decay, group), group["lr"])
            for group in self.param_groups
            for parameter, decay in with_gradients(group)
        ]
        pairs = [(local_of(each.detach()), direction) for each, direction, _ in moved]
        norms = norms_of_pairs([parameter for parameter, _, _ in moved], pairs)
        for (_, _, rate), (weights, direction), (size, length) in zip(
            moved, pairs, norms, strict=True
        ):
            ratio = size / length if size > 0 and length > 0 else 1.0
            weights.sub_(direction, alpha=rate * ratio)
        return loss

    def _direction(self, parameter: Any, decay: float, group: dict[str, Any]) -> torch.Tensor:
        """Advance the averages of a parameter; return what this rank has of its direction."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        (first, second), step = group["betas"], float(state["step"])
        weights, gradient = locals_of(parameter)
        mean, square = local_of(state["exp_avg"]), local_of(state["exp_avg_sq"])
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = (square.sqrt() / sqrt(1 - second**step)).add_(group["eps"])
        direction = mean.div(1 - first**step).div_(root)
        return direction.add_(weights, alpha=decay)
