"""Point-to-point messages of one group over MPI: sends and receives are begun here.

How they match is in `matching`, what is under way in `requests`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from mpi4py import MPI

from hpcdist.errors import UsageError
from hpcdist.transport.base import DONE, Done, Work
from hpcdist.transport.call import AnyMessage, Kind, Message, ObjectMessage
from hpcdist.transport.mpi.datatypes import block
from hpcdist.transport.mpi.early import Allowance
from hpcdist.transport.mpi.matching import Matching, code_of
from hpcdist.transport.mpi.news import Circles
from hpcdist.transport.mpi.pickled import send_pickled
from hpcdist.transport.mpi.requests import Receive, Send
from hpcdist.transport.mpi.tags import CODE_BITS, wire_tag


@final
class Messages:
    """Sends and receives of one group; `comm` is used for nothing else.

    `allowance` and `circles` are those of the process.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        ranks: Sequence[int],
        timeout_s: float,
        allowance: Allowance,
        circles: Circles,
    ) -> None:
        self.comm = comm
        self.matching = Matching(comm, ranks, timeout_s, allowance, circles)
        limit = comm.Get_attr(MPI.TAG_UB) or 32767
        self._largest_tag = int(limit) >> CODE_BITS
        self._may_thread = MPI.Query_thread() >= MPI.THREAD_MULTIPLE

    def start(self, call: AnyMessage) -> Work:
        """Begin a send or receive."""
        work = self._begin(call)
        if self._may_thread and not work.is_completed():
            self.matching.progress.keep(work)
        return work

    def run(self, call: AnyMessage) -> Work:
        """Finish a send or receive before returning."""
        if isinstance(call, Message) and call.kind is Kind.RECV and call.ended is None:
            received = self._receive_at_once(call)
            if type(received) is Done:
                return received
            work = received or self._begin(call)
        else:
            work = self._begin(call)
        work.wait()
        return work

    def refuse_nested(self) -> None:
        """Raise where this thread is in the middle of matching messages."""
        self.matching.refuse_nested()

    def close(self) -> None:
        """Stop the progress thread."""
        self.matching.progress.stop()

    def _receive_at_once(self, call: Message) -> Work | None:
        """Receive a message that is there already; anything unusual is left to `Receive`."""
        tag, recv, matching = self._wire_tag(call), call.data, self.matching
        taken = matching.take_at_once(recv, call.root, tag)
        if taken is None:
            return None
        if taken.arrived is not None:
            return Receive.under_way(matching, call, tag, taken.source, taken.arrived)
        if call.finish is not None:
            call.finish(None)
        return Done(matching.ranks[taken.source])

    def _begin(self, call: AnyMessage) -> Work:
        tag, matching = self._wire_tag(call), self.matching
        if isinstance(call, Message) and call.kind is Kind.SEND:
            matching.sent[call.root] += 1
            request = self.comm.Isend(block(call.data, call.data.nbytes), call.root, tag)
            if call.ended is None and request.Test():
                return DONE
            return Send(matching, call, [request])
        if isinstance(call, ObjectMessage) and call.kind is Kind.SEND_OBJECT_LIST:
            with matching.lock:  # the parts of a pickle follow each other
                requests = [
                    request
                    for pickled in call.pickles
                    for request in send_pickled(self.comm, pickled, call.root, tag)
                ]
                matching.sent[call.root] += len(requests)
            return Send(matching, call, requests)
        receive = Receive(matching, call, tag)
        matching.post(receive)
        return receive

    def _wire_tag(self, call: AnyMessage) -> int:
        if not 0 <= call.tag <= self._largest_tag:
            raise UsageError(
                f"tag {call.tag} is out of range; this MPI allows 0 to {self._largest_tag}"
            )
        return wire_tag(call.tag, code_of(call.dtype))
