"""Sends and receives under way: the works behind `Messages`.

[Note: other dtypes] Messages match by sender, tag and dtype, whenever they come. So a receive that
sees a message of another dtype waits on: the one it wants may follow. It is a `MismatchError` only
when that cannot be any more: the sender has left, or can do nothing before this rank does
([Note: chases] in `news`), or the time limit is over.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any, final

import numpy as np
from mpi4py import MPI

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.arrays.pickled import Pickled, empty_buffers
from hpcdist.errors import CollectiveTimeout, HpcdistError, MismatchError, RemoteError, UsageError
from hpcdist.transport.call.call import ANY_SOURCE, AnyMessage, Message
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.flight.call_site import call_site
from hpcdist.transport.flight.recorder import end, fail
from hpcdist.transport.mpi.early import keep_for_ever
from hpcdist.transport.mpi.matching import Delivery, Found, Matching
from hpcdist.transport.mpi.news import Blocker, Step
from hpcdist.transport.mpi.survival import translate
from hpcdist.transport.waiting.activity import Wait
from hpcdist.transport.waiting.polling import LISTEN_AFTER_S, poll, raising_held
from hpcdist.transport.waiting.queue import seconds
from hpcdist.transport.waiting.unheard import error_of
from hpcdist.transport.waiting.work import Known, Work

_EXPLAIN_AFTER_S = 0.05


@final
class Send(Work):
    """One message (or the parts of some pickles) on its way out; without `requests` it is there."""

    def __init__(self, matching: Matching, call: AnyMessage, requests: list[MPI.Request]) -> None:
        self._matching = matching
        self._call: AnyMessage | None = call
        self._requests = requests
        self._peer = call.root
        self._mark = 0
        self._site = call_site()
        if not requests:
            self._end()

    def recorded(self, mark: int) -> None:
        """See `Work.recorded`."""
        self._mark = mark
        if not self._requests:  # another thread may have ended it meanwhile
            end(mark)

    @property
    def limit_s(self) -> float:
        """The time limit of the group."""
        return self._matching.timeout_s

    def is_completed(self) -> bool:
        """Return whether the buffer may be changed again."""
        with self._matching.lock:
            try:
                if self._requests and MPI.Request.Testall(self._requests):
                    self._end()
            except MPI.Exception as error:
                keep_for_ever(self._requests)  # MPI may still read the array
                reason = translate(error, self._what(), self._matching.deaths)
                self._fail(reason)
                self._end()
        return not self._requests

    def _end(self) -> None:
        self._requests = []
        (end if self._failure is None else fail)(self._mark)
        call, self._call = self._call, None
        if call is not None and call.ended is not None:
            call.ended(error_of(self._failure))

    def refuse_nested(self) -> None:
        """See `Work.refuse_nested`."""
        self._matching.refuse_nested()

    @raising_held
    def wait(self, timeout: Any = None) -> bool:
        """Block until the buffer may be changed again."""
        self.refuse_nested()
        limit = seconds(timeout)
        limit = self._matching.timeout_s if limit is None else limit
        wait = Wait(self._what)
        if not poll(self.is_completed, limit, wait=wait):
            account = (
                "" if timeout is not None else _account(self._matching, self._peer, wait, limit)
            )
            if not self.is_completed():
                self._matching.progress.keep(self)  # MPI reads the array to the end: it must stay
                raise CollectiveTimeout(
                    f"{self._what()} was not received within {limit:g} s; called at {call_site()}. "
                    "It cannot be taken back: leave the array alone, for it is still to be sent. "
                    f"Look whether that rank calls recv with this group and tag{account}"
                )
        if self._failure is not None:
            raise self._failure.hear()
        return True

    def _what(self) -> str:
        return describe_message(self._call, self._matching.ranks)

    def known(self) -> Known:
        """See `Work.known`."""
        return Known(self._what(), not self._requests, error_of(self._failure))


@final
class Receive(Work):
    """One message to come; `source` is the world rank it came from, once it has."""

    def __init__(self, matching: Matching, call: AnyMessage, tag: int) -> None:
        self._matching = matching
        self._call: AnyMessage | None = call
        self.tag, self.user_tag = tag, call.tag
        self.source_wanted = call.root
        self._deliveries: list[Delivery] = []
        """Into an array, or the stream and the buffers of a pickle. Each may wait to begin again,
        as what an interrupt finds is either taken, and noted, or not."""
        self._buffers: list[NumpyArray] | None = None
        """Those of the pickle, once its stream is there."""
        self._ended = self._is_told = False
        self._site = call_site()
        self._ticket: int | None = None
        self._ask_at = LISTEN_AFTER_S
        self._mark = 0

    def recorded(self, mark: int) -> None:
        """See `Work.recorded`."""
        self._mark = mark
        if self._ended:  # perhaps before it had the mark
            self._record_end()

    def _record_end(self) -> None:
        (end if self._failure is None else fail)(self._mark)

    @classmethod
    def under_way(cls, matching: Matching, call: Message, tag: int, delivery: Delivery) -> Receive:
        """Return the receive of an array that has begun already."""
        receive = cls(matching, call, tag)
        receive.source_wanted, receive._deliveries = delivery.found.source, [delivery]
        return receive

    @property
    def has_begun(self) -> bool:
        """Whether a part of its message has been taken."""
        return bool(self._deliveries) and self._deliveries[0].has_begun

    def match(self, promised: AbstractSet[int]) -> bool:
        """Begin to receive if the message is there; True if nothing is left to match.

        Messages from the sources in `promised` belong to earlier receives.
        """
        if self.is_matched():  # an interrupt has kept who matched it from saying so
            return True
        if self._matching.is_over:
            self.detach()  # the end of the group has named it
            self._fail(
                UsageError(
                    f"{self._what()} had not come when the group was destroyed; wait for each "
                    "message before its group ends"
                )
            )
            return True
        if ANY_SOURCE in promised or self.source_wanted in promised:
            return False
        try:
            return self._match(promised)
        except MPI.Exception as error:  # of this message alone: the others may still come
            self._fail(translate(error, self._what(), self._matching.deaths))
            return True

    def is_matched(self) -> bool:
        """Return whether nothing of the message is left to be taken."""
        if self._ended or self._failure is not None:
            return True
        if not self.has_begun:
            return False
        if isinstance(self._call, Message) or self._buffers == []:
            return True
        return len(self._deliveries) == 2 and self._deliveries[1].has_begun

    def _match(self, promised: AbstractSet[int]) -> bool:
        if self.has_begun:
            first = self._deliveries[0]
            if not first.is_here():
                return False  # the first part of a pickle says what follows
            if self._buffers is None:
                self._buffers = empty_buffers(first.buffers[0])
            if not self._buffers:
                return True
        found = self._matching.find(self.source_wanted, self.tag)
        if found is None or found.source in promised:
            return False
        if self._buffers:
            return self._take(found, self._buffers)
        call = self._call
        if not isinstance(call, Message):
            self.source_wanted = found.source
            self._take(found, [np.empty(found.nbytes, np.uint8)])
            return self.match(promised)
        if found.nbytes != call.nbytes:
            self._fail(self._mismatch(found))
            return True
        self.source_wanted = found.source
        return self._take(found, [call.data])

    def _take(self, found: Found, buffers: list[NumpyArray]) -> bool:
        begun = [each for each in self._deliveries if each.has_begun]
        self._deliveries = [*begun, Delivery(self._matching, found, buffers)]
        self._deliveries[-1].begin()
        return True

    def _is_here(self) -> bool:
        return self._failure is not None or self._deliveries[-1].is_here()

    def _end(self) -> None:
        call, interrupt = self._call, None
        assert call is not None
        if self._failure is None:
            self.source = self._matching.ranks[self.source_wanted]
            interrupt = self._put_in_place(call)
        if call.ended is not None and not self._is_told:
            self._is_told = True
            try:
                call.ended(error_of(self._failure))
            except Exception as error:  # of a listener
                if self._failure is None:
                    self._fail(error)
        self._ended = True  # other threads look at it without the lock
        self._call, self._deliveries = None, []
        self._record_end()
        if interrupt is not None:
            raise interrupt

    def _put_in_place(self, call: AnyMessage) -> Exception | None:
        """Let the call finish with what has come; return an interrupt, after which it has, too.

        An interrupt does not come twice, as errors do.
        """
        try:
            self._finish(call)
        except Exception as error:
            try:
                self._finish(call)
            except Exception:
                self._fail(error)
                return None
            return error
        return None

    def _finish(self, call: AnyMessage) -> None:
        if call.finish is not None:
            call.finish(None if isinstance(call, Message) else self._received_pickles())

    def _received_pickles(self) -> list[Pickled]:
        return [Pickled(self._deliveries[0].buffers[0], self._buffers or [])]

    @property
    def limit_s(self) -> float:
        """The time limit of the group."""
        return self._matching.timeout_s

    def is_completed(self) -> bool:
        """Return whether the message has arrived; drives matching, unless in the middle of it."""
        if self._ended or self._matching.is_inside():
            return self._ended
        with self._matching.lock:
            if not self.is_matched():
                self._matching.look()
            try:
                if self.is_matched() and not self._ended and self._is_here():
                    self._end()
            except MPI.Exception as error:
                self._fail(translate(error, self._what(), self._matching.deaths))
                self._end()
        return self._ended

    def refuse_nested(self) -> None:
        """See `Work.refuse_nested`."""
        self._matching.refuse_nested()

    @raising_held
    def wait(self, timeout: Any = None) -> bool:
        """Block until the message is in the array."""
        self.refuse_nested()
        limit = seconds(timeout)
        limit = self._matching.timeout_s if limit is None else limit
        wait = Wait(self._what, self.blockers)
        try:
            if not poll(self.is_completed, limit, self.attend, _EXPLAIN_AFTER_S, wait):
                self._time_out(wait, limit, goes_on=timeout is not None)
        finally:
            self._forget_chase()
        if self._failure is not None:
            raise self._failure.hear()
        return True

    def known(self) -> Known:
        """See `Work.known`."""
        return Known(self._what(), self._ended, error_of(self._failure))

    def _what(self) -> str:
        return describe_message(self._call, self._matching.ranks)

    def blockers(self) -> list[Blocker]:
        """Return who has to send something before this receive can end, if it is one rank."""
        matching, source = self._matching, self.source_wanted
        if matching.news is None or self.is_matched() or self.has_begun:
            return []
        if source == ANY_SOURCE or source == matching.comm.rank:
            return []
        seen = matching.seen_from(source)
        with matching.lock:
            if matching.find(source, self.tag) is not None:
                return []
        return [Blocker(matching.news, source, Step(True, seen))]

    # ---- what can go wrong

    def attend(self, waited: float) -> None:
        """See whether no message will come that matches; see [Note: other dtypes]."""
        try:
            self._attend(waited)
        except MPI.Exception as error:
            raise translate(error, self._what(), self._matching.deaths) from error

    def _attend(self, waited: float) -> None:
        matching, source = self._matching, self.source_wanted
        if self.is_matched() or self.has_begun:
            return
        other = matching.find_of_other_dtype(self)
        if matching.says_all(source, self._ticket):
            if other is not None and matching.withdraw(self):
                self._give_up(self._mismatch(other))
            elif other is None and self._has_left(source) and matching.withdraw(self):
                self._give_up(self._gone(source))
        elif other is not None and waited >= self._ask_at:
            self._forget_chase()
            self._ask_at = min(2 * waited, waited + 1)
            self._ticket = matching.ask_for_more(source)

    def _has_left(self, source: int) -> bool:
        news = self._matching.news
        return news is not None and source in news.left

    def _forget_chase(self) -> None:
        if self._ticket is not None:
            self._matching.circles.forget(self._ticket)
            self._ticket = None

    def _give_up(self, error: HpcdistError) -> None:
        with self._matching.lock:
            if not self._ended:
                self._fail(error)
                self._end()

    def _time_out(self, wait: Wait, limit: float, *, goes_on: bool) -> None:
        """Raise what there is to say when the time is over; return if the message has come."""
        matching, source = self._matching, self.source_wanted
        account = "" if goes_on else _account(matching, source, wait, limit)
        if self.is_completed():
            return
        if self.is_matched() or self.has_begun:
            raise CollectiveTimeout(
                f"{self._what()} has begun to arrive but is not complete after {limit:g} s; called "
                f"at {call_site()}. Its sender has to be in an operation of hpcdist{account}",
                self._missing(),
            )
        other = matching.find_of_other_dtype(self)
        if not goes_on and not matching.withdraw(self):
            self.wait()  # it came in this moment
            return
        if other is not None and not goes_on:
            self._give_up(self._mismatch(other, f" within {limit:g} s", account))
            return
        there = "" if other is None else f" There is a message of {other.dtype}, which stays."
        error = CollectiveTimeout(
            f"{self._what()} got no message within {limit:g} s; called at {call_site()}. "
            f"{self._remedy()}.{there}{account}",
            self._missing(),
        )
        if goes_on:
            raise error
        self._give_up(error)

    def _remedy(self) -> str:
        if self.source_wanted == self._matching.comm.rank:
            return "That is this rank itself: let src be the rank that sends, or isend before"
        return "Look whether that rank sends with this group, tag and dtype"

    def _missing(self) -> tuple[int, ...]:
        source = self.source_wanted
        return () if source == ANY_SOURCE else (self._matching.ranks[source],)

    def _mismatch(self, found: Found, within: str = "", account: str = "") -> MismatchError:
        call, ranks = self._call, self._matching.ranks
        assert call is not None
        own, size = self._wanted_words(call)
        none = "" if self.tag == found.tag else f", and sent none of that{within}"
        return MismatchError(
            f"rank {ranks[found.source]} sent {found.nbytes} bytes of {found.dtype}, but rank "
            f"{ranks[self._matching.comm.rank]} receives {own} with tag {call.tag}{none}; called "
            f"at {call_site()}. The message was not taken: receive it with {size}{account}"
        )

    def _wanted_words(self, call: AnyMessage) -> tuple[str, str]:
        if not isinstance(call, Message):
            return "objects", "recv, into an array of its size and dtype"
        words = f"{call.nbytes} bytes of {call.dtype.name} (shape {call.shape})"
        return words, "an array of its size and dtype"

    def _gone(self, source: int) -> RemoteError:
        news, rank = self._matching.news, self._matching.ranks[source]
        assert news is not None
        return RemoteError(
            f"rank {rank} {news.left[source]} and sent nothing for {self._what()}, called at "
            f"{call_site()}; let it send with this group, tag and dtype",
            rank,
        )


def _account(matching: Matching, peer: int, wait: Wait, limit_s: float) -> str:
    """Ask a peer what it does; nothing where MPI cannot ask."""
    try:
        return matching.account(peer, wait, limit_s)
    except MPI.Exception as error:
        raise translate(error, wait.words(), matching.deaths) from error


def describe_message(call: AnyMessage | None, ranks: Any) -> str:
    """Describe a message: its peer, its tag, its dtype and its group."""
    if call is None:
        return "a message that has ended"
    preposition = "to" if call.kind in (Kind.SEND, Kind.SEND_OBJECT_LIST) else "from"
    peer = "any rank" if call.root == ANY_SOURCE else f"rank {ranks[call.root]}"
    what = "" if call.dtype is None else f" of {call.dtype.name} (shape {call.shape})"
    group = list(ranks) if len(ranks) <= 16 else f"{len(ranks)} ranks"
    return (
        f"{call.kind.name.lower()} {preposition} {peer}{what} with tag {call.tag} in the group of "
        f"ranks {group}"
    )
