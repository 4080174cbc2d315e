"""The server: where the ranks meet, and where messages wait for those who receive them.

It knows bytes and words only. As everything passes here, it knows who waits for whom.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.managers import BaseManager
from typing import Any

from hpcdist.errors import CollectiveTimeout, MismatchError, RemoteError
from hpcdist.transport.call.call import ANY_SOURCE
from hpcdist.transport.waiting.activity import account_of

Group = tuple[tuple[int, ...], int]
"""World ranks, and a number that tells groups of the same ranks apart."""


@dataclass
class Meeting:
    """One collective: what each rank brings."""

    group: Group
    offers: dict[int, bytes] = field(default_factory=dict)
    error: Exception | None = None

    def absent(self) -> list[int]:
        return [rank for rank in self.group[0] if rank not in self.offers]

    def blockers(self) -> list[int]:
        return [] if self.error else self.absent()


@dataclass
class Posted:
    """A message, or (without `data`) what a receive asks for; ranks are world ranks."""

    group: Group
    source: int
    to: int
    tag: int
    dtype: Any
    size: int
    words: str
    data: bytes | None = None
    got: Posted | None = None
    error: Exception | None = None
    is_open: bool = True

    def wants(self, sent: Posted) -> bool:
        return (self.group, self.to, self.tag) == (sent.group, sent.to, sent.tag) and (
            self.source in (ANY_SOURCE, sent.source)
        )

    def sources(self) -> tuple[int, ...]:
        return self.group[0] if self.source == ANY_SOURCE else (self.source,)

    def blockers(self) -> list[int]:
        return [self.source] if self.is_open and self.source != ANY_SOURCE else []


@dataclass
class Wait:
    """What a rank waits for; `holds` says that its program goes on only afterwards."""

    of: Meeting | Posted
    words: str
    holds: bool
    began: float = field(default_factory=time.monotonic)


class Board:
    """What all ranks share; each of their threads is served by a thread of its own."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.meetings: dict[tuple[Group, int], Meeting] = {}
        self.sent: list[Posted] = []
        self.receives: dict[int, Posted] = {}
        self.waits: dict[int, list[Wait]] = {}
        self.given_up: dict[int, tuple[float, str]] = {}
        self.left: dict[int, str] = {}
        self.posted = 0

    # ---- collectives

    def meet(
        self, group: Group, number: int, rank: int, offer: bytes, words: str, limit: float
    ) -> list[bytes]:
        """Return what all ranks bring, when all have come."""
        with self.changed:
            meeting = self.meetings.setdefault((group, number), Meeting(group))
            meeting.offers[rank] = offer
            self.changed.notify_all()
            with self._waiting(rank, meeting, words, holds=False):
                self._await_all(meeting, rank, words, limit)
            if not meeting.absent():
                self.meetings.pop((group, number), None)
            if meeting.error is not None:
                if isinstance(meeting.error, CollectiveTimeout):
                    self.given_up[rank] = time.monotonic(), words
                raise meeting.error
            return [meeting.offers[each] for each in group[0]]

    def _await_all(self, meeting: Meeting, rank: int, words: str, limit: float) -> None:
        deadline = time.monotonic() + limit
        while (absent := meeting.absent()) and meeting.error is None:
            gone = [each for each in absent if each in self.left]
            if gone:
                meeting.error = RemoteError(
                    f"rank {gone[0]} {self.left[gone[0]]} and did not join {words}", gone[0]
                )
            elif time.monotonic() >= deadline:
                meeting.error = CollectiveTimeout(
                    f"{words} was not joined by all ranks within {limit:g} s; missing ranks: "
                    f"{absent}.{self._account(absent, rank, words, limit)}",
                    tuple(absent),
                )
            self.changed.wait(min(1.0, max(0.0, deadline - time.monotonic())))
        self.changed.notify_all()

    def hold(self, group: Group, number: int, rank: int) -> None:
        """Note that the program of `rank` waits for a collective, until this has ended."""
        with self.changed:
            meeting = self.meetings.get((group, number))
            for wait in self.waits.get(rank, ()):
                wait.holds = wait.holds or wait.of is meeting

    # ---- messages

    def send(self, message: Posted) -> None:
        """Keep a message until it is received."""
        with self.changed:
            self.sent.append(message)
            self._match()

    def post(self, receive: Posted) -> int:
        """Begin to receive; return the number of the receive."""
        with self.changed:
            self.posted += 1
            self.receives[self.posted] = receive
            self._match()
            return self.posted

    def _match(self) -> None:
        """Match receives, in the order in which they were posted, with what was sent."""
        for receive in self.receives.values():
            fitting = (
                sent
                for sent in self.sent
                if receive.is_open and receive.wants(sent) and sent.dtype == receive.dtype
            )
            found = next(fitting, None)
            if found is None:
                continue
            receive.is_open = False
            if found.size == receive.size:
                self.sent.remove(found)
                receive.got = found
            else:
                receive.error = _mismatch(found, receive)
        self.changed.notify_all()

    def take(self, number: int, wait_s: float, limit: float | None) -> Posted | None:
        """Wait for a receive; return what came, None if nothing has after `wait_s`.

        With `limit`, the group's, the receive is given up then, which is an error.
        """
        with self.changed:
            receive = self.receives[number]
            deadline = time.monotonic() + wait_s
            with self._waiting(receive.to, receive, receive.words, holds=wait_s > 0):
                while receive.is_open:
                    self._attend(receive)
                    left = deadline - time.monotonic()
                    if not receive.is_open or left <= 0:
                        break
                    self.changed.wait(min(0.05, left))
                if receive.is_open and limit is not None:
                    self._give_up(receive, limit)
            if receive.is_open:
                return None
            del self.receives[number]
            if receive.error is not None:
                raise receive.error
            return receive.got

    def _attend(self, receive: Posted) -> None:
        """End a receive for which nothing can come any more."""
        other = next(filter(receive.wants, self.sent), None)
        if other is not None and all(
            each in self.left or self._awaits(each, receive.to) for each in receive.sources()
        ):
            receive.is_open, receive.error = False, _mismatch(other, receive)
        elif other is None and receive.source in self.left:
            receive.is_open = False
            receive.error = RemoteError(
                f"rank {receive.source} {self.left[receive.source]} and sent nothing for "
                f"{receive.words}",
                receive.source,
            )

    def _give_up(self, receive: Posted, limit: float) -> None:
        receive.is_open = False
        account = self._account(receive.sources(), receive.to, receive.words, limit)
        other = next(filter(receive.wants, self.sent), None)
        if other is not None:
            receive.error = _mismatch(other, receive, account)
        else:
            missing = () if receive.source == ANY_SOURCE else (receive.source,)
            text = f"{receive.words} got no message within {limit:g} s.{account}"
            receive.error = CollectiveTimeout(text, missing)

    # ---- who waits for whom

    @contextmanager
    def _waiting(self, rank: int, of: Any, words: str, *, holds: bool) -> Iterator[None]:
        waits, wait = self.waits.setdefault(rank, []), Wait(of, words, holds)
        waits.append(wait)
        try:
            yield
        finally:
            waits.remove(wait)

    def _awaits(self, rank: int, other: int, seen: frozenset[int] = frozenset()) -> bool:
        """Return whether `rank` can do nothing before `other` does."""
        if rank == other:
            return True
        return rank not in seen and any(
            self._awaits(each, other, seen | {rank})
            for wait in self.waits.get(rank, ())
            if wait.holds
            for each in wait.of.blockers()
        )

    def _account(self, ranks: Any, own: int, words: str, limit: float) -> str:
        """Return a line on what each of the other `ranks` does; note what `own` gives up."""
        now = time.monotonic()
        self.given_up[own] = now, words
        lines = []
        for rank in ranks:
            if rank != own:
                when, given_up = self.given_up.get(rank, (0.0, ""))
                waits = [f"{wait.words}, for {now - wait.began:.1f} s" for wait in self._of(rank)]
                recent = given_up if when > now - limit else ""
                lines.append(
                    account_of(rank, self.left.get(rank), recent, "; and in ".join(waits) or None)
                )
        return "".join(f"\n{line}" for line in lines)

    def _of(self, rank: int) -> list[Wait]:
        return self.waits.get(rank, [])

    def departed(self) -> dict[int, str]:
        """Return the ranks that have left, and why."""
        with self.changed:
            return dict(self.left)

    def leave(self, rank: int, why: str) -> None:
        """Note that a rank takes part no longer."""
        with self.changed:
            self.left[rank] = why
            self.changed.notify_all()


def _mismatch(sent: Posted, receive: Posted, account: str = "") -> MismatchError:
    return MismatchError(
        f"rank {sent.source} sent {sent.words}, but rank {receive.to} receives {receive.words}. "
        f"The message was not taken: receive it with an array of its size and dtype{account}"
    )


class BoardManager(BaseManager):
    """Hands calls of the ranks to the one `Board` of the process that starts it."""


def _board() -> Board:
    global _the_board
    if _the_board is None:
        _the_board = Board()
    return _the_board


_the_board: Board | None = None

BoardManager.register("board", _board)
