"""`Control`: small messages, told without waiting for anyone, and polled for.

The news of a group, the meetings of new groups and the handshakes of pairs of ranks are told this
way. What waits for an answer polls (`polling.poll`), so that the wait has an end and Ctrl-C works.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, final

from mpi4py import MPI

from hpcdist.transport.mpi.tags import Tag
from hpcdist.transport.waiting.polling import AT_ONCE

_FEW = 16


@final
class Control:
    """The messages of one kind between the ranks of a communicator."""

    def __init__(self, comm: MPI.Intracomm, tag: Tag) -> None:
        self._comm, self._tag = comm, tag
        self._unsent: dict[int, MPI.Request] = {}
        """Keeps messages alive until they are on their way."""
        self._limit = _FEW
        self._testing = threading.Lock()

    def tell(self, rank: int, content: Any) -> MPI.Request:
        """Send anything that pickles, without waiting; small ones need no care afterwards."""
        if len(self._unsent) >= self._limit:
            taken: list[bool] = []
            try:
                taken.extend(map(self._testing.acquire, AT_ONCE))
                if taken[0]:
                    self._forget_sent()
            finally:  # [Note: given back]
                if taken and taken[0]:
                    self._testing.release()
        request = self._comm.isend(content, rank, self._tag)
        self._unsent[id(request)] = request
        return request

    def heard(self, source: int = MPI.ANY_SOURCE) -> Iterator[tuple[int, Any]]:
        """Yield what has come, of `source` or of all ranks, and from whom, until nothing is left.

        A large message is waited for, so its sender has to be in MPI.
        """
        status = MPI.Status()
        while (message := self._comm.improbe(source, self._tag)) is not None:
            content = message.recv(status)
            yield status.Get_source(), content

    def _forget_sent(self) -> None:
        """Forget what is on its way; a signal handler, or another thread, may send meanwhile."""
        for request in list(self._unsent.values()):
            if request.Test():
                del self._unsent[id(request)]
        self._limit = max(_FEW, 2 * len(self._unsent))  # so each is tested a few times
