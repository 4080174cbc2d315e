"""What `distributed_optimizer` is given: optimizers and limits that it refuses. Local."""

from __future__ import annotations

from typing import Any

from hpcdist.errors import UsageError
from hpcdist.parallel.hybrid_options import HybridOptions
from hpcdist.torch.hybrid.replacements import check_replacement
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
