"""torch's optimizers: steps with a closure, and parameters that are replaced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hpcdist.errors import UsageError


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return what the closure of a step returns, which computes gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check_fresh(optimizer: Any, caller: str) -> None:
    """Refuse what is no optimizer of torch, and one with a state of the parameters it has now."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"{caller} needs an optimizer of torch.optim, got {optimizer!r}")
    if has_stepped(optimizer):
        raise UsageError(
            f"the optimizer has taken steps already; give {caller} a fresh one, and let it load "
            "the state"
        )


def has_stepped(optimizer: Any) -> bool:
    """Return whether an optimizer has a state of its parameters from a step that it has taken."""
    return not all(_is_initial(state) for state in optimizer.state.values())


def _is_initial(state: dict[str, Any]) -> bool:
    """Return whether a parameter has a state before the first step, as of Adagrad."""
    return "step" in state and float(state["step"]) == 0


def initial_state(optimizer: Any) -> Any:
    """Return the state that a fresh optimizer has of the parameters in its groups."""
    return made_like(optimizer, optimizer.param_groups).state


def materialize_states(optimizer: Any) -> None:
    """Create the states that parameters have before their first step, where they have none yet.

    Most optimizers of torch have a function that does so; others take a step of length zero that
    does not count.
    """
    every = [each for group in optimizer.param_groups for each in group["params"]]
    # Others never get a state.
    parameters = [each for each in every if each.requires_grad and each not in optimizer.state]
    if not parameters:
        return
    kept = [each.grad for each in every]
    for each in every:
        each.grad = None
    for each in parameters:
        each.grad = torch.zeros_like(each)
    if hasattr(optimizer, "_init_group"):
        lists = len(inspect.signature(optimizer._init_group).parameters) - 1
        with torch.no_grad():
            for group in optimizer.param_groups:
                optimizer._init_group(group, *([] for _ in range(lists)))
    if not all(optimizer.state.get(each) for each in parameters):  # as of SGD
        _step_nowhere(optimizer, parameters)
    for each, gradient in zip(every, kept, strict=True):
        each.grad = gradient


def _step_nowhere(optimizer: Any, parameters: Sequence[Any]) -> None:
    changing = {"lr": 0.0, "weight_decay": 0.0}
    groups = optimizer.param_groups
    before = [{key: group[key] for key in changing if key in group} for group in groups]
    for group, options in zip(groups, before, strict=True):
        group.update({key: changing[key] for key in options})
    optimizer.step()
    for group, options in zip(groups, before, strict=True):
        group.update(options)
    for each in parameters:
        step = optimizer.state[each].get("step")
        if isinstance(step, torch.Tensor):
            step.zero_()


def is_dampened(optimizer: Any) -> bool:
    """Return whether a step differs that has no momentum yet from one whose momentum is zero."""
    inner = getattr(optimizer, "inner", optimizer)  # that of master weights
    groups = optimizer.param_groups
    return isinstance(inner, torch.optim.SGD) and any(group["dampening"] for group in groups)


def set_aside(optimizer: Any) -> Callable[[], None]:
    """Take its states from an optimizer, as before its first step; return what gives them back."""
    owners = optimizer, getattr(optimizer, "inner", optimizer)
    kept = [(each, dict(each.state)) for each in owners]
    for each in owners:
        each.state.clear()

    def give_back() -> None:
        for each, states in kept:
            each.state.update(states)

    return give_back


def made_like(optimizer: Any, groups: Sequence[dict[str, Any]]) -> Any:
    """Return a fresh optimizer of the same class and options, of other groups of parameters."""
    kind = type(optimizer)
    taken = inspect.signature(kind).parameters  # AdamW has defaults that it does not take
    defaults = {key: value for key, value in optimizer.defaults.items() if key in taken}
    return kind([dict(each) for each in groups], **defaults)


def needs_closure(optimizer: Any) -> bool:
    """Return whether a step calls for losses at other weights, as of LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def check_own(optimizer: Any, model: torch.nn.Module) -> list[list[str]]:
    """Return the names of a fresh optimizer's parameters, by group; refuse one of another model."""
    check_fresh(optimizer, "parallelize")
    names = {id(each): name for name, each in model.named_parameters()}
    listed = [[names.get(id(each)) for each in group["params"]] for group in optimizer.param_groups]
    if any(name is None for group in listed for name in group):
        raise UsageError(
            "the optimizer has parameters that the model does not have; make it of "
            "model.parameters()"
        )
    return [[str(name) for name in group] for group in listed]


def keep_parameters(optimizer: Any, kept: Sequence[torch.Tensor]) -> None:
    """Keep only these parameters, at least one, in a fresh optimizer. Local."""
    own = {id(each) for each in kept}
    for group in optimizer.param_groups:
        group["params"] = [each for each in group["params"] if id(each) in own]
    if not any(group["params"] for group in optimizer.param_groups):
        optimizer.param_groups[0]["params"] = [*kept]
    if optimizer.state:
        optimizer.state = initial_state(optimizer)


@contextmanager
def follow_parameters(optimizer: Any, model: torch.nn.Module) -> Iterator[None]:
    """Replace an optimizer's parameters by those that `model` has after the block. Local."""
    if optimizer is None:
        yield
        return
    listed = check_own(optimizer, model)
    yield
    named = dict(model.named_parameters())
    for group, own in zip(optimizer.param_groups, listed, strict=True):
        group["params"] = [named[name] for name in own]
    if optimizer.state:  # of the parameters that have been replaced
        optimizer.state = initial_state(optimizer)
