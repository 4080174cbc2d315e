"""What LARS and LAMB share: a learning rate for each layer, from norms over whole parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hpcdist.torch.on_grid import local_of, role_of, sum_over_parts


def norms_of_pairs(
    parameters: Sequence[Any], pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> list[tuple[float, float]]:
    """Return the norms of two tensors for each parameter, of which this rank may have parts.

    Collective over the ranks that have the other parts. Sums over parts are in float64, and read
    by the host once.
    """
    if not pairs:
        return []
    squares = torch.stack([_square(each) for pair in pairs for each in pair]).view(-1, 2)
    sum_over_parts(squares, parameters)
    return [(first, second) for first, second in squares.sqrt().tolist()]


def _square(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return torch.linalg.vector_norm(tensor, dtype=wide).double().square()


def with_gradients(group: dict[str, Any]) -> Iterator[tuple[Any, float]]:
    """Give the parameters of a group that have gradients, each with its weight decay.

    It is 0 where the name of the parameter has a word of ``exclude_from_weight_decay``.
    """
    parameters, names = group["params"], group.get("param_names", ())
    if len(names) != len(parameters):  # a part of a group, of parameters with roles
        names = [""] * len(parameters)
    words = group["exclude_from_weight_decay"]
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.grad is None:
            continue
        role = role_of(parameter)
        called = name if role is None else role.name
        excluded = any(word in called for word in words)
        yield parameter, 0.0 if excluded else group["weight_decay"]


def locals_of(parameter: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what this rank has of a parameter and of its gradient."""
    return local_of(parameter.detach()), local_of(parameter.grad)
