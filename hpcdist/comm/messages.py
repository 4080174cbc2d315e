"""Point-to-point messages. `src`, `dst` and `peer` are world ranks; None receives from any.

Messages match by sender (or any), tag and dtype, in the order sent, whatever the timing. `send`
never waits for a receive that the receiver posts later in its program: whoever waits in hpcdist
takes in what others have sent to it. What goes to or comes from `PROC_NULL` is no message at all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdist.arrays.annotations import AnyArray
from hpcdist.comm.describe_messages import (
    describe_recv,
    describe_recv_objects,
    describe_send,
    describe_send_objects,
)
from hpcdist.comm.dispatch import (
    BatchEntry,
    Describe,
    as_flag,
    dispatch,
    dispatch_batch,
    not_a_member,
)
from hpcdist.comm.hot import hot, in_one_call
from hpcdist.comm.members import Members
from hpcdist.comm.session import resolve_group
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.call import PROC_NULL
from hpcdist.transport.waiting.work import Done, Work


@in_one_call
def send(
    tensor: AnyArray, dst: int = 0, group: Members | None = None, sync_op: bool = True, tag: int = 0
) -> Work:
    """Send `tensor` to rank `dst`; return when it may be changed again (MPI_Send).

    Args:
        tensor: what is sent.
        dst: the receiver's world rank, or `PROC_NULL` for nobody.
        group: the group both belong to; None for all.
        sync_op: return when `tensor` may be changed again.
        tag: a number from 0 on; only a receive with the same tag takes the message.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def ping():
        ...     x = np.full(2, float(dist.get_rank()))
        ...     if dist.get_rank() == 0:
        ...         dist.send(x, dst=1)
        ...     elif dist.get_rank() == 1:
        ...         dist.recv(x, src=0)
        ...     return x.tolist()
        >>> dist.simulate(3, ping)
        [[0.0, 0.0], [0.0, 0.0], [2.0, 2.0]]

    """
    return _dispatch(group, sync_op, describe_send, tensor, dst, tag)


@in_one_call
def recv(
    tensor: AnyArray,
    src: int | None = 0,
    group: Members | None = None,
    sync_op: bool = True,
    tag: int = 0,
) -> Work:
    """Receive a message of `tensor`'s size and dtype into it (MPI_Recv).

    Args:
        tensor: the output.
        src: the sender's world rank; None receives from any rank.
        group: the group sender and receiver belong to; None for all.
        sync_op: return when the message has arrived.
        tag: messages with another tag are left for other receives.

    Returns:
        Its `Work`; `Work.source` is the world rank the message came from.

    Raises:
        MismatchError: the first message that matches has another size; or the sender has sent
            other dtypes only, and cannot go on before this rank does, or not in time. The message
            stays where it is.
        RemoteError: the sender has ended and sent nothing that matches.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def collect():
        ...     x = np.array([dist.get_rank()])
        ...     if dist.get_rank() != 0:
        ...         dist.send(x, dst=0)
        ...         return []
        ...     return sorted(dist.recv(x, src=None).source for _ in range(2))
        >>> dist.simulate(3, collect)
        [[1, 2], [], []]

    """
    return _dispatch(group, sync_op, describe_recv, tensor, src, tag)


def isend(tensor: AnyArray, dst: int, group: Members | None = None, tag: int = 0) -> Work:
    """Begin `send`; `tensor` must be left alone until `Work.wait` (MPI_Isend).

    Args:
        tensor: what is sent.
        dst: the receiver's world rank, or `PROC_NULL` for nobody.
        group: the group both belong to; None for all.
        tag: as in `send`.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def around():
        ...     rank, n = dist.get_rank(), dist.get_world_size()
        ...     x, received = np.array([rank]), np.array([-1])
        ...     sending = dist.isend(x, dst=(rank + 1) % n)
        ...     dist.recv(received, src=(rank - 1) % n)
        ...     sending.wait()
        ...     return int(received[0])
        >>> dist.simulate(3, around)
        [2, 0, 1]

    """
    return hot.send(tensor, dst, group, False, tag) or _dispatch(
        group, False, describe_send, tensor, dst, tag
    )


def irecv(
    tensor: AnyArray, src: int | None = None, group: Members | None = None, tag: int = 0
) -> Work:
    """Begin `recv`; `tensor` holds the message after `Work.wait` (MPI_Irecv).

    Args:
        tensor: the output.
        src: the sender's world rank; None receives from any rank, `PROC_NULL` from nobody.
        group: the group both belong to; None for all.
        tag: as in `recv`.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def around():
        ...     rank, n = dist.get_rank(), dist.get_world_size()
        ...     received = np.array([-1])
        ...     work = dist.irecv(received, src=(rank - 1) % n)
        ...     dist.send(np.array([rank]), dst=(rank + 1) % n)
        ...     work.wait()
        ...     return int(received[0])
        >>> dist.simulate(3, around)
        [2, 0, 1]

    """
    return _dispatch(group, False, describe_recv, tensor, src, tag)


class _P2POpFields(NamedTuple):
    op: Callable[..., Work]
    tensor: AnyArray
    peer: int | None
    group: Members | None
    tag: int


class P2POp(_P2POpFields):
    """One `isend` or `irecv` for `batch_isend_irecv`.

    Attributes:
        op: the function `isend` or `irecv` itself.
        tensor: what is sent or received.
        peer: the other rank (world rank).
        group: the group; None for all.
        tag: as in `send`.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> dist.P2POp(dist.isend, np.zeros(2), peer=dist.PROC_NULL).tag
        0

    """

    __slots__ = ()

    def __new__(
        cls,
        op: Callable[..., Work],
        tensor: AnyArray,
        peer: int | None,
        group: Members | None = None,
        tag: int = 0,
    ) -> P2POp:
        """Check everything at once, where the mistake is and before a batch begins."""
        if op not in (isend, irecv):
            raise UsageError(
                f"Invalid ``op`` function {op!r}; pass hpcdist.isend or hpcdist.irecv itself"
            )
        where = resolve_group(group)
        if where.is_member():
            _DESCRIBE[op](where, tensor, where.world_rank if is_nobody(peer) else peer, tag)
        return super().__new__(cls, op, tensor, peer, group, tag)

    def __repr__(self) -> str:
        shape = getattr(self.tensor, "shape", None)
        dtype = getattr(self.tensor, "dtype", type(self.tensor).__name__)
        what = f"{dtype}" if shape is None else f"{dtype} of shape {tuple(shape)}"
        peer = "any rank" if self.peer is None else f"rank {self.peer}"
        way = "to" if self.op is isend else "from"
        where = "" if self.group is None else f", group {self.group.name}"
        return f"P2POp({self.op.__name__} {way} {peer}, {what}, tag {self.tag}{where})"


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Begin all sends and receives of the list; return their works in the same order.

    Local. An empty list is fine: ranks at the ends of a pipeline have nothing to do.

    Args:
        p2p_op_list: what to begin, in this order.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def around():
        ...     rank, n = dist.get_rank(), dist.get_world_size()
        ...     received = np.array([-1])
        ...     to_next = dist.P2POp(dist.isend, np.array([rank]), (rank + 1) % n)
        ...     from_last = dist.P2POp(dist.irecv, received, (rank - 1) % n)
        ...     dist.wait_all(dist.batch_isend_irecv([to_next, from_last]))
        ...     return int(received[0])
        >>> dist.simulate(3, around)
        [2, 0, 1]

    """
    if not isinstance(p2p_op_list, (list, tuple)) or not all(
        isinstance(each, P2POp) for each in p2p_op_list
    ):
        raise UsageError(f"batch_isend_irecv needs a list of P2POp, got {p2p_op_list!r}")
    real = [each for each in p2p_op_list if not is_nobody(each.peer)]
    works = iter(
        dispatch_batch(
            [
                BatchEntry(each.group, _DESCRIBE[each.op], (each.tensor, each.peer, each.tag))
                for each in real
            ]
        )
    )
    return [
        to_nobody(each.group, _DESCRIBE[each.op], each.tensor, each.tag)
        if is_nobody(each.peer)
        else next(works)
        for each in p2p_op_list
    ]


@in_one_call
def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Members | None = None,
    dst_in_group: int | None = None,
    *,
    sync_op: bool = True,
    tag: int = 0,
) -> Work:
    """Send the objects of a list to one rank, which calls `recv_object_list`.

    Args:
        object_list: at least one picklable object; large arrays in them are not copied.
        dst: the receiver's world rank (default: world rank 0).
        group: the group both belong to; None for all.
        dst_in_group: the receiver's rank in the group, instead of `dst`.
        sync_op: return when the objects may be changed again.
        tag: as in `send`.

    Example:
        >>> import hpcdist as dist
        >>> def hand_over():
        ...     found = ["nothing"]
        ...     if dist.get_rank() == 0:
        ...         dist.send_object_list([{"step": 7}], dst=1)
        ...     else:
        ...         dist.recv_object_list(found, src=0)
        ...     return found[0]
        >>> dist.simulate(2, hand_over)
        ['nothing', {'step': 7}]

    """
    if dst_in_group is not None:
        peer = _one_peer(group, dst, dst_in_group, "dst")
        return send_object_list(object_list, peer, group, sync_op=sync_op, tag=tag)
    return _dispatch(group, sync_op, describe_send_objects, object_list, dst, tag)


@in_one_call
def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Members | None = None,
    src_in_group: int | None = None,
    *,
    sync_op: bool = True,
    tag: int = 0,
) -> Work:
    """Receive objects into `object_list`, which has as many entries as were sent.

    Args:
        object_list: its entries are replaced.
        src: the sender's world rank; None receives from any rank.
        group: the group both belong to; None for all.
        src_in_group: the sender's rank in the group, instead of `src`.
        sync_op: return when the objects have arrived.
        tag: as in `send`.

    Raises:
        MismatchError: the list that arrived has another length.

    Example:
        >>> import hpcdist as dist
        >>> def hand_over():
        ...     found = [None, None]
        ...     if dist.get_rank() == 0:
        ...         dist.send_object_list(["loss", 0.5], dst=1)
        ...     else:
        ...         dist.recv_object_list(found, src=0)
        ...     return found
        >>> dist.simulate(2, hand_over)
        [[None, None], ['loss', 0.5]]

    """
    if src_in_group is not None:
        peer = _one_peer(group, src, src_in_group, "src")
        return recv_object_list(object_list, peer, group, sync_op=sync_op, tag=tag)
    return _dispatch(group, sync_op, describe_recv_objects, object_list, src, tag)


# ---- no rank at all


def _dispatch(
    group: Members | None,
    sync_op: bool,
    describe: Describe,
    what: Any,
    peer: Any,
    tag: int,
) -> Work:
    is_rank = type(peer) is int and peer >= 0
    if not is_rank and is_nobody(peer):
        as_flag(sync_op, "sync_op")
        return to_nobody(group, describe, what, tag)
    return dispatch(group, sync_op, describe, what, peer, tag)


def is_nobody(peer: Any) -> bool:
    """Return whether `peer` is `PROC_NULL`, ours or that of the MPI library in use."""
    if peer is None or not isinstance(peer, (int, np.integer)) or peer >= 0:
        return False
    mpi = sys.modules.get("mpi4py.MPI")
    return peer == PROC_NULL or (mpi is not None and peer == mpi.PROC_NULL)


def to_nobody(group: Members | None, describe: Describe, what: Any, tag: int) -> Work:
    """Exchange nothing; what is wrong with the arguments is an error all the same."""
    where = resolve_group(group)
    if not where.is_member():
        return not_a_member(where)
    describe(where, what, where.world_rank, tag)
    return Done(PROC_NULL)


_DESCRIBE = {isend: describe_send, irecv: describe_recv}


def _one_peer(group: Members | None, world: int | None, in_group: int, what: str) -> Any:
    if world is not None:
        raise UsageError(f"Cannot specify both {what} and {what}_in_group")
    if is_nobody(in_group):
        return in_group
    return resolve_group(group).get_global_rank(in_group)
