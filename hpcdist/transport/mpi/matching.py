"""`Matching`: which message belongs to which receive, in one group.

Messages match by sender, tag and dtype, in the order in which they were sent, and receives in the
order in which they were posted, as in MPI. A receive looks at a message before it takes it: one of
another size is a `MismatchError` and stays where it is. Handing MPI a buffer that is too small
instead corrupts memory in some libraries.

The tag on the wire carries the dtype below the user's tag, so a receive of another dtype does
not match, and finding out why it waits costs nothing until it has waited (`requests`).

Whoever waits takes in what has been sent to it: [Note: early messages] in `early`. All
receiving happens under the lock of the group, so what a probe has found is still there for the
receive. Nothing is waited for under the lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set as AbstractSet
from typing import Any, Protocol, final

from mpi4py import MPI

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.call import ANY_SOURCE
from hpcdist.transport.mpi.datatypes import block, scattered
from hpcdist.transport.mpi.early import Allowance, Early, keep
from hpcdist.transport.mpi.news import Circles, News, Step, is_single_threaded
from hpcdist.transport.mpi.progress import ProgressThread
from hpcdist.transport.mpi.survival import translate
from hpcdist.transport.mpi.tags import name_of_dtype, user_tag, wire_tags
from hpcdist.transport.presence.deaths import Deaths
from hpcdist.transport.shm.mail import Mailboxes
from hpcdist.transport.waiting.activity import Wait
from hpcdist.transport.waiting.polling import (
    AT_ONCE,
    LISTEN_AFTER_S,
    SPIN,
    add_errand,
    at_once,
    remove_errand,
    step,
)
from hpcdist.transport.waiting.queue import refusal

_AT_ONCE = 4096
"""Up to so many bytes a message has arrived when it is found, in every MPI library."""


class Found(NamedTuple):
    """A message that can be received: in MPI, taken in early, or in a mailbox."""

    source: int
    tag: int
    nbytes: int
    early: Early | None = None
    is_mailed: bool = False

    @property
    def dtype(self) -> str:
        """The name of its dtype, for messages."""
        return name_of_dtype(self.tag)


@final
class Delivery:
    """A message on its way into `buffers`, one after the other, which are as large together.

    It has begun, and that is known, or it has not: see [Note: at once] in `polling`.
    """

    def __init__(self, matching: Matching, found: Found, buffers: list[NumpyArray]) -> None:
        self._matching, self.found, self.buffers = matching, found, buffers
        self._noted: list[Any] = []

    @property
    def has_begun(self) -> bool:
        """Whether its message has been taken."""
        return bool(self._noted)

    def begin(self, receive: Callable[..., Any] | None = None) -> None:
        """Take the message, under the lock; by `receive` of MPI, if it is there."""
        matching, source, tag, nbytes, early, is_mailed = self._matching, *self.found
        if is_mailed:
            assert matching.mail is not None
            at_once(self._noted, step(matching.mail.take, source, tag, self.buffers))
        elif early is not None:
            at_once(self._noted, step(matching.early.remove, early), matching.received(source))
        elif len(self.buffers) == 1:
            spec: Any = block(self.buffers[0], nbytes)
            taken = step(receive or matching.comm.Irecv, spec, source, tag)
            at_once(self._noted, taken, *matching.counted(source))
        else:
            spec, datatype = scattered(self.buffers)
            taken = step(matching.comm.Irecv, spec, source, tag)
            at_once(self._noted, taken, *matching.counted(source))
            datatype.Free()

    def is_here(self) -> bool:
        """Return whether all of it is in the buffers, once it has begun."""
        early, request = self.found.early, self._noted[0]
        if early is None:
            return request is None or request.Test()
        if not early.has_arrived():
            return False
        early.copy_to(self.buffers)
        self._matching.allowance.give_back(early)
        return True


class Posted(Protocol):
    """A receive that waits for its message."""

    tag: int
    user_tag: int
    source_wanted: int

    @property
    def has_begun(self) -> bool:
        """Whether a part of its message has been taken."""

    def is_matched(self) -> bool:
        """Return whether nothing of the message is left to be taken."""

    def match(self, promised: AbstractSet[int]) -> bool:
        """Begin to receive if the message is there; True if nothing is left to match.

        Messages from the sources in `promised` belong to earlier receives.
        """


@final
class Matching:
    """The messages and receives of one group; `comm` is used for nothing else.

    `allowance`, `circles` and `deaths` are those of the process; `news` has to be set where the
    group has several ranks.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        ranks: Sequence[int],
        timeout_s: float,
        allowance: Allowance,
        circles: Circles,
        deaths: Deaths,
    ) -> None:
        self.comm = comm
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.lock = threading.RLock()
        self.news: News | None = None
        self.mail: Mailboxes | None = None
        """Where small messages are, if the ranks share memory; see [Note: one order] there."""
        self.circles = circles
        self.deaths = deaths
        self.allowance = allowance
        self._posted: list[Posted] = []
        self._look_again = 0.0
        self.early: list[Early] = []
        self.sent = [0] * comm.size
        self.taken = [0] * comm.size
        """Messages sent to each rank by MPI, and taken from MPI from each."""
        self.is_over = False
        """Whether the communicator is freed, or about to be."""
        self.progress = ProgressThread(self.lock)
        self._any_thread = MPI.Query_thread() >= MPI.THREAD_SERIALIZED

    def start_taking_in(self) -> None:
        """Take in what is sent to this rank whenever it waits, from now on."""
        add_errand(self._errand)

    def abandon(self) -> list[Early]:
        """Take in nothing any more, and return what was taken in; its memory must stay."""
        remove_errand(self._errand)
        with self.lock:
            dropped, self.early = self.early, []
        for early in dropped:
            self.allowance.give_back(early)
        return dropped

    def stop_taking_in(self, patience_s: float) -> None:
        """Drop what was taken in and not received, before the communicator is freed.

        Receives that still wait for a message fail.
        """
        with self.lock:
            self.advance()
            self.is_over = True
            self.advance()
        keep([early.request for early in self.abandon()], patience_s)

    def unreceived(self) -> list[str]:
        """Return in words what has been sent to this rank and not received; local, at the end."""
        with self.lock:
            self._take_in()
            left = [] if self.mail is None else self.mail.left()
            left += [(each.source, each.tag, each.data.nbytes) for each in self.early]
        return [
            f"{nbytes} B of {name_of_dtype(tag)} from rank {self.ranks[source]} with tag "
            f"{user_tag(tag)}"
            for source, tag, nbytes in left
        ]

    def refuse_nested(self) -> None:
        """Raise where this thread is in the middle of matching messages; see [Note: nested]."""
        if self.is_inside():
            raise refusal()

    def is_inside(self) -> bool:
        """Return whether this thread is in the middle of matching messages."""
        return self.lock._is_owned()  # type: ignore[attr-defined,no-any-return]

    # ---- matching

    def take_at_once(
        self, recv: NumpyArray, source: int, tag: int, begun: list[Any]
    ) -> Delivery | None:
        """Receive a message that is there already, or very soon; return None if it is not.

        Only while nothing else waits for messages, and only a message of the size of `recv`. It is
        put into `begun` before it begins.
        """
        status, nbytes = MPI.Status(), recv.nbytes
        with self.lock:
            if self._posted or self.early:
                return None
            for _ in range(SPIN):
                found = self._find_mailed(source, tag) or self._probe(source, tag, status)
                if found is not None:
                    break
            else:
                return None
            if found.nbytes != nbytes:
                return None
            delivery = Delivery(self, found, [recv])
            begun.append(delivery)
            delivery.begin(self.comm.Recv if nbytes <= _AT_ONCE else None)
            return delivery

    def post(self, receive: Posted) -> None:
        """Post a receive, which waits for its message."""
        with self.lock:
            self._posted.append(receive)
            self._tell_posted()
            self.look()

    def advance(self) -> None:
        """Match messages that have arrived with receives, in posting order.

        A message that arrives in between belongs to the earlier receive, not to a later one.
        """
        with self.lock:
            waiting: list[Posted] = []
            promised: dict[int, set[int]] = {}
            for receive in self._posted:
                if not receive.match(promised.get(receive.tag, frozenset())):
                    waiting.append(receive)
                    promised.setdefault(receive.tag, set()).add(receive.source_wanted)
            self._posted = waiting
            self._tell_posted()

    def _tell_posted(self) -> None:
        if self.mail is not None:
            self.mail.posted = len(self._posted)

    def look(self) -> None:
        """Like `advance`, but spend no more than half of the time on it, however many wait."""
        now = time.perf_counter()
        if now >= self._look_again:
            self.advance()
            self._look_again = 2 * time.perf_counter() - now

    def withdraw(self, receive: Posted) -> bool:
        """Take back a receive; False if a message for it has come meanwhile.

        An interrupt may have kept it from being posted.
        """
        with self.lock:
            self.advance()
            if receive.has_begun or receive.is_matched():
                return False
            if receive in self._posted:
                self._posted.remove(receive)
                self._tell_posted()
            return True

    def find(self, source: int, tag: int, *, probes: bool = True) -> Found | None:
        """Probe for a message; of MPI only if `probes`."""
        mailed = self._find_mailed(source, tag)
        if mailed is not None:
            return mailed
        for early in self.early:
            if early.tag == tag and source in (ANY_SOURCE, early.source):
                return Found(early.source, tag, early.data.nbytes, early)
        return self._probe(source, tag, MPI.Status()) if probes else None

    def _find_mailed(self, source: int, tag: int) -> Found | None:
        found = None if self.mail is None else self.mail.find(source, tag)
        return None if found is None else Found(found[0], tag, found[1], is_mailed=True)

    def _probe(self, source: int, tag: int, status: MPI.Status) -> Found | None:
        """Probe MPI for a message; what that sender has mailed meanwhile comes before it."""
        if self.is_over or not self.comm.Iprobe(_mpi_source(source), tag, status):
            return None
        found = Found(status.Get_source(), tag, status.Get_elements(MPI.BYTE))
        return self._find_mailed(found.source, tag) or found

    def find_of_other_dtype(self, receive: Posted) -> Found | None:
        """Probe for a message that a receive does not match only because of its dtype."""
        source, others = receive.source_wanted, wire_tags(receive.user_tag)
        with self.lock:
            if self.is_over:
                return None
            probes = self.comm.Iprobe(_mpi_source(source), MPI.ANY_TAG)  # one question for many
            found = (self.find(source, tag, probes=probes) for tag in others if tag != receive.tag)
            return next(filter(None, found), None)

    # ---- the way by MPI, and the one past it: steps of `at_once`

    def sends(self, to: int) -> tuple[Iterator[Any], ...]:
        """Return the steps that count a message which is about to be sent by MPI."""
        counts = _one_more(self.sent, to)
        return (counts,) if self.mail is None else (counts, step(self.mail.sent, to))

    def counted(self, source: int) -> tuple[Iterator[Any], ...]:
        """Return the steps that count a message which a receive has got from MPI."""
        return _one_more(self.taken, source), self.received(source)

    def received(self, source: int) -> Iterator[Any]:
        """Return the step that lets the sender know that a receive has got its message of MPI."""
        return iter(()) if self.mail is None else step(self.mail.received, source)

    # ---- how many: see `Count`

    def sent_to(self, rank: int) -> int:
        """Return a number that grows with each message that is sent to a rank."""
        return self.sent[rank] + (0 if self.mail is None else self.mail.written(rank))

    def seen_from(self, rank: int) -> int:
        """Return the sender's number, less what has not reached this rank.

        What has may not have been looked at: look behind this.
        """
        return self.taken[rank] + (0 if self.mail is None else self.mail.arrived(rank))

    # ---- what others have sent

    def _errand(self, waited: float) -> None:
        """Take in what has been sent to this rank, and listen; see [Note: early messages]."""
        if not (self._any_thread or MPI.Is_thread_main()):
            return
        if self.news is not None and waited >= LISTEN_AFTER_S:
            self.news.listen()
        if self.is_inside():
            return
        taken: list[bool] = []
        try:
            taken.extend(map(self.lock.acquire, AT_ONCE))
            if taken[0]:
                self._take_in()
        except MPI.Exception as error:  # whoever waits hears of it, in whatever group
            raise translate(error, "a wait", self.deaths) from error
        finally:  # [Note: given back]
            if taken and taken[0]:
                self.lock.release()

    def _take_in(self) -> None:
        status = MPI.Status()
        while True:
            self.advance()
            if not self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
                return
            source, tag, nbytes = (
                status.Get_source(),
                status.Get_tag(),
                status.Get_elements(MPI.BYTE),
            )
            world, of_user = self.ranks[source], user_tag(tag)
            if not self.allowance.admits(nbytes, world, of_user):
                return
            early = Early(source, tag, nbytes, world, of_user)
            is_kept, counts = step(self.early.append, early), _one_more(self.taken, source)
            at_once(early.noted, early.receive(self.comm), is_kept, counts)
            self.allowance.take(early)

    def says_all(self, source: int, ticket: int | None) -> bool:
        """Return whether no message can come from `source` before this rank has done something.

        `ticket` is of the chases that `ask_for_more` began.
        """
        if source == ANY_SOURCE:
            return all(self.says_all(rank, ticket) for rank in range(self.comm.size))
        if self.news is None or source == self.comm.rank:
            return is_single_threaded()
        if source in self.news.left:
            return self.seen_from(source) == self.news.sent_before_leaving[source]
        return ticket is not None and source in self.circles.closed(ticket)

    def ask_for_more(self, source: int) -> int:
        """Find out whether messages of `source` can still come; return the ticket."""
        ticket = self.circles.open()
        with self.lock:
            self._take_in()
        if self.news is not None:
            others = self.news.others
            for rank in others if source == ANY_SOURCE else {source} & set(others):
                self.news.chase(ticket, rank, Step(True, self.seen_from(rank)))
        return ticket

    def account(self, peer: int, wait: Wait, waited_s: float) -> str:
        """Ask a peer (or any) what it does; return sentences to be put behind an error message."""
        if self.news is None:
            complaint = self.allowance.complaint()
            return f". This rank {complaint}" if complaint else ""
        others = self.news.others
        asked = others if peer == ANY_SOURCE else [each for each in others if each == peer]
        return self.news.account(asked, self.news.ask(asked, wait, waited_s), waited_s)


def _one_more(numbers: list[int], rank: int) -> Iterator[Any]:
    """Return the step that counts one more message of a rank."""
    return step(numbers.__setitem__, rank, numbers[rank] + 1)


def _mpi_source(source: int) -> int:
    return MPI.ANY_SOURCE if source == ANY_SOURCE else source
