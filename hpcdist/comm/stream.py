"""The stream variants: each takes one array or a list, and `use_calc_stream`.

For arrays in host memory there is one stream, the program's own: ``use_calc_stream=True`` runs
the operation on it, with nothing left to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcdist.comm import collectives, messages
from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.transport.base import Work
from hpcdist.transport.recipes import ReduceOp

__all__ = [
    "all_gather",
    "all_reduce",
    "alltoall",
    "alltoall_single",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]


def _check(sync_op: bool, use_calc_stream: bool) -> None:
    if use_calc_stream and not sync_op:
        raise UsageError("use_calc_stream can only be true in sync op behavior.")


def all_reduce(
    tensor: Any,
    op: int = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Do `hpcdist.all_reduce`."""
    _check(sync_op, use_calc_stream)
    return collectives.all_reduce(tensor, op, group, sync_op)


def reduce(
    tensor: Any,
    dst: int = 0,
    op: int = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Do `hpcdist.reduce`; `dst` defaults to 0."""
    _check(sync_op, use_calc_stream)
    return collectives.reduce(tensor, dst, op, group, sync_op)


def reduce_scatter(
    tensor: Any,
    tensor_or_tensor_list: Any,
    op: int = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Do `hpcdist.reduce_scatter`."""
    _check(sync_op, use_calc_stream)
    return collectives.reduce_scatter(tensor, tensor_or_tensor_list, op, group, sync_op)


def broadcast(
    tensor: Any,
    src: int,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Do `hpcdist.broadcast`."""
    _check(sync_op, use_calc_stream)
    return collectives.broadcast(tensor, src, group, sync_op)


def all_gather(
    tensor_or_tensor_list: Any,
    tensor: Any,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Do `hpcdist.all_gather`."""
    _check(sync_op, use_calc_stream)
    return collectives.all_gather(tensor_or_tensor_list, tensor, group, sync_op)


def gather(
    tensor: Any,
    gather_list: Any = None,
    dst: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Do `hpcdist.gather`."""
    _check(sync_op, use_calc_stream)
    return collectives.gather(tensor, gather_list, dst, group, sync_op)


def scatter(
    tensor: Any,
    tensor_or_tensor_list: Any = None,
    src: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Do `hpcdist.scatter`."""
    _check(sync_op, use_calc_stream)
    return collectives.scatter(tensor, tensor_or_tensor_list, src, group, sync_op)


def alltoall(
    out_tensor_or_tensor_list: Any,
    in_tensor_or_tensor_list: Any,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Do `hpcdist.alltoall`."""
    _check(sync_op, use_calc_stream)
    return collectives.alltoall(out_tensor_or_tensor_list, in_tensor_or_tensor_list, group, sync_op)


def alltoall_single(
    out_tensor: Any,
    in_tensor: Any,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
    *,
    in_split_sizes: Sequence[int] | None = None,
    out_split_sizes: Sequence[int] | None = None,
) -> Work:
    """Do `hpcdist.alltoall_single`; split sizes by keyword only, in both forms."""
    _check(sync_op, use_calc_stream)
    return collectives.alltoall_single(
        out_tensor,
        in_tensor,
        group,
        sync_op,
        in_split_sizes=in_split_sizes,
        out_split_sizes=out_split_sizes,
    )


def send(
    tensor: Any,
    dst: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
    tag: int = 0,
) -> Work:
    """Do `hpcdist.send`."""
    _check(sync_op, use_calc_stream)
    return messages.send(tensor, dst, group, sync_op, tag)


def recv(
    tensor: Any,
    src: int | None = 0,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
    tag: int = 0,
) -> Work:
    """Do `hpcdist.recv`."""
    _check(sync_op, use_calc_stream)
    return messages.recv(tensor, src, group, sync_op, tag)


all_to_all = alltoall
all_to_all_single = alltoall_single
