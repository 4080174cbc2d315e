"""The stream variants: each takes one array or a list, and `use_calc_stream`.

An operation on arrays of a GPU runs on the group's communication stream: it waits there for what
the current stream has computed, and the current stream waits for it (with ``sync_op=False`` at
`Work.wait`). With ``use_calc_stream=True`` it runs on the current stream itself, with nothing left
to wait for. For arrays in host memory there is one stream, the program's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcdist.arrays.annotations import AnyArray, AnyArrays
from hpcdist.comm import describe
from hpcdist.comm.collectives import check_no_split_sizes, warn_of_meaningless
from hpcdist.comm.describe_messages import describe_recv, describe_send
from hpcdist.comm.dispatch import Describe, as_flag, dispatch
from hpcdist.comm.group import Group
from hpcdist.comm.hot import VERBS, hot
from hpcdist.comm.messages import is_nobody, to_nobody
from hpcdist.errors import UsageError
from hpcdist.transport.call.call import WITH_ARRAYS, Call
from hpcdist.transport.call.reduction import ReduceOp
from hpcdist.transport.waiting.work import Work

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
    verb = _HOT.get(describe_call)
    if verb is not None and (use_calc_stream is False or (use_calc_stream is sync_op is True)):
        done: Work | None = verb(*args, group, sync_op)
        if done is not None:  # arrays in host memory, which know one stream
            return done
    if not as_flag(use_calc_stream, "use_calc_stream"):
        return dispatch(group, sync_op, describe_call, *args)
    if not as_flag(sync_op, "sync_op"):
        raise UsageError("use_calc_stream can only be true in sync op behavior.")
    return dispatch(group, True, _on_current, describe_call, args)


_HOT = {describe_call: getattr(hot, verb) for verb, describe_call in VERBS.items()}


def _on_current(group: Group, describe_call: Describe, args: Sequence[Any]) -> Call:
    call = describe_call(group, *args)
    return call._replace(on_current=True) if isinstance(call, WITH_ARRAYS) else call


def all_reduce(
    tensor: AnyArray,
    op: int = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Call `hpcdist.all_reduce` with `use_calc_stream`.

    Args:
        tensor: array of equal shape and dtype on all ranks.
        op: a `ReduceOp`. float16 and bfloat16 are accumulated in float32; MAX and MIN propagate
            NaN; AVG is for floats and complex.
        group: the ranks that take part; None for all.
        sync_op: return when the operation has ended.
        use_calc_stream: on a GPU, run on the current stream itself, with nothing left to wait for;
            for arrays in host memory it changes nothing.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> dist.stream.all_reduce(np.ones(3), use_calc_stream=True).is_completed()
        True

    """
    return _dispatch(group, sync_op, use_calc_stream, describe.all_reduce, tensor, op)


def reduce(
    tensor: AnyArray,
    dst: int = 0,
    op: int = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Call `hpcdist.reduce` with `use_calc_stream`; `dst` defaults to 0.

    Args:
        tensor: array of equal shape and dtype on all ranks.
        dst: the world rank that gets the result.
        op: a `ReduceOp`, as in `all_reduce`.
        group: the ranks that take part; None for all.
        sync_op: return when the operation has ended.
        use_calc_stream: on a GPU, run on the current stream itself, with nothing left to wait for;
            for arrays in host memory it changes nothing.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> dist.stream.reduce(np.ones(3), dst=0, use_calc_stream=True).is_completed()
        True

    """
    return _dispatch(group, sync_op, use_calc_stream, describe.reduce, tensor, dst, op)


def reduce_scatter(
    tensor: AnyArray,
    tensor_or_tensor_list: AnyArrays,
    op: int = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Call `hpcdist.reduce_scatter` with `use_calc_stream`.

    Args:
        tensor: the output.
        tensor_or_tensor_list: one array per rank of the group, each like the `tensor` of that rank,
            or one array of n times the elements.
        op: a `ReduceOp`.
        group: the ranks that take part; None for all.
        sync_op: return when the operation has ended.
        use_calc_stream: on a GPU, run on the current stream itself, with nothing left to wait for;
            for arrays in host memory it changes nothing.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> x = np.ones((dist.get_world_size(), 3))
        >>> dist.stream.reduce_scatter(np.empty(3), x, use_calc_stream=True).is_completed()
        True

    """
    return _dispatch(
        group, sync_op, use_calc_stream, describe.reduce_scatter, tensor, tensor_or_tensor_list, op
    )


def broadcast(
    tensor: AnyArray,
    src: int,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Call `hpcdist.broadcast` with `use_calc_stream`.

    Args:
        tensor: on `src` what is sent, on the other ranks the output; of equal shape and dtype.
        src: the world rank whose array all get.
        group: the ranks that take part; None for all.
        sync_op: return when the operation has ended.
        use_calc_stream: on a GPU, run on the current stream itself, with nothing left to wait for;
            for arrays in host memory it changes nothing.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> dist.stream.broadcast(np.ones(3), src=0, use_calc_stream=True).is_completed()
        True

    """
    return _dispatch(group, sync_op, use_calc_stream, describe.broadcast, tensor, src)


def all_gather(
    tensor_or_tensor_list: AnyArrays,
    tensor: AnyArray,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Call `hpcdist.all_gather` with `use_calc_stream`.

    Args:
        tensor_or_tensor_list: an empty list is filled with one new array per rank; a list of n
            arrays, each like the `tensor` of that rank, is written in place; one array of n times
            the elements takes them one after the other, if all are alike.
        tensor: this rank's contribution.
        group: the ranks that take part; None for all.
        sync_op: return when the operation has ended.
        use_calc_stream: on a GPU, run on the current stream itself, with nothing left to wait for;
            for arrays in host memory it changes nothing.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> parts = []
        >>> dist.stream.all_gather(parts, np.ones(3), use_calc_stream=True).is_completed()
        True

    """
    return _dispatch(
        group, sync_op, use_calc_stream, describe.all_gather, tensor_or_tensor_list, tensor
    )


def gather(
    tensor: AnyArray,
    gather_list: AnyArrays | None = None,
    dst: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Call `hpcdist.gather` with `use_calc_stream`.

    Args:
        tensor: this rank's contribution.
        gather_list: on `dst`: an empty list to fill, n arrays, or one array; see `all_gather`.
            Ignored on the other ranks.
        dst: the world rank that collects.
        group: the ranks that take part; None for all.
        sync_op: return when the operation has ended.
        use_calc_stream: on a GPU, run on the current stream itself, with nothing left to wait for;
            for arrays in host memory it changes nothing.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> dist.stream.gather(np.ones(3), [], dst=0, use_calc_stream=True).is_completed()
        True

    """
    return _dispatch(group, sync_op, use_calc_stream, describe.gather, tensor, gather_list, dst)


def scatter(
    tensor: AnyArray,
    tensor_or_tensor_list: AnyArrays | None = None,
    src: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Call `hpcdist.scatter` with `use_calc_stream`.

    Args:
        tensor: the output.
        tensor_or_tensor_list: on `src`: one array per rank, each like the `tensor` of that rank, or
            one array of n times the elements. Meaningless (and warned of) on the other ranks.
        src: the world rank that hands out.
        group: the ranks that take part; None for all.
        sync_op: return when the operation has ended.
        use_calc_stream: on a GPU, run on the current stream itself, with nothing left to wait for;
            for arrays in host memory it changes nothing.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> x = np.ones((dist.get_world_size(), 3))
        >>> dist.stream.scatter(np.empty(3), x, src=0, use_calc_stream=True).is_completed()
        True

    """
    warn_of_meaningless(tensor_or_tensor_list, src, group)
    return _dispatch(
        group, sync_op, use_calc_stream, describe.scatter, tensor, tensor_or_tensor_list, src
    )


def alltoall(
    out_tensor_or_tensor_list: AnyArrays,
    in_tensor_or_tensor_list: AnyArrays,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Work:
    """Call `hpcdist.alltoall` with `use_calc_stream`.

    Args:
        out_tensor_or_tensor_list: n arrays, of the sizes that the others send, or an empty list to
            fill.
        in_tensor_or_tensor_list: n arrays of one dtype, whose shapes may differ. Both may instead
            be one array each, cut into equal parts along dim 0.
        group: the ranks that take part; None for all.
        sync_op: return when the operation has ended.
        use_calc_stream: on a GPU, run on the current stream itself, with nothing left to wait for;
            for arrays in host memory it changes nothing.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> x = np.ones((dist.get_world_size(), 3))
        >>> dist.stream.alltoall(np.empty_like(x), x, use_calc_stream=True).is_completed()
        True

    """
    return _dispatch(
        group,
        sync_op,
        use_calc_stream,
        describe.alltoall,
        out_tensor_or_tensor_list,
        in_tensor_or_tensor_list,
    )


def alltoall_single(
    out_tensor: AnyArray,
    in_tensor: AnyArray,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
    *,
    in_split_sizes: Sequence[int] | None = None,
    out_split_sizes: Sequence[int] | None = None,
) -> Work:
    """Call `hpcdist.alltoall_single` with `use_calc_stream`; split sizes by keyword only.

    Args:
        out_tensor: takes the parts in rank order.
        in_tensor: what is cut.
        group: the ranks that take part; None for all.
        sync_op: return when the operation has ended.
        use_calc_stream: on a GPU, run on the current stream itself, with nothing left to wait for;
            for arrays in host memory it changes nothing.
        in_split_sizes: rows for each rank; None for equal parts. By keyword only, because their
            order differs between Paddle's two forms.
        out_split_sizes: rows from each rank; None for equal parts.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> x = np.ones((dist.get_world_size(), 3))
        >>> dist.stream.alltoall_single(np.empty_like(x), x, use_calc_stream=True).is_completed()
        True

    """
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
    tensor: AnyArray,
    dst: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
    tag: int = 0,
) -> Work:
    """Call `hpcdist.send` with `use_calc_stream`.

    Args:
        tensor: what is sent.
        dst: the receiver's world rank, or `PROC_NULL` for nobody.
        group: the group both belong to; None for all.
        sync_op: return when `tensor` may be changed again.
        use_calc_stream: on a GPU, run on the current stream itself, with nothing left to wait for;
            for arrays in host memory it changes nothing.
        tag: a number from 0 on; only a receive with the same tag takes the message.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> dist.stream.send(np.ones(3), dst=dist.PROC_NULL, use_calc_stream=True).is_completed()
        True

    """
    if is_nobody(dst):
        return to_nobody(group, describe_send, tensor, tag)
    return _dispatch(group, sync_op, use_calc_stream, describe_send, tensor, dst, tag)


def recv(
    tensor: AnyArray,
    src: int | None = 0,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
    tag: int = 0,
) -> Work:
    """Call `hpcdist.recv` with `use_calc_stream`.

    Args:
        tensor: the output.
        src: the sender's world rank; None receives from any rank.
        group: the group sender and receiver belong to; None for all.
        sync_op: return when the message has arrived.
        use_calc_stream: on a GPU, run on the current stream itself, with nothing left to wait for;
            for arrays in host memory it changes nothing.
        tag: messages with another tag are left for other receives.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> dist.stream.recv(np.ones(3), src=dist.PROC_NULL, use_calc_stream=True).is_completed()
        True

    """
    if is_nobody(src):
        return to_nobody(group, describe_recv, tensor, tag)
    return _dispatch(group, sync_op, use_calc_stream, describe_recv, tensor, src, tag)


all_to_all = alltoall
all_to_all_single = alltoall_single
