"""Averaging gradients by hand: `average_gradients` of a tree, `fused_allreduce_gradients`.

For training loops without `DataParallel`: call one of them between the backward pass and the
optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from hpcdist.arrays.buffer import Buffer, as_buffer
from hpcdist.arrays.trees import leaves, with_leaves
from hpcdist.comm.collectives import all_reduce
from hpcdist.comm.dispatch import not_a_member
from hpcdist.comm.group import Group
from hpcdist.comm.session import resolve_group
from hpcdist.comm.states import state_of, verifying
from hpcdist.errors import UsageError
from hpcdist.parallel.fused import fused
from hpcdist.parallel.parameter import Parameter
from hpcdist.transport.call.reduction import ReduceOp, rule_for


def average_gradients(tree: Any, group: Group | None = None, *, op: ReduceOp = ReduceOp.AVG) -> Any:
    """Return `tree` with every array replaced by its mean over the ranks. Collective.

    Arrays that can be written (NumPy, torch) are averaged in place and are the same objects in
    the result; for those that cannot (JAX) the result holds new ones. Many arrays travel in few
    operations.

    Args:
        tree: an array, or dicts, lists and tuples of arrays, nested; None where there is no
            array. Where jax is in use, also what is registered with it as a pytree.
        group: the ranks to average over; None for all.
        op: `ReduceOp.AVG`, or `ReduceOp.REPRODUCIBLE_SUM`, whose sums are divided: they have the
            same bits in whatever order the ranks stand.

    Raises:
        MismatchError: the trees of two ranks differ in structure, shape or dtype, or `op` does; on
            every rank.
        UsageError: `op` is another one, or a leaf is not an array of floats or complex numbers;
            names it by its path. The other ranks, if theirs are fine, get a `RemoteError`.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def one_rank():
        ...     return dist.average_gradients({"w": np.full(2, float(dist.get_rank()))})
        >>> dist.simulate(2, one_rank)[0]
        {'w': array([0.5, 0.5])}

    """
    group = resolve_group(group)
    if not group.is_member():
        not_a_member(group)
        return tree
    named = leaves(tree)
    means = _average(named, group, "array", op)
    if all(mean is array for mean, (_, array) in zip(means, named, strict=True)):
        return tree
    return with_leaves(tree, means)


def fused_allreduce_gradients(
    parameter_list: Iterable[Any], hcg: Any = None, *, group: Group | None = None
) -> None:
    """Average the gradient of every parameter that has one, in place. Collective.

    Args:
        parameter_list: torch parameters or `Parameter`s, or anything with a ``grad``. Those
            without a gradient are skipped; all ranks must skip the same.
        hcg: an object with ``get_data_parallel_group()``, as fleet has.
        group: the ranks to average over, where `hcg` is None; None for all.

    Raises:
        MismatchError: two ranks have gradients of different parameters, shapes or dtypes.

    Reference: ``paddle.distributed.fleet.utils.hybrid_parallel_util``.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def averaged():
        ...     w = dist.Parameter(np.ones(2))
        ...     w.grad = np.full(2, float(dist.get_rank()))
        ...     dist.fused_allreduce_gradients([w])
        ...     return w.grad.tolist()
        >>> dist.simulate(3, averaged)
        [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]

    """
    if hcg is not None and group is not None:
        raise UsageError("fused_allreduce_gradients got both hcg and group; give one of them")
    group = resolve_group(hcg.get_data_parallel_group() if hcg is not None else group)
    if not group.is_member():
        not_a_member(group)
        return
    gradients = [
        (f"parameter_list[{index}].grad", parameter, _gradient_of(parameter))
        for index, parameter in enumerate(parameter_list)
    ]
    gradients = [each for each in gradients if each[2] is not None]
    means = _average([(name, gradient) for name, _, gradient in gradients], group, "gradient")
    for (_, parameter, gradient), mean in zip(gradients, means, strict=True):
        if mean is not gradient:
            parameter.grad = mean


def _gradient_of(parameter: Any) -> Any:
    return parameter.memory() if type(parameter) is Parameter else parameter.grad


def _average(
    named: Sequence[tuple[str, Any]], group: Group, noun: str, op: ReduceOp = ReduceOp.AVG
) -> list[Any]:
    buffers: list[Buffer] = []
    with verifying(group, noun) as alike:
        if op not in _MEANS:
            raise UsageError(f"op must be one of ReduceOp.AVG and REPRODUCIBLE_SUM, got {op!r}")
        for path, array in named:
            buffers.append(_to_average(path, array, op))
            alike.append(state_of(path, buffers[-1]))
    return fused(buffers, group, partial(_mean, group=group, op=op))


_MEANS = ReduceOp.AVG, ReduceOp.REPRODUCIBLE_SUM


def _mean(flat: Any, group: Group, op: ReduceOp) -> None:
    all_reduce(flat, op, group)
    if op is ReduceOp.REPRODUCIBLE_SUM:
        flat /= group.nranks


def _to_average(path: str, array: Any, op: ReduceOp) -> Buffer:
    buffer = as_buffer(array, path)
    try:
        rule_for(ReduceOp.AVG, buffer.dtype)
        rule_for(op, buffer.dtype)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    return buffer
