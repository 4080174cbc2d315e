"""Point-to-point messages of one group over MPI: sends and receives are begun here.

How they match is in `matching`, what is under way in `requests`.

[Note: interrupted sends] MPI reads an array until the message is there, and nothing takes it back.
If an exception leaves a `send` that waits, the program goes on and writes to the array. So what a
`send` hands to MPI on one node is a copy, up to some size (through mailboxes, a receiver that waits
has taken it from its place before). A larger array is kept until it is sent, as it is then.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, final

import numpy as np
from mpi4py import MPI

from hpcdist.arrays.pickled import Pickled
from hpcdist.errors import CollectiveTimeout, UsageError
from hpcdist.runtime.survival import can_recover
from hpcdist.text import in_short
from hpcdist.transport.call.call import AnyMessage, Message, ObjectMessage
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.flight.call_site import call_site
from hpcdist.transport.mpi.datatypes import block, scattered
from hpcdist.transport.mpi.early import Allowance, keep_for_ever
from hpcdist.transport.mpi.matching import Delivery, Matching
from hpcdist.transport.mpi.news import Circles
from hpcdist.transport.mpi.requests import Receive, Send, describe_message
from hpcdist.transport.mpi.tags import user_tag, wire_tag, wire_tags
from hpcdist.transport.presence.deaths import Deaths
from hpcdist.transport.shm.mail import open_mail
from hpcdist.transport.shm.node import SharedNode
from hpcdist.transport.shm.segment import is_dead
from hpcdist.transport.waiting.activity import Wait
from hpcdist.transport.waiting.polling import at_once, poll, step, to_the_end
from hpcdist.transport.waiting.work import DONE, Done, Work

_DEAD_AFTER_S = 0.2
_SHOWN = 8
"""So many messages are named that nobody has received."""

_COPIED_UP_TO = 8 << 20
_ARRIVAL_SPIN = 500
"""Looks at a message of medium size that is arriving, before the wait becomes a patient one."""

_ARRIVES_S = 10.0
"""How long a message may take that is arriving in the array of a rank that is interrupted."""

_HEAR_OF_DEATHS_NS = 10_000_000
"""Where ranks may die, so often at least a message goes by MPI, which tells of it."""


@final
class Messages:
    """Sends and receives of one group; `comm` is used for nothing else.

    `allowance`, `circles` and `deaths` are those of the process.
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
        self.matching = Matching(comm, ranks, timeout_s, allowance, circles, deaths)
        self.refuse_nested = self.matching.refuse_nested
        self._pids: Sequence[int] = ()
        limit = comm.Get_attr(MPI.TAG_UB) or 32767
        self._last_tag = wire_tags(user_tag(int(limit)))[-1]
        self._may_thread = MPI.Query_thread() >= MPI.THREAD_MULTIPLE

    def open_mail(self, node: SharedNode) -> None:
        """Send small messages through memory from now on, if that can be; see `shm.mail`."""
        matching = self.matching
        self._pids = node.pids
        mail = open_mail(node.mail_memory, node.rank, matching.ranks, node.pids, matching.lock)
        if mail is not None:
            mail.attaches = node.attaches
            mail.last_tag = self._last_tag
            mail.pause_ns = _HEAR_OF_DEATHS_NS if can_recover() else 0
        matching.mail = mail

    def await_copied(self, call: Message) -> None:
        """Wait while the other rank copies a large message: reads this one's, or writes to it.

        Raises:
            CollectiveTimeout: it does not end in time.
            RankFailure: it has died.

        """
        matching, mail = self.matching, self.matching.mail
        assert mail is not None
        is_sent = call.kind is Kind.SEND
        is_copied = partial(mail.is_settled if is_sent else mail.is_copied, call.root)
        what = partial(describe_message, call, matching.ranks)

        def check_alive(waited: float) -> None:
            if is_dead(self._pids[call.root]) and not is_copied():
                matching.deaths.note([matching.ranks[call.root]])
                raise matching.deaths.failure(what())

        wait = Wait(what)
        if not to_the_end(
            lambda: poll(is_copied, matching.timeout_s, check_alive, _DEAD_AFTER_S, wait)
        ):
            keep_for_ever([call.data])
            raise CollectiveTimeout(
                f"{what()} has begun to be {'received' if is_sent else 'written'}, but has not "
                f"arrived within {matching.timeout_s:g} s; called at {call_site()}. Leave the "
                f"array alone, for that rank may still {'read' if is_sent else 'write to'} it, "
                "and look why it has stopped"
            )

    def start(self, call: AnyMessage) -> Work:
        """Begin a send or receive."""
        begun: list[Any] = []
        try:
            work = self._begin(call, begun)
            if self._may_thread and not work.is_completed():
                self.matching.progress.keep(work)
        except BaseException:
            for each in begun:
                self._leave(call, each)
            raise
        return work

    def run(self, call: AnyMessage) -> Work:
        """Finish a send or receive before returning."""
        begun: list[Any] = []
        try:
            if isinstance(call, Message) and call.kind is Kind.RECV and call.ended is None:
                work = self._receive_at_once(call, begun)
                if type(work) is Done:
                    return work
            else:
                work = None
            if work is None:
                work = self._begin(call, begun, lends=False)
            work.wait()
        except BaseException:
            for each in begun:
                self._leave(call, each)
            raise
        return work

    def _leave(self, call: AnyMessage, begun: Any) -> None:
        """Take back a message whose wait has ended with an exception, or keep what it uses."""
        matching = self.matching
        if isinstance(begun, Delivery):
            if not begun.has_begun:
                return
            assert isinstance(call, Message)
            begun = Receive.under_way(matching, call, wire_tag(call.tag, call.dtype), begun)
        elif isinstance(begun, Parcel):
            if not begun.has_begun:
                return
            begun = Send(matching, begun.call, to_the_end(begun.send))
        elif matching.withdraw(begun):
            return
        begun.detach()
        try:
            is_over = isinstance(begun, Receive) and to_the_end(
                lambda: poll(begun.is_completed, _ARRIVES_S)
            )
        except BaseException:  # another exception is on its way already
            is_over = False
        if not is_over and not begun.is_completed():
            matching.progress.keep(begun)

    def close(self) -> list[Work]:
        """Stop the progress thread; return the messages that are under way."""
        return self.matching.progress.stop()

    def tell_unreceived(self) -> None:
        """Say what was sent to this rank and never received: most often a tag is wrong."""
        ranks, found = self.matching.ranks, Counter(self.matching.unreceived())
        if not found:
            return
        several = [
            f"{count} times {words}" if count > 1 else words for words, count in found.items()
        ]
        more = f", and {len(several) - _SHOWN} more" if len(several) > _SHOWN else ""
        sys.stderr.write(
            f"[rank {ranks[self.comm.rank]}] the group of ranks {in_short(ranks)} ends, and "
            f"this rank has never received {', '.join(several[:_SHOWN])}{more}; give each message "
            "a receive of its tag and dtype\n"
        )
        sys.stderr.flush()

    def _receive_at_once(self, call: Message, begun: list[Any]) -> Work | None:
        """Receive a message that is there already; anything unusual is left to `Receive`."""
        tag, matching = wire_tag(call.tag, call.dtype), self.matching
        if not 0 <= tag <= self._last_tag:
            raise self._out_of_range(call)
        delivery = matching.take_at_once(call.data, call.root, tag, begun)
        if delivery is None:
            return None
        if not any(delivery.is_here() for _ in range(_ARRIVAL_SPIN)):
            return Receive.under_way(matching, call, tag, delivery)
        if call.finish is not None:
            call.finish(None)
        return Done(matching.ranks[delivery.found.source])

    def _begin(self, call: AnyMessage, begun: list[Any], *, lends: bool = True) -> Work:
        """Begin a message, and put what has begun into `begun`.

        If it does not lend, what MPI still has to send is a copy.
        """
        tag, matching = wire_tag(call.tag, call.dtype), self.matching
        if not 0 <= tag <= self._last_tag:
            raise self._out_of_range(call)
        if isinstance(call, Message) and call.kind is Kind.SEND:
            parcel = Parcel(matching, call, tag, [call.data])
            parcel.copies_up_to = _COPIED_UP_TO if self._pids and not lends else 0
            begun.append(parcel)
            requests = parcel.send()
            if call.ended is None and (not requests or requests[0].Test()):
                return DONE
            return Send(matching, call, requests)
        if isinstance(call, ObjectMessage) and call.kind is Kind.SEND_OBJECT_LIST:
            if not lends:
                call = call._replace(pickles=[*map(_as_copy, call.pickles)])
            parts = [part for pickled in call.pickles for part in _parts(pickled)]
            begun.append(parcel := Parcel(matching, call, tag, parts))
            with matching.lock:  # the parts of a pickle follow each other
                return Send(matching, call, parcel.send())
        receive = Receive(matching, call, tag)
        begun.append(receive)
        matching.post(receive)
        return receive

    def _out_of_range(self, call: AnyMessage) -> UsageError:
        return UsageError(
            f"tag {call.tag} is out of range; this MPI allows 0 to {user_tag(self._last_tag)}"
        )


@final
class Parcel:
    """What is sent to a rank: parts that follow each other, each of them bytes, or buffers.

    A part has been sent, and that is noted, or it has not: see [Note: at once] in `polling`. So
    `send` goes on where an interrupt has left it.
    """

    copies_up_to = 0
    """The bytes of a part up to which MPI gets a copy; see [Note: interrupted sends]."""

    def __init__(
        self, matching: Matching, call: AnyMessage, tag: int, parts: Sequence[Any]
    ) -> None:
        self.call = call
        """Has the memory of the parts."""
        self._matching, self._to, self._tag = matching, call.root, tag
        self._parts = [(part, list[Any]()) for part in parts]

    @property
    def has_begun(self) -> bool:
        """Whether a part has been sent."""
        return bool(self._parts[0][1])

    def send(self) -> list[MPI.Request]:
        """Send the parts through a mailbox, or begin to by MPI; return what is under way."""
        for part, noted in self._parts:
            if not noted:
                self._send(part, noted)
        return [each for _, noted in self._parts for each in noted if each not in (None, True)]

    def _send(self, part: Any, noted: list[Any]) -> None:
        matching, to, tag = self._matching, self._to, self._tag
        if isinstance(part, tuple):
            message, datatype = scattered([*part])
            at_once(noted, *matching.sends(to), step(matching.comm.Isend, message, to, tag))
            datatype.Free()
            return
        nbytes, mail = part.nbytes if isinstance(part, np.ndarray) else len(part), matching.mail
        if mail is not None and nbytes <= mail.most:
            noted.extend(filter(None, step(mail.put, to, tag, part)))
            if noted:
                return
        if nbytes <= self.copies_up_to:
            part = part.copy()
        at_once(noted, *matching.sends(to), step(matching.comm.Isend, block(part, nbytes), to, tag))


def _parts(pickled: Pickled) -> list[Any]:
    """Return what is sent of a pickle: its meta, then its buffers as one part."""
    return [pickled.meta, *([tuple(pickled.buffers)] if pickled.buffers else [])]


def _as_copy(pickled: Pickled) -> Pickled:
    """Return a pickle that shares no memory with its object, unless it is large."""
    return pickled if pickled.nbytes > _COPIED_UP_TO else pickled.copy()
