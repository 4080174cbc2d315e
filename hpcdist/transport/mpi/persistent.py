"""`MpiPlan`: persistent collectives (MPI-4, section 6.13), one row of `PERSISTENT` for each.

Small ones of the ranks of a node are not MPI's: `plan_slots` has a request that is used alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from mpi4py import MPI

from hpcdist.errors import CollectiveTimeout, HpcdistError, UsageError
from hpcdist.events import listeners
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.base import REFUSE_START, Counter, Plan
from hpcdist.transport.call.call import Collective, Distribution, Reduction, label
from hpcdist.transport.call.kinds import ARRAYS, Family, Kind, table_for
from hpcdist.transport.flight.call_site import call_site, issued
from hpcdist.transport.flight.recorder import STARTED, begin, end
from hpcdist.transport.mpi.context import MpiContext
from hpcdist.transport.mpi.datatypes import OPS, block, numbers
from hpcdist.transport.waiting.activity import Wait
from hpcdist.transport.waiting.polling import poll, raising_held
from hpcdist.transport.waiting.queue import seconds
from hpcdist.transport.waiting.work import Known, Work


def _reduction(verb: Callable[..., Any]) -> Callable[[MPI.Intracomm, Any], MPI.Prequest]:
    def make(comm: MPI.Intracomm, call: Reduction) -> Any:
        return verb(comm, MPI.IN_PLACE, numbers(call.recv), OPS[call.rule.combine])

    return make


def _broadcast(comm: MPI.Intracomm, call: Distribution) -> Any:
    return comm.Bcast_init(block(call.recv, call.recv.nbytes), call.root)


_C = MPI.Intracomm
_ROWS: dict[Kind, Callable[[MPI.Intracomm, Any], Any]] = {
    Kind.ALL_REDUCE: _reduction(_C.Allreduce_init),
    Kind.SCAN: _reduction(_C.Scan_init),
    Kind.BROADCAST: _broadcast,
    Kind.BARRIER: lambda comm, call: comm.Barrier_init(),
}
_STARTED_ANEW = (
    Kind.REDUCE,
    Kind.REDUCE_SCATTER,
    Kind.EXSCAN,
    Kind.SCATTER,
    Kind.ALL_GATHER,
    Kind.GATHER,
    Kind.ALLTOALL,
)
PERSISTENT = table_for("PERSISTENT", ARRAYS | {Family.BARRIER}, _ROWS, without=_STARTED_ANEW)


_under_way: set[_PlanWork] = set()
"""What MPI moves at this moment, which uses its arrays even if nobody asks for them any more."""


class Persistent(NamedTuple):
    """What starts an operation again and again, and tells whether it has ended.

    `meet` is `test` for those who can wait a little. `check` is called in a long wait, and raises
    where the operation cannot end. `lends` says that others use the arrays while it is under way.
    """

    start: Callable[[], Any]
    test: Callable[[], bool]
    meet: Callable[[], bool]
    free: Callable[[], Any]
    check: Callable[[], None] | None = None
    lends: bool = False


def of_mpi(request: MPI.Prequest) -> Persistent:
    """Return how a persistent request of MPI is used."""
    return Persistent(request.Start, request.Test, request.Test, request.Free, lends=True)


@final
class MpiPlan(Plan):
    """A persistent collective."""

    def __init__(self, request: Persistent, call: Collective, context: MpiContext) -> None:
        self._request: Persistent | None = request
        self._begin = request.start
        self._work = _PlanWork(request, call, context)
        self._told: Work = self._work
        """The work of the last start, which tells its end to listeners."""
        self._counter: Counter = self
        self._tell: Callable[[Callable[[], Work]], Work] = lambda start: start()
        self.issued = self.flight = 0

    def watch(self, counter: Counter, tell: Callable[[Callable[[], Work]], Work]) -> None:
        """See `Plan.watch`."""
        self._counter, self._tell = counter, tell

    def start(self) -> Work:
        """Begin the collective on what the buffers hold now."""
        work = self._work
        if work.active or self._request is None:
            raise UsageError(REFUSE_START)
        counter, number = self._counter, None
        if issued.at is None:  # else its place in the order is left to chance
            counter.issued = number = counter.issued + 1
        work.mark = begin(work.call, counter.flight, number, STARTED)
        if listeners:
            self._told = self._tell(self._start)
            return self._told
        return self._start()

    def _start(self) -> Work:
        work = self._told = self._work
        try:
            self._begin()
        except MPI.Exception as error:
            raise work.failure(error) from error
        work.active = True
        if work.lends:
            _under_way.add(work)
        return work

    def free(self) -> None:
        """Give the request back to MPI."""
        request, self._request = self._request, None
        if request is not None:
            self._told.wait()
            request.free()

    def abandon(self) -> None:
        """Leave the request, which a rank's death has ended, to MPI; local."""
        self._request, self._work.active = None, False

    def in_words(self) -> str:
        """See `Plan.in_words`."""
        state = "under way" if self._work.active else "ready"
        return f"{self._work.known().what}, {'freed' if self._request is None else state}"


@final
class _PlanWork(Work):
    """The one work of a persistent collective, active from start to wait."""

    def __init__(self, request: Persistent, call: Collective, context: MpiContext) -> None:
        self.active = False
        self._test, self._meet, self._check = request.test, request.meet, request.check
        self.lends = request.lends
        self.call = call
        self._context = context
        self.mark = 0
        """Of the record of its last start."""

    @property
    def limit_s(self) -> float:
        """The time limit of the group."""
        return self._context.timeout_s

    def wait(self, timeout: Any = None) -> bool:
        try:
            if not self._meet():
                self._wait(timeout)
        except MPI.Exception as error:
            raise self.failure(error) from error
        self._end()
        return True

    def _end(self) -> None:
        self.active = False
        if self.lends:
            _under_way.discard(self)
        end(self.mark)

    def failure(self, error: MPI.Exception) -> HpcdistError:
        """Return what is raised where MPI fails; see `MpiContext.failure`."""
        return self._context.failure(self.call, error)

    @raising_held
    def _wait(self, timeout: Any) -> None:
        limit = seconds(timeout)
        limit = self._context.timeout_s if limit is None else limit
        what = f"the plan of {label(self.call, self._context.ranks)}"
        wait, news = Wait(lambda: what), self._context.news
        check = self._check
        attend = None if check is None else lambda waited: check()
        if not poll(self._test, limit, attend, wait=wait):
            account = ""
            if news is not None and timeout is None:
                answers = news.ask(news.others, wait, limit)
                account = news.account(news.others, answers, limit)
            raise CollectiveTimeout(
                f"{what} has not ended within {limit:g} s; called at {call_site()}. Let every rank "
                f"start its plan{account}"
            )

    def is_completed(self) -> bool:
        try:
            if self.active and self._test():
                self._end()
        except MPI.Exception as error:
            raise self.failure(error) from error
        return not self.active

    def known(self) -> Known:
        return Known(label(self.call, self._context.ranks), not self.active)
