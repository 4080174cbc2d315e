"""`Communicators`: those that hpcdist has made in a world, so that all can be revoked together.

[Note: no Dup] Where a rank may die meanwhile, communicators are made by Split: Open MPI 5.0 can
crash when that happens in ``MPI_Comm_dup``.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TypeVar, cast, final

from mpi4py import MPI

from hpcdist.runtime.process import snapshot
from hpcdist.runtime.survival import can_recover

_C = TypeVar("_C", bound=MPI.Comm)


@final
class Communicators:
    """Those of one world; what comes when they are revoked is revoked at once."""

    def __init__(self) -> None:
        self._made: list[MPI.Comm] = []
        self._lock = threading.Lock()
        self._are_revoked = False
        self._splits = can_recover(snapshot())

    def __repr__(self) -> str:
        return f"<Communicators: {len(self._made)}>"

    def add(self, comm: _C) -> _C:
        """Keep a communicator, and return it."""
        if self._splits:
            with self._lock:
                self._made = [each for each in self._made if each != MPI.COMM_NULL]
                self._made.append(comm)
                is_late = self._are_revoked
            if is_late:
                comm.Revoke()
        return comm

    def duplicate(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        """Return a communicator of the same ranks. Collective."""
        if not self._splits:
            return comm.Dup()
        return self.add(cast(MPI.Intracomm, comm.Split(0, comm.rank)))  # [Note: no Dup]

    def revoke(self) -> None:
        """End whatever is under way, on all ranks, and whatever comes. Local; on any thread."""
        with self._lock:
            self._are_revoked = True
            made = tuple(self._made)
        for comm in made:
            with suppress(MPI.Exception):
                if comm != MPI.COMM_NULL:
                    comm.Revoke()

    def free(self) -> None:
        """Give all back to MPI, which nobody uses any more. Local after `revoke`."""
        with self._lock:
            made, self._made = self._made, []
        for comm in made:
            with suppress(MPI.Exception):
                if comm != MPI.COMM_NULL:
                    comm.Free()
