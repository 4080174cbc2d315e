"""torch's optimizers, when the parameters that they were made of are replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hpcdist.errors import UsageError


def check_fresh(optimizer: Any, caller: str) -> None:
    """Refuse what is no optimizer of torch, and one with a state of the parameters it has now."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"{caller} needs an optimizer of torch.optim, got {optimizer!r}")
    if optimizer.state:
        raise UsageError(
            f"the optimizer has taken steps already; give {caller} a fresh one, and let it load "
            "the state"
        )


@contextmanager
def follow_parameters(optimizer: Any, model: torch.nn.Module) -> Iterator[None]:
    """Let an optimizer have the parameters that `model` has after the block. Local."""
    if optimizer is None:
        yield
        return
    check_fresh(optimizer, "parallelize")
    names = {id(each): name for name, each in model.named_parameters()}
    listed = [[names.get(id(each)) for each in group["params"]] for group in optimizer.param_groups]
    if any(name is None for group in listed for name in group):
        raise UsageError(
            "the optimizer has parameters that the model does not have; make it of "
            "model.parameters()"
        )
    yield
    named = dict(model.named_parameters())
    for group, own in zip(optimizer.param_groups, listed, strict=True):
        group["params"] = [named[str(name)] for name in own]
