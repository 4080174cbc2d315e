"""Which layers a stage has: `plan_segments` cuts a row of them into parts of like cost. Pure.

A segment is from one bound to before the next, so that `n` stages have `n + 1` bounds.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcdist.errors import UsageError

BY_NAME = "layer:"
_REMEDY = (
    f"use 'uniform', 'parameters', '{BY_NAME}Name', the first layer of each stage in a list, or "
    "the cost of each layer as LayerCosts"
)


def plan_segments(costs: Sequence[float], stages: int, method: Any = None) -> list[int]:
    """Cut a sequence of layers into `stages` segments, none empty; return their bounds.

    The most expensive segment is as cheap as can be; among such plans the one whose segments
    differ least, with the longer ones last. Pure.

    Args:
        costs: what each layer costs, in any unit; numbers of at least 0.
        stages: how many segments.
        method: bounds to take as they are: the first layer of each segment, with or without the
            end; None to find them.

    Raises:
        UsageError: there are fewer layers than stages, or the bounds given are none.

    Example:
        >>> plan_segments([1] * 10, 4)
        [0, 2, 4, 7, 10]
        >>> plan_segments([8, 1, 1, 1, 1], 2)
        [0, 1, 5]

    """
    if stages < 1:
        raise UsageError(f"a pipeline has at least 1 stage, got {stages}")
    if len(costs) < stages:
        raise UsageError(
            f"{len(costs)} layers cannot be cut into {stages} stages: each has at least one. Use "
            "fewer stages, or divide the model into more layers"
        )
    if method is not None:
        return _given(method, len(costs), stages)
    numbers = np.asarray(costs, float)
    if not (np.isfinite(numbers) & (numbers >= 0)).all():
        raise UsageError(f"layers cost numbers of at least 0, got {list(costs)}")
    before = np.concatenate([[0.0], np.cumsum(numbers)])
    sums = before[None, :] - before[:, None]  # sums[i, j]: of the layers from i to before j
    limit = _cheapest(sums, stages)
    allowed = np.tri(len(before), k=-1, dtype=bool).T & (sums <= limit * (1 + 1e-9))
    squares = np.where(allowed, sums**2, np.inf)
    best = np.where(np.arange(len(before)) == 0, 0.0, np.inf)
    choices = []
    for _ in range(stages):
        total = best[:, None] + squares
        choices.append(total.argmin(0))
        best = total.min(0)
    bounds = [len(costs)]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return bounds[::-1]


def _cheapest(sums: Any, stages: int) -> float:
    """Return the cost of the most expensive of so many segments, where it is the least."""
    row = np.where(np.tri(len(sums), k=-1, dtype=bool).T, sums, np.inf)
    best = row[0]
    for _ in range(stages - 1):
        best = np.maximum(best[:, None], row).min(0)
    return float(best[-1])


def _given(bounds: Any, layers: int, stages: int) -> list[int]:
    if not isinstance(bounds, Sequence):
        raise UsageError(f"seg_method is {bounds!r}; {_REMEDY}")
    found = list(bounds)
    if len(found) == stages:
        found.append(layers)
    integers = all(type(each) is int for each in found)
    rising = integers and all(one < other for one, other in itertools.pairwise(found))
    if len(found) != stages + 1 or found[0] != 0 or found[-1] != layers or not rising:
        raise UsageError(
            f"seg_method {found} does not cut {layers} layers into {stages} stages: give "
            f"the first layer of each, rising from 0"
        )
    return found


def costs_by_name(names: Sequence[str], method: str, stages: int) -> list[float]:
    """Return a cost of 1 for layers whose class is named as ``"layer:Name"`` says, 0 for others.

    Raises:
        UsageError: no such method, or fewer such layers than stages.

    """
    if not method.startswith(BY_NAME):
        raise UsageError(f"seg_method is {method!r}; {_REMEDY}")
    pattern = method.removeprefix(BY_NAME)
    try:
        matcher = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise UsageError(f"seg_method {method!r} is no regular expression: {error}") from None
    costs = [float(matcher.search(name) is not None) for name in names]
    if sum(costs) < stages:
        raise UsageError(
            f"seg_method {method!r} finds {sum(costs):g} layers for {stages} stages, among "
            f"{', '.join(dict.fromkeys(names))}; each stage needs one of them"
        )
    return costs
