"""The stream variants: each takes one array or a list, and `use_calc_stream`.

An operation on arrays of a GPU runs on the group's communication stream: it waits there for what
the current stream has computed, and the current stream waits for it (with ``sync_op=False`` at
`Work.wait`). With ``use_calc_stream=True`` it runs on the current stream itself, with nothing left
to wait for. For arrays in host memory there is one stream, the program's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcdist.comm import describe
from hpcdist.comm.collectives import check_no_split_sizes, warn_of_meaningless
from hpcdist.comm.dispatch import Describe, as_flag, dispatch
from hpcdist.comm.group import Group
from hpcdist.comm.messages import describe_recv, describe_send, is_nobody, to_nobody
from hpcdist.errors import UsageError
from hpcdist.transport.base import Work
from hpcdist.transport.call import WITH_ARRAYS, Call
from hpcdist.transport.reduction import ReduceOp

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


def _dispatch(
    group: Group | None, sync_op: bool, use_calc_stream: bool, describe_call: Describe, *args: Any
) -> Work:
    if not as_flag(use_calc_stream, "use_calc_stream"):
        return dispatch(group, sync_op, describe_call, *args)
    if not as_flag(sync_op, "sync_op"):
        raise UsageError("use_calc_stream can only be true in sync op behavior.")
    return dispatch(group, True, _on_current, describe_call, args)


def _on_current(group: Group, describe_call: Describe, args: Sequence[Any]) -> Call:
    call = describe_call(group, *args)
    return call._replace(on_current=True) if isinstance(call, WITH_ARRAYS) else call


def all_reduce(
    tensor: Any,
    op: int = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Call `hpcdist.all_reduce` with `use_calc_stream`."""
    return _dispatch(group, sync_op, use_calc_stream, describe.all_reduce, tensor, op)


def reduce(
    tensor: Any,
    dst: int = 0,
    op: int = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Call `hpcdist.reduce` with `use_calc_stream`; `dst` defaults to 0."""
    return _dispatch(group, sync_op, use_calc_stream, describe.reduce, tensor, dst, op)


def reduce_scatter(
    tensor: Any,
    tensor_or_tensor_list: Any,
    op: int = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Call `hpcdist.reduce_scatter` with `use_calc_stream`."""
    return _dispatch(
        group, sync_op, use_calc_stream, describe.reduce_scatter, tensor, tensor_or_tensor_list, op
    )


def broadcast(
    tensor: Any,
    src: int,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Call `hpcdist.broadcast` with `use_calc_stream`."""
    return _dispatch(group, sync_op, use_calc_stream, describe.broadcast, tensor, src)


def all_gather(
    tensor_or_tensor_list: Any,
    tensor: Any,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Call `hpcdist.all_gather` with `use_calc_stream`."""
    return _dispatch(
        group, sync_op, use_calc_stream, describe.all_gather, tensor_or_tensor_list, tensor
    )


def gather(
    tensor: Any,
    gather_list: Any = None,
    dst: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Call `hpcdist.gather` with `use_calc_stream`."""
    return _dispatch(group, sync_op, use_calc_stream, describe.gather, tensor, gather_list, dst)


def scatter(
    tensor: Any,
    tensor_or_tensor_list: Any = None,
    src: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Call `hpcdist.scatter` with `use_calc_stream`."""
    warn_of_meaningless(tensor_or_tensor_list, src, group)
    return _dispatch(
        group, sync_op, use_calc_stream, describe.scatter, tensor, tensor_or_tensor_list, src
    )


def alltoall(
    out_tensor_or_tensor_list: Any,
    in_tensor_or_tensor_list: Any,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Call `hpcdist.alltoall` with `use_calc_stream`."""
    return _dispatch(
        group,
        sync_op,
        use_calc_stream,
        describe.alltoall,
        out_tensor_or_tensor_list,
        in_tensor_or_tensor_list,
    )


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
    """Call `hpcdist.alltoall_single` with `use_calc_stream`; split sizes by keyword only."""
    check_no_split_sizes(group, sync_op)
    return _dispatch(
        group,
        sync_op,
        use_calc_stream,
        describe.alltoall_single,
        out_tensor,
        in_tensor,
        in_split_sizes,
        out_split_sizes,
    )


def send(
    tensor: Any,
    dst: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
    tag: int = 0,
) -> Work:
    """Call `hpcdist.send` with `use_calc_stream`."""
    if is_nobody(dst):
        return to_nobody(group, describe_send, tensor, tag)
    return _dispatch(group, sync_op, use_calc_stream, describe_send, tensor, dst, tag)


def recv(
    tensor: Any,
    src: int | None = 0,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
    tag: int = 0,
) -> Work:
    """Call `hpcdist.recv` with `use_calc_stream`."""
    if is_nobody(src):
        return to_nobody(group, describe_recv, tensor, tag)
    return _dispatch(group, sync_op, use_calc_stream, describe_recv, tensor, src, tag)


all_to_all = alltoall
all_to_all_single = alltoall_single
