"""Gradients averaged inside the jitted step: `average_gradients`, and `average` of optimizers.

The buckets are joined by XLA, in the order of the tree, and each is one `all_reduce`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, cast

import jax
import jax.numpy as jnp

from hpcdist.comm.group import Group
from hpcdist.comm.session import resolve_group
from hpcdist.errors import UsageError
from hpcdist.jax.verbs import all_reduce
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.buckets import plan_buckets
from hpcdist.parallel.options import DEFAULT_MB, bucket_limits
from hpcdist.transport.call.reduction import ReduceOp

Tree = Any


def average_gradients(tree: Tree, group: Group | None = None) -> Tree:
    """Return `tree` with every array replaced by its mean over the ranks. Collective.

    It is for the jitted step of a training; outside of it, `hpcdist.average_gradients` compares the
    trees of the ranks by the names of their leaves, too. Small arrays travel together.

    Args:
        tree: arrays of floats or complex numbers, nested as JAX knows it, equal on all ranks in
            structure, shapes and dtypes.
        group: the ranks to average over; None for all.

    Raises:
        UsageError: an array is of integers; names it, when the function is traced.
        MismatchError: the arrays of two ranks differ in shape or dtype; on every rank.

    Example:
        >>> import jax, hpcdist as dist, hpcdist.jax as hj
        >>> def one_rank():
        ...     share = 1.0 + dist.get_rank()
        ...     slopes = jax.jit(lambda w: hj.average_gradients(jax.grad(lambda w: share * w)(w)))
        ...     return float(slopes(5.0))
        >>> dist.simulate(3, one_rank)
        [2.0, 2.0, 2.0]

    """
    named, structure = jax.tree_util.tree_flatten_with_path(tree)
    arrays = [_floating(path, leaf) for path, leaf in named]
    nbytes = [array.size * array.dtype.itemsize for array in arrays]
    _, limit = bucket_limits(resolve_group(group), DEFAULT_MB, DEFAULT_MB)
    large = [index for index, size in enumerate(nbytes) if size >= limit]
    for indices in plan_buckets(nbytes, [str(x.dtype) for x in arrays], [limit], sparse=large):
        parts = [arrays[index] for index in indices]
        ends = [*accumulate(part.size for part in parts)]
        flat = jnp.concatenate([part.reshape(-1) for part in parts])
        means = jnp.split(all_reduce(flat, ReduceOp.AVG, group), ends[:-1])
        for index, part, mean in zip(indices, parts, means, strict=True):
            arrays[index] = mean.reshape(part.shape)
    return jax.tree.unflatten(structure, arrays)


def _floating(path: Any, leaf: Any) -> Any:
    array = jnp.asarray(leaf)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        raise UsageError(
            f"the gradient {jax.tree_util.keystr(path)} is of {array.dtype}, and a mean needs "
            "floats; leave it out, or convert it with .astype(float)"
        )
    return array


def average(optimizer: Any, group: Group | None = None) -> Any:
    """Return an optax optimizer that averages the gradients over the ranks first. Local.

    Its `update` is collective, and belongs into the jitted step: all ranks then take the same step,
    if they begin with the same weights.

    Args:
        optimizer: an ``optax.GradientTransformation``, or what else has ``init`` and ``update``.
        group: the ranks to average over; None for all.

    Example:
        >>> import hpcdist.jax as hj
        >>> from types import SimpleNamespace
        >>> plain = SimpleNamespace(init=lambda w: (), update=lambda g, state, w: (-0.1 * g, state))
        >>> import hpcdist as dist
        >>> def one_rank():
        ...     slope = 10.0 * dist.get_rank()
        ...     return float(hj.average(plain).update(slope, (), 1.0)[0])
        >>> dist.simulate(3, one_rank)
        [-1.0, -1.0, -1.0]

    """
    if not callable(getattr(optimizer, "init", None)) or not hasattr(optimizer, "update"):
        raise UsageError(
            f"average needs an optimizer of optax, with init and update, got {optimizer!r}; for a "
            "tree of gradients there is average_gradients"
        )

    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        return cast(
            "tuple[Tree, Any]",
            optimizer.update(average_gradients(updates, group), state, params, **extra),
        )

    return _Averaging(optimizer.init, update)


class _Averaging(NamedTuple):
    """What optax calls a GradientTransformationExtraArgs, without optax."""

    init: Callable[..., Any]
    update: Callable[..., Any]
