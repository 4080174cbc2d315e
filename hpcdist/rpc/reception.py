"""`Reception`: listens, and hands over a `Link` for each rank that has proved that it is one.

[Note: strangers] Anyone may connect to a socket. Until the other side has answered the challenge
(`trust`), it is read at most the bytes of an answer, nothing is unpickled, and it takes no thread.
A Unix socket tells the user, who must be the same. At most `HELD` connections wait for their
answer; then the oldest is closed, and all that have not answered after `ANSWER_S`. A rank that is
pushed out by a flood tries again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, final

from hpcdist.rpc.links import Address, Door, Link, reason
from hpcdist.rpc.trust import ANSWER_BYTES, Challenge, Stranger

logger = logging.getLogger("hpcdist.rpc")

HELD = 128
"""Connections that have not answered yet."""
ANSWER_S = 10.0
"""How long an answer may take."""
_QUIET_S = 1.0
_CLOSES_S = 1.0
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class _Guest:
    """Someone who has connected and not answered yet."""

    __slots__ = ("answer", "challenge", "socket", "until", "where")

    def __init__(self, sock: Any, where: str, challenge: Challenge) -> None:
        self.socket, self.where, self.challenge = sock, where, challenge
        self.answer = bytearray()
        self.until = time.monotonic() + ANSWER_S


@final
class Reception:
    """The doors of rank `me`."""

    def __init__(self, token: bytes, me: int, doors: Sequence[Door]) -> None:
        self.refused = 0
        """Connections that were closed because they proved nothing."""
        self._token, self._me = token, me
        self._doors = doors
        self._guests: dict[_Guest, None] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe()
        self._closed = False
        self._idle = threading.Event()
        """Set while no thread serves."""
        self._idle.set()
        self._quiet_until = 0.0

    def serve(self, admit: Callable[[Link], Any]) -> None:
        """Accept connections of ranks until `close`; the task of one thread."""
        self._idle.clear()
        self._selector.register(self._woken, selectors.EVENT_READ)
        for door in self._doors:
            self._selector.register(door.socket, selectors.EVENT_READ, door)
        while not self._closed:
            for key, _ in self._selector.select(self._patience_s()):
                if isinstance(key.data, Door):
                    self._let_in(key.data)
                elif key.data in self._guests:  # it may have been sent away for another one
                    self._listen(key.data, admit)
            self._send_away_late()
        self.abandon()
        self._idle.set()

    def close(self) -> None:
        """Stop accepting connections; the doors are closed, or else others would wait before them.

        The thread that serves may not come to it, if the program ends.
        """
        os.write(self._wake, b"x")
        self._closed = True  # from now on the thread that serves may give the pipe back
        self._idle.wait(_CLOSES_S)

    def abandon(self) -> None:
        """Give back what this process has of it; all that a forked child does."""
        for guest in self._guests:
            guest.socket.close()
        self._guests.clear()
        self._selector.close()
        for door in self._doors:
            door.close()
        for descriptor in (self._woken, self._wake):
            os.close(descriptor)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where it listens."""
        return tuple(door.address for door in self._doors)

    @property
    def waiting(self) -> int:
        """Connections that have not answered yet."""
        return len(self._guests)

    def _patience_s(self) -> float | None:
        oldest = next(iter(self._guests), None)
        return None if oldest is None else max(oldest.until - time.monotonic(), 0.0)

    def _let_in(self, door: Door) -> None:
        try:
            sock, where = door.accept()
        except OSError as error:
            if error.errno in _NO_ROOM:  # make some, or the door would be heard for ever
                self._send_away_oldest("this process has no descriptor left")
                time.sleep(0.05)
            return
        guest = _Guest(sock, where, Challenge(self._token, self._me))
        try:
            door.check_user(sock)
            sock.send(guest.challenge.greeting)
        except (Stranger, OSError) as error:
            self._refuse(guest, _said(error))
            return
        if len(self._guests) >= HELD:
            self._send_away_oldest(f"it did not answer before {HELD} others came")
        self._guests[guest] = None
        self._selector.register(sock, selectors.EVENT_READ, guest)

    def _listen(self, guest: _Guest, admit: Callable[[Link], Any]) -> None:
        try:
            came = guest.socket.recv(ANSWER_BYTES - len(guest.answer))
            guest.answer += came
            if not came:
                raise Stranger(f"it left after {len(guest.answer)} bytes of an answer")
            if len(guest.answer) < ANSWER_BYTES:
                return
            caller, welcome = guest.challenge.welcome(bytes(guest.answer))
            guest.socket.send(welcome)
        except BlockingIOError:
            return
        except (Stranger, OSError) as error:
            self._refuse(guest, _said(error))
            return
        self._forget(guest)
        try:
            admit(Link(guest.socket, caller))
        except Exception:  # no thread to read it, for example
            logger.exception("rank %d cannot serve rank %d", self._me, caller)
            guest.socket.close()

    def _refuse(self, guest: _Guest, why: str) -> None:
        self.refused += 1
        if time.monotonic() >= self._quiet_until:  # a flood must not fill the log
            self._quiet_until = time.monotonic() + _QUIET_S
            logger.warning(
                "rank %d refused a connection at %s: %s (%d so far)",
                self._me,
                guest.where,
                why,
                self.refused,
            )
        self._forget(guest)
        guest.socket.close()

    def _send_away_late(self) -> None:
        now = time.monotonic()
        for guest in [each for each in self._guests if each.until <= now]:
            self._refuse(guest, f"it did not answer within {ANSWER_S:g} s")

    def _send_away_oldest(self, why: str) -> None:
        oldest = next(iter(self._guests), None)
        if oldest is not None:
            self._refuse(oldest, why)

    def _forget(self, guest: _Guest) -> None:
        if guest in self._guests:
            del self._guests[guest]
            with contextlib.suppress(KeyError):
                self._selector.unregister(guest.socket)


def _said(error: Exception) -> str:
    return reason(error) if isinstance(error, OSError) else str(error)
