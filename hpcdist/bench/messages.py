"""Calls made of messages: send and back, windows of messages one way and both ways.

Rank r of the first half of a group talks to rank r + size // 2, so on several nodes the messages
cross from node to node. `latency` and the bandwidths use one pair, `message_rate` uses all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcdist.bench.interleaved import Call, idle
from hpcdist.bench.task import Array, Messages, Task
from hpcdist.named_tuple import NamedTuple

WINDOW = 64
"""Messages under way at the same time."""
_WINDOW_BYTES = 64 << 20

Pattern = Callable[[Task, Messages], Call]


class _Seat(NamedTuple):
    """Where this rank sits in its pair, if it is in one."""

    sends_first: bool
    partner: int


def window_of(nbytes: int) -> int:
    """Return how many messages of `nbytes` are under way at the same time."""
    return min(WINDOW, max(2, _WINDOW_BYTES // max(1, nbytes)))


def pairs_of(size: int) -> int:
    """Return how many pairs the ranks of a group make."""
    return size // 2


def _seat(task: Task, pairs: int) -> _Seat | None:
    half = task.size // 2
    if task.rank < pairs:
        return _Seat(True, task.rank + half)
    return _Seat(False, task.rank - half) if half <= task.rank < half + pairs else None


def send_and_back(task: Task, messages: Messages) -> Call:
    """Return the call that sends to the partner and gets the same back."""
    seat, x = _seat(task, 1), messages.prepare(task.x)
    if seat is None:
        return idle
    send, recv, partner = messages.send, messages.recv, seat.partner
    if seat.sends_first:
        return lambda: (send(x, partner), recv(x, partner))
    return lambda: (recv(x, partner), send(x, partner))


def one_way(task: Task, messages: Messages) -> Call:
    """Return the call that sends a window of messages and gets one answer, by one pair."""
    return _one_way(task, messages, 1)


def all_pairs(task: Task, messages: Messages) -> Call:
    """Return the same, by all pairs at the same time."""
    return _one_way(task, messages, pairs_of(task.size))


def _one_way(task: Task, messages: Messages, pairs: int) -> Call:
    seat = _seat(task, pairs)
    if seat is None:
        return idle
    window, partner = window_of(task.x.nbytes), seat.partner
    x, answer = messages.prepare(task.x), messages.prepare(task.x[:1].copy())
    rows = [messages.prepare(row) for row in _rows(task.x, window)]

    def give() -> None:
        messages.wait([messages.begin_send(x, partner) for _ in range(window)])
        messages.recv(answer, partner)

    def take() -> None:
        messages.wait([messages.begin_recv(row, partner) for row in rows])
        messages.send(answer, partner)

    return give if seat.sends_first else take


def both_ways(task: Task, messages: Messages) -> Call:
    """Return the call that sends a window of messages each way, by one pair."""
    seat = _seat(task, 1)
    if seat is None:
        return idle
    window, partner = window_of(task.x.nbytes), seat.partner
    x = messages.prepare(task.x)
    rows = [messages.prepare(row) for row in _rows(task.x, window)]

    def exchange() -> None:
        works: list[Any] = [messages.begin_recv(row, partner) for row in rows]
        works += [messages.begin_send(x, partner) for _ in range(window)]
        messages.wait(works)

    return exchange


def _rows(x: Array, window: int) -> list[Array]:
    """Return arrays like `x`, one for each message of a window."""
    return [x.copy() for _ in range(window)]
