"""Objects in a state: whatever has `state_dict` and `load_state_dict`, taken for its state.

What has `sharded_state_dict` besides gives each rank's own part. Objects are known by what they
have, so that torch is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcdist.checkpoint.boxes import Shape
from hpcdist.checkpoint.dtensor import is_dtensor
from hpcdist.checkpoint.local_slice import LocalSlice
from hpcdist.checkpoint.nodes import ARRAYS, Node, children
from hpcdist.checkpoint.plan import Array
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple

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
    state = thing.state_dict()
    return _placed(thing, state) if _is_optimizer(thing, state) else state


def template_of(thing: Any, node: Node, arrays: Mapping[str, Array]) -> Any:
    """Return the state that an object expects, as far as it knows; None for the saved one.

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
    if _is_optimizer(thing, state):
        _add_parts(thing, state["state"], dict(children(node)).get("state"), arrays)
        return _placed(thing, state)
    return state


def give(thing: Any, state: Any) -> None:
    """Load a state into an object. Collective for those that are sharded."""
    if _is_sharded(thing):
        thing.load_sharded_state_dict(state)
    else:
        thing.load_state_dict(_without_places(state) if _is_optimizer(thing, state) else state)


def _is_sharded(thing: Any) -> bool:
    return hasattr(thing, "sharded_state_dict") and hasattr(thing, "load_sharded_state_dict")


def _is_zero(thing: Any) -> bool:
    """Return whether it is torch's ZeroRedundancyOptimizer."""
    return hasattr(thing, "consolidate_state_dict")


def _is_optimizer(thing: Any, state: Any) -> bool:
    if not is_optimizer_state(state) or not hasattr(thing, "param_groups"):
        return False
    for group in thing.param_groups:
        for each in group["params"]:
            role = getattr(each, "hpcdist_role", None)
            if role is not None and role.grid.degree("pp") > 1:
                raise UsageError(
                    "it counts its parameters, and each stage of the pipeline has others; save "
                    "what fleet.distributed_optimizer returns, which names them"
                )
    return True


# ---- optimizers of parameters of which each rank has a part


class _Place(NamedTuple):
    """Of a parameter: the shape it has, that of the whole, and where it begins in it.

    A `DTensor` knows that itself, and so do its states; it has the shape of the whole.
    """

    shape: Shape
    whole: Shape
    begin: Shape | None


def _places(optimizer: Any) -> dict[int, _Place]:
    """Return the places of an optimizer's parameters that are parts, by their number."""
    parameters = [each for group in optimizer.param_groups for each in group.get("params", ())]
    found = {}
    for index, each in enumerate(parameters):
        shape = tuple(getattr(each, "shape", ()))
        whole = getattr(each, "global_shape", None)
        if whole is not None:  # cut by a layer of model parallelism
            found[index] = _Place(shape, tuple(whole), tuple(each.global_offsets))
        elif is_dtensor(each):
            found[index] = _Place(shape, shape, None)
    return found


def _placed(optimizer: Any, state: Any) -> Any:
    """Return the state of an optimizer; entries of a sharded parameter become slices."""
    places = {index: each for index, each in _places(optimizer).items() if each.begin is not None}
    known = {
        index: {key: _slice_of(value, places[index]) for key, value in of_one.items()}
        for index, of_one in state["state"].items()
        if index in places
    }
    return {**state, "state": {**state["state"], **known}} if known else state


def _slice_of(value: Any, place: _Place) -> Any:
    if place.begin is None or tuple(getattr(value, "shape", ())) != place.shape:
        return value
    return LocalSlice(value, place.whole, place.begin)


def _without_places(state: Any) -> Any:
    """Return the state of an optimizer as that itself knows it."""
    known = {
        index: {
            key: value.data if isinstance(value, LocalSlice) else value
            for key, value in of_one.items()
        }
        for index, of_one in state["state"].items()
        if isinstance(of_one, dict)
        and any(isinstance(each, LocalSlice) for each in of_one.values())
    }
    return {**state, "state": {**state["state"], **known}} if known else state


def _add_parts(
    optimizer: Any, known: dict[Any, Any], node: Node | None, arrays: Mapping[str, Array]
) -> None:
    """Add to the state of a fresh optimizer what is divided as its parameters are."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    places = _places(optimizer)
    for index, saved in children(node) if node else ():
        if index not in places:
            continue
        parameter = parameters[index]
        for key, leaf in children(saved):
            ((kind, name),) = leaf.items()
            if kind in ARRAYS and arrays[name].shape == places[index].whole:
                part = parameter.detach().clone()
                known[index] = {key: part, **known.get(index, {})}
