"""Collectives on arrays. Every member of the group calls them, in the same order.

All of them work on NumPy arrays, torch tensors and whatever shows its memory, of any layout
and any fixed-size dtype; results are written into the caller's own arrays. `src` and `dst` are
world ranks. With ``sync_op=False`` a function returns before the operation has ended, and the
arrays must be left alone until `Work.wait`. A rank outside the group is warned and goes on.

Errors common to all: `UsageError` (a wrong argument, before anything is sent), `MismatchError`
(the ranks disagree), `RemoteError` (another rank cannot take part), `CollectiveTimeout` (a rank
did not come).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcdist.arrays.annotations import AnyArray, AnyArrays
from hpcdist.comm import describe
from hpcdist.comm.dispatch import dispatch, not_a_member
from hpcdist.comm.group import Group
from hpcdist.comm.hot import in_one_call
from hpcdist.comm.session import resolve_group
from hpcdist.errors import UsageError
from hpcdist.transport.call.reduction import ReduceOp
from hpcdist.transport.waiting.work import Work


@in_one_call
def all_reduce(
    tensor: AnyArray, op: int = ReduceOp.SUM, group: Group | None = None, sync_op: bool = True
) -> Work:
    """Replace `tensor` on every rank by its reduction over all ranks (MPI_Allreduce).

    Args:
        tensor: array of equal shape and dtype on all ranks.
        op: a `ReduceOp`. float16 and bfloat16 are accumulated in float32; MAX and MIN propagate
            NaN; AVG is for floats and complex.
        group: the ranks that take part; None for all.
        sync_op: return when the operation has ended.

    Returns:
        The operation's `Work`. All ranks end with the same bits.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> x = np.ones(3)
        >>> dist.all_reduce(x).is_completed()
        True

    """
    return dispatch(group, sync_op, describe.all_reduce, tensor, op)


@in_one_call
def reduce(
    tensor: AnyArray,
    dst: int,
    op: int = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
) -> Work:
    """Replace `tensor` on rank `dst` by its reduction over all ranks (MPI_Reduce).

    The other ranks' arrays stay as they are. Arguments as in `all_reduce`.

    Args:
        tensor: array of equal shape and dtype on all ranks.
        dst: the world rank that gets the result.
        op: a `ReduceOp`, as in `all_reduce`.
        group: the ranks that take part; None for all.
        sync_op: return when the operation has ended.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> x = np.ones(3)
        >>> _ = dist.reduce(x, dst=0)  # on rank 0 the sum, elsewhere ones
        >>> x.tolist() == [dist.get_world_size()] * 3
        True

    """
    return dispatch(group, sync_op, describe.reduce, tensor, dst, op)


@in_one_call
def reduce_scatter(
    tensor: AnyArray,
    tensor_list: AnyArrays,
    op: int = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
) -> Work:
    """Write into `tensor` the reduction of the blocks meant for this rank.

    (MPI_Reduce_scatter_block, MPI_Reduce_scatter.)

    Args:
        tensor: the output.
        tensor_list: one array per rank of the group, each like the `tensor` of that rank, or one
            array of n times the elements.
        op: a `ReduceOp`.
        group: the ranks that take part; None for all.
        sync_op: return when the operation has ended.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def mine():
        ...     block = np.zeros(2)
        ...     dist.reduce_scatter(block, np.arange(6.0))
        ...     return block.tolist()
        >>> dist.simulate(3, mine)
        [[0.0, 3.0], [6.0, 9.0], [12.0, 15.0]]

    """
    return dispatch(group, sync_op, describe.reduce_scatter, tensor, tensor_list, op)


def scan(
    tensor: AnyArray, op: int = ReduceOp.SUM, group: Group | None = None, sync_op: bool = True
) -> Work:
    """Replace `tensor` by its reduction over this rank and those before it (MPI_Scan).

    Args:
        tensor: array of equal shape and dtype on all ranks.
        op: a `ReduceOp`, as in `all_reduce`.
        group: the ranks that take part; None for all.
        sync_op: return when the operation has ended.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def so_far():
        ...     x = np.array([dist.get_rank() + 1])
        ...     dist.scan(x)
        ...     return int(x[0])
        >>> dist.simulate(3, so_far)
        [1, 3, 6]

    """
    return dispatch(group, sync_op, describe.scan, tensor, op)


def exscan(
    tensor: AnyArray, op: int = ReduceOp.SUM, group: Group | None = None, sync_op: bool = True
) -> Work:
    """Replace `tensor` by its reduction over the ranks before this one (MPI_Exscan).

    The first rank's array stays as it is.

    Args:
        tensor: array of equal shape and dtype on all ranks.
        op: a `ReduceOp`, as in `all_reduce`.
        group: the ranks that take part; None for all.
        sync_op: return when the operation has ended.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def before_me():
        ...     x = np.array([dist.get_rank() + 1])
        ...     dist.exscan(x)
        ...     return int(x[0])
        >>> dist.simulate(3, before_me)
        [1, 1, 3]

    """
    return dispatch(group, sync_op, describe.exscan, tensor, op)


@in_one_call
def broadcast(tensor: AnyArray, src: int, group: Group | None = None, sync_op: bool = True) -> Work:
    """Replace `tensor` on every rank by the one of rank `src` (MPI_Bcast).

    Of at most 512 bytes on a node with fewer cores than ranks nobody waits for who only receives.
    If ranks disagree there, those that have gone on get the `MismatchError` in the next operation
    that waits for all.

    Args:
        tensor: on `src` what is sent, on the other ranks the output; of equal shape and dtype.
        src: the world rank whose array all get.
        group: the ranks that take part; None for all.
        sync_op: return when the operation has ended.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def received():
        ...     x = np.full(2, dist.get_rank())
        ...     dist.broadcast(x, src=1)
        ...     return x.tolist()
        >>> dist.simulate(3, received)
        [[1, 1], [1, 1], [1, 1]]

    """
    return dispatch(group, sync_op, describe.broadcast, tensor, src)


@in_one_call
def all_gather(
    tensor_list: AnyArrays, tensor: AnyArray, group: Group | None = None, sync_op: bool = True
) -> Work:
    """Collect the `tensor` of every rank on all ranks (MPI_Allgather, MPI_Allgatherv).

    Args:
        tensor_list: an empty list is filled with one new array per rank; a list of n arrays,
            each like the `tensor` of that rank, is written in place; one array of n times the
            elements takes them one after the other, if all are alike.
        tensor: this rank's contribution.
        group: the ranks that take part; None for all.
        sync_op: return when the operation has ended.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def collected():
        ...     parts = []
        ...     dist.all_gather(parts, np.array([dist.get_rank()]))
        ...     return np.concatenate(parts).tolist()
        >>> dist.simulate(3, collected)
        [[0, 1, 2], [0, 1, 2], [0, 1, 2]]

    """
    return dispatch(group, sync_op, describe.all_gather, tensor_list, tensor)


@in_one_call
def gather(
    tensor: AnyArray,
    gather_list: AnyArrays | None = None,
    dst: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
) -> Work:
    """Collect the `tensor` of every rank on rank `dst` (MPI_Gather, MPI_Gatherv).

    Args:
        tensor: this rank's contribution.
        gather_list: on `dst`: an empty list to fill, n arrays, or one array; see `all_gather`.
            Ignored on the other ranks.
        dst: the world rank that collects.
        group: the ranks that take part; None for all.
        sync_op: return when the operation has ended.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def collected():
        ...     parts = []
        ...     dist.gather(np.array([dist.get_rank()]), parts, dst=0)
        ...     return len(parts)
        >>> dist.simulate(3, collected)
        [3, 0, 0]

    """
    return dispatch(group, sync_op, describe.gather, tensor, gather_list, dst)


@in_one_call
def scatter(
    tensor: AnyArray,
    tensor_list: AnyArrays | None = None,
    src: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
) -> Work:
    """Hand one array of rank `src` to each rank, into `tensor` (MPI_Scatter, MPI_Scatterv).

    Where ranks share cores, the error of a disagreement may come later, as that of `broadcast`.

    Args:
        tensor: the output.
        tensor_list: on `src`: one array per rank, each like the `tensor` of that rank, or one
            array of n times the elements. Meaningless (and warned of) on the other ranks.
        src: the world rank that hands out.
        group: the ranks that take part; None for all.
        sync_op: return when the operation has ended.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def handed_out():
        ...     part = np.zeros(2)
        ...     dist.scatter(part, np.arange(6.0) if dist.get_rank() == 0 else None, src=0)
        ...     return part.tolist()
        >>> dist.simulate(3, handed_out)
        [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]

    """
    warn_of_meaningless(tensor_list, src, group)
    return dispatch(group, sync_op, describe.scatter, tensor, tensor_list, src)


def warn_of_meaningless(tensor_list: AnyArrays | None, src: int, group: Group | None) -> None:
    """Warn, at the caller's caller, of a list that only rank `src` of a scatter gives."""
    at_hand = resolve_group(group)
    if tensor_list is not None and at_hand.is_member() and at_hand.world_rank != src:
        warnings.warn(
            f"tensor_list is meaningless on rank {at_hand.world_rank}: rank {src} scatters",
            stacklevel=3,
        )


@in_one_call
def alltoall(
    out_tensor_list: AnyArrays,
    in_tensor_list: AnyArrays,
    group: Group | None = None,
    sync_op: bool = True,
) -> Work:
    """Send entry j of `in_tensor_list` to rank j; entry i of the output comes from rank i.

    (MPI_Alltoall, MPI_Alltoallv.)

    Args:
        out_tensor_list: n arrays, of the sizes that the others send, or an empty list to fill.
        in_tensor_list: n arrays of one dtype, whose shapes may differ. Both may instead be one
            array each, cut into equal parts along dim 0.
        group: the ranks that take part; None for all.
        sync_op: return when the operation has ended.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def exchanged():
        ...     to_each = [np.array([10 * dist.get_rank() + other]) for other in range(3)]
        ...     from_each = []
        ...     dist.alltoall(from_each, to_each)
        ...     return np.concatenate(from_each).tolist()
        >>> dist.simulate(3, exchanged)
        [[0, 10, 20], [1, 11, 21], [2, 12, 22]]

    """
    return dispatch(group, sync_op, describe.alltoall, out_tensor_list, in_tensor_list)


@in_one_call
def alltoall_single(
    out_tensor: AnyArray,
    in_tensor: AnyArray,
    group: Group | None = None,
    sync_op: bool = True,
    *,
    in_split_sizes: Sequence[int] | None = None,
    out_split_sizes: Sequence[int] | None = None,
) -> Work:
    """Cut `in_tensor` along dim 0 and send part j to rank j (MPI_Alltoallv).

    Args:
        out_tensor: takes the parts in rank order.
        in_tensor: what is cut.
        group: the ranks that take part; None for all.
        sync_op: return when the operation has ended.
        in_split_sizes: rows for each rank; None for equal parts. By keyword only, because their
            order differs between Paddle's two forms.
        out_split_sizes: rows from each rank; None for equal parts.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def exchanged():
        ...     x = np.arange(3) + 10 * dist.get_rank()
        ...     out = np.empty_like(x)
        ...     dist.alltoall_single(out, x)
        ...     return out.tolist()
        >>> dist.simulate(3, exchanged)
        [[0, 10, 20], [1, 11, 21], [2, 12, 22]]

    """
    args = out_tensor, in_tensor, in_split_sizes, out_split_sizes
    check_no_split_sizes(group, sync_op)
    return dispatch(group, sync_op, describe.alltoall_single, *args)


def check_no_split_sizes(group: Any, sync_op: Any) -> None:
    """Refuse split sizes where `group` and `sync_op` are: other libraries have them there."""
    if sync_op is None or isinstance(group, _SIZES) or isinstance(sync_op, _SIZES):
        raise UsageError(
            f"alltoall_single got {group!r} for its group and {sync_op!r} for sync_op, where other "
            "libraries have split sizes; give them by keyword: in_split_sizes=, out_split_sizes="
        )


_SIZES = (list, tuple, np.ndarray)


@in_one_call
def barrier(group: Group | None = None, sync_op: bool = True) -> Work:
    """Wait until every rank of the group has called this (MPI_Barrier).

    Args:
        group: the ranks that wait for each other; None for all.
        sync_op: return when all have come; else `Work.wait` waits for them.

    Example:
        >>> import hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> dist.barrier().is_completed()
        True

    """
    return dispatch(group, sync_op, describe.barrier)


def wait(tensor: AnyArray, group: Group | None = None, use_calc_stream: bool = True) -> None:
    """Block until the operations issued on the group have ended, so that `tensor` may be used.

    Local. For arrays in host memory both values of `use_calc_stream` mean the same. For arrays on
    a GPU the current stream waits, and not the host, unless ``use_calc_stream=False``.

    Args:
        tensor: what is used next; operations on other arrays are waited for, too.
        group: the group that they were issued on; None for that of all ranks.
        use_calc_stream: let the current stream of a GPU wait, and not the host.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> x = np.ones(3)
        >>> _ = dist.all_reduce(x, sync_op=False)
        >>> dist.wait(x)

    """
    group = resolve_group(group)
    if group.transport is None:
        not_a_member(group)
    else:
        group.transport.synchronize(on_device=use_calc_stream)


all_to_all = alltoall
all_to_all_single = alltoall_single
all_gather_into_tensor = all_gather
reduce_scatter_tensor = reduce_scatter
