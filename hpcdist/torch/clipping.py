"""The norm of torch gradients, sharded or not: what `clip_grad_norm_` does with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpcdist.errors import UsageError
from hpcdist.parallel.gradient_groups import own_group


def measure_tensors(
    parameters: list[Any], norm_type: float
) -> tuple[float, Callable[[float], None]]:
    """Return the norm over all gradients, and what multiplies them.

    Collective where they are `DTensor`s, as those of ``fully_shard``.

    Raises:
        UsageError: some have a group of their own; then only the model knows all ranks.

    """
    if any(own_group(each) is not None for each in parameters):
        raise UsageError(
            "clip_grad_norm_ got parameters with an hpcdist_group, whose norm takes all ranks; "
            "pass the DataParallel model"
        )
    return norm_of_all(parameters, norm_type)


def norm_of_all(
    parameters: Iterable[Any], norm_type: float
) -> tuple[float, Callable[[float], None]]:
    """Return the norm over the gradients of parameters that every rank has, and what scales them.

    Collective where they are `DTensor`s.
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm

    def scale(factor: float) -> None:
        with torch.no_grad():
            for gradient in gradients:
                gradient.mul_(factor)

    return float(whole), scale
