"""`Switchboard`: the links of a rank: one for each rank that it talks to, made when needed.

[Note: parting] Where there are more links than there may be, those go that were not used longest. A
rank that has no call under way by a link makes no more by it, and says so (`PARTING`). The other
side closes it if it has none either; if it has, the link stays, for these. A call that is made
meanwhile is noted before it looks whether the link is parting, and who parts looks for such calls
after it has said so: one of the two sees the other.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, final

from hpcdist.named_tuple import NamedTuple
from hpcdist.rpc import links
from hpcdist.rpc.frames import FAREWELL, PARTING, Frame, Parcel
from hpcdist.rpc.links import Address, Link, LinkError, reason
from hpcdist.rpc.names import Directory, WorkerInfo
from hpcdist.rpc.reception import Reception
from hpcdist.rpc.serve import Pool

logger = logging.getLogger("hpcdist.rpc")


class Contact(NamedTuple):
    """How a rank is reached: its entry in the directory, and where it listens."""

    info: WorkerInfo
    node: Any
    """Equal for ranks that reach each other by Unix sockets."""
    on_node: tuple[Address, ...] = ()
    between: tuple[Address, ...] = ()

    def seen_from(self, other: Contact) -> tuple[Address, ...]:
        """Return where `other` finds it, the best first."""
        return (*self.on_node, *self.between) if self.node == other.node else self.between


class Setup(NamedTuple):
    """What `init_rpc` has agreed on: the ranks, their token, and how this one listens."""

    me: int
    contacts: Mapping[int, Contact]
    directory: Directory
    token: bytes
    reception: Reception
    threads: int
    max_threads: int
    group: Any
    comm: Any = None
    """A communicator of MPI that carries the calls, instead of sockets."""
    most_links: int = 512
    """So many links stay open where more are not in use."""


@final
class Switchboard:
    """Makes links, takes those that others make, and has each one read.

    `take` is what is done with a frame; it returns True if it has let another thread `read_on`.
    `lost` is told of a link that has ended. `busy` says whether calls of this rank are under way by
    a link.
    """

    def __init__(
        self,
        setup: Setup,
        pool: Pool,
        take: Callable[[Link, Frame], bool],
        lost: Callable[[Link], Any],
        busy: Callable[[Link], bool],
    ) -> None:
        self._token, self._me = setup.token, setup.me
        self._contacts, self._reception = setup.contacts, setup.reception
        self._pool = pool
        self._take, self._lost, self._busy = take, lost, busy
        self._most = setup.most_links
        self._by_rank: dict[int, Link] = {}
        self._all: set[Link] = set()
        self._connecting: dict[int, threading.Lock] = {}
        self._adopting, self._parting = threading.Lock(), threading.Lock()
        self._closed = ""
        self._farewell: Parcel | None = None

    def open(self) -> None:
        """Begin to let others in."""
        self._pool.spawn(lambda: self._reception.serve(self.admit))

    def link_to(self, rank: int, until: float | None = None) -> Link:
        """Return the link to a rank, which may be made now, until then (`time.monotonic`).

        Raises:
            LateError: it is not made until then.
            LinkError: the rank cannot be reached.

        """
        link = self._by_rank.get(rank)
        if link is not None and not link.ended:
            link.used = time.perf_counter()
            return link
        connecting = self._connecting.setdefault(rank, threading.Lock())
        if not connecting.acquire(timeout=links.left_s(until)):
            raise links.LateError("another thread of this rank connects to it")
        try:
            link = self._by_rank.get(rank)
            if link is not None and not link.ended:
                return link
            where = self._contacts[rank].seen_from(self._contacts[self._me])
            return self.admit(links.connect(self._token, self._me, rank, where, until))
        finally:
            connecting.release()

    def admit(self, link: Link) -> Link:
        """Take a link, and return the one for calls to that rank: this one, unless there is one.

        Where both ranks have connected at once, each keeps to one of the two, so that what it
        sends arrives in order.
        """
        with self._adopting:
            closed = self._farewell
            self._all.add(link)
            link.used = time.perf_counter()
            current = self._by_rank.get(link.peer)
            if current is None or current.ended:
                current = self._by_rank[link.peer] = link
        if closed is not None:
            self._dismiss(link, closed)
        self.read_on(link)
        if len(self._all) > self._most:
            self._part_with_some(link)
        return current

    def _part_with_some(self, new: Link) -> None:
        """Offer to close as many links as there are too many, those first that were used first."""
        with self._adopting:
            oldest_first = sorted(self._all - {new}, key=lambda link: link.used)
        too_many = len(oldest_first) + 1 - self._most
        for link in oldest_first:
            if too_many <= 0:
                break
            if self._is_idle(link):
                too_many -= 1
                with contextlib.suppress(LinkError):
                    link.send(PARTING, 0, Parcel(b""), 0.0, self._pool.spawn)

    def part(self, link: Link) -> None:
        """Close a link by which the other side makes no more calls, if this one has none either."""
        if self._is_idle(link):
            link.break_off("it was not used")

    def has_parted(self, link: Link) -> bool:
        """Return whether a call that was just noted has to go by another link than this."""
        with self._parting:
            return link.parting

    def _is_idle(self, link: Link) -> bool:
        """Make no more calls by a link, unless some are under way; return whether none is."""
        with self._parting:
            has_said_so, link.parting = link.parting, True
            if self._busy(link):
                link.parting = has_said_so
                return False
            with self._adopting:
                if self._by_rank.get(link.peer) is link:
                    del self._by_rank[link.peer]
        return True

    def read_on(self, link: Link) -> None:
        """Start another thread that reads a link; see [Note: who reads]."""
        self._pool.spawn(lambda: self._read(link))

    def _read(self, link: Link) -> None:
        """Take what arrives, until the link ends or another thread reads it."""
        why = "its process has ended"
        try:
            while (frame := link.read()) is not None:
                if self._take(link, frame):
                    return
        except LinkError as error:
            why = str(error)
        except OSError as error:
            why = f"the connection broke, as it does when its process ends: {reason(error)}"
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            logger.warning("rank %d gave up its link to rank %d: %s", self._me, link.peer, why)
        link.break_off(link.farewell or why)
        with self._adopting:
            self._all.discard(link)
            if self._by_rank.get(link.peer) is link:
                del self._by_rank[link.peer]
        self._lost(link)
        link.close()

    def close(self, why: str, farewell: Parcel) -> None:
        """End all links; the others are told, as far as that does not take time. Local."""
        with self._adopting:
            self._closed, self._farewell = why, farewell
            links_now = list(self._all)
        for link in links_now:
            self._dismiss(link, farewell)

    def _dismiss(self, link: Link, farewell: Parcel) -> None:
        with contextlib.suppress(LinkError):
            link.send(FAREWELL, 0, farewell, until=0.0)
        link.break_off(self._closed)

    def abandon(self) -> None:
        """Give back what a forked child has of it."""
        for link in list(self._all):
            link.close()
