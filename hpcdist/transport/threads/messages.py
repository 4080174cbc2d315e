"""Point-to-point messages between ranks that are threads: envelopes in a shared mailbox.

A send copies its data into an envelope and has ended. Receives are matched with envelopes by
sender, tag and dtype, in the order in which they were posted, as over MPI. An envelope of another
dtype is an error only when no other can come any more.
"""

from __future__ import annotations

import threading
import time
from typing import Any, final

from hpcdist.errors import CollectiveTimeout, HpcdistError, MismatchError, RemoteError
from hpcdist.transport.call.call import ANY_SOURCE, AnyMessage, Message, label
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.flight.call_site import call_site
from hpcdist.transport.threads.group import Envelope, ThreadGroup
from hpcdist.transport.waiting import activity
from hpcdist.transport.waiting.queue import refusal, seconds
from hpcdist.transport.waiting.unheard import error_of
from hpcdist.transport.waiting.work import DONE, Known, Work

_LOOK_AGAIN_S = 0.05


@final
class Mailbox:
    """The messages of one rank of a room; the envelopes are shared by all its ranks."""

    def __init__(self, rank: int, room: ThreadGroup, timeout_s: float) -> None:
        self.rank = rank
        self.room, self.ranks = room, room.ranks
        self.envelopes = room.envelopes
        self.changed: threading.Condition = room.changed
        self.timeout_s = timeout_s
        self.posted: list[ThreadReceive] = []
        self._is_matching = False

    def start(self, call: AnyMessage) -> Work:
        """Send an envelope, or begin to wait for one."""
        with self.changed:
            if call.kind in (Kind.SEND, Kind.SEND_OBJECT_LIST):
                envelope = Envelope(self.rank, call)
                self.envelopes.setdefault((call.root, call.tag), []).append(envelope)
                self.changed.notify_all()
                if call.ended is not None:
                    call.ended(None)
                return DONE
            receive = ThreadReceive(self, call)
            self.posted.append(receive)
            return receive

    def advance(self) -> None:
        """Match envelopes with receives, in posting order; under the lock.

        Nothing in the middle of it, in a signal handler or while an object is unpickled.
        """
        if self._is_matching:
            return
        self._is_matching = True
        try:
            self.posted = [receive for receive in self.posted if not receive.match()]
        finally:
            self._is_matching = False

    def refuse_nested(self) -> None:
        """Raise in the middle of matching, for which a wait would wait; under the lock."""
        if self._is_matching:
            raise refusal()


@final
class ThreadReceive(Work):
    """A receive of one rank."""

    def __init__(self, box: Mailbox, call: AnyMessage) -> None:
        self._box = box
        self._call = call
        self._site = call_site()
        self._ended = False

    def match(self) -> bool:
        """Take the first envelope that fits; True if nothing is left to match."""
        call = self._call
        for envelope in self._envelopes():
            if not self._fits(envelope):
                continue
            if isinstance(call, Message):
                if envelope.content.size != call.data.size:
                    self._end(self._mismatch(envelope))
                    return True
                call.data.reshape(-1)[...] = envelope.content
            self._take(envelope)
            self.source = self._box.ranks[envelope.source]
            failure = None
            try:
                if call.finish is not None:
                    call.finish(None if isinstance(call, Message) else envelope.content)
            except Exception as error:
                failure = error
            self._end(failure)
            return True
        return False

    def _end(self, error: Exception | None) -> None:
        self._ended = True
        if error is not None:
            self._fail(error)
        if self._call.ended is not None:
            try:
                self._call.ended(error)
            except Exception as raised:  # of a listener
                if error is None:
                    self._fail(raised)

    @property
    def limit_s(self) -> float:
        """The time limit of the group."""
        return self._box.timeout_s

    def is_completed(self) -> bool:
        """Return whether the message has arrived."""
        with self._box.changed:
            if not self._ended:
                self._box.advance()
            return self._ended

    def wait(self, timeout: Any = None) -> bool:
        """Block until the message is in the array."""
        box, limit = self._box, seconds(timeout)
        limit = box.timeout_s if limit is None else limit
        deadline = time.monotonic() + limit
        with box.changed, activity.noted(activity.Wait(self._what, self._blockers)):
            if not self._ended:
                box.refuse_nested()
            while not self.is_completed():
                left = deadline - time.monotonic()
                if left <= 0:
                    self._time_out(limit, goes_on=timeout is not None)
                elif not self._no_other_will_come():
                    box.changed.wait(min(_LOOK_AGAIN_S, left))
        if self._failure is not None:
            raise self._failure.hear()
        return True

    def refuse_nested(self) -> None:
        """See `Work.refuse_nested`."""
        with self._box.changed:
            self._box.refuse_nested()

    def attend(self, waited: float) -> None:
        """See whether what is wanted cannot be sent any more."""
        with self._box.changed:
            if not self._ended:
                self._no_other_will_come()

    def known(self) -> Known:
        """See `Work.known`."""
        return Known(label(self._call, self._box.ranks), self._ended, error_of(self._failure))

    def _what(self) -> str:
        box = self._box
        call, ranks = self._call, list(box.ranks)
        peer = "any rank" if call.root == ANY_SOURCE else f"rank {ranks[call.root]}"
        return f"{label(call, ranks)} from {peer} with tag {call.tag} in the group of ranks {ranks}"

    def _blockers(self) -> list[tuple[ThreadGroup, int]]:
        """Return who has to send something before this receive can end, if it is one rank."""
        if self._ended or self._call.root == ANY_SOURCE:
            return []
        if any(map(self._fits, tuple(self._envelopes()))):
            return []
        return [(self._box.room, self._call.root)]

    def _envelopes(self) -> list[Envelope]:
        """Return what was sent to this rank with this tag."""
        return self._box.envelopes.get((self._box.rank, self._call.tag), [])

    def _take(self, envelope: Envelope) -> None:
        envelopes = self._envelopes()
        envelopes.remove(envelope)
        if not envelopes:
            del self._box.envelopes[self._box.rank, self._call.tag]

    def _wanted(self, envelope: Envelope) -> bool:
        return self._call.root in (ANY_SOURCE, envelope.source)

    def _fits(self, envelope: Envelope) -> bool:
        return self._wanted(envelope) and envelope.call.dtype == self._call.dtype

    # ---- what can go wrong

    def _no_other_will_come(self) -> bool:
        """End with an error if what is wanted cannot be sent any more; return whether it did."""
        box, root = self._box, self._call.root
        other = next(filter(self._wanted, self._envelopes()), None)
        if other is not None:
            own, left = box.room.threads[box.rank], box.room.left
            sources = range(len(box.ranks)) if root == ANY_SOURCE else [root]
            if not all(each in left or box.room.awaits(each, own) for each in sources):
                return False
            self._give_up(self._mismatch(other))
            return True
        if root in box.room.left:
            self._give_up(self._gone(root))
            return True
        return False

    def _time_out(self, limit: float, *, goes_on: bool) -> None:
        box, root = self._box, self._call.root
        other = next(filter(self._wanted, self._envelopes()), None)
        asked = [each for each in range(len(box.ranks)) if root in (each, ANY_SOURCE)]
        account = box.room.account(asked, box.rank, limit)
        if other is not None and not goes_on:
            self._give_up(self._mismatch(other, f" within {limit:g} s", account))
            return
        there = "" if other is None else f" There is {label(other.call, box.ranks)}, which stays."
        error = CollectiveTimeout(
            f"{self._what()} got no message within {limit:g} s; called at {call_site()}."
            f"{there}{account}",
            () if root == ANY_SOURCE else (box.ranks[root],),
        )
        if goes_on:
            raise error
        self._give_up(error)

    def _give_up(self, error: HpcdistError) -> None:
        self._box.posted.remove(self)
        self._end(error)

    def _mismatch(self, envelope: Envelope, within: str = "", account: str = "") -> MismatchError:
        ranks = self._box.ranks
        none = "" if self._fits(envelope) else f", and sent none of that{within}"
        return MismatchError(
            f"rank {ranks[envelope.source]} sent {label(envelope.call, ranks)}, but rank "
            f"{ranks[self._box.rank]} receives {label(self._call, ranks)} with tag "
            f"{self._call.tag}{none}; called at {call_site()}. The message was not taken: receive "
            f"it with an array of its size and dtype{account}"
        )

    def _gone(self, root: int) -> RemoteError:
        why, details = self._box.room.left[root]
        rank = self._box.ranks[root]
        return RemoteError(
            f"rank {rank} {why} and sent nothing for {self._what()}, called at {call_site()}; let "
            "it send with this group, tag and dtype",
            rank,
            details,
        )
