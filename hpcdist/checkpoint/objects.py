"""Objects in a state: whatever has `state_dict` and `load_state_dict`, taken for its state.

What has `sharded_state_dict` besides gives each rank's own part. Objects are known by what they
have, so that torch is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcdist.checkpoint.dtensor import is_dtensor
from hpcdist.checkpoint.nodes import ARRAYS, Node, children
from hpcdist.checkpoint.plan import Array

ELSEWHERE = object()
"""The state of an object that another rank tells of."""


def is_object(value: Any) -> bool:
    """Return whether `value` has a state that can be taken and given back."""
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    )


def is_model(value: Any) -> bool:
    """Return whether an object's state has entries of fixed names and shapes."""
    return hasattr(value, "named_parameters") or _is_sharded(value)


def is_optimizer_state(state: Any) -> bool:
    """Return whether `state` is one of torch's optimizers."""
    return (
        isinstance(state, dict)
        and isinstance(state.get("state"), dict)
        and isinstance(state.get("param_groups"), list)
    )


def state_of(thing: Any) -> Any:
    """Return what this rank saves of an object. Collective for some that are sharded."""
    if _is_sharded(thing):
        return thing.sharded_state_dict()
    if _is_zero(thing):
        thing.consolidate_state_dict(to=0)
        return thing.state_dict() if thing.rank == 0 else ELSEWHERE
    return thing.state_dict()


def template_of(thing: Any, node: Node, arrays: Mapping[str, Array]) -> Any:
    """Return what an object is to be given, as far as it knows; None for what was saved.

    Args:
        thing: the object.
        node: what was saved of it.
        arrays: what was saved.

    """
    if _is_sharded(thing):
        return thing.sharded_state_dict()
    if _is_zero(thing):
        return None  # it takes the whole state on every rank, and keeps its part
    state = thing.state_dict()
    if is_optimizer_state(state) and hasattr(thing, "param_groups"):
        _add_parts(thing, state["state"], dict(children(node)).get("state"), arrays)
    return state


def give(thing: Any, state: Any) -> None:
    """Load a state into an object. Collective for those that are sharded."""
    load = thing.load_sharded_state_dict if _is_sharded(thing) else thing.load_state_dict
    load(state)


def _is_sharded(thing: Any) -> bool:
    return hasattr(thing, "sharded_state_dict") and hasattr(thing, "load_sharded_state_dict")


def _is_zero(thing: Any) -> bool:
    """Return whether it is torch's ZeroRedundancyOptimizer."""
    return hasattr(thing, "consolidate_state_dict")


def _add_parts(
    optimizer: Any, known: dict[Any, Any], node: Node | None, arrays: Mapping[str, Array]
) -> None:
    """Add to the state of a fresh optimizer what is divided as its parameters, `DTensor`s, are."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for index, saved in children(node) if node else ():
        if type(index) is not int or not 0 <= index < len(parameters):
            continue
        parameter = parameters[index]
        if not is_dtensor(parameter):
            continue
        for key, leaf in children(saved):
            ((kind, name),) = leaf.items()
            if kind in ARRAYS and arrays[name].shape == tuple(parameter.shape):
                part = parameter.detach().clone()
                known[index] = {key: part, **known.get(index, {})}
