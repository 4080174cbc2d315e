"""What the threads of this process wait for, for ranks that ask and for error messages.

A wait is noted only once it has become long, so that short operations pay nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, final

from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.flight import recorder
from hpcdist.transport.flight.call_site import call_site
from hpcdist.transport.flight.neighbours import last_line

NOTE_AFTER_S = 0.1
"""From this long a wait is noted, and its thread answers the questions of other ranks."""


def _nobody() -> Iterable[Any]:
    return ()


class Wait(NamedTuple):
    """What a thread waits for, in words.

    `blockers` returns those of whom at least one has to act before the wait can end, as the
    transport names them; nobody where that is not known. `thread` is another thread of this process
    that is waited for, whose own wait says more.
    """

    words: Callable[[], str]
    blockers: Callable[[], Iterable[Any]] = _nobody
    thread: int | None = None


class _Noted(NamedTuple):
    wait: Wait
    site: str
    began: float
    slot: int


_waits: dict[int, tuple[_Noted, ...]] = {}
"""By thread; an operation inside a callback of another one waits inside its wait."""


def note(wait: Wait, waited_s: float = 0.0) -> None:
    """Note that this thread waits since `waited_s`; `forget` ends it."""
    thread = threading.get_ident()
    slot = recorder.note_wait(wait.words(), waited_s) if recorder.is_open() else -1
    noted = _Noted(wait, call_site(), time.monotonic() - waited_s, slot)
    _waits[thread] = (*_waits.get(thread, ()), noted)


def forget() -> None:
    """End the innermost wait of this thread."""
    thread = threading.get_ident()
    *outer, ended = _waits.pop(thread)
    recorder.forget_wait(ended.slot)
    if outer:
        _waits[thread] = tuple(outer)


@final
class noted:  # noqa: N801 (used like a function)
    """Note `wait` for the length of a block."""

    __slots__ = ("_wait", "_waited_s")

    def __init__(self, wait: Wait, waited_s: float = 0.0) -> None:
        self._wait, self._waited_s = wait, waited_s

    def __enter__(self) -> None:
        note(self._wait, self._waited_s)

    def __exit__(self, *_: object) -> None:
        forget()


def told(thread: int | None = None) -> str:
    """Return in words what a thread, or every thread of this process, waits for."""
    threads = tuple(_waits) if thread is None else (thread,)
    found = {id(each): each for each in map(_innermost, threads) if each is not None}
    now = time.monotonic()
    return "; and in ".join(
        f"{each.wait.words()}, called at {each.site}, for {now - each.began:.1f} s"
        for each in found.values()
    )


def blockers_of(thread: int | None) -> list[Any]:
    """Return those of whom one has to act before `thread` goes on; nobody if that is unknown."""
    found = _innermost(thread)
    return [] if found is None else list(found.wait.blockers())


def _innermost(thread: int | None) -> _Noted | None:
    stack = _waits.get(-1 if thread is None else thread, ())
    if not stack:
        return None
    return _innermost(stack[-1].wait.thread) or stack[-1]


class GivenUp(NamedTuple):
    """What a rank waited for when its time was over, and when that was."""

    words: str
    when: float

    def since(self, moment: float) -> str:
        """Return the words if it was given up after `moment`, else nothing."""
        return self.words if self.when >= moment else ""


NOTHING = GivenUp("", 0.0)


def account_of(rank: int, left: str | None, given_up: str, waits: str | None) -> str:
    """Describe what another rank does, for error messages.

    Args:
        rank: its world rank.
        left: why it takes part no longer, if that is so.
        given_up: what it has given up lately, if anything.
        waits: what it waits for; None if it has told nothing.

    """
    parts = [f"has given up {given_up}"] if given_up else []
    if left is not None:
        parts.append(left)
    elif waits is not None and not _is_part(waits, given_up):
        parts.append(f"waits in {waits or 'an operation that is about to end'}")
    elif not given_up:
        parts.append("does not answer: it waits in no operation of hpcdist")
        parts += filter(None, [last_line(rank)])
    return f"Rank {rank} {', and '.join(parts)}."


def _is_part(waits: str, given_up: str) -> bool:
    """Return whether what a rank waits for, and nothing else, is what it gives up right now."""
    wait, _, time_s = waits.rpartition(", for ")
    return bool(wait) and wait in given_up and time_s.removesuffix(" s").replace(".", "").isdigit()
