"""`MpiContext`: one group, as everything that works for it over MPI sees it.

`MpiTransport` makes it and composes what works with it; nothing that gets it knows the transport.
"""

from __future__ import annotations

import _thread
import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar, final

from mpi4py import MPI

from hpcdist.errors import HpcdistError
from hpcdist.transport.call.call import Call, Collective, label
from hpcdist.transport.mpi.agreement import Agreement
from hpcdist.transport.mpi.exchange import Slots
from hpcdist.transport.mpi.messages import Messages
from hpcdist.transport.mpi.news import News
from hpcdist.transport.mpi.patience import LOOK_S, Named, PolledComm, await_thread
from hpcdist.transport.mpi.site import Site
from hpcdist.transport.mpi.survival import translate
from hpcdist.transport.presence.membership import Membership
from hpcdist.transport.shm.node import SharedNode
from hpcdist.transport.tuning import TuningTable
from hpcdist.transport.waiting.polling import do_errands, to_the_end
from hpcdist.transport.waiting.queue import CollectiveQueue, QueuedWork

_T = TypeVar("_T")


class Agree(Protocol):
    """What `MpiContext.agree` is."""

    def __call__(
        self, call: Collective, address: int = 0, data: Any = None, *, enters: bool = False
    ) -> tuple[int, int]:
        """Check that all ranks issued an equal `call`; return the range of `detail`.

        In shared memory `address` and `data` are published, too, and `data` where there are slots.
        `enters` says that something follows in which all ranks take part.
        """


HandOver = Callable[[], Callable[[Callable[[], tuple[int, int]]], Any]]
"""Copies the arrays of an operation; returns what ends it, given what waits until all have come."""


@final
class MpiContext:
    """The parts of one group of this rank.

    `comm` is the communicator of its collectives, and `ranks` are its world ranks. `node` is the
    memory that its ranks share, None where they do not; `agreement` and `news` are None where it
    has one rank. `run_inside` runs a call as a part of the operation whose turn it is in `queue`.
    `threads` says whether MPI may be used by several threads at once; `slots` are what few ranks
    that share no memory send each other with the agreement.
    """

    def __init__(
        self,
        *,
        comm: MPI.Intracomm,
        ranks: Sequence[int],
        timeout_s: float,
        site: Site,
        one_node: bool,
        piece_bytes: int,
        threads: bool,
        messages: Messages,
        node: SharedNode | None,
        slots: Slots | None,
        tuning_table: TuningTable,
        queue: CollectiveQueue,
        agreement: Agreement | None,
        news: News | None,
        run_inside: Callable[[Collective], Any],
    ) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.ranks, self.timeout_s = ranks, timeout_s
        self.site, self.heap = site, site.heap
        self.one_node, self.piece_bytes, self.threads = one_node, piece_bytes, threads
        self.messages, self.node, self.slots = messages, node, slots
        self.tuning_table, self.queue, self.run_inside = tuning_table, queue, run_inside
        self.agreement, self.news = agreement, news
        self.agree: Agree = _alone if agreement is None else agreement
        self.membership = Membership(ranks) if news is None else news.membership
        self.under_way: list[None] = [] if agreement is None else agreement.under_way
        """Not empty once the operation at hand is MPI's, or another thread's, or has failed.

        A rank that is interrupted before leaves it to another thread, for the others count on it.
        """
        self.stopped = ""
        """The operation that has stopped on its way, after which the group can do nothing more."""
        self._polled: tuple[PolledComm, MpiContext] | None = None
        if agreement is not None:
            agreement.limited = lambda what: self.polled(what).comm

    def set_timeout(self, timeout_s: float) -> None:
        """Change the time limit of operations from now on; local."""
        self.timeout_s = self.messages.matching.timeout_s = timeout_s
        if self.agreement is not None:
            self.agreement.set_timeout(timeout_s)

    def run(self, call: Collective) -> Any:
        """Run `call`, on host memory, when its turn has come."""
        return self.guarded(call, self.queue.run, self.run_inside, call)

    def progress(self) -> None:
        """Drive MPI's progress on messages under way; raise what it finds that has happened."""
        try:
            self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
        except MPI.Exception as error:
            raise translate(error, "a wait", self.site.deaths) from error

    def departed(self) -> Mapping[int, str]:
        """Return the ranks (of this group) that take part no longer, and why."""
        if self.news is None:
            return {}
        self.news.listen()
        return self.news.left

    def to_its_end(self, call: Call, perform: Callable[[], Any]) -> Any:
        """Return what `perform` returns, which takes several calls of MPI that ranks wait in.

        An interrupt between two of them would leave the others inside MPI. So another thread makes
        them, which runs no signal handlers, and interrupts are raised at the end of the operation.
        This one answers the others meanwhile, and looks at the time limit: see `patience`. What the
        queue puts on streams of a device stays on its thread, by which it knows what to wait for.
        """
        is_queued = threading.current_thread() is not threading.main_thread()
        if is_queued and call.device is not None:
            return perform()

        has_begun = False

        def begun() -> Any:
            nonlocal has_begun
            has_begun = True
            self.under_way[:] = (None,)
            return perform()

        try:
            return self.on_helper(self.named(call), begun)
        except BaseException:
            if not has_begun:  # the interrupt came before the other thread had taken over
                self.on_helper(self.named(call), begun)
            raise

    def named(self, call: Call) -> Named:
        """Return what names `call`."""
        return partial(label, call, self.ranks)

    def making(self, what: Named, make: Callable[[], _T]) -> _T:
        """Return what `make` makes of communicators, for which ranks wait inside MPI.

        Within a node that ends: a rank there dies, or comes.
        """
        made: _T = make() if self.one_node else self.on_helper(what, make, of_operation=False)
        return made

    def on_helper(
        self,
        what: Named,
        perform: Callable[[], Any],
        *,
        of_operation: bool = True,
        interrupts: list[BaseException] | None = None,
    ) -> Any:
        """Have another thread `perform` what blocks inside MPI, if MPI may be used by several.

        `of_operation`: see `to_the_end`. With `interrupts`, to which those that come are added,
        `perform` looks at them and at the time limit itself.
        """
        if not self.threads:
            return perform()
        # detached, for an interrupt that was held is raised in place of its error
        work = QueuedWork(perform, what(), detached=True)
        once = threading.Lock()

        def run() -> None:
            if once.acquire(blocking=False):
                work.execute()
                work.end()

        def wait() -> None:
            if not once.locked():
                _HELPERS.run(run)
            if interrupts is not None:
                began = time.monotonic()
                while not work.ended.wait(LOOK_S):
                    do_errands(time.monotonic() - began)
            elif not work.ended.wait(LOOK_S):  # which it mostly has
                await_thread(self, what, work.ended)

        to_the_end(wait, of_operation=of_operation, interrupts=interrupts)
        return work.result()

    def polled(self, what: Named) -> MpiContext:
        """Return the same group for an operation that must not block inside MPI: `PolledComm`."""
        if self._polled is None:
            comm, twin = PolledComm(self.comm), copy.copy(self)
            comm.limited, twin.comm = self, comm
            self._polled = comm, twin
        comm, twin = self._polled
        comm.what = what
        return twin

    def agree_or_hand_over(
        self,
        call: Collective,
        hand_over: HandOver,
        *,
        data: Any = None,
        enters: bool = False,
    ) -> tuple[int, int]:
        """Agree; where an interrupt leaves the wait, the queue's thread takes part instead.

        The others find everything as they would if this rank waited.

        Args:
            call: see `Agree`.
            hand_over: see `HandOver`.
            data: see `Agree`.
            enters: see `Agree`. Where the ranks share memory the operation is called off instead.

        """
        agreement = self.agreement
        before = 0 if agreement is None else agreement.sequence
        self.under_way.clear()
        try:
            return self.agree(call, 0, data, enters=enters)
        except (HpcdistError, MPI.Exception):
            raise
        except BaseException:
            if agreement is not None and self.node is None:
                self.hand_over(call, agreement, before, hand_over)
            raise

    def hand_over(
        self, call: Collective, agreement: Agreement, before: int, hand_over: HandOver
    ) -> None:
        """Leave an operation in which this rank has been interrupted to the queue's thread.

        Nothing is left that this rank has not posted: `before` is the agreement's sequence before.
        """
        agreement.recount()
        if agreement.sequence == before or self.under_way:
            return
        agreement.note_left()
        self.under_way[:] = (None,)
        if self.threads and not self.queue.is_current():
            go_on, agreed = hand_over(), partial(agreement.end_posted, call)
            end = partial(self.queue.turn.call, go_on, agreed)
            self.queue.start(end, label(call, self.ranks), detached=True)

    def leave(self, call: Collective, error: BaseException, before: int = -1) -> None:
        """Take back what a collective has lent that this rank leaves; see `SharedNode.leave`."""
        if self.node is None or self.agreement is None:
            return
        self.agreement.recount()
        if self.node.leave(call, error, before):
            self.agreement.note_left()

    def guarded(self, call: Call, perform: Callable[..., Any], *args: Any) -> Any:
        """Return ``perform(*args)``, which is done for `call`; raise its `failure` if MPI fails."""
        try:
            return perform(*args)
        except MPI.Exception as error:
            raise self.failure(call, error) from error

    def failure(self, call: Call, error: MPI.Exception) -> HpcdistError:
        """Return what is raised where MPI fails in `call`: a `RankFailure`, if a rank has died."""
        what = f"{label(call, self.ranks)} on rank {self.ranks[self.rank]}"
        return translate(error, what, self.site.deaths)


def _alone(
    call: Collective, address: int = 0, data: Any = None, *, enters: bool = False
) -> tuple[int, int]:
    """Agree where there is one rank."""
    if call.error is not None:
        raise call.error
    return call.detail, call.detail


@final
class _Helpers:
    """Threads that do a part of an operation which no signal handler may interrupt.

    They are as many as there are jobs at a time, and stay, as making one takes 50 us.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._idle: list[None] = []

    def run(self, job: Callable[[], None]) -> None:
        """Have a thread run `job`, which raises nothing. An interrupted caller may ask again."""
        try:
            self._idle.pop()
        except IndexError:
            _thread.start_new_thread(self._serve, (job,))
        else:
            self._jobs.put(job)

    def _serve(self, job: Callable[[], None]) -> None:
        while True:
            job()
            del job  # what it holds is the caller's again
            self._idle.append(None)
            job = self._jobs.get()


_HELPERS = _Helpers()
"""Of this process."""
