"""The verbs on JAX arrays: they return new arrays, eagerly and in traced functions alike.

All ranks of the group call them, in the same order, as they do outside of JAX. `x` is an array, a
number, or a tree of them (one operation for each leaf). A group is a `Group`, and static; `src` and
`dst` are world ranks, and static as well. n is the number of ranks of the group. A rank outside of
it is warned and gets `x` back.

Errors common to all: `UsageError` (a wrong argument, when the function is traced, before anything
is sent), and when it runs `MismatchError`, `RemoteError` and `CollectiveTimeout`, as those of
`hpcdist`.

Gradients are those of the sum over all ranks of what each of them differentiates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpcdist.arrays.dtypes import dtype_row
from hpcdist.comm.dispatch import not_a_member
from hpcdist.comm.group import Group
from hpcdist.comm.session import resolve_group
from hpcdist.errors import UsageError
from hpcdist.jax.devices import bind_once
from hpcdist.jax.running import Site
from hpcdist.transport.call.call import PROC_NULL
from hpcdist.transport.call.reduction import ReduceOp, check_op, rule_for
from hpcdist.transport.flight.call_site import outer_frame

Tree = Any


def all_reduce(x: Tree, op: int = ReduceOp.SUM, group: Group | None = None) -> Tree:
    """Return the reduction of `x` over all ranks, on each of them (MPI_Allreduce).

    Args:
        x: of equal shape and dtype on all ranks.
        op: a `ReduceOp`. Differentiable are SUM, AVG, MAX, MIN and PROD.
        group: the ranks that take part; None for all.

    The cotangent is all-reduced in the same way.

    Example:
        >>> import jax, hpcdist as dist, hpcdist.jax as hj
        >>> def one_rank():
        ...     return float(jax.jit(lambda x: hj.all_reduce(2 * x))(1.0))
        >>> dist.simulate(3, one_rank)
        [6.0, 6.0, 6.0]

    """
    return _each("all_reduce", x, group, op=op)


def reduce(x: Tree, dst: int, op: int = ReduceOp.SUM, group: Group | None = None) -> Tree:
    """Return the reduction of `x` over all ranks on rank `dst`, and zeros elsewhere (MPI_Reduce).

    Args:
        x: of equal shape and dtype on all ranks.
        dst: the world rank that gets the result.
        op: a `ReduceOp`, as in `all_reduce`.
        group: the ranks that take part; None for all.

    The cotangent of rank `dst` is broadcast.

    Example:
        >>> import hpcdist as dist, hpcdist.jax as hj
        >>> dist.simulate(3, lambda: float(hj.reduce(1.0, dst=1)))
        [0.0, 3.0, 0.0]

    """
    return _each("reduce", x, group, op=op, dst=dst)


def reduce_scatter(x: Tree, op: int = ReduceOp.SUM, group: Group | None = None) -> Tree:
    """Return the reduction of the blocks meant for this rank (MPI_Reduce_scatter_block).

    Args:
        x: of shape (n, ...), equal on all ranks: block i is for the i-th rank of the group.
        op: a `ReduceOp`, as in `all_reduce`.
        group: the ranks that take part; None for all.

    Returns:
        The reduced block, of the shape of `x` without its first axis. The cotangents are gathered.

    Example:
        >>> import jax.numpy as jnp, hpcdist as dist, hpcdist.jax as hj
        >>> dist.simulate(3, lambda: float(hj.reduce_scatter(jnp.arange(3.0))))
        [0.0, 3.0, 6.0]

    """
    return _each("reduce_scatter", x, group, op=op, blocks=True)


def broadcast(x: Tree, src: int, group: Group | None = None) -> Tree:
    """Return the `x` of rank `src` on all ranks (MPI_Bcast).

    Args:
        x: of equal shape and dtype on all ranks; only the values of rank `src` count.
        src: the world rank whose array all get.
        group: the ranks that take part; None for all.

    The cotangents are summed on rank `src`.

    Example:
        >>> import hpcdist as dist, hpcdist.jax as hj
        >>> dist.simulate(3, lambda: int(hj.broadcast(dist.get_rank(), src=2)))
        [2, 2, 2]

    """
    return _each("broadcast", x, group, src=src)


def all_gather(x: Tree, group: Group | None = None) -> Tree:
    """Return the `x` of every rank, stacked, on all ranks (MPI_Allgather).

    Args:
        x: of equal shape and dtype on all ranks.
        group: the ranks that take part; None for all.

    Returns:
        An array of shape (n, *x.shape). Its cotangents are reduced and scattered.

    Example:
        >>> import hpcdist as dist, hpcdist.jax as hj
        >>> dist.simulate(2, lambda: hj.all_gather(dist.get_rank()).tolist())
        [[0, 1], [0, 1]]

    """
    return _each("all_gather", x, group)


def gather(x: Tree, dst: int = 0, group: Group | None = None) -> Tree:
    """Return the `x` of every rank, stacked, on rank `dst`, and zeros elsewhere (MPI_Gather).

    Args:
        x: of equal shape and dtype on all ranks.
        dst: the world rank that collects.
        group: the ranks that take part; None for all.

    Returns:
        An array of shape (n, *x.shape). The cotangent of rank `dst` is scattered.

    Example:
        >>> import hpcdist as dist, hpcdist.jax as hj
        >>> dist.simulate(2, lambda: hj.gather(dist.get_rank() + 1).tolist())
        [[1, 2], [0, 0]]

    """
    return _each("gather", x, group, dst=dst)


def scatter(x: Tree, src: int = 0, group: Group | None = None) -> Tree:
    """Return the block that rank `src` has for this rank (MPI_Scatter).

    Args:
        x: of shape (n, ...), equal on all ranks; only the values of rank `src` count.
        src: the world rank that hands out.
        group: the ranks that take part; None for all.

    Returns:
        A block, of the shape of `x` without its first axis. The cotangents are gathered on `src`.

    Example:
        >>> import jax.numpy as jnp, hpcdist as dist, hpcdist.jax as hj
        >>> dist.simulate(3, lambda: float(hj.scatter(jnp.arange(3.0))))
        [0.0, 1.0, 2.0]

    """
    return _each("scatter", x, group, src=src, blocks=True)


def alltoall(x: Tree, group: Group | None = None) -> Tree:
    """Send block j of `x` to rank j; block i of the result comes from rank i (MPI_Alltoall).

    Args:
        x: of shape (n, ...), equal on all ranks.
        group: the ranks that take part; None for all.

    Returns:
        An array like `x`. Its cotangent is exchanged in the same way.

    Example:
        >>> import jax.numpy as jnp, hpcdist as dist, hpcdist.jax as hj
        >>> dist.simulate(2, lambda: hj.alltoall(jnp.arange(2) + 10 * dist.get_rank()).tolist())
        [[0, 10], [1, 11]]

    """
    return _each("alltoall", x, group, blocks=True)


def barrier(group: Group | None = None) -> None:
    """Wait until every rank of the group has come here (MPI_Barrier).

    Args:
        group: the ranks that wait for each other; None for all.

    What stands before it in the program communicates before, what stands behind it afterwards;
    computing is not ordered by it.

    Example:
        >>> import hpcdist as dist, hpcdist.jax as hj
        >>> dist.simulate(2, hj.barrier)
        [None, None]

    """
    at_hand = resolve_group(_static(group))
    if not at_hand.is_member():
        not_a_member(at_hand)
        return
    bind_once("barrier", group=group, n=at_hand.nranks, site=_site())


def send(x: Tree, dst: int, group: Group | None = None, tag: int = 0) -> None:
    """Send `x` to rank `dst`, which calls `recv` (MPI_Send).

    Args:
        x: what is sent.
        dst: the receiver's world rank, or `hpcdist.PROC_NULL` for nobody.
        group: the group both belong to; None for all.
        tag: a number from 0 on; only a receive with the same tag takes the message.

    Raises:
        UsageError: it is differentiated. `sendrecv` and `permute` can be.

    Example:
        >>> import hpcdist as dist, hpcdist.jax as hj
        >>> def one_rank():
        ...     if dist.get_rank() == 0:
        ...         return hj.send(2.5, dst=1)
        ...     return float(hj.recv(0.0, src=0))
        >>> dist.simulate(2, one_rank)
        [None, 2.5]

    """
    _each("send", x, group, dst=dst, tag=tag)


def recv(like: Tree, src: int, group: Group | None = None, tag: int = 0) -> Tree:
    """Return what rank `src` sends by `send` (MPI_Recv).

    Args:
        like: of the shape and dtype that is sent, for example a `jax.ShapeDtypeStruct`; its values
            do not count.
        src: the sender's world rank, or `hpcdist.PROC_NULL` for nobody: then the result is zeros.
        group: the group both belong to; None for all.
        tag: messages with another tag are left for other receives.

    Raises:
        UsageError: `like` is differentiated.

    Example:
        >>> import hpcdist as dist, hpcdist.jax as hj
        >>> def one_rank():
        ...     if dist.get_rank() == 0:
        ...         return hj.send(2.5, dst=1)
        ...     return float(hj.recv(0.0, src=0))
        >>> dist.simulate(2, one_rank)
        [None, 2.5]

    """
    like = jax.tree.map(_filled, like)
    return _each("recv", like, group, src=src, tag=tag)


def sendrecv(x: Tree, dst: int, src: int, group: Group | None = None, tag: int = 0) -> Tree:
    """Send `x` to rank `dst`, and return what rank `src` sends to this one (MPI_Sendrecv).

    Args:
        x: of equal shape and dtype on the ranks that exchange.
        dst: a world rank, or `hpcdist.PROC_NULL` for nobody.
        src: a world rank, or `hpcdist.PROC_NULL` for nobody: then the result is zeros.
        group: the group all belong to; None for all.
        tag: a number from 0 on, as in `send`.

    The cotangent goes to `src`, and that of rank `dst` comes back.

    Example:
        >>> import hpcdist as dist, hpcdist.jax as hj
        >>> def from_the_left():
        ...     rank = dist.get_rank()
        ...     return int(hj.sendrecv(rank, dst=(rank + 1) % 3, src=(rank - 1) % 3))
        >>> dist.simulate(3, from_the_left)
        [2, 0, 1]

    """
    return _each("sendrecv", x, group, dst=dst, src=src, tag=tag)


def permute(
    x: Tree, perm: Sequence[tuple[int, int]], group: Group | None = None, tag: int = 0
) -> Tree:
    """Send `x` along pairs of ranks; who receives nothing gets zeros (`jax.lax.ppermute`).

    Args:
        x: of equal shape and dtype on all ranks.
        perm: pairs of world ranks, of which the first sends and the second receives, equal on all
            ranks of the group. A rank is the first of one pair at most, and the second of one.
        group: the group all belong to; None for all.
        tag: a number from 0 on, as in `send`.

    The cotangents go back along the pairs.

    Example:
        >>> import hpcdist as dist, hpcdist.jax as hj
        >>> dist.simulate(3, lambda: int(hj.permute(dist.get_rank() + 1, [(0, 1), (1, 2)])))
        [0, 1, 2]

    """
    at_hand = resolve_group(_static(group))
    senders, receivers = dict(perm), {receiver: sender for sender, receiver in perm}
    if not len(senders) == len(receivers) == len(perm):
        raise UsageError(
            f"permute got {list(perm)}, in which a rank sends or receives twice; let each rank be "
            "the first of one pair at most, and the second of one"
        )
    for rank in {*senders, *receivers}:
        at_hand.root_of(rank, "a rank in perm")
    rank = at_hand.world_rank
    return _each(
        "sendrecv",
        x,
        group,
        dst=senders.get(rank, PROC_NULL),
        src=receivers.get(rank, PROC_NULL),
        tag=tag,
    )


# ---- what is checked when a function is traced


def _each(verb: str, x: Tree, group: Group | None, *, blocks: bool = False, **given: Any) -> Tree:
    """Check everything, then do `verb` for each leaf of `x`, in the order of the tree."""
    at_hand = resolve_group(_static(group))
    if not at_hand.is_member():
        not_a_member(at_hand)
        return x
    params: dict[str, Any] = {
        name: _CHECKS[name](at_hand, name, value) for name, value in given.items()
    }
    leaves, tree = jax.tree.flatten(x)
    arrays = [_array(verb, leaf) for leaf in leaves]
    for array in arrays:
        if "op" in params:
            rule_for(params["op"], dtype_row(array.dtype))
        if blocks and (array.ndim == 0 or array.shape[0] != at_hand.nranks):
            raise UsageError(
                f"{verb} got an array of shape {array.shape}, and needs one whose first axis is "
                f"{at_hand.nranks} long, with a block for each rank of the group"
            )
    params.update(group=group, n=at_hand.nranks, site=_site())
    return jax.tree.unflatten(tree, [bind_once(verb, array, **params) for array in arrays])


def _static(group: Any) -> Any:
    if isinstance(group, jax.core.Tracer):
        raise UsageError(
            "group is traced by JAX, and has to be known before: use it from outside of the "
            "function, or name it in static_argnames of jax.jit"
        )
    return group


def _known(name: str, value: Any) -> Any:
    if isinstance(value, jax.core.Tracer):
        raise UsageError(
            f"{name} is traced by JAX, and has to be known before: give it as a Python integer, or "
            "name it in static_argnames of jax.jit"
        )
    return value


def _op(group: Group, name: str, value: Any) -> ReduceOp:
    return check_op(_known(name, value))


def _root(group: Group, name: str, value: Any) -> int:
    group.root_of(_known(name, value), name)
    return int(value)


def _peer(group: Group, name: str, value: Any) -> int:
    value = _known(name, value)
    return PROC_NULL if value == PROC_NULL else _root(group, name, value)


def _tag(group: Group, name: str, value: Any) -> int:
    value = _known(name, value)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise UsageError(f"tag={value!r} must be an integer from 0 on")
    return int(value)


_CHECKS = {"op": _op, "src": _peer, "dst": _peer, "tag": _tag}


def _array(verb: str, leaf: Any) -> Any:
    """Return a leaf as an array of JAX, whose dtype we can send."""
    if isinstance(leaf, jax.Array):
        array = leaf
    else:
        try:
            array = jnp.asarray(leaf)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{verb} got {leaf!r}, of which JAX makes no array ({error}); send arrays and "
                "numbers, or objects outside of jax.jit"
            ) from None
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise UsageError(
            f"{verb} got an array of {array.dtype}, which has no plain memory; send "
            "jax.random.key_data(x)"
        )
    return array


def _filled(leaf: Any) -> Any:
    return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def _site() -> Site:
    frame, _ = outer_frame()
    if frame is None:
        return Site("<unknown>", 1, "")
    return Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
