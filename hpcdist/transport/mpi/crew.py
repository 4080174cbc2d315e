"""`Crew`: what is left of a job whose MPI goes on when a process dies.

`regroup` is what all that are left do together. They meet, leave the dead behind, build the new
world, and vote: if anybody could not go on, because there was another death meanwhile, all try
anew. Spares are part of the crew, and not of the world: `is_called` is where they wait.

[Note: bounded] A rank that has failed in an attempt revokes what it knows of it. A rank that waits
in a communicator which that one has not got yet would wait for ever, so a thread beside each
attempt looks at what all have in common, and revokes the rest as soon as that is revoked, a
process of this node dies ([Note: in the making] in `communicators`), or the attempt takes too long.

[Note: lowest] Where the making of a communicator was ended by a death, Open MPI 5.0 waits for ever
in later ones that are made of a communicator with a higher number than that one was made of.
Numbers are given from the lowest free one on. So what all have in common is made before anything
else of a world, and the one before it keeps its number.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol, TypeVar, cast, final

from mpi4py import MPI

from hpcdist.errors import CollectiveTimeout, RankFailure
from hpcdist.runtime.mpi import numbers_in_job
from hpcdist.transport.flight.call_site import call_site
from hpcdist.transport.mpi.communicators import (
    Communicators,
    processes_here,
    revoke,
    sight_of,
)
from hpcdist.transport.mpi.survival import failed_in
from hpcdist.transport.presence.roles import SPARE, Roles, Seat, Told
from hpcdist.transport.shm.segment import is_dead
from hpcdist.transport.waiting.polling import poll

_LOOK_MS = 2
_ATTEMPT_S = 60.0
_HEARD_S = 1.0
_MOST_ATTEMPTS = 100
_PARKED_S = 5e-3
"""How often a spare looks whether it is called: each time takes it some microseconds."""


class Built(Protocol):
    """What an attempt makes, which is given up if another rank could not make it."""

    def abandon(self) -> None:
        """Leave everything to MPI; local."""


B = TypeVar("B", bound=Built)
Build = Callable[[MPI.Intracomm, Communicators], B]


@final
class Crew:
    """The processes of a job that are left. Collective over `comm` to make.

    Args:
        comm: all of them, spares among them.
        nodes: for each of them a number of its node; () if unknown.
        spares: those that have no rank yet; the others are ranks in their order.
        least: the fewest ranks with which the job goes on.

    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        nodes: Sequence[int] = (),
        spares: Sequence[int] = (),
        least: int = 1,
    ) -> None:
        self._full = cast(MPI.Intracomm, comm.Split(0, comm.rank))
        self._since = time.monotonic()
        self._neighbours = processes_here(comm)
        self._least = least
        seats = [*map(Seat, numbers_in_job(comm), nodes or [0] * comm.size)]
        self._own = seats[comm.rank]
        self._ranked = [each for each in range(comm.size) if each not in spares]
        self.seats: Sequence[Seat] = [seats[each] for each in self._ranked]
        """Who the ranks of the world are."""
        self.ranks: MPI.Intracomm | None = None
        """The ranks of the world, in their order; None until there is one here."""
        self._meeting: MPI.Request | None = None

    def told(self, rank: int = SPARE, size: int = 0, generation: int = 0) -> Told:
        """Return what this process tells the others of itself."""
        return Told(rank, size, generation, *self._own)

    def settle(self, roles: Roles) -> None:
        """Note who is which rank from now on; local, on all that are left."""
        self._ranked = [each for each, rank in enumerate(roles.ranks) if rank != SPARE]
        self.seats = roles.seats

    def is_called(self) -> bool:
        """Wait, as a spare, until ranks have died and the others recover; False if none is left."""
        while not self._full.Is_revoked():
            if set(self._ranked) <= set(failed_in(self._full)):
                return False
            time.sleep(_PARKED_S)
        return True

    def regroup(self, build: Build[B], timeout_s: float) -> B:
        """Go on with whoever is left, and return what `build` made of it. Collective over them.

        Args:
            build: makes the new world on a communicator of all that are left; all call it. The
                communicators that it makes it adds to those given.
            timeout_s: how long to wait for the others to come here.

        Raises:
            CollectiveTimeout: not all that are left came in time.
            RankFailure: rank after rank died in a hundred attempts, or too few are left.

        """
        with suppress(MPI.Exception):
            revoke(self._full, self._since)
        error: Exception | None = None
        for _ in range(_MOST_ATTEMPTS):
            self._meet(timeout_s)
            self._let_mpi_hear()
            self._full = cast(MPI.Intracomm, self._full.Shrink())  # [Note: lowest]
            self._since = time.monotonic()
            self._check_size()
            made = Communicators()
            built = None
            with self._bounded(made):
                try:
                    built = build(made.duplicate(self._full), made)
                except Exception as failure:  # the others need to hear of whatever it is
                    error = failure
                    revoke(self._full, self._since)
                    made.revoke()
            if self._all_agree(built is not None) and built is not None:
                return built
            made.revoke()
            if built is not None:
                built.abandon()
        raise error or RankFailure("recover() was interrupted by too many deaths; end the job")

    def _check_size(self) -> None:
        """Refuse to go on with too few; all see the same. Spares that are left have places then."""
        left = self._full.size
        if left < self._least:
            raise RankFailure(
                f"recover() cannot go on: no more than {left} of the job's processes "
                f"{'are' if left > 1 else 'is'} left, and --min-ranks asks for {self._least}. Let "
                "the job end; with --restarts hpcdist run starts it again, from what is on disk"
            )

    def _let_mpi_hear(self) -> None:
        """Wait until MPI has heard of who is dead on this node, which its shrink may need."""
        alive = [each for each in self._neighbours if not is_dead(each)]
        gone = len(self._neighbours) - len(alive)
        poll(lambda: len([*failed_in(self._full)]) >= gone, _HEARD_S)
        self._neighbours = alive

    def _meet(self, timeout_s: float) -> None:
        """Wait until all that are left are here."""
        if self._meeting is None:  # else called again, after a timeout
            self._meeting = self._full.Iagree(array("i", [1]))
        request = self._meeting

        def met() -> bool:
            try:
                return request.Test()
            except MPI.Exception:  # somebody is dead, as all know here
                return True

        if not poll(met, timeout_s):
            raise CollectiveTimeout(
                f"recover() was not called by all ranks that are left within {timeout_s:g} s; "
                f"called at {call_site()}. Let every rank that gets a RankFailure call it, and "
                "pass a larger timeout if ranks may be that far apart"
            )
        self._meeting = None

    @contextmanager
    def _bounded(self, made: Communicators) -> Iterator[None]:
        """See [Note: bounded]."""
        over, until, full = threading.Event(), time.monotonic() + _ATTEMPT_S, self._full

        def watch() -> None:
            with sight_of(self._neighbours) as died:
                while not over.is_set():
                    if died(_LOOK_MS) or full.Is_revoked() or time.monotonic() > until:
                        revoke(full, self._since)
                        made.revoke()
                        return

        thread = threading.Thread(target=watch, name="hpcdist-recovery", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _all_agree(self, yes: bool) -> bool:
        try:
            return bool(self._full.Agree(int(yes)))
        except MPI.Exception:  # another death, of which all hear
            return False
