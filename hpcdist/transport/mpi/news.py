"""`News`: what the ranks of a group tell each other beside their operations.

Whoever waits in hpcdist for a while, in whatever group, listens to the news of all its groups
([Note: errands] in `polling`). They are

- that a rank leaves, and takes part no longer;
- questions: what are you doing? A question also tells what its sender is about to give up, so that
  both sides can name each other, whichever of them gives up first;
- chases, which find out whether ranks wait for each other in a circle.

[Note: chases] A rank that waits for a message asks its sender: can you do anything before I do?
The sender, if it waits itself, hands the question on to those it waits for, and they do, too. A
question that comes back has gone round a circle of ranks, none of which will go on. Every step says
what its sender waits for (the operation with this number, or a message after so many), and a rank
that has done this already, or has something else to do, drops it: no answer, no circle. This is
edge chasing for the AND model (Chandy, Misra, Haas, "Distributed deadlock detection", 1983).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

from mpi4py import MPI

from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.mpi.control import Control
from hpcdist.transport.mpi.early import Allowance
from hpcdist.transport.mpi.tags import Tag
from hpcdist.transport.presence.deaths import Deaths
from hpcdist.transport.presence.membership import Membership
from hpcdist.transport.waiting import activity
from hpcdist.transport.waiting.activity import NOTHING, GivenUp, Wait, account_of
from hpcdist.transport.waiting.polling import BEYOND_S, LISTEN_AFTER_S, do_errands, poll

_WORDS = 1500
_FEW = 8


class Answer(NamedTuple):
    """What a rank does: the number of its last operation in the group, and what it waits for."""

    sequence: int
    words: str


class Step(NamedTuple):
    """What a rank waits for: an operation of that number, or a message after this `sent`."""

    is_message: bool
    number: int


class Blocker(NamedTuple):
    """A rank of a group that has to act before a wait can end."""

    news: News
    rank: int
    step: Step


class _Chase(NamedTuple):
    """Whose question it is, and to which rank of its group it was first put."""

    world: int
    ticket: int
    first: int


class Count(NamedTuple):
    """What this rank has done in a group: operations begun, and issued; what is sent to a rank.

    Operations that are under way may count twice among those issued. What is sent is a number that
    grows with each message, and is the receiver's number once all of them have reached it.
    """

    begun: Callable[[], int]
    issued: Callable[[], int]
    sent: Callable[[int], int]


@final
class News:
    """Those of one rank of a group of at least two.

    `allowance`, `circles` and `deaths` are those of the process.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        ranks: Sequence[int],
        allowance: Allowance,
        circles: Circles,
        count: Count,
        deaths: Deaths,
    ) -> None:
        self._comm, self._ranks = comm, ranks
        self._allowance, self._circles, self._count = allowance, circles, count
        self._deaths = deaths
        self.membership = Membership(ranks, self.listen)
        deaths.concern(self.membership)
        self.left: dict[int, str] = {}
        """Why ranks of the group will not come any more."""
        self.sent_before_leaving: dict[int, int] = {}
        self._answers: dict[int, dict[int, Answer]] = {}
        self._given_up: dict[int, GivenUp] = {}
        self._control = Control(comm, Tag.NEWS)
        self._subjects: dict[str, Callable[..., None]] = {
            "ask": self._answer,
            "answer": self._note_answer,
            "leave": self._note_leaving,
            "chase": self._hand_on,
        }

    @property
    def others(self) -> list[int]:
        """The other ranks of the group."""
        return [rank for rank in range(self._comm.size) if rank != self._comm.rank]

    def listen(self) -> None:
        """Take in all news and answer questions; where MPI cannot, note who has died."""
        try:
            for rank, (subject, *content) in self._control.heard():
                self._subjects[subject](rank, *content)
        except MPI.Exception:  # the operation that waits meets it, too
            self._deaths.known()

    def _tell(self, rank: int, subject: str, *content: Any) -> None:
        self._control.tell(rank, (subject, *content))

    # ---- leaving

    def leave(self, why: str) -> None:
        """Report to all other ranks that this one will not come any more."""
        for rank in self.others:
            self._tell(rank, "leave", why, self._count.sent(rank))

    def _note_leaving(self, rank: int, why: str, sent: int) -> None:
        self.sent_before_leaving[rank] = sent
        self.left[rank] = why
        self.membership.note(self._ranks[rank], why)

    # ---- questions

    def ask(
        self, ranks: Iterable[int], wait: Wait, waited_s: float, *, all_the_time: bool = False
    ) -> dict[int, Answer]:
        """Return what ranks of the group are doing, of those that wait in hpcdist.

        Args:
            ranks: whom to ask.
            wait: what this rank is giving up.
            waited_s: since when it has waited.
            all_the_time: wait for `BEYOND_S` even when all have answered.

        """
        asked, ticket = list(ranks), time.monotonic_ns()
        answers = self._answers[ticket] = {}
        with activity.noted(wait, waited_s):
            self._circles.given_up = GivenUp(activity.told()[:_WORDS], time.monotonic())
            for rank in asked:
                self._tell(rank, "ask", ticket, self._own_words())

            def answered() -> bool:
                do_errands(LISTEN_AFTER_S)
                return not all_the_time and len(answers) == len(asked)

            poll(answered, BEYOND_S)
        return self._answers.pop(ticket)

    def _own_words(self) -> str:
        complaint = self._allowance.complaint()
        words = activity.told()[:_WORDS]
        return f"{words}, and {complaint}" if complaint else words

    def _answer(self, rank: int, ticket: int, words: str) -> None:
        now, (given_up, when) = time.monotonic(), self._circles.given_up
        self._given_up[rank] = GivenUp(words, now)
        answer = self._count.begun(), self._own_words(), given_up, now - when
        self._tell(rank, "answer", ticket, *answer)

    def _note_answer(
        self, rank: int, ticket: int, sequence: int, words: str, given_up: str, ago_s: float
    ) -> None:
        answers = self._answers.get(ticket)  # another thread may just have stopped asking
        if answers is not None:
            self._given_up[rank] = GivenUp(given_up, time.monotonic() - ago_s)
            answers[rank] = Answer(sequence, words)

    def account(self, ranks: Iterable[int], answers: Mapping[int, Answer], waited_s: float) -> str:
        """Return sentences on what `ranks` were doing, to be put behind an error message."""
        asked, since = list(ranks), time.monotonic() - waited_s - BEYOND_S
        sentences = [
            account_of(
                self._ranks[rank],
                self.left.get(rank),
                self._given_up.get(rank, NOTHING).since(since),
                None if rank not in answers else answers[rank].words,
            )
            for rank in asked[:_FEW]
        ]
        complaint = self._allowance.complaint()
        if complaint:
            sentences.append(f"This rank {complaint}.")
        return "".join(f"\n{sentence}" for sentence in sentences)

    # ---- circles

    def chase(self, ticket: int, rank: int, step: Step) -> None:
        """Ask `rank`, of which this one waits for `step`, whether it can go on by itself.

        The answer is among the `closed` of the `Circles` that gave the ticket.
        """
        chase = _Chase(self._ranks[self._comm.rank], ticket, rank)
        self._tell(rank, "chase", tuple(chase), tuple(step))

    def _hand_on(self, rank: int, told: tuple[int, int, int], needed: tuple[bool, int]) -> None:
        """See [Note: chases]."""
        chase, step = _Chase(*told), Step(*needed)
        if step.is_message:
            is_due = self._count.sent(rank) == step.number
        else:
            is_due = self._count.issued() < step.number
        if not is_due or not is_single_threaded():
            return  # what is waited for is on its way, or may come from another thread
        if chase.world == self._ranks[self._comm.rank]:
            self._circles.close(chase)
        elif self._circles.is_new(chase):
            for blocker in activity.blockers_of(threading.main_thread().ident):
                blocker.news.pass_on(chase, blocker)

    def pass_on(self, chase: _Chase, blocker: Blocker) -> None:
        """Put the question of another rank to one that this rank waits for."""
        self._tell(blocker.rank, "chase", tuple(chase), tuple(blocker.step))


def is_single_threaded() -> bool:
    """Return whether what this process sends next is up to its main thread alone.

    Daemon threads do not count: they belong to hpcdist and to other libraries.
    """
    main = threading.main_thread()
    return all(each is main or each.daemon or _is_ours(each) for each in threading.enumerate())


def _is_ours(thread: threading.Thread) -> bool:
    return thread.name.startswith("hpcdist")


@final
class Circles:
    """What has come of the chases of this process, and which ones of others it has handed on.

    `given_up` is the last thing this process has waited for in vain.
    """

    def __init__(self) -> None:
        self.given_up = NOTHING
        self._closed: dict[int, set[int]] = {}
        self._handed_on: dict[int, tuple[int, set[int]]] = {}

    def open(self) -> int:
        """Return a ticket for new chases, later than all before."""
        ticket = time.monotonic_ns()
        self._closed[ticket] = set()
        return ticket

    def closed(self, ticket: int) -> set[int]:
        """Return the ranks asked with `ticket` that cannot go on before this one does."""
        return self._closed[ticket]

    def forget(self, ticket: int) -> None:
        """Take no interest in `ticket` any more."""
        self._closed.pop(ticket, None)

    def close(self, chase: _Chase) -> None:
        """Note that a chase of this process has come back."""
        if chase.ticket in self._closed:
            self._closed[chase.ticket].add(chase.first)

    def is_new(self, chase: _Chase) -> bool:
        """Return whether this process has not yet handed on a chase of another one."""
        ticket, firsts = self._handed_on.get(chase.world, (0, set()))
        if chase.ticket > ticket:
            ticket, firsts = self._handed_on[chase.world] = chase.ticket, set()
        if chase.ticket < ticket or chase.first in firsts:
            return False
        firsts.add(chase.first)
        return True
