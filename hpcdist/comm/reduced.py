"""`all_reduced`: numbers in, their reductions over the ranks out; nothing is written in place.

Every leaf of the tree becomes a `_Leaf`: arrays to be reduced, and how the result is made of
them. Arrays of one dtype and operator travel as one, whatever leaves they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from hpcdist.arrays.buffer import Buffer, as_buffer, typed, wrap_like
from hpcdist.arrays.device import align_streams, on_device
from hpcdist.arrays.dtypes import Dtype
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.arrays.trees import leaves, with_leaves
from hpcdist.comm.alarms import raise_alarm
from hpcdist.comm.dispatch import dispatch, not_a_member
from hpcdist.comm.group import Group
from hpcdist.comm.session import resolve_group
from hpcdist.comm.states import State, verify_states
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.call import Reduction
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import ReduceOp, check_op, rule_for


def all_reduced(tree: Any, op: int = ReduceOp.SUM, group: Group | None = None) -> Any:
    """Return the reduction of `tree` over all ranks; `tree` itself stays as it is.

    All numbers of one kind travel together, so that a dict of metrics costs hardly more than one.

    Args:
        tree: a Python or NumPy number, an array, or a dict, list or (named) tuple of these, nested
            as you like; None is an empty place. It has the same structure on all ranks.
        op: a `ReduceOp`. AVG of integers and bools is their mean, a float.
        group: the ranks that take part; None for all.

    Returns:
        The same structure on every rank, with new values of the kinds that were given: an int
        stays an int and a sum of ints is exact however large, arrays have their shape, dtype and
        library. On a rank outside the group: `tree`.

    Raises:
        MismatchError: the trees differ; names the first difference.
        UsageError: a value cannot be reduced, or the product of ints exceeds 64 bits.

    Example:
        >>> import hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> dist.all_reduced({"loss": 0.5, "samples": 12})
        {'loss': 0.5, 'samples': 12}

    """
    group, op = resolve_group(group), check_op(op)
    if group.transport is None:
        not_a_member(group)
        return tree
    opened: list[_Leaf] = []
    error = None
    try:
        opened = [_open(path, leaf, op, group.nranks) for path, leaf in leaves(tree)]
    except UsageError as reason:
        error = reason
    except Exception as reason:  # whatever it is: the other ranks wait
        error = UsageError(f"the value cannot be read: {reason!r}")
        error.__cause__ = reason
        raise_alarm(group, Kind.ALL_REDUCE, error)
    verify_states([leaf.state for leaf in opened], group, "value", error)
    reduced = _reduce([part for leaf in opened for part in leaf.parts], group)
    results = iter(reduced)
    return with_leaves(tree, [leaf.result([next(results) for _ in leaf.parts]) for leaf in opened])


class _Part(NamedTuple):
    """An array, flat, of which all elements are reduced by `op`."""

    data: NumpyArray
    dtype: Dtype
    op: ReduceOp


class _Leaf(NamedTuple):
    """A leaf: its part of the comparison, the array that travels, and the result's form."""

    state: State
    parts: Sequence[_Part]
    result: Callable[[Sequence[NumpyArray]], Any]


# ---- leaves


def _open(path: str, leaf: Any, op: ReduceOp, ranks: int) -> _Leaf:
    kind = None if isinstance(leaf, np.generic) else _kind_of(leaf)
    try:
        if kind is not None:
            return _SCALARS[kind](path, leaf, op, ranks)
        return _array(path, leaf, op)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _kind_of(leaf: Any) -> type | None:
    return next((kind for kind in _SCALARS if isinstance(leaf, kind)), None)


def _part(values: Any, dtype: str, op: ReduceOp) -> _Part:
    buffer = as_buffer(np.array(values, dtype))
    rule_for(op, buffer.dtype)
    return _Part(buffer.data, buffer.dtype, op)


def _number(dtype: str, kind: type, path: str, value: Any, op: ReduceOp, ranks: int) -> _Leaf:
    state = path, (), kind.__name__
    part = _part([value], dtype, op)
    return _Leaf(state, [part], lambda reduced: kind(reduced[0][0]))


def _truth(path: str, value: bool, op: ReduceOp, ranks: int) -> _Leaf:
    if op is ReduceOp.AVG:
        return _number("f8", float, path, value, op, ranks)._replace(state=(path, (), "bool"))
    return _number("?", bool, path, value, op, ranks)


def _integer(path: str, value: int, op: ReduceOp, ranks: int) -> _Leaf:
    if not -(1 << 63) <= value < 1 << 63:
        raise UsageError(f"{value} does not fit into 64 bits; reduce float({value}) instead")
    state = path, (), "int"
    # two halves, so that no sum is too large
    if op in (ReduceOp.SUM, ReduceOp.REPRODUCIBLE_SUM, ReduceOp.AVG):
        part = _part([value & _LOW, value >> 32], "i8", ReduceOp.SUM)
        divided = op is ReduceOp.AVG

        def total(reduced: Sequence[NumpyArray]) -> int | float:
            low, high = map(int, reduced[0])
            exact = low + (high << 32)
            return exact / ranks if divided else exact

        return _Leaf(state, [part], total)
    parts = [_part([value], "i8", op)]
    if op is ReduceOp.PROD:
        parts.append(_part([value], "f8", op))
    return _Leaf(state, parts, partial(_checked, path))


def _checked(path: str, reduced: Sequence[NumpyArray]) -> int:
    """Return an int, unless its float beside it tells that it exceeds 64 bits."""
    value, *about = (each[0] for each in reduced)
    if about and abs(about[0]) > _LARGEST:
        raise UsageError(
            f"{path}: the product is about {about[0]:.6g}, which does not fit into 64 bits; reduce "
            "float(x) instead"
        )
    return int(value)


def _array(path: str, leaf: Any, op: ReduceOp) -> _Leaf:
    buffer = as_buffer(leaf, "value")
    where = " on a device" if on_device(buffer.data) else ""
    state = path, buffer.shape, buffer.dtype.name + where
    if op is ReduceOp.AVG and buffer.dtype.family in ("int", "bool"):
        mean = typed(buffer.data, buffer.dtype).astype("f8")
        buffer = as_buffer(mean)._replace(array=leaf, shape=buffer.shape)
    rule_for(op, buffer.dtype)
    part = _Part(buffer.data.reshape(-1), buffer.dtype, op)
    return _Leaf(state, [part], partial(_like, buffer))


def _like(buffer: Buffer, reduced: Sequence[NumpyArray]) -> Any:
    result = wrap_like(buffer.array, reduced[0], buffer.dtype, buffer.shape)
    return result[()] if isinstance(buffer.array, np.generic) else result


_LOW = (1 << 32) - 1
_LARGEST = 2.0**63 * (1 - 2.0**-40)
"""A product is refused from a little below the limit on: the float beside it is rounded."""

_SCALARS: dict[type, Callable[[str, Any, ReduceOp, int], _Leaf]] = {
    bool: _truth,
    int: _integer,
    float: partial(_number, "f8", float),
    complex: partial(_number, "c16", complex),
}
"""In the order in which they are asked for: a bool is an int, too."""


# ---- travelling


def _reduce(parts: Sequence[_Part], group: Group) -> list[NumpyArray]:
    """Reduce all parts, one operation for all that can travel together."""
    together: dict[tuple[ReduceOp, int, bool], list[int]] = {}
    for at, (data, dtype, op) in enumerate(parts):
        together.setdefault((op, dtype.code, on_device(data)), []).append(at)
    reduced: dict[int, NumpyArray] = {}
    for places in together.values():
        flats = [parts[at].data for at in places]
        align_streams(flats[0])
        whole = np.concatenate(flats, out=np.empty_like(flats[0], shape=(sum(map(len, flats)),)))
        dispatch(group, True, _describe, whole, parts[places[0]])
        end = 0
        for at, flat in zip(places, flats, strict=True):
            start, end = end, end + len(flat)
            reduced[at] = whole[start:end]
    return [reduced[at] for at in range(len(parts))]


def _describe(group: Group, whole: NumpyArray, like: _Part) -> Reduction:
    _, dtype, op = like
    rule, shape = rule_for(op, dtype), whole.shape
    return Reduction(Kind.ALL_REDUCE, None, whole, dtype, shape, 0, op, rule)
