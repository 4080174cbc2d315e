"""The norm of torch gradients, sharded or not: what `clip_grad_norm_` does with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from hpcdist.comm.collectives import all_reduce
from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.parallel.clipping import Measured, check_all
from hpcdist.parallel.gradient_groups import own_group
from hpcdist.torch.on_grid import (
    check_settled,
    is_any_narrow,
    measure_on_grid,
    norm_of_one,
    role_of,
    total_norm,
)


def measure_tensors(
    parameters: list[Any], norm_type: float
) -> tuple[float, Callable[[float], None]]:
    """Return the norm over all gradients, and what multiplies them.

    Collective where they are `DTensor`s, as those of ``fully_shard``, where they are on a grid:
    then over all parts of the model; and where each rank has the gradients that it owns.

    Raises:
        UsageError: some have a group of their own; then only the model knows all ranks. Or their
            gradients are not yet those of the whole batch.

    """
    if any(own_group(each) is not None for each in parameters):
        raise UsageError(
            "clip_grad_norm_ got parameters with an hpcdist_group, whose norm takes all ranks; "
            "pass the DataParallel model"
        )
    model = owning_model(parameters)
    if model is not None:
        check_all(parameters, model)
        found: Measured = model.measure_gradients(norm_type)
        return found
    roles = [role for each in parameters if (role := role_of(each)) is not None]
    if roles:
        check_settled(parameters)
        return measure_on_grid(parameters, roles[0].grid, norm_type)
    return norm_of_all(parameters, norm_type)


_OWNING: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Models of which each rank has the gradients of the parameters that it owns."""


def note_owning(model: Any) -> None:
    """Note that each rank has those gradients of `model` only that it owns. Local."""
    _OWNING[id(model)] = model
    _refuse_what_is_here()


def owning_model(parameters: Iterable[Any]) -> Any:
    """Return the model with such gradients of which some of `parameters` are; None if none are."""
    given = {id(each) for each in parameters} if _OWNING else set()
    models = [model for each in _OWNING.valuerefs() if (model := each()) is not None]
    for model in models:
        if any(id(each) in given for each in model.parameters() if each.requires_grad):
            return model
    return None


@cache
def _refuse_what_is_here() -> None:
    """Let torch's own function refuse such gradients: it would see those of one rank alone."""
    torchs = clip_grad.clip_grad_norm_

    @wraps(torchs)
    def clip_grad_norm_(parameters: Any, *args: Any, **options: Any) -> Any:
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if owning_model(listed) is not None:
            raise UsageError(
                "torch's clip_grad_norm_ would take the norm of the gradients that are on this "
                'rank: at level "os_g" on virtual ranks each has those of its own parameters; '
                "call hpcdist.clip_grad_norm_(model, max_norm)"
            )
        return torchs(listed, *args, **options)

    for module in (clip_grad, torch.nn.utils):
        module.clip_grad_norm_ = clip_grad_norm_


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
    return float(whole), _scaling(gradients)


def norm_of_owned(
    parameters: list[Any], norm_type: float, group: Group
) -> tuple[float, Callable[[float], None]]:
    """Return the same of gradients each of which is on one rank, with the same bits. Collective.

    Args:
        parameters: those that are trained, on whatever rank their gradients are.
        norm_type: the order of the norm.
        group: the ranks.

    """
    owned = {index: each.grad for index, each in enumerate(parameters) if each.grad is not None}
    norms = np.zeros(len(parameters))
    for index, gradient in owned.items():
        norms[index] = float(norm_of_one(gradient, norm_type))
    all_reduce(norms, group=group)  # of each number but one summand is not 0
    in_64 = is_any_narrow(parameters) or any(each.dtype == torch.float64 for each in parameters)
    dtype = torch.float64 if in_64 else torch.float32
    total = torch.linalg.vector_norm(torch.from_numpy(norms).to(dtype), norm_type)
    return float(total), _scaling(owned.values())


def _scaling(gradients: Iterable[Any]) -> Callable[[float], None]:
    """Return what multiplies gradients in place."""

    def scale(factor: float) -> None:
        with torch.no_grad():
            for gradient in gradients:
                gradient.mul_(factor)

    return scale
