"""The norm of torch gradients, sharded or not: what `clip_grad_norm_` does with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpcdist.errors import UsageError
from hpcdist.parallel.gradient_groups import own_group
from hpcdist.torch.on_grid import check_settled, measure_on_grid, role_of, total_norm


def measure_tensors(
    parameters: list[Any], norm_type: float
) -> tuple[float, Callable[[float], None]]:
    """Return the norm over all gradients, and what multiplies them.

    Collective where they are `DTensor`s, as those of ``fully_shard``, and where they are on a grid:
    then over all parts of the model.

    Raises:
        UsageError: some have a group of their own; then only the model knows all ranks. Or their
            gradients are not yet those of the whole batch.

    """
    if any(own_group(each) is not None for each in parameters):
        raise UsageError(
            "clip_grad_norm_ got parameters with an hpcdist_group, whose norm takes all ranks; "
            "pass the DataParallel model"
        )
    roles = [role for each in parameters if (role := role_of(each)) is not None]
    if roles:
        check_settled(parameters)
        return measure_on_grid(parameters, roles[0].grid, norm_type)
    return norm_of_all(parameters, norm_type)


def norm_of_all(
    parameters: Iterable[Any], norm_type: float
) -> tuple[float, Callable[[float], None]]:
    """Return the norm over the gradients of parameters that every rank has, and what scales them.

    Collective where they are `DTensor`s.
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    cut = any(isinstance(each, DTensor) for each in gradients)
    measure = torch.nn.utils.get_total_norm if cut else total_norm
    norm = measure(gradients, norm_type)
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm

    def scale(factor: float) -> None:
        with torch.no_grad():
            for gradient in gradients:
                gradient.mul_(factor)

    return float(whole), scale
