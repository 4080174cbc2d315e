"""What a model keeps by name: its parameters, and its buffers.

An entry is a `Parameter`, or, for a buffer, a plain array. `sync_params_buffers` makes the entries
of all ranks equal; the rest is what it and `DataParallel` do with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from hpcdist.arrays.buffer import as_buffer, is_writeable
from hpcdist.arrays.device import on_device
from hpcdist.arrays.libraries import NumpyArray, library_of, view_of
from hpcdist.arrays.transfer import near
from hpcdist.comm.collectives import broadcast
from hpcdist.comm.dispatch import not_a_member
from hpcdist.comm.group import Group
from hpcdist.comm.session import resolve_group
from hpcdist.comm.states import State, state_of, verifying
from hpcdist.errors import UsageAssertionError, UsageError
from hpcdist.parallel.fused import fused
from hpcdist.parallel.gradient_groups import own_group
from hpcdist.parallel.parameter import Parameter
from hpcdist.text import an

Named = Sequence[tuple[str, Any]]
"""Names and entries."""


def sync_params_buffers(
    model: Any,
    comm_group: Group | None = None,
    src_rank: int = 0,
    is_model_parallel: bool = False,
    fuse_params: bool = True,
    is_moe_sharding_parallel: bool = False,
) -> None:
    """Give all parameters and buffers of `model` the values they have on rank `src_rank`.

    Collective over `comm_group`. Parameters with a true attribute ``no_sync`` are left out, and
    those with a group of their own.

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

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> class Model:
        ...     def __init__(self):
        ...         self.w = dist.Parameter(np.array([float(dist.get_rank())]))
        ...     def named_parameters(self):
        ...         yield "w", self.w
        >>> def synchronized():
        ...     model = Model()
        ...     dist.sync_params_buffers(model, src_rank=2)
        ...     return model.w.data.tolist()
        >>> dist.simulate(3, synchronized)
        [[2.0], [2.0], [2.0]]

    """
    group = resolve_group(comm_group)
    if not group.is_member():
        not_a_member(group)
        return
    group.root_of(src_rank, "src_rank")
    own = ["no_sync"]
    own += ["is_distributed"] if is_model_parallel else []
    own += ["expert"] if is_moe_sharding_parallel else []
    entries = [
        (name, entry)
        for name, entry in parameters_and_buffers(model)
        if own_group(entry) is None and not any(_is_marked(entry, mark) for mark in own)
    ]
    with verifying(group) as alike:
        alike += states_of(entries)
    broadcast_state(entries, group, src_rank)


def _is_marked(entry: Any, mark: str) -> bool:
    """Return whether an entry has a true attribute; a tensor has a method ``is_distributed``."""
    value = getattr(entry, mark, False)
    return bool(value) and not callable(value)


def parameters_and_buffers(model: Any) -> list[tuple[str, Any]]:
    """Return names and entries of all parameters and buffers."""
    return [*model.named_parameters(), *buffers_of(model)]


def buffers_of(model: Any) -> list[tuple[str, Any]]:
    """Return names and entries of all buffers, as they are now."""
    named_buffers = getattr(model, "named_buffers", None)
    return [] if named_buffers is None else list(named_buffers())


def unique(entries: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Keep the first of the names of an object."""
    first: dict[int, tuple[str, Any]] = {}
    for name, entry in entries:
        first.setdefault(id(entry), (name, entry))
    return list(first.values())


def trainable(model: Any) -> list[tuple[str, Any]]:
    """Return names and entries of all parameters and buffers, each once.

    Raises:
        UsageError: the model cannot be trained; says why.

    """
    for name, parameter in model.named_parameters():
        if type(parameter) is not Parameter:
            raise UsageError(
                f"named_parameters() gave {name!r}, {an(type(parameter).__name__)}; make it an "
                "hpcdist.Parameter, and give arrays that are not trained in named_buffers()"
            )
    entries = parameters_and_buffers(model)
    for name, times in Counter(name for name, _ in entries).items():
        if times > 1:
            raise UsageError(
                f"{times} parameters or buffers of the model are called {name!r}; give each a name "
                "of its own in named_parameters() and named_buffers()"
            )
    trained = [(name, entry) for name, entry in entries if is_trained(entry)]
    if not trained:
        raise UsageAssertionError(
            "This model does not have any parameters to train, and does not need to use "
            "DataParallel; let named_parameters() give hpcdist.Parameters with requires_grad=True"
        )
    for name, parameter in trained:
        if not parameter.is_free():
            raise UsageError(
                f"parameter {name!r} belongs to another DataParallel already; use that one, or "
                "delete it first"
            )
    return unique(entries)


def is_trained(entry: Any) -> bool:
    """Return whether `entry` is a parameter that takes gradients."""
    return type(entry) is Parameter and entry.requires_grad


def array_in(entry: Any) -> Any:
    """Return the array that `entry` holds or is."""
    return entry.data if type(entry) is Parameter else entry


def states_of(entries: Named) -> list[State]:
    """Return what ranks compare of the entries; a parameter that is trained must be so everywhere.

    Raises:
        UsageError: an entry is not an array, or is a buffer that cannot be written.

    """
    return [_state_of(name, entry) for name, entry in entries]


def _state_of(name: str, entry: Any) -> State:
    buffer = as_buffer(array_in(entry), repr(name))
    if type(entry) is not Parameter and not is_writeable(view_of(entry)):
        raise UsageError(
            f"buffer {name!r} of the model is {an(type(entry).__name__)} that cannot be written; "
            "let named_buffers() give writable NumPy arrays, torch tensors or "
            "hpcdist.Parameter(x, requires_grad=False)"
        )
    _, shape, dtype = state_of(name, buffer)
    place = ", on a GPU" if on_device(buffer.data) else ""
    frozen = type(entry) is Parameter and not entry.requires_grad
    return name, shape, f"{dtype}{place}{', not trained' if frozen else ''}"


def broadcast_state(entries: Named, group: Group, src: int) -> None:
    """Give the entries what they hold on rank `src` (of the world). Collective over `group`."""
    arrays = [array_in(entry) for _, entry in entries]
    received = broadcast_states(arrays, group, src)
    for (_, entry), old, new in zip(entries, arrays, received, strict=True):
        if new is not old:
            entry.data = new


def broadcast_states(arrays: Sequence[Any], group: Group, src: int) -> list[Any]:
    """Give all `arrays` the contents they have on rank `src`, few operations for many arrays.

    Collective over `group`; shapes and dtypes must be equal (see `verify_states`).

    Args:
        arrays: of any library; tensors that require grad are changed without autograd noticing.
        group: the ranks that take part.
        src: a world rank.

    Returns:
        The arrays: the same objects where they can be written, new ones where they cannot (JAX).

    """
    buffers = [as_buffer(array, f"array {index}") for index, array in enumerate(arrays)]
    return fused(buffers, group, partial(broadcast, src=src, group=group))


def load(entries: Named, arrays: Mapping[str, Any]) -> None:
    """Copy `arrays` into the entries of the same names. Local; all or nothing.

    Raises:
        UsageError: a name is missing or unknown, or an array has another shape.

    """
    names = {name for name, _ in entries}
    different = sorted(map(str, names ^ arrays.keys()))
    if different:
        raise UsageError(
            f"the state has other names than the model: {', '.join(different[:8])} occur in one of "
            "them only; load a state_dict() of the same model"
        )
    views = [_fitting(name, array_in(entry), arrays[name]) for name, entry in entries]
    for (_, entry), view in zip(entries, views, strict=True):
        _copy(view, entry)


def _fitting(name: str, mine: Any, array: Any) -> NumpyArray:
    given = view_of(array)
    if given.shape != tuple(mine.shape):
        raise UsageError(
            f"the state's {name!r} has shape {given.shape}, but the model's has "
            f"{tuple(mine.shape)}; load a state_dict() of the same model"
        )
    return given


def _copy(view: NumpyArray, entry: Any) -> None:
    array = array_in(entry)
    target = view_of(array)
    view = near(target, view)
    if is_writeable(target):
        target[...] = view
    else:
        entry.data = library_of(array).wrap(np.array(view, target.dtype))
