"""`Plans`: the plans of one group over MPI, in the best way that all of its ranks can go.

A small operation of ranks on one node gets a slot in their memory (`plan_slots`), another one a
persistent collective of MPI (`persistent`), where there is one and nothing else is faster.
"""

from __future__ import annotations

from functools import partial
from typing import Any, final
from weakref import WeakSet

from mpi4py import MPI

from hpcdist.transport.call.call import Call, Collective, Reduction, is_even
from hpcdist.transport.call.kinds import LOOSE
from hpcdist.transport.mpi.context import MpiContext
from hpcdist.transport.mpi.ordered import keeps_order
from hpcdist.transport.mpi.persistent import PERSISTENT, MpiPlan, Persistent, of_mpi
from hpcdist.transport.mpi.plan_slots import PlanSlots, Steps, steps_of
from hpcdist.transport.shm.control import PAYLOAD
from hpcdist.transport.shm.node import SharedNode

_IN_SLOTS = 2


@final
class Plans:
    """See the module. `in_slots`: whether the group has the hot path, and so memory for slots."""

    def __init__(self, context: MpiContext, *, in_slots: bool) -> None:
        self._context, self._in_slots = context, in_slots
        self._made: WeakSet[MpiPlan] = WeakSet()
        self._slots: PlanSlots | None = None
        self.comm: MPI.Intracomm | None = None
        """Of the persistent collectives, once there is one."""

    def abandon(self) -> None:
        """Leave all plans to MPI."""
        for plan in list(self._made):
            plan.abandon()

    def free(self) -> None:
        """Free all plans."""
        for plan in list(self._made):
            plan.free()

    def make(self, call: Collective) -> MpiPlan | None:
        """Return a plan of an operation, or None where there is none for it. Collective."""
        context, make = self._context, PERSISTENT.get(call.kind)
        steps = steps_of(call, context.rank, context.size) if self._in_slots else None
        if make is None and not self._in_slots:
            return None
        way = _IN_SLOTS if steps is not None else int(make is not None and self._suits_mpi(call))
        request = context.queue.run(self._make_request, call, way, steps, make)
        if request is None:
            return None
        plan = MpiPlan(request, call, context)
        self._made.add(plan)
        return plan

    def _suits_mpi(self, call: Collective) -> bool:
        rule = call.rule if isinstance(call, Reduction) else None
        direct = rule is None or (rule.encode is None and rule.decode is None)
        if rule is not None and keeps_order(self._context.site.config, rule):
            return False
        data = call.recv if call.recv is not None else call.send
        if self._context.node is not None and data is not None and data.nbytes > PAYLOAD:
            return False  # shared memory is faster than a persistent collective
        return call.device is None and direct and call.finish is None and not _is_large(call)

    def _make_request(
        self, call: Collective, way: int, steps: Steps | None, make: Any
    ) -> Persistent | None:
        """Make what starts a plan, in the best way that all ranks can go. Collective."""
        context = self._context
        if call.kind in LOOSE:  # whose shapes are not compared otherwise
            way = way if is_even(context.agree(call)) else 0
        way, _ = context.agree(call._replace(detail=way), enters=True)
        if way == _IN_SLOTS and steps is not None and context.node is not None:
            if self._slots is None:
                self._slots = PlanSlots(context.comm, context.node)
            slot = self._slots.take()
            if slot is not None:
                return self._request_in_slot(context.node, slot, call, steps)
            way, _ = context.agree(
                call._replace(detail=int(make and self._suits_mpi(call))), enters=True
            )
        if way == 0:
            return None
        if self.comm is None:
            self.comm = context.making(lambda: "the first plan", self._duplicate)
        try:
            return of_mpi(make(self.comm, call))
        except NotImplementedError:  # an MPI library older than MPI-4
            return None

    def _duplicate(self) -> MPI.Intracomm:
        communicators, comm = self._context.site.communicators, self._context.comm
        with communicators.making(comm, self._context.ranks):
            return communicators.duplicate(comm)

    def _request_in_slot(
        self, node: SharedNode, slot: int, call: Collective, steps: Steps
    ) -> Persistent:
        assert self._slots is not None
        request = self._slots.request(slot, call, steps)
        check = lambda: node.check_alive(call, request.behind())  # noqa: E731
        free = partial(self._slots.give_back, slot)
        return Persistent(request.Start, request.Test, request.Meet, free, check)


def _is_large(call: Call) -> bool:
    return any(array is not None and array.nbytes > (1 << 30) for array in (call.send, call.recv))
