"""Sends and receives under way: the works behind `Messages`."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, final

import numpy as np
from mpi4py import MPI

from hpcdist.arrays.dtypes import Dtype, name_of_code
from hpcdist.arrays.parcel import Parcel, empty_buffers
from hpcdist.errors import CollectiveTimeout, MismatchError
from hpcdist.transport.base import Work
from hpcdist.transport.call import ANY_SOURCE, Call, Kind
from hpcdist.transport.call_site import call_site
from hpcdist.transport.lane import seconds
from hpcdist.transport.mpi_types import block
from hpcdist.transport.patience import poll

if TYPE_CHECKING:
    from hpcdist.transport.mpi_messages import Messages

CODE_BITS = 5
"""Low bits of a tag on the wire that hold the code of the dtype."""

_EXPLAIN_AFTER_S = 0.05
_HELP_AFTER_S = 1e-3


@final
class Send(Work):
    """One message (or the parts of some parcels) on its way out."""

    def __init__(self, messages: Messages, call: Call, requests: list[MPI.Request]) -> None:
        self._messages = messages
        self._call: Call | None = call
        self._requests = requests
        self._what = f"{call.kind.name.lower()} to rank {messages.ranks[call.root]}"

    @property
    def limit_s(self) -> float:
        """The time limit of the group."""
        return self._messages.timeout_s

    def is_completed(self) -> bool:
        """Say whether the buffer may be changed again."""
        with self._messages.lock:
            if self._requests and MPI.Request.Testall(self._requests):
                self._requests = []
                call, self._call = self._call, None
                if call is not None and call.ended is not None:
                    call.ended(None)
        return not self._requests

    def wait(self, timeout: Any = None) -> bool:
        """Block until the buffer may be changed again."""
        limit = seconds(timeout)
        limit = self._messages.timeout_s if limit is None else limit
        if not poll(self.is_completed, limit, self._help, _HELP_AFTER_S):
            raise CollectiveTimeout(
                f"{self._what} was not received within {limit:g} s; called at {call_site()}. "
                "Look whether that rank calls recv with this group and tag"
            )
        return True

    def _help(self, waited: float) -> None:
        self._messages.help_senders()


@final
class Receive(Work):
    """One message to come; `source` is the world rank it came from, once it has."""

    def __init__(self, messages: Messages, call: Call, tag: int) -> None:
        self._messages = messages
        self._call: Call | None = call
        self.tag = tag
        self.source_wanted = self._from = call.root
        self._request: MPI.Request | None = None
        self._error: Exception | None = None
        self._ended = False
        peer = "any rank" if call.root == ANY_SOURCE else f"rank {messages.ranks[call.root]}"
        self._what = f"{call.kind.name.lower()} from {peer}"

    def match(self, promised: AbstractSet[int]) -> bool:
        """Begin to receive if the message is there; True if nothing is left to match.

        Messages from the sources in `promised` belong to earlier receives.
        """
        call, messages = self._call, self._messages
        assert call is not None
        if ANY_SOURCE in promised or self.source_wanted in promised:
            return False
        found = messages.find(self.source_wanted, self.tag)
        if found is None or found[0] in promised:
            return False
        source, nbytes, early = found
        if call.kind is Kind.RECV_OBJECT_LIST:
            self._receive_parcel(call, source)
            return True
        assert call.recv is not None
        if nbytes != call.recv.nbytes:
            self._fail(source, call.dtype, nbytes)
            return True
        self._from = source
        if early is not None:
            flat = call.recv.reshape(-1).view(np.uint8)
            flat[...] = np.frombuffer(messages.take(early), np.uint8)
            self._end(call, None)
        else:
            self._request = messages.comm.Irecv(block(call.recv, nbytes), source, self.tag)
        return True

    def _receive_parcel(self, call: Call, source: int) -> None:
        """Take both parts of a parcel; they have been sent without a gap."""
        messages = self._messages
        meta = messages.receive_next(source, self.tag, None)
        buffers = empty_buffers(meta)
        if buffers:
            messages.receive_next(source, self.tag, buffers)
        self._from = source
        self._end(call, [Parcel(meta, buffers)])

    def _end(self, call: Call, result: Any) -> None:
        self.source = self._messages.ranks[self._from]
        try:
            if call.finish is not None:
                call.finish(result)
        except Exception as error:
            self._error = error
        self._close(call)

    def _close(self, call: Call) -> None:
        self._ended, self._call = True, None
        if call.ended is not None:
            call.ended(self._error)

    def _fail(self, source: int, sent: Dtype | int | None, nbytes: int) -> None:
        call = self._call
        assert call is not None
        assert call.recv is not None
        assert call.dtype is not None
        name = name_of_code(sent) if isinstance(sent, int) else call.dtype.name
        ranks = self._messages.ranks
        self._error = MismatchError(
            f"rank {ranks[source]} sent {nbytes} bytes of {name}, but rank "
            f"{ranks[self._messages.comm.rank]} receives {call.recv.nbytes} bytes of "
            f"{call.dtype.name} (shape {call.shape}) with tag {call.tag}; called at {call_site()}. "
            "The message was not taken: receive it with an array of its size and dtype"
        )
        self._close(call)

    @property
    def limit_s(self) -> float:
        """The time limit of the group."""
        return self._messages.timeout_s

    def is_completed(self) -> bool:
        """Say whether the message has arrived; drives matching."""
        if self._ended:
            return True
        with self._messages.lock:
            if self._request is None and not self._ended:
                self._messages.advance()
            if self._request is not None and self._request.Test():
                self._request = None
                call = self._call
                assert call is not None
                self._end(call, None)
        return self._ended

    def wait(self, timeout: Any = None) -> bool:
        """Block until the message is in the array."""
        limit = seconds(timeout)
        limit = self._messages.timeout_s if limit is None else limit
        if not poll(self.is_completed, limit, self._explain, _EXPLAIN_AFTER_S) and (
            timeout is not None or self._messages.withdraw(self)
        ):
            raise CollectiveTimeout(
                f"{self._what} got no message within {limit:g} s; called at {call_site()}. "
                "Look whether that rank sends with this group, tag and dtype",
                () if self._from == ANY_SOURCE else (self._messages.ranks[self._from],),
            )
        if self._error is not None:
            raise self._error
        return True

    def _explain(self, waited: float) -> None:
        """Look for a message that does not match only because its dtype is another one."""
        messages, call = self._messages, self._call
        if call is None or self._request is not None:
            return
        with messages.lock:
            for code in range(1 << CODE_BITS):
                tag = call.tag << CODE_BITS | code
                if tag == self.tag or call.dtype is None:
                    continue
                found = messages.find(self._from, tag)
                if found is not None and messages.withdraw(self):
                    self._fail(found[0], code, found[1])
                    return
