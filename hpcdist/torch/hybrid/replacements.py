"""The optimizer that a strategy puts in the place of the one that was given: LARS or LAMB."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from hpcdist.errors import UsageError
from hpcdist.parallel.hybrid_options import HybridOptions, Lamb, Lars
from hpcdist.torch.lamb import LAMB
from hpcdist.torch.lars import LARS


def check_replacement(optimizer: Any, options: HybridOptions) -> None:
    """Refuse an optimizer whose place the one of the strategy cannot take."""
    if options.lars is not None and options.lamb is not None:
        raise UsageError("the strategy has lars and lamb, which are two optimizers; choose one")
    for asked, kinds in _REPLACED:
        if getattr(options, asked) is not None and not (
            isinstance(optimizer, kinds) and _is_plain(optimizer)
        ):
            raise UsageError(
                f"strategy.{asked} takes the place of {_REPLACED_IN_WORDS[asked]}, but the "
                f"optimizer is {type(optimizer).__name__}; give it that one, or use "
                f"hpcdist.torch.{asked.upper()} without strategy.{asked}"
            )


_REPLACED: Sequence[tuple[str, Any]] = (
    ("lars", torch.optim.SGD),
    ("lamb", (torch.optim.Adam, torch.optim.AdamW)),
)
_REPLACED_IN_WORDS = {
    "lars": "torch.optim.SGD with momentum, without dampening and nesterov",
    "lamb": "torch.optim.Adam without amsgrad",
}
_VARIANTS = "dampening", "nesterov", "amsgrad", "maximize"
"""Options of torch's that LARS and LAMB do not have."""


def _is_plain(optimizer: Any) -> bool:
    return all(
        group.get("momentum", 1) > 0 and not any(group.get(name) for name in _VARIANTS)
        for group in optimizer.param_groups
    )


def as_asked(optimizer: Any, groups: list[dict[str, Any]], options: HybridOptions) -> Any:
    """Return the optimizer, or the one that the strategy puts in its place.

    It has the same groups: a scheduler may have been made of them.
    """
    asked: Lars | Lamb | None = options.lars or options.lamb
    if asked is None:
        return optimizer
    for group in groups:
        ask_group(group, options)
    if isinstance(asked, Lars):
        return LARS(
            groups,
            trust_coefficient=asked.coeff,
            eps=asked.epsilon,
            exclude_from_weight_decay=asked.exclude,
        )
    return LAMB(groups, exclude_from_weight_decay=asked.exclude)


def ask_group(group: dict[str, Any], options: HybridOptions) -> None:
    """Give a group of parameters the weight decay of the strategy, if it has one."""
    asked: Lars | Lamb | None = options.lars or options.lamb
    if asked is not None:
        group["weight_decay"] = asked.weight_decay


def arguments_of(optimizer: Any) -> dict[str, Any]:
    """Return the options with which another optimizer of the same class can be made."""
    taken = inspect.signature(type(optimizer)).parameters  # AdamW has some that it does not take
    return {name: value for name, value in optimizer.defaults.items() if name in taken}
