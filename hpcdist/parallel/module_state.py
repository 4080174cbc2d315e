"""Holders: what a model keeps its arrays in, which are `Parameter`s, and plain arrays for buffers.

`sync_params_buffers` makes those of all ranks equal; the rest is what it and `DataParallel` do
with holders by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hpcdist.arrays.buffer import as_buffer, is_writeable
from hpcdist.arrays.device import on_device
from hpcdist.arrays.libraries import NumpyArray, library_of, view_of
from hpcdist.arrays.transfer import near
from hpcdist.comm.dispatch import not_a_member
from hpcdist.comm.group import Group
from hpcdist.comm.session import resolve_group
from hpcdist.comm.states import State, state_of, verify_states
from hpcdist.errors import UsageError
from hpcdist.parallel.parameter import Parameter
from hpcdist.parallel.states import broadcast_states

Named = Sequence[tuple[str, Any]]
"""Names and holders."""


def sync_params_buffers(
    model: Any,
    comm_group: Group | None = None,
    src_rank: int = 0,
    is_model_parallel: bool = False,
    fuse_params: bool = True,
    is_moe_sharding_parallel: bool = False,
) -> None:
    """Give all parameters and buffers of `model` the values they have on rank `src_rank`.

    Collective over `comm_group`. Parameters with a true attribute ``no_sync`` are left out.

    Args:
        model: anything with ``named_parameters()`` and, maybe, ``named_buffers()``.
        comm_group: the ranks that take part; None for all.
        src_rank: a world rank.
        is_model_parallel: leave out parameters with a true attribute ``is_distributed``, of which
            every rank has a part of its own.
        fuse_params: accepted for Paddle's sake; many arrays always travel together.
        is_moe_sharding_parallel: leave out parameters with a true attribute ``expert``.

    Raises:
        MismatchError: two ranks differ in name, order, shape or dtype of an array.
        UsageError: `src_rank` is not in the group, or a buffer cannot be written.

    Reference: ``paddle.distributed.parallel.sync_params_buffers``.

    """
    group = resolve_group(comm_group)
    if not group.is_member():
        not_a_member(group)
        return
    group.root_of(src_rank, "src_rank")
    own = ["no_sync"]
    own += ["is_distributed"] if is_model_parallel else []
    own += ["expert"] if is_moe_sharding_parallel else []
    held = [
        (name, holder)
        for name, holder in holders_of(model)
        if not any(getattr(holder, mark, False) for mark in own)
    ]
    states: list[State] = []
    problem = None
    try:
        states = described(held)
    except UsageError as error:
        problem = error
    verify_states(states, group, error=problem)
    broadcast_state(held, group, src_rank)


def holders_of(model: Any) -> list[tuple[str, Any]]:
    """Return names and holders of all parameters and buffers."""
    return [*model.named_parameters(), *buffers_of(model)]


def buffers_of(model: Any) -> list[tuple[str, Any]]:
    """Return names and holders of all buffers, as they are now."""
    named_buffers = getattr(model, "named_buffers", None)
    return [] if named_buffers is None else list(named_buffers())


def distinct(held: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Keep the first of the names under which an object is held."""
    first: dict[int, tuple[str, Any]] = {}
    for name, holder in held:
        first.setdefault(id(holder), (name, holder))
    return list(first.values())


def trainable(model: Any) -> list[tuple[str, Any]]:
    """Return names and holders of all parameters and buffers, each once.

    Raises:
        UsageError: the model cannot be trained; says why.

    """
    for name, parameter in model.named_parameters():
        if type(parameter) is not Parameter:
            raise UsageError(
                f"named_parameters() gave {name!r}, a {type(parameter).__name__}; make it an "
                "hpcdist.Parameter, and give arrays that are not trained in named_buffers()"
            )
    held = holders_of(model)
    for name, times in Counter(name for name, _ in held).items():
        if times > 1:
            raise UsageError(
                f"{times} parameters or buffers of the model are called {name!r}; give each a name "
                "of its own in named_parameters() and named_buffers()"
            )
    trained = [(name, holder) for name, holder in held if is_trained(holder)]
    if not trained:
        raise UsageError(
            "This model does not have any parameters to train, and does not need to use "
            "DataParallel; let named_parameters() give hpcdist.Parameters with requires_grad=True"
        )
    for name, parameter in trained:
        if not parameter.is_free():
            raise UsageError(
                f"parameter {name!r} belongs to another DataParallel already; use that one, or "
                "delete it first"
            )
    return distinct(held)


def is_trained(holder: Any) -> bool:
    """Say whether `holder` is a parameter that takes gradients."""
    return type(holder) is Parameter and holder.requires_grad


def array_in(holder: Any) -> Any:
    """Return the array that `holder` holds or is."""
    return holder.data if type(holder) is Parameter else holder


def described(held: Named) -> list[State]:
    """Return what ranks compare of the holders; a parameter that is trained must be so everywhere.

    Raises:
        UsageError: a holder is no array, or a buffer that cannot be written.

    """
    return [_described(name, holder) for name, holder in held]


def _described(name: str, holder: Any) -> State:
    buffer = as_buffer(array_in(holder), repr(name))
    if type(holder) is not Parameter and not is_writeable(view_of(holder)):
        raise UsageError(
            f"buffer {name!r} of the model is a {type(holder).__name__} that cannot be written; "
            "let named_buffers() give writable NumPy arrays, torch tensors or "
            "hpcdist.Parameter(x, requires_grad=False)"
        )
    _, shape, dtype = state_of(name, buffer)
    place = ", on a GPU" if on_device(buffer.data) else ""
    frozen = type(holder) is Parameter and not holder.requires_grad
    return name, shape, f"{dtype}{place}{', not trained' if frozen else ''}"


def broadcast_state(held: Named, group: Group, src: int) -> None:
    """Give the holders what they hold on rank `src` (of the world). Collective over `group`."""
    arrays = [array_in(holder) for _, holder in held]
    received = broadcast_states(arrays, group, src)
    for (_, holder), old, new in zip(held, arrays, received, strict=True):
        if new is not old:
            holder.data = new


def load(held: Named, arrays: Mapping[str, Any]) -> None:
    """Copy `arrays` into the holders of the same names. Local; all or nothing.

    Raises:
        UsageError: a name is missing or unknown, or an array has another shape.

    """
    names = {name for name, _ in held}
    different = sorted(map(str, names ^ arrays.keys()))
    if different:
        raise UsageError(
            f"the state has other names than the model: {', '.join(different[:8])} occur in one of "
            "them only; load a state_dict() of the same model"
        )
    views = [_fitting(name, array_in(holder), arrays[name]) for name, holder in held]
    for (_, holder), view in zip(held, views, strict=True):
        _copy(view, holder)


def _fitting(name: str, mine: Any, array: Any) -> NumpyArray:
    given = view_of(array)
    if given.shape != tuple(mine.shape):
        raise UsageError(
            f"the state's {name!r} has shape {given.shape}, but the model's has "
            f"{tuple(mine.shape)}; load a state_dict() of the same model"
        )
    return given


def _copy(view: NumpyArray, holder: Any) -> None:
    array = array_in(holder)
    target = view_of(array)
    view = near(target, view)
    if is_writeable(target):
        target[...] = view
    else:
        holder.data = library_of(array).wrap(np.array(view, target.dtype))
