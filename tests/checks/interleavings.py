"""`explore`: every order in which the steps of a few threads can happen, and what memory may do.

A thread is a generator of steps. Plain stores wait in a buffer of their thread, as processors have
it: they reach memory in their order where `in_order` (x86), else in any, but for those to one
place. A store that releases, a compare-and-swap and an addition wait until the buffer is empty.
Loads happen in their order, as those that acquire do.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cache
from typing import Any

Step = tuple[Any, ...]
Thread = Callable[[], Generator[Step, Any, Any]]


def load(place: str) -> Step:
    """Step: what a place holds."""
    return "load", place


def store(place: str, value: Any) -> Step:
    """Step: write later, as far as others can see."""
    return "store", place, value


def release(place: str, value: Any) -> Step:
    """Step: write when all that was written before can be seen."""
    return "release", place, value


def swap(place: str, before: Any, after: Any) -> Step:
    """Step: write where a place holds `before`; whether it did."""
    return "swap", place, before, after


def add(place: str, number: int) -> Step:
    """Step: add to what a place holds, as a fetch-and-add; what it held before."""
    return "add", place, number


def until(place: str, holds: Callable[[Any], bool]) -> Step:
    """Step: wait until a place holds such a value; that value."""
    return "until", place, holds


def either() -> Step:
    """Step: True or False, as for one who may lose patience."""
    return ("either",)


class Stuck(AssertionError):
    """No thread can go on, and some have not ended."""


def explore(
    threads: Sequence[Thread], memory: Mapping[str, Any], *, in_order: bool = False
) -> set[tuple[Any, ...]]:
    """Return the results of all threads, a tuple for each way in which they may come out.

    Raises:
        Stuck: in some order the threads wait for each other without end.

    """

    @cache
    def step_of(thread: int, told: tuple[Any, ...]) -> Step:
        steps = threads[thread]()
        try:
            step = next(steps)
            for value in told:
                step = steps.send(value)
        except StopIteration as end:
            return "end", end.value
        return step

    places = sorted(memory)
    nothing: tuple[Any, ...] = ((),) * len(threads)
    first = tuple(memory[place] for place in places), nothing, nothing
    waiting, seen, results = [first], {first}, set()
    while waiting:
        state = waiting.pop()
        steps = [step_of(thread, told) for thread, told in enumerate(state[2])]
        found = [
            after
            for thread, step in enumerate(steps)
            for after in _after(state, thread, step, places, in_order)
        ]
        if not found:
            if any(step[0] != "end" for step in steps):
                raise Stuck(f"{steps} with {dict(zip(places, state[0], strict=True))}")
            results.add(tuple(step[1] for step in steps))
        waiting += [after for after in found if after not in seen]
        seen.update(found)
    return results


def _after(state: Any, thread: int, step: Step, places: list[str], in_order: bool) -> Any:
    """Yield the states that come next if this thread, or its buffer, is the one to go on."""
    memory, buffers, told = state
    buffer = buffers[thread]
    for at, (place, value) in enumerate(buffer[:1] if in_order else buffer):
        if all(place != before for before, _ in buffer[:at]):
            left = _with(buffers, thread, buffer[:at] + buffer[at + 1 :])
            yield _with(memory, places.index(place), value), left, told
    kind, *rest = step
    if kind == "either":
        for answer in (True, False):
            yield memory, buffers, _with(told, thread, (*told[thread], answer))
    elif kind == "store":
        heard = _with(told, thread, (*told[thread], None))
        yield memory, _with(buffers, thread, (*buffer, tuple(rest))), heard
    elif kind == "load":
        own = [value for place, value in buffer if place == rest[0]]
        value = own[-1] if own else memory[places.index(rest[0])]
        yield memory, buffers, _with(told, thread, (*told[thread], value))
    elif kind == "until":
        value = memory[places.index(rest[0])]
        if rest[1](value):
            yield memory, buffers, _with(told, thread, (*told[thread], value))
    elif kind in ("release", "swap") and not buffer:
        at = places.index(rest[0])
        written = kind == "release" or memory[at] == rest[1]
        changed = _with(memory, at, rest[-1]) if written else memory
        yield changed, buffers, _with(told, thread, (*told[thread], written))
    elif kind == "add" and not buffer:
        at = places.index(rest[0])
        heard = _with(told, thread, (*told[thread], memory[at]))
        yield _with(memory, at, memory[at] + rest[1]), buffers, heard


def _with(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])
