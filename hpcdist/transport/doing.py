"""What the threads of this process wait for, for ranks that ask and for error messages.

A wait is noted only once it has become long, so that short operations pay nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from hpcdist.transport.call_site import call_site

NOTE_AFTER_S = 0.1
"""From this long a wait is noted, and its thread answers the questions of other ranks."""


def _nobody() -> Iterable[Any]:
    return ()


class Wait(NamedTuple):
    """What a thread waits for, in words; empty where another thread's wait says it.

    `blockers` returns those of whom at least one has to act before the wait can end, as the
    transport names them; nobody where that is not known.
    """

    words: Callable[[], str]
    blockers: Callable[[], Iterable[Any]] = _nobody


class _Noted(NamedTuple):
    wait: Wait
    site: str
    began: float


_waits: dict[int, list[_Noted]] = {}
"""By thread; an operation inside a callback of another one waits inside its wait."""


def note(wait: Wait, waited_s: float = 0.0) -> None:
    """Note that this thread waits since `waited_s`; `forget` ends it."""
    noted = _Noted(wait, call_site(), time.monotonic() - waited_s)
    _waits.setdefault(threading.get_ident(), []).append(noted)


def forget() -> None:
    """End the innermost wait of this thread."""
    thread = threading.get_ident()
    _waits[thread].pop()
    if not _waits[thread]:
        del _waits[thread]


@contextmanager
def noted(wait: Wait, waited_s: float = 0.0) -> Iterator[None]:
    """Note `wait` for the length of the block."""
    note(wait, waited_s)
    try:
        yield
    finally:
        forget()


def told() -> str:
    """Return in words what the threads of this process wait for."""
    now = time.monotonic()
    innermost = [each[-1] for each in tuple(_waits.values()) if each]
    described = [(each.wait.words(), each) for each in innermost]
    return "; and in ".join(
        f"{words}, called at {each.site}, for {now - each.began:.1f} s"
        for words, each in described
        if words
    )


def blockers_of(thread: int | None) -> list[Any]:
    """Return those of whom one has to act before `thread` goes on; nobody if that is unknown."""
    found = _waits.get(thread or -1)
    return list(found[-1].wait.blockers()) if found else []
