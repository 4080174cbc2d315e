"""`clip_grad_norm_`: gradients of at most a norm, also where no rank has all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any

import numpy as np

from hpcdist.arrays.device import on_device
from hpcdist.arrays.libraries import NumpyArray, row_of
from hpcdist.arrays.transfer import host_numbers
from hpcdist.comm.collectives import all_reduce
from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.lazy import load
from hpcdist.parallel.parameter import Parameter
from hpcdist.text import an
from hpcdist.transport.call.reduction import ReduceOp


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> float:
    """Scale all gradients down so that their norm, taken over all of them, is at most `max_norm`.

    Collective where the model is sharded or has parameters in groups of their own; then the norm is
    the one of the whole model, in which every parameter counts once. Elsewhere local, and equal on
    all ranks once gradients are averaged.

    Args:
        parameters: what `group_sharded_parallel` or `DataParallel` returned, or all parameters of
            one model: `Parameter`s, or torch parameters (of torch's sharded engines, too).
        max_norm: the largest norm; ``inf`` only measures.
        norm_type: the order of the norm, ``inf`` for the largest absolute value.
        error_if_nonfinite: raise where the norm is inf or NaN, and change nothing.

    Returns:
        The norm before.

    Raises:
        UsageError: `max_norm` or `norm_type` is not positive, these are not all parameters of a
            sharded model, or the norm is not finite and `error_if_nonfinite` is set.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> w = dist.Parameter(np.zeros(2))
        >>> w.grad = np.array([3.0, 4.0])
        >>> dist.clip_grad_norm_([w], max_norm=1.0)
        5.0

    """
    if not max_norm > 0 or not norm_type > 0:
        raise UsageError(
            f"max_norm and norm_type must be positive, got {max_norm!r} and {norm_type!r}"
        )
    norm, scale = _measure(parameters, norm_type)
    if error_if_nonfinite and not np.isfinite(norm):
        raise UsageError(
            f"the norm of the gradients is {norm}; look at the loss and the learning rate, or pass "
            "error_if_nonfinite=False"
        )
    factor = clip_factor(norm, max_norm)
    if factor != 1:
        scale(factor)
    return norm


Measured = tuple[float, Callable[[float], None]]
"""A norm, and what multiplies the gradients."""


def _measure(parameters: Any, norm_type: float) -> Measured:
    if getattr(parameters, "norm_is_collective", False):
        found: Measured = parameters.measure_gradients(norm_type)
        return found
    listed = _listed(parameters)
    row = row_of(type(listed[0]), _ENGINES) if listed else None
    if row is not None:
        engine: Callable[[Any, float], Measured] = load(row)
        return engine(listed, norm_type)
    return measure_parameters(listed, norm_type)


_ENGINES = {("torch", "Tensor"): "hpcdist.torch.clipping:measure_tensors"}


def _listed(parameters: Any) -> list[Any]:
    if type(parameters) is Parameter:
        return [parameters]
    if callable(named := getattr(parameters, "named_parameters", None)):
        parameters = [parameter for _, parameter in named()]
    if not isinstance(parameters, Iterable):
        raise UsageError(f"clip_grad_norm_ got {parameters!r}; pass a model or its parameters")
    return list(parameters)


def measure_parameters(parameters: list[Any], norm_type: float) -> Measured:
    """Return the norm of the gradients of `Parameter`s."""
    for parameter in parameters:
        if type(parameter) is not Parameter:
            raise UsageError(f"clip_grad_norm_ got {an(type(parameter).__name__)} among parameters")
    owners = {id(each.owner()): each.owner() for each in parameters if each.requires_grad}
    for owner in owners.values():
        if getattr(owner, "norm_is_collective", False):
            check_all(parameters, owner)
            found: Measured = owner.measure_gradients(norm_type)
            return found
    memories = [memory for each in parameters if (memory := each.memory()) is not None]
    return norm_of(power_sums(memories, norm_type), norm_type), scaler(memories)


def check_all(parameters: list[Any], owner: Any) -> None:
    """Raise `UsageError` unless these are the parameters that `owner` trains."""
    given = {id(each) for each in parameters if each.requires_grad}
    if given != {id(each) for each in owner.parameters() if each.requires_grad}:
        raise UsageError(
            "clip_grad_norm_ got some of the parameters of a sharded model, or of one that has "
            "parameters in groups of their own; pass the model, or all its parameters and no others"
        )


def measure_groups(
    gradients: Sequence[tuple[NumpyArray, Group]], group: Group, norm_type: float
) -> Measured:
    """Return the norm of gradients, each of which is on all ranks of its group.

    Collective over `group`. Each rank adds its share of what is on several ranks.
    """
    memories = [memory for memory, _ in gradients]
    everywhere, shares = [], [0.0]
    for (_, own), power in zip(gradients, power_sums(memories, norm_type), strict=True):
        if own is group:
            everywhere.append(power)
        else:
            shares.append(power if norm_type == inf else power / own.nranks)
    elsewhere = np.array([max(shares) if norm_type == inf else sum(shares)])
    all_reduce(elsewhere, ReduceOp.MAX if norm_type == inf else ReduceOp.SUM, group)
    return norm_of([*everywhere, float(elsewhere[0])], norm_type), scaler(memories)


def scaler(gradients: Iterable[NumpyArray]) -> Callable[[float], None]:
    """Return what multiplies gradients in place."""

    def scale(factor: float) -> None:
        for gradient in gradients:
            np.multiply(gradient, factor, out=gradient, casting="unsafe")

    return scale


def power_sums(gradients: Iterable[NumpyArray], norm_type: float) -> list[float]:
    """Return of each gradient the sum of absolute values to a power; for infinity, the largest."""
    return host_numbers([_power_sum(each, norm_type) for each in gradients])


def _power_sum(gradient: NumpyArray, norm_type: float) -> Any:
    """Return a sum in float64, or a largest value, where the gradient is."""
    if gradient.size == 0:
        return 0.0
    if norm_type == inf:
        return np.abs(gradient).max()
    if norm_type == 2 and gradient.dtype.kind == "f" and gradient.dtype.itemsize > 2:
        if on_device(gradient):
            return np.sum(np.square(gradient), dtype=np.float64)
        flat = gradient.reshape(-1)
        return sum(
            float(np.dot(part, part))
            for part in (flat[start : start + _PART] for start in range(0, flat.size, _PART))
        )
    wide = np.abs(gradient).astype(np.float64)
    return (wide**norm_type).sum()


_PART = 1 << 16
"""Elements that are summed in their own dtype; the sums of parts are added in float64.

On a device one kernel adds the squares in float64.
"""


def norm_of(sums: Iterable[float], norm_type: float) -> float:
    """Return the norm, given `power_sums` of its parts."""
    listed = list(sums)
    if norm_type == inf:
        return max(listed, default=0.0)
    return float(sum(listed) ** (1 / norm_type))


def clip_factor(norm: float, max_norm: float) -> float:
    """Return what gradients of this norm must be multiplied with to have at most `max_norm`."""
    return min(1.0, max_norm / (norm + _TINY))


_TINY = 1e-6
"""Added to the norm, as torch does: no division by zero."""
