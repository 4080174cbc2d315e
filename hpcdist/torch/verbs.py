"""`Verbs`: torch's collectives, each described to hpcdist in a line or two.

The methods have the names torch calls: those of its C++ interface, and where torch 2.13 renamed
one, both names. Arguments are lists of tensors because torch once had several devices a process;
options carry operator, root (a rank of the group) and whether the call is asynchronous.

A call goes straight to hpcdist, unless a tool of torch looks on (`onlookers`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.distributed as c10d

from hpcdist.comm import describe
from hpcdist.comm.describe_messages import describe_recv, describe_send
from hpcdist.comm.dispatch import dispatch
from hpcdist.comm.group import Group
from hpcdist.comm.hot import hot
from hpcdist.torch import descriptions
from hpcdist.torch.onlookers import shown, somebody_looks_on, wraps_others
from hpcdist.torch.works import TorchWork
from hpcdist.transport.call.call import Call

FORMER_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""What verbs were called before torch 2.13."""


def _verb(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make the verb that torch calls of what it does, which goes to `UNSEEN`."""
    name = method.__name__

    @wraps(method)
    def unseen(self: Verbs, *args: Any) -> Any:
        """Run the verb, for tensors that wrap others by the dispatcher.

        Tensors on devices hpcdist does not reach itself go to torch's backend.
        """
        tensor = next(_tensors(args), None)
        if type(tensor) not in _PLAIN and wraps_others(type(tensor)):
            return shown(torchs_own(name), unseen, self, *args)
        if tensor is not None and tensor.device.type != "cpu":
            theirs = self.handed_over(name, tensor.device)
            if theirs is not None:
                return theirs(self, *args)
        return method(self, *args)

    @wraps(method)
    def run(self: Verbs, *args: Any, **named: Any) -> Any:
        args += tuple(named.values())  # torch names the options of a barrier
        if somebody_looks_on():
            return shown(torchs_own(name), unseen, self, *args)
        return unseen(self, *args)

    UNSEEN[name] = unseen
    return run


UNSEEN: dict[str, Callable[..., Any]] = {}
"""All verbs by name, as they are when nobody looks on; functions of a process group."""


_PLAIN = {type(None), torch.Tensor, torch.nn.Parameter}


def torchs_own(name: str) -> Callable[..., Any]:
    """Return the method of torch's process groups, which sends an operation to its dispatcher.

    C++ calls the Python method of this name, unless it is called from there: pybind11 knows that
    by the name of the caller.
    """
    known = name if hasattr(c10d.ProcessGroup, name) else FORMER_NAMES[name]
    method = getattr(c10d.ProcessGroup, known)

    def dispatch(self: Any, *args: Any) -> Any:
        return method(self, *args)

    dispatch.__code__ = dispatch.__code__.replace(co_name=known)
    return dispatch


def _tensors(args: Any) -> Iterator[torch.Tensor]:
    for each in args:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors(each)


class Verbs:
    """torch's collectives on an hpcdist `Group`; mixed into what torch takes as a process group."""

    group: Group

    @abstractmethod
    def handed_over(self, name: str, device: torch.device) -> Callable[..., Any] | None:
        """Return the verb `name` of torch's backend for `device`; None to run our own."""

    # ---- reductions

    @_verb
    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors = _listed(tensors)
        return self._go(opts, tensors, *((descriptions.all_reduce, t, opts) for t in tensors))

    @_verb
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return UNSEEN["allreduce"](self, tensors, opts)

    @_verb
    def reduce(self, tensors: Any, opts: Any) -> Any:
        tensors, dst = _listed(tensors), self.group.get_global_rank(opts.rootRank)
        return self._go(opts, tensors, *((descriptions.reduce, t, dst, opts) for t in tensors))

    @_verb
    def reduce_scatter(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        if isinstance(outs, torch.Tensor):
            outs, ins = [outs], [ins]
        pairs = zip(outs, ins, strict=True)
        calls = ((descriptions.reduce_scatter, out, given, opts) for out, given in pairs)
        return self._go(opts, outs, *calls)

    @_verb
    def reduce_scatter_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        return UNSEEN["reduce_scatter"](self, outs, ins, opts)

    @_verb
    def reduce_scatter_single(
        self, out: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Any:
        return self._go(opts, [out], (descriptions.reduce_scatter, out, given, opts))

    # ---- moving data

    @_verb
    def broadcast(self, tensors: Any, opts: Any) -> Any:
        tensors, src = _listed(tensors), self.group.get_global_rank(opts.rootRank)
        return self._go(opts, tensors, *((describe.broadcast, t, src) for t in tensors))

    @_verb
    def allgather(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        if isinstance(ins, torch.Tensor):
            outs, ins = [outs], [ins]
        calls = ((descriptions.all_gather, out, own) for out, own in zip(outs, ins, strict=True))
        return self._go(opts, list(_tensors(outs)), *calls)

    @_verb
    def all_gather_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        return UNSEEN["allgather"](self, outs, ins, opts)

    @_verb
    def all_gather_single(self, out: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        return self._go(opts, [out], (describe.all_gather, out, given))

    @_verb
    def allgather_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        return UNSEEN["allgather"](
            self, [list(column) for column in zip(*outs, strict=True)], ins, opts
        )

    @_verb
    def gather(self, outs: Any, ins: Any, opts: Any) -> Any:
        into, dst = (outs[0] if outs else None), self.group.get_global_rank(opts.rootRank)
        return self._go(opts, into or [], (descriptions.gather, into, ins[0], dst))

    @_verb
    def scatter(self, outs: Any, ins: Any, opts: Any) -> Any:
        given, src = (ins[0] if ins else None), self.group.get_global_rank(opts.rootRank)
        return self._go(opts, outs, (describe.scatter, outs[0], given, src))

    @_verb
    def all_to_all_single(
        self,
        out: torch.Tensor,
        given: torch.Tensor,
        out_sizes: Any,
        in_sizes: Any,
        opts: Any = None,
    ) -> Any:
        call = (describe.alltoall_single, out, given, in_sizes or None, out_sizes or None)
        return self._go(opts, [out], call)

    @_verb
    def alltoall(self, outs: list[torch.Tensor], ins: list[torch.Tensor], opts: Any = None) -> Any:
        return self._go(opts, outs, (describe.alltoall, outs, ins))

    @_verb
    def barrier(self, opts: Any = None) -> Any:
        return self._go(opts, [], (describe.barrier,))

    # ---- messages

    @_verb
    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Any:
        return self._go(
            None, tensors, (describe_send, tensors[0], self.group.get_global_rank(dst), tag)
        )

    @_verb
    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Any:
        return self._go(
            None, tensors, (describe_recv, tensors[0], self.group.get_global_rank(src), tag)
        )

    @_verb
    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Any:
        return self._go(None, tensors, (describe_recv, tensors[0], None, tag))

    def _go(self, opts: Any, tensors: list[torch.Tensor], *calls: tuple[Any, ...]) -> TorchWork:
        """Issue `calls`, each a function that describes and its arguments after the group."""
        group = self.group
        if opts is not None and not opts.asyncOp:
            for describe_call, *args in calls:
                at_once = _HOT.get(describe_call)
                if at_once is None or at_once(*args, group, True) is None:
                    dispatch(group, True, describe_call, *args)
            return TorchWork(group, tensors, 0)
        work = TorchWork(group, tensors, len(calls))
        for describe_call, *args in calls:
            work.works.append(dispatch(group, False, _watched, work.ended, describe_call, args))
        return work


for _now, _formerly in FORMER_NAMES.items():
    # Where torch knows both names, its C++ calls one of the other; of these two it does not.
    if not hasattr(c10d.ProcessGroup, _now) or _now in (
        "all_gather_single",
        "reduce_scatter_single",
    ):
        setattr(Verbs, _formerly, getattr(Verbs, _now))


def _reducing(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Return a verb of the hot path that takes torch's options in place of an operator."""

    def run(*args: Any) -> Any:
        *given, opts, group, sync_op = args
        op, factor = descriptions.operator_of(opts)
        return verb(*given, op, group, sync_op) if factor is None else None

    return run


def _gather(outs: Any, own: torch.Tensor, dst: int, group: Group, sync_op: bool) -> Any:
    return hot.gather(own, outs, dst, group, sync_op)


_HOT: dict[Callable[..., Any], Callable[..., Any]] = {
    descriptions.all_reduce: _reducing(hot.all_reduce),
    descriptions.reduce: _reducing(hot.reduce),
    descriptions.reduce_scatter: _reducing(hot.reduce_scatter),
    descriptions.all_gather: hot.all_gather,
    descriptions.gather: _gather,
    describe.broadcast: hot.broadcast,
    describe.all_gather: hot.all_gather,
    describe.scatter: hot.scatter,
    describe.alltoall: hot.alltoall,
    describe.alltoall_single: hot.alltoall_single,
    describe.barrier: hot.barrier,
}
"""The hot path of what is described; it takes the same arguments, the group and ``sync_op``."""


def _watched(group: Group, ended: Any, describe_call: Callable[..., Call], args: Any) -> Call:
    return describe_call(group, *args)._replace(ended=ended)


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors
