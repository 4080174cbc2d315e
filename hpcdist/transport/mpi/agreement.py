"""`Agreement`: before any data moves, all ranks of a group make sure they mean the same thing.

Every collective is preceded by one tiny all-reduce (six integers: how they travel is in `exchange`,
what they mean in `decision`): among them the minimum of a fingerprint and of its negative. If they
differ, the ranks tell each other what they called and all raise `MismatchError`; if one rank cannot
take part, all raise its error. Nothing was sent yet, so the group stays usable. The wait is polled
from Python: a rank that never comes becomes a `CollectiveTimeout` that names it, and Ctrl-C works.

[Note: time limits] A rank that gives up on an operation cannot take its contribution back, and
a rank that comes late would find everything there and move data with nobody. So the integers
also hold the earliest deadline and the latest arrival. If a rank arrived after a deadline, the
operation is void, and every rank that completes the exchange raises; a rank that gives up waits
a little beyond its deadline first, so no rank can think otherwise. Ranks that gave up complete
the exchange before their next operation: after a time-out all are in step again. Clocks of
different nodes must agree within half a second when a group is made; afterwards they may jump.

[Note: counting] An operation counts as begun when it is posted. Signal handlers run between calls
of Python: if one raised between the two, this rank would be a number ahead of the others from then
on. So it is counted right before the compiled call that posts, with nothing to be called for it.
Where Python posts, one that was counted and not posted is forgotten when it is left (`recount`).

[Note: leaving] A rank that leaves while others still use the group tells them (`news`); whoever
waits for it gets a `RemoteError` at once instead of waiting for the time-out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, final

import numpy as np
from mpi4py import MPI

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.errors import HpcdistError, RemoteError
from hpcdist.runtime.mpi import told_by_all
from hpcdist.transport.call.call import (
    Barrier,
    Collective,
    Distribution,
    Objects,
    Reduction,
    label,
)
from hpcdist.transport.flight.call_site import call_site
from hpcdist.transport.mpi.decision import (
    CANNOT,
    LATE,
    NEVER,
    Called,
    Told,
    Verdict,
    decide,
    disagreement,
    eager_call,
    not_begun,
    not_joined,
    voided,
)
from hpcdist.transport.mpi.exchange import Exchange
from hpcdist.transport.mpi.news import Blocker, News, Step
from hpcdist.transport.shm.control import SPINS, Six
from hpcdist.transport.shm.hot import Tally
from hpcdist.transport.shm.node import SharedNode
from hpcdist.transport.waiting.activity import Wait
from hpcdist.transport.waiting.polling import LEFT_GRACE_S, LISTEN_AFTER_S, hold, poll, step

_GOODBYE_S = 1.0
"""So long a rank that ends waits for the others to take what it has given."""
_TOLD_S = 10.0
"""And so long for all to hear that they disagree."""


@final
class Agreement:
    """The agreement of one group of at least two ranks; collective to create and to call.

    `check(call, those waited for)` is called now and then during a long wait, and may raise; None
    stands for all. `news` has to be set before the first call.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        ranks: Sequence[int],
        timeout_s: float,
        exchange: Exchange,
        check: Callable[[Collective, Sequence[int] | None], None] | None = None,
    ) -> None:
        self._comm = comm
        self._ranks = ranks
        self._tally = Tally()
        self.set_timeout(timeout_s)
        self._exchange = exchange
        self._post, self._look, self._progress = exchange.post, exchange.test, exchange.progress
        self._check_others = check
        self._found: Six | None = None
        self.clock_ns = time.time_ns() - time.monotonic_ns()
        """What is added to the clock that never jumps to compare it with those of other nodes."""
        self.node: SharedNode | None = None
        """The memory that the ranks share, where they may call an operation off."""
        self.check_off: Callable[[Collective], None] | None = None
        """Raises if the operation at hand has been called off."""
        self.limited: Callable[[Callable[[], str]], MPI.Intracomm] = lambda _: comm
        """Returns a communicator whose verbs end, of an operation in words; see `PolledComm`."""
        self.under_way: list[None] = []
        """See `MpiContext.under_way`."""
        self.news: News

    def set_timeout(self, timeout_s: float) -> None:
        """Change how long operations from now on wait for other ranks; local."""
        self._timeout_s = timeout_s
        self._tally.limit_ns = int(min(timeout_s * 1e9, NEVER // 2))

    @property
    def sequence(self) -> int:
        """How many agreements this rank has begun; the same on all ranks that are in step."""
        return self._tally.sequence

    @property
    def begun(self) -> int:
        """How many operations this rank has begun: eager ones, too."""
        return self._tally.sequence + self._tally.eager_calls

    def count_in(self, tally: Tally) -> None:
        """Count in `tally` from now on, as the hot path does."""
        before = self._tally
        tally.sequence, tally.unfinished = before.sequence, before.unfinished
        tally.limit_ns = before.limit_ns
        self._tally = tally

    def __call__(
        self, call: Collective, address: int = 0, data: Any = None, *, enters: bool = False
    ) -> tuple[int, int]:
        """Return the smallest and the largest `detail`, once all ranks issued an equal `call`.

        An exchange through shared memory publishes `address` and `data`, too. `enters` says that
        something follows in which all ranks take part.
        """
        tally = self._tally
        if tally.unfinished:
            self._settle(call)
        now, detail = time.monotonic_ns() + self.clock_ns, call.detail
        if call.error is None:
            number = call.fingerprint()
            opposite = -number
        else:
            number, opposite = CANNOT
        tally.sequence += 1  # [Note: counting]
        found = self._post(
            number, opposite, detail, -detail, now + tally.limit_ns, -now, address, data, SPINS
        )
        if found is None:
            found = self._wait(call)
        decided = decide(found)
        if type(decided) is tuple:
            if enters and self.node is not None:
                self.node.enter(call)
            return decided
        return self._refuse(call, now, found)

    def reduce(
        self,
        control: Any,
        call: Collective,
        data: Any,
        out: Any,
        first: int,
        code: int,
        count: int,
        divisor: float,
    ) -> bool:
        """Agree on a small reduction and do it; False: agreed, and `control` holds all data."""
        tally = self._tally
        if tally.unfinished:
            self._settle(call)
        number, limit = call.fingerprint(), tally.limit_ns
        tally.sequence += 1  # [Note: counting]
        if control.reduce(number, limit, data, out, first, code, count, divisor, SPINS):
            return True
        self.end_posted(call)
        return False

    def within(self, call: Collective, perform: Callable[..., Any], *args: Any) -> Any:
        """Agree on `call` by a method of the control block that does it, too; return its result.

        Where that is false, nothing was done: return the range of `detail` once all have agreed.
        `reduce` is the same, and 0.2 us faster, as it names what it hands on.
        """
        tally = self._tally
        if tally.unfinished:
            self._settle(call)
        number, limit = call.fingerprint(), tally.limit_ns
        tally.sequence += 1  # [Note: counting]
        return perform(number, limit, *args, SPINS) or self.end_posted(call)

    def take_given(self, call: Distribution | Objects, out: Any, first: int) -> bool:
        """Take what the root of `call` has given; False: all ranks agree on it, as on any other.

        See [Note: eager operations] in `shm/native/eager.h`.
        """
        tally = self._tally
        if tally.unfinished:
            self._settle(call)
        given = call.fingerprint(), call.detail, call.root
        if call.root == self._comm.rank or not tally.finds_given(*given):
            return False
        tally.take_given(*given, out, first, (label(call, self._ranks), call_site()))
        return True

    def reduce_eagerly(self, call: Reduction, data: Any) -> NumpyArray | None:
        """Give `data` to the root of `call`; return there what all have given, elsewhere nothing.

        None: all ranks agree on it, as on any other. See [Note: eager operations].
        """
        tally = self._tally
        if tally.unfinished:
            self._settle(call)
        if not tally.all_give(data.nbytes):
            return None
        given = call.fingerprint(), call.detail
        tally.give(*given, data, (label(call, self._ranks), call_site()))
        is_root = call.root == self._comm.rank
        if is_root and not self._await_given(call, *given):
            return None
        everything = np.empty(data.nbytes * self._comm.size if is_root else 0, np.uint8)
        if is_root:
            tally.take_all(everything)
        return everything

    def _await_given(self, call: Reduction, number: int, detail: int) -> bool:
        """Wait until all have given; False: some never will, but agree on another operation."""
        tally, missing = self._tally, self._tally.not_given
        found: list[bool | None] = [False]

        def is_known() -> bool:
            if found[0] is False:
                found[:] = step(tally.has_all, number, detail)  # [Note: at once] in `polling`
            if found[0] is False:
                self._progress()
            return found[0] is not False

        def attend(waited: float) -> None:
            self._attend(call, waited, is_known, missing)

        wait = Wait(lambda: self._what(call), lambda: self._blockers(missing()))
        if not poll(is_known, self._timeout_s, attend, wait=wait):
            answers = self.news.ask(missing(), wait, self._timeout_s)
            if not is_known():
                absent = missing()
                account = self.news.account(absent, answers, self._timeout_s)
                names = [self._ranks[rank] for rank in absent]
                raise not_joined(self._what(call), names, self._timeout_s, account, self._ranks)
        return found[0] is True

    def end_eager(self) -> None:
        """Raise if another rank means something else than what this one has given; waits a moment.

        For the end of the group, as no agreement follows that would find it.
        """
        if self.node is None or self._tally.unfinished:
            return
        control = self.node.control
        poll(lambda: not control.awaits_eager(), _GOODBYE_S)
        if control.agrees_elsewhere():
            self.set_timeout(min(self._timeout_s, _TOLD_S))
            self(Barrier(words="the end of the group"))

    def take_failure(self) -> Exception | None:
        """Return, once, what MPI has raised where a compiled call has posted."""
        tally = self._tally
        failure, tally.failure = tally.failure, None
        if failure is not None:  # nothing of it is under way any more
            tally.unfinished = 0
        return failure

    def end_posted(self, call: Collective) -> tuple[int, int]:
        """Wait for all ranks where a compiled call has posted; return the range of `detail`."""
        now, found = time.monotonic_ns() + self.clock_ns, self._look() or self._wait(call)
        self._tally.unfinished = 0
        decided = decide(found)
        return decided if type(decided) is tuple else self._refuse(call, now, found)

    def _refuse(self, call: Collective, now: int, found: Six) -> NoReturn:
        """Raise on every rank: the operation is void, or the ranks disagree."""
        self.under_way[:] = (None,)
        self._hesitate()
        if decide(found) is Verdict.VOID:
            if self.node is not None:
                self.node.end()  # nobody begins what all have found void
            raise voided(self._what(call), found, now, self._ranks[self._comm.rank])
        if self.node is not None:
            self.node.enter(call)
            self.node.end()
        self._disagree(call)

    def note_left(self) -> None:
        """Note that this rank has left an operation in which it has posted its part."""
        self._tally.unfinished = max(self._tally.unfinished, 1)

    def recount(self) -> None:
        """Count what is posted, when this rank leaves an operation; see [Note: counting]."""
        tally = self._tally
        posted = self._exchange.posted() + tally.posted
        tally.sequence = posted + max(tally.unfinished - 1, 0)

    def is_settled(self) -> bool:
        """Return whether no exchange is under way."""
        unfinished = self._tally.unfinished
        return not unfinished or (unfinished == 1 and self._test())

    def close(self) -> bool:
        """Free the exchange; False if it is still under way."""
        if not poll(self.is_settled, 1.0):
            return False
        self._exchange.close()
        return True

    # ---- waiting

    def _test(self) -> bool:
        """Return whether the exchange is complete; let MPI proceed if it is not."""
        found = self._found = self._look()
        if found is not None:
            return True
        self._progress()
        return False

    def _wait(self, call: Collective) -> Six:
        try:
            if not self._poll(call, self._as_wait(call), self.check_off):
                self._time_out(call)
        except BaseException as error:
            if not self._is_held(error):
                self._tally.unfinished = 1
                raise
        assert self._found is not None
        return self._found

    def _is_held(self, error: BaseException) -> bool:
        """Hold an interrupt where all ranks have come and some have gone on: so does this one."""
        if self.node is None or isinstance(error, (HpcdistError, MPI.Exception)):
            return False
        if threading.current_thread() is not threading.main_thread():
            return False
        if self.node.control.call_off(False):
            return False
        self._found = self._look()
        hold(error)
        return self._found is not None

    def _poll(
        self, call: Collective, wait: Wait, check: Callable[[Collective], None] | None = None
    ) -> bool:
        def attend(waited: float) -> None:
            self._attend(call, waited, self._test)
            if check is not None:
                check(call)

        return poll(self._test, self._timeout_s, attend, wait=wait)

    def _as_wait(self, call: Collective) -> Wait:
        return Wait(lambda: self._what(call), lambda: self._blockers(self.news.others))

    def _blockers(self, ranks: Sequence[int]) -> list[Blocker]:
        """Return `ranks`, which may be missing: one that does not come is enough."""
        begun = Step(False, self.begun)
        return [Blocker(self.news, rank, begun) for rank in ranks]

    def _attend(
        self,
        call: Collective,
        waited: float,
        done: Callable[[], bool],
        missing: Callable[[], list[int]] | None = None,
    ) -> None:
        """Look what others do; `missing` tells whom this rank waits for, if not for all."""
        if waited < LISTEN_AFTER_S:
            return
        self.news.listen()
        behind = None if missing is None else missing()
        left = {
            rank: why for rank, why in self.news.left.items() if behind is None or rank in behind
        }
        if left and not poll(done, LEFT_GRACE_S):
            rank, why = next(iter(left.items()))
            raise RemoteError(
                f"rank {self._ranks[rank]} {why} and did not join {self._what(call)}; let every "
                "rank of a group take part in each of its operations",
                self._ranks[rank],
            )
        if self._check_others is not None and (missing is None or not done()):
            self._check_others(call, None if missing is None else missing())

    def _time_out(self, call: Collective) -> None:
        """Find out who is missing; return normally if they come in the meantime."""
        absent, account = self._who_is_absent(call)
        if self._test():
            return
        raise not_joined(self._what(call), absent, self._timeout_s, account, self._ranks)

    def _settle(self, call: Collective) -> None:
        """Complete the exchanges of operations this rank gave up on."""
        tally = self._tally
        while tally.unfinished:
            if not self._poll(call, Wait(lambda: self._what(call))):
                tally.unfinished += 1  # this operation is given up, too
                tally.sequence += 1
                absent, account = self._who_is_absent(call)
                raise not_begun(self._what(call), absent, self._timeout_s, account)
            tally.unfinished -= 1
            if tally.unfinished:
                self._post(*LATE, 0, None, 0)
        self._hesitate()

    def _hesitate(self) -> None:
        """Let the next operation not be eager; see [Note: eager operations]."""
        if self.node is not None:
            self.node.control.hesitates = 1

    def _who_is_absent(self, call: Collective) -> tuple[list[int], str]:
        """Ask all ranks; return those (of the world) that wait elsewhere, and where."""
        wait, others = self._as_wait(call), self.news.others
        answers = self.news.ask(others, wait, self._timeout_s, all_the_time=True)
        joined = {rank for rank, each in answers.items() if each.sequence >= self.sequence}
        absent = sorted(set(others) - joined)
        missing = [self._ranks[rank] for rank in absent]
        return missing, self.news.account(absent, answers, self._timeout_s)

    # ---- disagreement

    def _disagree(self, call: Collective) -> NoReturn:
        """Exchange what was called, and raise on every rank."""
        error, report = call.error, None
        if error is not None:
            import traceback

            report = str(error), "".join(traceback.format_exception(error))
        own = Called(label(call, self._ranks), call_site())
        comm = self.limited(lambda: self._what(call))
        told = told_by_all(comm, Told(*own, report, self._earlier(), self.begun))
        behind = max(each.begun for each in told) - self.begun
        self._tally.eager_calls += behind  # so that operations have one number on all ranks again
        self._tally.missed += behind
        if error is not None:
            raise error
        raise disagreement(self._what(call), dict(zip(self._ranks, told, strict=True)))

    def _earlier(self) -> tuple[Called, ...]:
        """Return the eager operations since the last agreement."""
        return tuple(eager_call(each, self._ranks) for each in self._tally.earlier())

    def _what(self, call: Collective) -> str:
        ranks = list(self._ranks) if len(self._ranks) <= 16 else f"{len(self._ranks)} ranks"
        name, number = label(call, self._ranks), self.begun
        return f"{name}, operation #{number} of the group of ranks {ranks}"
