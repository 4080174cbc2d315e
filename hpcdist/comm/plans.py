"""Persistent plans: describe a collective once, start it many times on the same arrays.

``plan = plan_all_reduce(x)`` is collective and has the arguments of `all_reduce`; then
``plan.start().wait()`` in the loop, on every rank, and ``plan.free()`` at the end. It is faster
than a call, because everything has been checked and set up: small arrays of the ranks of a node
have places in shared memory, for others the persistent form that MPI has of some collectives
(MPI-4, section 6.13) is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import numpy as np

from hpcdist.arrays.annotations import AnyArray, AnyArrays
from hpcdist.arrays.packing import same_memory
from hpcdist.comm import describe
from hpcdist.comm.announcement import Announcement
from hpcdist.comm.dispatch import described, dispatch, is_refused, missed, not_a_member
from hpcdist.comm.group import Group
from hpcdist.comm.session import resolve_group
from hpcdist.comm.tensor_lists import keep
from hpcdist.errors import CollectiveTimeout, UsageError
from hpcdist.transport.base import REFUSE_START, Plan
from hpcdist.transport.call.call import Barrier, Call, Refusal, label, making
from hpcdist.transport.call.reduction import ReduceOp
from hpcdist.transport.flight.call_site import issued
from hpcdist.transport.flight.layout import PLAN
from hpcdist.transport.flight.recorder import end, fail, note
from hpcdist.transport.waiting.work import DONE, Known, Work


def plan_all_reduce(tensor: AnyArray, op: int = ReduceOp.SUM, group: Group | None = None) -> Plan:
    """Plan `all_reduce`. Collective.

    Args:
        tensor: array of equal shape and dtype on all ranks.
        op: a `ReduceOp`. float16 and bfloat16 are accumulated in float32; MAX and MIN propagate
            NaN; AVG is for floats and complex.
        group: the ranks that take part; None for all.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> plan = dist.plan_all_reduce(np.ones(3))
        >>> plan.start().wait()
        True
        >>> plan.free()

    """
    return _plan(group, describe.all_reduce, tensor, op)


def plan_reduce(
    tensor: AnyArray, dst: int, op: int = ReduceOp.SUM, group: Group | None = None
) -> Plan:
    """Plan `reduce`. Collective.

    Args:
        tensor: array of equal shape and dtype on all ranks.
        dst: the world rank that gets the result.
        op: a `ReduceOp`, as in `all_reduce`.
        group: the ranks that take part; None for all.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> plan = dist.plan_reduce(np.ones(3), dst=0)
        >>> plan.start().wait()
        True

    """
    return _plan(group, describe.reduce, tensor, dst, op)


def plan_reduce_scatter(
    tensor: AnyArray, tensor_list: AnyArrays, op: int = ReduceOp.SUM, group: Group | None = None
) -> Plan:
    """Plan `reduce_scatter`. Collective.

    Args:
        tensor: the output.
        tensor_list: one array per rank of the group, each like the `tensor` of that rank, or one
            array of n times the elements.
        op: a `ReduceOp`.
        group: the ranks that take part; None for all.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> n = dist.get_world_size()
        >>> plan = dist.plan_reduce_scatter(np.zeros(2), np.ones(2 * n))
        >>> plan.start().wait()
        True

    """
    return _plan(group, describe.reduce_scatter, tensor, tensor_list, op)


def plan_scan(tensor: AnyArray, op: int = ReduceOp.SUM, group: Group | None = None) -> Plan:
    """Plan `scan`. Collective.

    Args:
        tensor: array of equal shape and dtype on all ranks.
        op: a `ReduceOp`, as in `all_reduce`.
        group: the ranks that take part; None for all.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> plan = dist.plan_scan(np.ones(3))
        >>> plan.start().wait()
        True

    """
    return _plan(group, describe.scan, tensor, op)


def plan_exscan(tensor: AnyArray, op: int = ReduceOp.SUM, group: Group | None = None) -> Plan:
    """Plan `exscan`. Collective.

    Args:
        tensor: array of equal shape and dtype on all ranks.
        op: a `ReduceOp`, as in `all_reduce`.
        group: the ranks that take part; None for all.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> plan = dist.plan_exscan(np.ones(3))
        >>> plan.start().wait()
        True

    """
    return _plan(group, describe.exscan, tensor, op)


def plan_broadcast(tensor: AnyArray, src: int, group: Group | None = None) -> Plan:
    """Plan `broadcast`. Collective.

    Args:
        tensor: on `src` what is sent, on the other ranks the output; of equal shape and dtype.
        src: the world rank whose array all get.
        group: the ranks that take part; None for all.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> plan = dist.plan_broadcast(np.ones(3), src=0)
        >>> plan.start().wait()
        True

    """
    return _plan(group, describe.broadcast, tensor, src)


def plan_all_gather(tensor_list: AnyArrays, tensor: AnyArray, group: Group | None = None) -> Plan:
    """Plan `all_gather`. Collective.

    Args:
        tensor_list: an empty list is filled with one new array per rank; a list of n arrays, each
            like the `tensor` of that rank, is written in place; one array of n times the elements
            takes them one after the other, if all are alike.
        tensor: this rank's contribution.
        group: the ranks that take part; None for all.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> plan = dist.plan_all_gather(np.empty((dist.get_world_size(), 3)), np.ones(3))
        >>> plan.start().wait()
        True

    """
    return _plan(group, describe.all_gather, tensor_list, tensor)


def plan_gather(
    tensor: AnyArray, gather_list: AnyArrays | None = None, dst: int = 0, group: Group | None = None
) -> Plan:
    """Plan `gather`. Collective.

    Args:
        tensor: this rank's contribution.
        gather_list: on `dst`: an empty list to fill, n arrays, or one array; see `all_gather`.
            Ignored on the other ranks.
        dst: the world rank that collects.
        group: the ranks that take part; None for all.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> plan = dist.plan_gather(np.ones(3), np.empty((dist.get_world_size(), 3)), dst=0)
        >>> plan.start().wait()
        True

    """
    return _plan(group, describe.gather, tensor, gather_list, dst)


def plan_scatter(
    tensor: AnyArray, tensor_list: AnyArrays | None = None, src: int = 0, group: Group | None = None
) -> Plan:
    """Plan `scatter`. Collective.

    Args:
        tensor: the output.
        tensor_list: on `src`: one array per rank, each like the `tensor` of that rank, or one array
            of n times the elements. Meaningless (and warned of) on the other ranks.
        src: the world rank that hands out.
        group: the ranks that take part; None for all.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> plan = dist.plan_scatter(np.empty(3), np.ones((dist.get_world_size(), 3)), src=0)
        >>> plan.start().wait()
        True

    """
    return _plan(group, describe.scatter, tensor, tensor_list, src)


def plan_alltoall(
    out_tensor_list: AnyArrays, in_tensor_list: AnyArrays, group: Group | None = None
) -> Plan:
    """Plan `alltoall`. Collective.

    Args:
        out_tensor_list: n arrays, of the sizes that the others send, or an empty list to fill.
        in_tensor_list: n arrays of one dtype, whose shapes may differ. Both may instead be one
            array each, cut into equal parts along dim 0.
        group: the ranks that take part; None for all.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> x = np.ones((dist.get_world_size(), 3))
        >>> plan = dist.plan_alltoall(np.empty_like(x), x)
        >>> plan.start().wait()
        True

    """
    return _plan(group, describe.alltoall, out_tensor_list, in_tensor_list)


def plan_alltoall_single(
    out_tensor: AnyArray,
    in_tensor: AnyArray,
    group: Group | None = None,
    *,
    in_split_sizes: Sequence[int] | None = None,
    out_split_sizes: Sequence[int] | None = None,
) -> Plan:
    """Plan `alltoall_single`. Collective.

    Args:
        out_tensor: takes the parts in rank order.
        in_tensor: what is cut.
        group: the ranks that take part; None for all.
        in_split_sizes: rows for each rank; None for equal parts. By keyword only, because their
            order differs between Paddle's two forms.
        out_split_sizes: rows from each rank; None for equal parts.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> x = np.ones((dist.get_world_size(), 3))
        >>> plan = dist.plan_alltoall_single(np.empty_like(x), x)
        >>> plan.start().wait()
        True

    """
    return _plan(
        group, describe.alltoall_single, out_tensor, in_tensor, in_split_sizes, out_split_sizes
    )


def plan_barrier(group: Group | None = None) -> Plan:
    """Plan `barrier`. Collective.

    Args:
        group: the ranks that wait for each other; None for all.

    Example:
        >>> import hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> plan = dist.plan_barrier()
        >>> plan.start().wait()
        True

    """
    return _plan(group, describe.barrier)


def _plan(group: Group | None, describe_call: Callable[..., Any], *args: Any) -> Plan:
    group = resolve_group(group)
    if group.transport is None:
        not_a_member(group)
        return _NoPlan()
    call = _lasting(described(group, describe_call, *args), described(group, describe_call, *args))
    what = label(call, group.ranks)
    _meet(group, making(call, group.ranks))
    plan = group.transport.plan(call)
    if plan is None:
        return _ReplayPlan(group, describe_call, args, what)
    plan.watch(group, partial(_tell, group, call))
    return plan


def _meet(group: Group, made: Barrier | Refusal) -> None:
    """Return once all ranks of the group make the same plan, or raise."""
    number = 0
    if issued.at is None:  # else its place in the order is left to chance
        group.issued = number = group.issued + 1 + missed(group.transport)
    mark = note(PLAN, group.flight, number, 0, 0, 0)
    assert group.transport is not None
    try:
        group.transport.run(made)
    except BaseException as error:
        fail(mark)
        if number and is_refused(error):
            group.issued -= 1
        raise
    end(mark)


def _lasting(call: Any, again: Any) -> Any:
    """Return `call`, which was described twice, with something to finish if it sends a copy.

    So nobody starts it again: the copy is of what the arrays hold now. A reduce sends what is in
    `recv`, and a broadcast's root does.
    """
    sent, sent_again = (
        [each for each in (one.send, one.recv, *getattr(one, "sends", ())) if each is not None]
        for one in (call, again)
    )
    on_host = all(type(each) is np.ndarray for each in sent)
    if not on_host or all(
        one.nbytes == 0 or same_memory(one, other)
        for one, other in zip(sent, sent_again, strict=True)
    ):
        return call
    return call._replace(finish=call.finish or keep)


def _tell(group: Group, call: Call, start: Callable[[], Work]) -> Work:
    """Start a plan of the transport, and tell the listeners."""
    announcement = Announcement(group, call, group.issued if issued.at is None else None)
    with announcement as told:
        return _ToldWork(start(), announcement, told.error)


@final
class _ToldWork(Work):
    """The work of a plan that listeners were told of, and are told of again at its end.

    A plan cannot be called off: what a listener raised at its begin is raised by `wait`.
    """

    def __init__(self, work: Work, announcement: Announcement, error: Exception | None) -> None:
        self._work, self._announcement, self._error = work, announcement, error

    @property
    def limit_s(self) -> float:
        """The time limit of the operation."""
        return self._work.limit_s

    def wait(self, timeout: Any = None) -> bool:
        """Wait, and tell the end."""
        try:
            self._work.wait(timeout)
        except BaseException as error:
            if timeout is None or not isinstance(error, CollectiveTimeout):  # else it goes on
                self._announcement.end(error)
            raise
        self._end()
        return True

    def is_completed(self) -> bool:
        """Return whether the operation has ended, and tell the end."""
        if not self._work.is_completed():
            return False
        self._announcement.end(self._error)
        return True

    def detach(self) -> None:
        """See `Work.detach`."""
        self._work.detach()

    def _end(self) -> None:
        self._announcement.end(self._error)
        if self._error is not None:
            raise self._error

    def known(self) -> Known:
        """See `Work.known`."""
        return self._work.known()


@final
class _ReplayPlan(Plan):
    """A plan for calls without a persistent form: it describes and starts the call anew."""

    def __init__(self, group: Group, describe_call: Any, args: tuple[Any, ...], what: str) -> None:
        self._group: Group | None = group
        self._describe = describe_call
        self._args = args
        self._what = what
        self._work: Work = DONE

    def start(self) -> Work:
        """Begin the operation on what the arrays hold now."""
        if self._group is None or not self._work.is_completed():
            raise UsageError(REFUSE_START)
        self._work = dispatch(self._group, False, self._describe, *self._args)
        return self._work

    def free(self) -> None:
        """Forget the arrays."""
        self._work.wait()
        self._group, self._args = None, ()

    def in_words(self) -> str:
        """See `Plan.in_words`."""
        state = "under way" if self._work.known().ended is False else "ready"
        return f"{self._what}, {'freed' if self._group is None else state}"


@final
class _NoPlan(Plan):
    """What a rank outside the group gets: nothing happens."""

    def start(self) -> Work:
        """Return a completed work."""
        return DONE

    def free(self) -> None:
        """No-op."""

    def in_words(self) -> str:
        """See `Plan.in_words`."""
        return "nothing: this rank is not in the group"
