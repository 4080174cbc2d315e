"""Losses of DTensors: rules for those that torch computes on parts as if they were the whole.

Torch (2.13 and before) derives rules for losses that it has none for. A mean over parts of a batch
then divides by the length of the part: gradients are wrong by a factor, without a word. Here such
losses are computed where the whole is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

_LOSSES = (
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "soft_margin_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
_NONE, _MEAN, _SUM = range(3)

Sharding = tuple[list[Any], list[Any]]


def mend_losses() -> None:
    """Give torch the rules; once per process."""
    for name in _LOSSES:
        for full_name in (name, f"{name}_backward"):
            packet = getattr(torch.ops.aten, full_name, None)
            if packet is not None:
                operator = packet.default
                register_sharding(operator)(_rule_of(operator))


def _rule_of(operator: Any) -> Callable[..., list[Sharding]]:
    names = [each.name for each in operator._schema.arguments]
    return partial(_shardings, names.index("reduction"), operator._schema.name.endswith("backward"))


def _shardings(position: int, is_backward: bool, *args: Any, **kwargs: Any) -> list[Sharding]:
    """Return what may be cut how: outputs and arguments, along one axis of a mesh."""
    values = [*args, *kwargs.values()]
    reduction = args[position] if position < len(args) else kwargs.get("reduction", _MEAN)
    specs = [each if hasattr(each, "tensor_meta") else None for each in values]
    found = [([Replicate()], [each and Replicate() for each in specs])]
    if reduction == _MEAN:
        return found
    ndim = max(each.ndim for each in specs if each is not None)
    for dim in range(ndim):
        cut: Any = Shard(dim)
        output = Partial() if reduction == _SUM and not is_backward else cut
        found.append(([output], [_placed(each, ndim, cut) for each in specs]))
    return found


def _placed(spec: Any, ndim: int, cut: Any) -> Any:
    """Return the placement of an argument: what has fewer dimensions belongs to all parts."""
    if spec is None:
        return None
    return cut if spec.ndim == ndim else Replicate()
