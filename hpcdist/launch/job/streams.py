"""`Streams`: one selector loop for all pipes of a job."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable

_PIECE = 1 << 16


class Streams:
    """Waits for many descriptors at once, and hands on what comes; it closes them in the end."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._ending: set[int] = set()

    def read(self, fd: int, take: Callable[[bytes], None], ends: bool = True) -> None:
        """Give every piece that comes by `fd` to `take`, b"" at its end.

        Args:
            fd: a descriptor that does not block; ours from now on.
            take: takes a piece.
            ends: an end is to be expected; `read_rest` waits for it.

        """
        self._selector.register(fd, selectors.EVENT_READ, take)
        if ends:
            self._ending.add(fd)

    def wake_for(self, fd: int) -> None:
        """Make `turn` return once `fd` is ready; nothing is read from it."""
        self._selector.register(fd, selectors.EVENT_READ, None)

    def turn(self, longest_s: float) -> bool:
        """Wait for something and pass it on; False if nothing came in time."""
        ready = self._selector.select(max(0.0, longest_s))
        for key, _ in ready:
            piece = b"" if key.data is None else _read(key.fd)
            if piece is not None and key.data is not None:
                key.data(piece)
            if piece == b"":
                self._close(key.fd)
        return bool(ready)

    def read_rest(self, longest_s: float) -> None:
        """Read until all has ended or nothing comes: a grandchild may hold a pipe for ever."""
        until = time.monotonic() + longest_s
        while self._ending and time.monotonic() < until and self.turn(0.05):
            pass

    def close(self) -> None:
        """Close all descriptors."""
        for key in list(self._selector.get_map().values()):
            self._close(key.fd)
        self._selector.close()

    def _close(self, fd: int) -> None:
        self._selector.unregister(fd)
        self._ending.discard(fd)
        os.close(fd)


def _read(fd: int) -> bytes | None:
    """Read a piece: b"" at the end, None where there is nothing yet."""
    try:
        return os.read(fd, _PIECE)
    except BlockingIOError:
        return None
