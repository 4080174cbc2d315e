"""`Link`: a connection between two ranks, on which frames go either way.

Nothing else in hpcdist knows sockets that carry data. Inside a node these are Unix sockets without
a name in the file system, between nodes TCP. Who connects has to prove that it is a rank (`trust`),
to `Reception` on the other side.

[Note: one writes for all] A call of the system lets go of Python's lock, and while a thread waits
to get it back others have more to write. Small frames are therefore queued, and whoever holds the
lock of the connection writes all of them at once; nobody waits for it. Frames leave in the order
in which they were queued, and large ones, which do wait, after those queued before them. Where
many calls are under way a task writes (`batched`), and the thread that calls does not at all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from hpcdist.errors import HpcdistError
from hpcdist.named_tuple import NamedTuple
from hpcdist.rpc import frames, passing, trust
from hpcdist.rpc.frames import Frame, FrameError, Parcel

CONNECT_S = 30.0
"""How long a rank tries to connect to another one."""
_TRY_S = 3.0
"""How long it tries one address, while there are others."""
_ROOM = 64 << 10
_BUFFER = 4 << 20
_MOST_PARTS = 512
"""What one call of the system takes at a time; the limit of Linux is 1024."""
_SMALL = 4 << 10
"""Pickles of at most so many bytes may queue for another thread to write them."""
_MOST_QUEUED = 1024
_BACKLOG = 1024
_CREDENTIALS = struct.Struct("3i")
_DESCRIPTOR = struct.calcsize("i")

Task = Callable[[], Any]


class LinkError(HpcdistError):
    """The connection has ended, or none could be made."""


class LateError(LinkError):
    """No connection could be made before the limit of the call that needs it."""


class Address(NamedTuple):
    """Where a rank listens: `host` and `port` between nodes, `name` inside a node."""

    host: str = ""
    port: int = 0
    name: str = ""

    @property
    def family(self) -> socket.AddressFamily:
        """What a socket for it is made of."""
        if self.name:
            return socket.AF_UNIX
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    @property
    def at(self) -> Any:
        """The address as the system has it."""
        return f"\0{self.name}" if self.name else (self.host, self.port)

    def __str__(self) -> str:
        return f"@{self.name}" if self.name else f"{self.host}:{self.port}"


@final
class Link:
    """A connection to a rank that has proved who it is. One thread reads; any may write."""

    def __init__(self, sock: socket.socket, peer: int) -> None:
        self.peer = peer
        self.ended = ""
        """Why it cannot be used any more."""
        self.farewell = ""
        """Why the other side takes no more calls."""
        self.parting = False
        """Whether this side makes no more calls by it; see `switchboard`."""
        self.used = 0.0
        """When a call went or came last (`time.perf_counter`)."""
        self._socket = sock
        self._passes = sock.family == socket.AF_UNIX
        self._passed: deque[int] = deque()
        self._room = bytearray(_ROOM)
        self._view = memoryview(self._room)
        self._start = self._end = 0
        self._writes, self._awaited = threading.Lock(), threading.Lock()
        self._queue: deque[bytes] = deque()
        sock.setblocking(True)
        _tune(sock)

    # ---- writing

    def send(
        self,
        kind: int,
        call: int,
        parcel: Parcel,
        until: float | None = None,
        carry_on: Callable[[Task], Any] | None = None,
        *,
        batched: bool = False,
    ) -> bool:
        """Write a frame; return when the system has it, or at `until` (`time.monotonic`).

        What is left then is written by a task given to `carry_on`. Returns False if the frame was
        not begun until then: nothing is sent. A small frame may be left to others, and is with
        `batched`; see [Note: one writes for all].

        Raises:
            LinkError: the other side is gone.

        """
        if self.ended:
            raise LinkError(self.ended)
        if not parcel.buffers and len(parcel.pickle) <= _SMALL and len(self._queue) < _MOST_QUEUED:
            self._queue.append(frames.joined(kind, call, parcel.pickle))
            if batched and carry_on is not None:
                self._write_later(carry_on)
            elif self._writes.acquire(False):
                self._write_out(None, until, carry_on)
            return True
        if not self._writes.acquire(timeout=left_s(until)):
            return False
        self._write_out((kind, call, parcel), until, carry_on)
        return True

    def _write_later(self, carry_on: Callable[[Task], Any]) -> None:
        """Start a task that writes what is queued, unless one is about to."""
        if self._awaited.acquire(False):
            try:
                carry_on(self._write_queued)
            except BaseException:
                self._awaited.release()
                raise

    def _write_queued(self) -> None:
        self._awaited.release()
        with contextlib.suppress(LinkError):  # those whose frames these are hear of it
            self._catch_up()

    def _write_out(
        self,
        frame: tuple[int, int, Parcel] | None,
        until: float | None,
        carry_on: Callable[[Task], Any] | None,
    ) -> None:
        """Write what is queued, then a frame; with the lock held, which is given back."""
        if self._write_once(frame, until, carry_on) and self._queue:
            if carry_on is not None:
                self._write_later(carry_on)
            else:
                self._catch_up()

    def _catch_up(self) -> None:
        """Write what was queued while the lock was held."""
        while self._queue and self._writes.acquire(False):
            self._write_once(None, None, None)

    def _write_once(
        self,
        frame: tuple[int, int, Parcel] | None,
        until: float | None,
        carry_on: Callable[[Task], Any] | None,
    ) -> bool:
        """Write, and give the lock back; or return False, and a task does so."""
        left: list[memoryview] = []
        try:
            if self.ended:
                raise LinkError(self.ended)
            left = self._begin(frame, until)
        except OSError as error:
            self.break_off(f"it does not take what is sent ({reason(error)})")
            raise LinkError(self.ended) from error
        except LinkError:
            raise
        except BaseException:  # an interrupt, perhaps in the middle of the frame
            self.break_off("this rank was interrupted while it sent")
            raise
        finally:
            if not left:
                self._writes.release()
        if left and carry_on is not None:
            carry_on(lambda: self._rest(left))
        return not left

    def _begin(
        self, frame: tuple[int, int, Parcel] | None, until: float | None
    ) -> list[memoryview]:
        left = self._queued()
        if frame is None:
            return self._write(left, until)
        kind, call, parcel = frame
        passed = self._put(parcel) if parcel.buffers and self._passes else {}
        try:
            left += _memoryviews(frames.parts(kind, call, parcel, passed.keys()))
            return self._write(left, until, [*passed.values()])
        finally:
            passing.close_all(passed.values())

    def _queued(self) -> list[memoryview]:
        """Take what is queued."""
        taken = [self._queue.popleft() for _ in range(len(self._queue))]
        return [memoryview(b"".join(taken))] if taken else []

    def _put(self, parcel: Parcel) -> dict[int, int]:
        """Put what is large into memory that can be passed; return its descriptors by place."""
        passed: dict[int, int] = {}
        for place, buffer in enumerate(parcel.buffers):
            if buffer.nbytes >= passing.LARGE and len(passed) < frames.MOST_PASSED:
                descriptor = passing.put(buffer)
                if descriptor is not None:
                    passed[place] = descriptor
        return passed

    def _write(
        self, left: list[memoryview], until: float | None, passed: Sequence[int] = ()
    ) -> list[memoryview]:
        """Write parts, with descriptors that go with the first byte; return what is left."""
        beside = [_beside(passed)] if passed else []
        while left:
            if until is None:
                sent = self._socket.sendmsg(left[:_MOST_PARTS], beside)
            else:
                try:
                    sent = self._socket.sendmsg(left[:_MOST_PARTS], beside, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    if beside:  # wait with these: they are closed when this returns
                        until = None
                    elif not self._takes_more(until):
                        return left
                    continue
            beside = []
            left = _rest_of(left, sent)
        return left

    def _takes_more(self, until: float) -> bool:
        """Wait until the system takes more, at most so long."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        return bool(poll.poll(max(until - time.monotonic(), 0.0) * 1e3))

    def _rest(self, left: list[memoryview]) -> None:
        """Write the rest of a frame whose sender has gone on."""
        try:
            self._write(left, None)
        except OSError as error:
            self.break_off(f"it does not take what is sent ({reason(error)})")
        finally:
            self._writes.release()
        with contextlib.suppress(LinkError):
            self._catch_up()

    # ---- reading, by one thread

    @property
    def has_more(self) -> bool:
        """Whether a part of the next frame is here."""
        return self._end > self._start

    def read(self) -> Frame | None:
        """Wait for the next frame; None when the other side has closed.

        Raises:
            LinkError: the connection broke in the middle of a frame.
            FrameError: what came is not a frame.

        """
        if not self._fill(frames.HEADER_BYTES, at_start=True):
            return None
        kind, count, call, pickle_bytes = frames.read_head(self._room, self._start)
        self._start += frames.HEADER_BYTES
        if not count:
            return Frame(kind, call, Parcel(self._take(pickle_bytes)))
        lengths = frames.read_lengths(self._take(8 * count), count)
        pickle = self._take(pickle_bytes)
        return Frame(kind, call, Parcel(pickle, [self._take_array(each) for each in lengths]))

    def _take(self, nbytes: int) -> Any:
        """Return the next bytes, as something that lasts."""
        if nbytes > _ROOM:
            target = bytearray(nbytes)
            self._take_into(memoryview(target))
            return target
        self._fill(nbytes)
        start = self._start
        self._start = start + nbytes
        return bytes(self._view[start : start + nbytes])

    def _take_array(self, length: int) -> Any:
        if length & frames.PASSED:
            if not self._passed:
                raise FrameError("a frame says that memory is passed, but none came")
            return passing.take(self._passed.popleft(), length & ~frames.PASSED)
        target: Any = np.empty(length, np.uint8)
        if length:
            self._take_into(memoryview(target))
        return target

    def _take_into(self, target: memoryview) -> None:
        here = min(self._end - self._start, len(target))
        target[:here] = self._view[self._start : self._start + here]
        self._start += here
        while here < len(target):
            received = self._socket.recv_into(target[here:])
            if not received:
                raise LinkError(self.ended or _HALF)
            here += received

    def _fill(self, nbytes: int, *, at_start: bool = False) -> bool:
        """Receive until `nbytes` are there; False if the other side closed before the first."""
        waiting = self._end - self._start
        if waiting >= nbytes:
            return True
        if not waiting or self._start + nbytes > _ROOM:
            self._view[:waiting] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, waiting
        while self._end - self._start < nbytes:
            received = self._receive(self._view[self._end :])
            if not received:
                if at_start and self._end == self._start:
                    return False
                raise LinkError(self.ended or _HALF)
            self._end += received
        return True

    def _receive(self, target: memoryview) -> int:
        """Receive bytes, and the descriptors that come with them."""
        if not self._passes:
            return self._socket.recv_into(target)
        received, beside, _, _ = self._socket.recvmsg_into([target], _BESIDE, _CLOSE_ON_EXEC)
        for level, kind, raw in beside:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                count = len(raw) // _DESCRIPTOR
                self._passed.extend(struct.unpack_from(f"{count}i", raw))
        return received

    # ---- ending

    def break_off(self, why: str) -> None:
        """Use it no more: what reads or writes ends at once. `why` is told by later errors."""
        self.ended = self.ended or why
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back, when nobody reads it any more."""
        self.ended = self.ended or "it was closed"
        self._socket.close()
        passing.close_all(self._passed)
        self._passed.clear()


_HALF = "the connection ended in the middle of a frame"
_BESIDE = socket.CMSG_SPACE(frames.MOST_PASSED * _DESCRIPTOR)
_CLOSE_ON_EXEC = socket.MSG_CMSG_CLOEXEC
_LONGEST_S = threading.TIMEOUT_MAX


def left_s(until: float | None) -> float:
    """Return how long a lock may be waited for, as `acquire` has it."""
    return -1.0 if until is None else min(max(until - time.monotonic(), 0.0), _LONGEST_S)


def _beside(descriptors: Sequence[int]) -> tuple[int, int, bytes]:
    raw = struct.pack(f"{len(descriptors)}i", *descriptors)
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, raw


def _memoryviews(parts: Sequence[Any]) -> list[memoryview]:
    """Return the bytes of each part that has any."""
    return [memoryview(part) for part in parts if memoryview(part).nbytes]


def _rest_of(parts: list[memoryview], sent: int) -> list[memoryview]:
    """Return what is left when so many bytes are sent."""
    for at, part in enumerate(parts):
        if sent < len(part):
            return [part[sent:], *parts[at + 1 :]]
        sent -= len(part)
    return []


# ---- listening


@final
class Door:
    """A socket that listens, and where."""

    def __init__(self, address: Address) -> None:
        self.socket = socket.socket(address.family, socket.SOCK_STREAM)
        try:
            self.socket.bind(address.at)
            self.socket.listen(_BACKLOG)
            self.socket.setblocking(False)
            port = 0 if address.name else self.socket.getsockname()[1]
        except BaseException:
            self.socket.close()
            raise
        self.address = address._replace(port=port)

    def accept(self) -> tuple[socket.socket, str]:
        """Return the next connection, which does not block, and where it comes from."""
        sock, where = self.socket.accept()
        sock.setblocking(False)
        return sock, f"{where[0]}:{where[1]}" if where else str(self.address)

    def check_user(self, sock: socket.socket) -> None:
        """Raise `Stranger` if another user has connected, where the system tells."""
        _check_user(sock, self.address)

    def close(self) -> None:
        """Listen no more."""
        self.socket.close()


def door_on_node() -> Door:
    """Listen to the ranks of this node, under a name that nobody can guess."""
    return Door(Address(name=f"hpcdist-{secrets.token_hex(16)}"))


def own_networks() -> dict[str, str]:
    """Return the networks of this node that are up, and its address (IPv4) in each. Local."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


_SIOCGIFADDR = 0x8915


# ---- connecting


class _SentAway(Exception):
    """The listener closed a connection that may be tried again."""


def connect(
    token: bytes, me: int, to: int, addresses: Sequence[Address], until: float | None = None
) -> Link:
    """Connect to rank `to`, at the first of its addresses that answers.

    Raises:
        LateError: none has until then (`time.monotonic`).
        LinkError: none does.

    """
    deadline = time.monotonic() + CONNECT_S
    kind: type[LinkError] = LinkError
    if until is not None and until < deadline:
        deadline, kind = until, LateError
    pause_s = 0.005
    while True:
        failures: list[str] = []
        again = False
        for address in addresses:
            last = address is addresses[-1]
            limit_s = max(deadline - time.monotonic(), 0.001)
            try:
                return _connect(token, me, to, address, limit_s if last else min(limit_s, _TRY_S))
            except OSError as error:
                failures.append(f"{address}: {reason(error)}")
                again = again or error.errno in _AGAIN
            except trust.Stranger as error:
                failures.append(f"{address}: {error}")
            except _SentAway:
                failures.append(f"{address}: closed before it was answered")
                again = True
        if not again:
            raise LinkError("; ".join(failures) or "it gave no address that this rank can reach")
        if time.monotonic() + pause_s >= deadline:
            raise kind("; ".join(failures))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)


def _connect(token: bytes, me: int, to: int, address: Address, limit_s: float) -> Link:
    sock = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        sock.settimeout(limit_s)
        sock.connect(address.at)
        _check_user(sock, address)
        response = trust.Response(token, me, to, _exactly(sock, trust.GREETING_BYTES))
        sock.sendall(response.answer)
        response.check(_exactly(sock, trust.WELCOME_BYTES))
        return Link(sock, to)
    except BaseException:
        sock.close()
        raise


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    came = b""
    while len(came) < nbytes:
        more = sock.recv(nbytes - len(came))
        if not more:
            raise _SentAway
        came += more
    return came


def _check_user(sock: socket.socket, address: Address) -> None:
    if address.name:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        user = _CREDENTIALS.unpack(raw)[1]
        if user != os.getuid():
            raise trust.Stranger(f"it runs as user {user}, this rank as {os.getuid()}")


def _tune(sock: socket.socket) -> None:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
)
"""A node that is gone says nothing: after 25 seconds it is missed."""

_AGAIN = {errno.EAGAIN, errno.ECONNRESET, errno.EPIPE, None}
"""What a listener that is busy, or flooded, may answer; None: it took too long."""


def reason(error: OSError) -> str:
    """Return what the system says, without its number."""
    return error.strerror or str(error)
