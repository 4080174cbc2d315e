"""What `distributed_optimizer` is given: what it refuses of it, and what ranks compare. Local."""

from __future__ import annotations

from typing import Any

import torch

from hpcdist.comm.states import State
from hpcdist.errors import UsageError
from hpcdist.parallel.hybrid_options import HybridOptions
from hpcdist.torch.hybrid.replacements import check_replacement
from hpcdist.torch.on_grid import latest, role_of
from hpcdist.torch.optimizers import check_fresh, needs_closure


def check_optimizer(optimizer: Any, options: HybridOptions) -> None:
    """Refuse what cannot be stepped on a grid as the options say."""
    check_fresh(optimizer, "distributed_optimizer")
    if needs_closure(optimizer):
        raise UsageError(
            f"{type(optimizer).__name__} computes the loss several times in a step, which "
            "distributed_optimizer does not do; use another optimizer"
        )
    for merge in (options.gradient_merge, options.localsgd):
        if merge is not None and merge.k_steps < 1:
            raise UsageError(f"k_steps must be at least 1, got {merge.k_steps} in {merge}")
    check_replacement(optimizer, options)


def norm_limit(clip: Any) -> float | None:
    """Return the largest norm that `clip` allows; None for any."""
    norm = getattr(clip, "clip_norm", clip)
    if norm is not None and (
        isinstance(norm, bool) or not isinstance(norm, (int, float)) or not norm > 0
    ):
        raise UsageError(
            f"clip_norm must be a positive number, an object that has one as clip_norm, or None, "
            f"got {clip!r}"
        )
    return norm


def with_latest(group: Any) -> dict[str, Any]:
    """Return a group of parameters, in place of which are those that the model has now."""
    if not isinstance(group, dict) or "params" not in group:
        raise UsageError(f"a group of parameters is a dict that has 'params', got {group!r}")
    given = group["params"]
    if not isinstance(given, (torch.Tensor, set)):  # torch refuses sets
        group["params"] = [
            (each[0], latest(each[1])) if isinstance(each, tuple) else latest(each)
            for each in given
        ]
    else:
        group["params"] = latest(given)
    return group


def states_of_group(group: dict[str, Any]) -> list[State]:
    """Return what ranks compare of a group of parameters: their names, and the options."""
    options = [
        f"{name}={value!r}"
        for name, value in group.items()
        if isinstance(value, (int, float, str, tuple, type(None)))
    ]
    roles = [role_of(each) for each in group["params"]]
    names = ["" if role is None else role.name for role in roles]
    return [(", ".join(options), (), ""), *((name, (), "") for name in names)]
