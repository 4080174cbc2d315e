"""`Ahead`: values that a thread makes while those before them are used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar, final

from hpcdist.named_tuple import NamedTuple

T = TypeVar("T")


class _End(NamedTuple):
    """What comes after the last value."""

    error: BaseException | None


@final
class Ahead(Generic[T]):
    """Iterates over `values`, which a thread makes while the block is open.

    An error of theirs is raised where the next value would come.

    Args:
        values: iterated by the thread alone.
        depth: the thread waits when so many values wait.
        name: of the thread.

    """

    def __init__(self, values: Iterable[T], depth: int, name: str) -> None:
        self._waiting: queue.Queue[T | _End] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._make, args=(values,), name=name, daemon=True)

    def __enter__(self) -> Iterator[T]:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        value = self._waiting.get()
        if not isinstance(value, _End):
            return value
        self._ended = True
        if value.error is not None:
            raise value.error
        raise StopIteration

    def close(self, *, wait: bool = True) -> None:
        """Stop the thread after the value it is at; with `wait`, return once it has ended."""
        self._ended = True
        self._stopped.set()
        with suppress(queue.Empty):  # the thread may wait for room, which is there now
            while True:
                self._waiting.get_nowait()
        if wait:
            self._thread.join()

    def _make(self, values: Iterable[T]) -> None:
        error: BaseException | None = None
        try:
            for value in values:
                self._waiting.put(value)
                if self._stopped.is_set():
                    return
        except BaseException as reason:
            error = reason
        self._waiting.put(_End(error))
