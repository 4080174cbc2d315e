"""Point-to-point messages of one group over MPI.

A receive looks at a message before it takes it (matched in posting order, as MPI does): one of
another size or dtype is a `MismatchError` and stays where it is. Handing MPI a buffer that is
too small instead corrupts memory in some libraries.

[Note: early messages] A send must not wait for a receive that comes later in the receiver's
program, or two ranks that send to each other first would wait for ever. So a rank that waits
for one of its sends takes in what others sent it, and keeps it for the receives to come.

The tag on the wire carries the dtype below the user's tag, so a receive of another dtype does
not match, and finding out why it waits costs nothing until it has waited.
"""

from __future__ import annotations

import threading
import time
from typing import Any, final

import numpy as np
from mpi4py import MPI

from hpcdist.arrays.dtypes import BYTES_CODE, Dtype
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.errors import UsageError
from hpcdist.transport.base import DONE, Done, Work
from hpcdist.transport.call import ANY_SOURCE, Call, Kind
from hpcdist.transport.mpi_objects import send_parcel
from hpcdist.transport.mpi_outbox import take_in
from hpcdist.transport.mpi_transfers import CODE_BITS, Receive, Send
from hpcdist.transport.mpi_types import block, scattered
from hpcdist.transport.patience import SPIN

_OBJECT_CODE = BYTES_CODE - 1
_IDLE_S = 1e-3


@final
class Messages:
    """Sends and receives of one group; `comm` is used for nothing else."""

    def __init__(self, comm: MPI.Intracomm, ranks: Any, timeout_s: float) -> None:
        self.comm = comm
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.lock = threading.RLock()
        self._posted: list[Receive] = []
        self._early: list[_Early] = []
        self._busy: list[Work] = []
        self._progress: threading.Thread | None = None
        self._wake = threading.Event()
        limit = comm.Get_attr(MPI.TAG_UB) or 32767
        self._largest_tag = int(limit) >> CODE_BITS

    def start(self, call: Call) -> Work:
        """Begin a send or receive."""
        work = self._begin(call)
        if not work.is_completed():
            self._keep_moving(work)
        return work

    def run(self, call: Call) -> Work:
        """Finish a send or receive before returning."""
        if call.kind is Kind.RECV and call.ended is None:
            source = self._receive_at_once(call)
            if source >= 0:
                return Done(self.ranks[source])
        work = self._begin(call)
        work.wait()
        return work

    def close(self) -> None:
        """Stop the progress thread."""
        self._busy.clear()
        if self._progress is not None:
            progress, self._progress = self._progress, None
            self._wake.set()
            progress.join(1.0)

    def _receive_at_once(self, call: Call) -> int:
        """Receive a message that is there already, or very soon; return its source, or -1.

        Only while nothing else waits for messages. Anything unusual is left to `Receive`.
        """
        recv, tag, status = call.recv, self._wire_tag(call), MPI.Status()
        assert recv is not None
        with self.lock:
            if self._posted or self._early:
                return -1
            for _ in range(SPIN):
                if self.comm.Iprobe(_mpi_source(call.root), tag, status):
                    break
            else:
                return -1
            if status.Get_elements(MPI.BYTE) != recv.nbytes:
                return -1
            source: int = status.Get_source()
            self.comm.Recv(block(recv, recv.nbytes), source, tag)
        if call.finish is not None:
            call.finish(None)
        return source

    # ---- starting

    def _begin(self, call: Call) -> Work:
        tag = self._wire_tag(call)
        if call.kind is Kind.SEND:
            assert call.send is not None
            request = self.comm.Isend(block(call.send, call.send.nbytes), call.root, tag)
            if call.ended is None and request.Test():
                return DONE
            return Send(self, call, [request])
        if call.kind is Kind.SEND_OBJECT_LIST:
            with self.lock:  # the parts of a parcel follow each other
                requests = [
                    request
                    for parcel in call.parcels
                    for request in send_parcel(self.comm, parcel, call.root, tag)
                ]
            return Send(self, call, requests)
        receive = Receive(self, call, tag)
        with self.lock:
            self._posted.append(receive)
            self.advance()
        return receive

    def _wire_tag(self, call: Call) -> int:
        if not 0 <= call.tag <= self._largest_tag:
            raise UsageError(
                f"tag {call.tag} is out of range; this MPI allows 0 to {self._largest_tag}"
            )
        return call.tag << CODE_BITS | _wire_code(call.dtype)

    # ---- matching

    def advance(self) -> None:
        """Match messages that have arrived with receives, in posting order.

        A message that arrives in between belongs to the earlier receive, not to a later one.
        """
        with self.lock:
            waiting: list[Receive] = []
            promised: dict[int, set[int]] = {}
            for receive in self._posted:
                if not receive.match(promised.get(receive.tag, frozenset())):
                    waiting.append(receive)
                    promised.setdefault(receive.tag, set()).add(receive.source_wanted)
            self._posted = waiting

    def withdraw(self, receive: Receive) -> bool:
        """Take back a receive; False if it has got its message meanwhile."""
        with self.lock:
            self.advance()
            if receive not in self._posted:
                return False
            self._posted.remove(receive)
            return True

    def find(self, source: int, tag: int) -> tuple[int, int, _Early | None] | None:
        """Look for a message: its source, its bytes, and itself if it was taken in early."""
        for early in self._early:
            if early.tag == tag and source in (ANY_SOURCE, early.source):
                return early.source, len(early.data), early
        status = MPI.Status()
        if not self.comm.Iprobe(_mpi_source(source), tag, status):
            return None
        return status.Get_source(), status.Get_elements(MPI.BYTE), None

    def take(self, early: _Early) -> bytearray:
        """Take an early message out of the store."""
        self._early.remove(early)
        return early.data

    def receive_next(self, source: int, tag: int, buffers: list[NumpyArray] | None) -> Any:
        """Receive the next message, which is known to have been sent.

        It goes into `buffers`, one after the other, or into new memory, which is returned.
        """
        while (found := self.find(source, tag)) is None:
            time.sleep(0)
        _, nbytes, early = found
        if early is not None:
            data = self.take(early)
            for buffer in buffers or ():
                buffer[...] = np.frombuffer(data[: buffer.size], np.uint8)
                data = data[buffer.size :]
            return data
        if buffers is not None:
            spec, datatype = scattered(buffers)
            self.comm.Recv(spec, source, tag)
            datatype.Free()
            return None
        data = bytearray(nbytes)
        self.comm.Recv(block(data, nbytes), source, tag)
        return data

    def help_senders(self) -> None:
        """See [Note: early messages]."""
        with self.lock:
            self.advance()
            for taken in take_in(self.comm):
                self._early.append(_Early(*taken))
            self.advance()

    # ---- progress while the caller computes

    def _keep_moving(self, work: Work) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            return
        with self.lock:
            self._busy.append(work)
            if self._progress is None:
                self._progress = threading.Thread(
                    target=self._move, name="hpcdist-messages", daemon=True
                )
                self._progress.start()
        self._wake.set()

    def _move(self) -> None:
        while self._progress is threading.current_thread():
            self._wake.wait()
            self._wake.clear()
            while self._busy:
                time.sleep(_IDLE_S)
                with self.lock:
                    self._busy = [work for work in self._busy if not _ended(work)]


def _ended(work: Work) -> bool:
    try:
        return work.is_completed()
    except Exception:
        return True  # its owner gets the exception from wait()


@final
class _Early:
    """A message taken in before it was asked for."""

    def __init__(self, source: int, tag: int, data: bytearray) -> None:
        self.source, self.tag, self.data = source, tag, data


def _wire_code(dtype: Dtype | None) -> int:
    return _OBJECT_CODE if dtype is None else min(dtype.code, BYTES_CODE)


def _mpi_source(source: int) -> int:
    return MPI.ANY_SOURCE if source == ANY_SOURCE else source
