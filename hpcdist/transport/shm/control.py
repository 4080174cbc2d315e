"""`ControlBlock`: what the ranks of a group on one node tell each other through shared memory.

One segment per group: a slot per rank in which it publishes six numbers (those of an
`Agreement`), an address and up to `PAYLOAD` bytes; and a count of steps per rank, on which ranks
wait for each other inside an operation. Everybody reads everybody's slot.

[Note: two turns] There are two sets of slots, used in turn. A rank writes into a slot again
after two operations, and begins an operation only when all ranks published in the one before,
hence have read everything of the one before that. So no operation needs a second exchange.

[Note: calling off] Where there is no compiled control block, no store is conditional on another.
So a rank that calls an operation off first says that it decides, then waits until all see that, and
calls it off if nobody has said by then that it has entered. Whoever enters says so first, and looks
then; if a rank decides, it waits for what that says.

`PythonControlBlock` is the same as `ControlBlock` of `native/control.c`. It relies on the order in
which x86 processors make stores visible; elsewhere the compiled one is needed.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any, final

from hpcdist.compiled import expect
from hpcdist.transport.shm.kernel import compiled

PAYLOAD = 8 << 10
SPINS = 400
"""Looks at the others' slots before Python takes over the waiting. After 300 of them, a few
microseconds, or 5 where others need this core, each gives it away, for half a millisecond."""

LINE = 64
AGREED = 6
STEP_BITS = 24
"""Steps are counted from where an operation begins; see "leaving" in `native/control.c`."""

OF_A_DEATH = 1 << 14
"""Added to the rank that has called an operation off because another one has died."""

MOST_EAGER = 16
EAGER_BYTES = 512
"""So many operations in a row, of so many bytes, are eager; see `eager.h`."""

expect(compiled, LINE=LINE, AGREED=AGREED, STEP_BITS=STEP_BITS, OF_A_DEATH=OF_A_DEATH)
expect(compiled, MOST_EAGER=MOST_EAGER, EAGER_BYTES=EAGER_BYTES)

_BEYOND = 1 << STEP_BITS - 1
_SEEN_AFTER_S = 0.01
"""After so long every rank sees what was written."""

_DECIDES_S = 10.0
"""So long a rank is waited for that decides; then it is taken for dead, or stopped."""

_GOES_ON, _ENTERED, _DECIDING, _OFF, _OFF_FOR_A_DEATH = range(5)
_SAYINGS = 8
"""What a rank says of an operation is written down as this times its number, and what it says."""

_WORDS = LINE // 8
_POLLS_PER_SPIN = 50

Six = tuple[int, int, int, int, int, int]


def control_block_bytes(size: int) -> int:
    """Return how much memory the control block of `size` ranks needs."""
    return _before_payloads(size) + size * 2 * PAYLOAD


def _before_payloads(size: int) -> int:
    return size * 3 * LINE + MOST_EAGER * (LINE + size * (LINE + EAGER_BYTES))


def payload_places(size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where the payloads lie in a control block, by turn and rank."""
    first = _before_payloads(size)
    return (
        tuple(first + rank * PAYLOAD for rank in range(size)),
        tuple(first + (size + rank) * PAYLOAD for rank in range(size)),
    )


def control_block_class(*, use_compiled: bool) -> Any:
    """Return the class of control blocks that works here, or None."""
    if use_compiled and compiled is not None:
        return compiled.ControlBlock
    return PythonControlBlock if platform.machine() in ("x86_64", "AMD64", "i686") else None


@final
class PythonControlBlock:
    """The part of rank `rank` in a control block of `size` ranks, which all map `memory`.

    A signal handler finds what this rank publishes either published or not: each is one store, the
    last, and `sequence` and the steps are what the memory says.
    """

    def __init__(self, memory: Any, rank: int, size: int, payload: int) -> None:
        self._words = memoryview(memory).cast("q")
        self._bytes = memoryview(memory)
        self._rank, self._size, self._payload = rank, size, payload
        self.ended = 0
        """The last operation in which nobody can use this rank's memory any more."""

    @property
    def sequence(self) -> int:
        """The operations so far."""
        words, places = self._words, [self._slot(self._rank, turn) + AGREED + 1 for turn in (0, 1)]
        return max(words[places[0]], words[places[1]])

    @property
    def turn(self) -> int:
        """The set of slots (0 or 1) of the operation at hand."""
        return self.sequence & 1

    hesitates = 0
    """No operation is eager here."""

    def awaits_eager(self) -> bool:
        """Return False: no operation is eager here."""
        return False

    def agrees_elsewhere(self) -> bool:
        """Return False, for the same reason."""
        return False

    def post(self, *args: Any) -> Six | None:
        """Publish six numbers, an address and data (or None); then `test` for `spins` turns."""
        *numbers, data, spins = args
        raw: Any = b""
        if data is not None and memoryview(data).nbytes:
            raw = memoryview(data).cast("B")
        if len(raw) > self._payload:
            raise ValueError("the data are larger than the control block's payload")
        sequence = self.sequence + 1
        own, words = self._slot(self._rank, sequence & 1), self._words
        for place, number in enumerate(numbers):
            words[own + place] = number
        start = payload_places(self._size)[sequence & 1][self._rank]
        self._bytes[start : start + len(raw)] = raw
        words[own + AGREED + 1] = sequence
        found: Six | None = _spin(self.test, spins)
        return found

    def test(self) -> Six | None:
        """Return the least of each number once all ranks published theirs, else None."""
        words, sequence = self._words, self.sequence
        slots = [self._slot(rank, sequence & 1) for rank in range(self._size)]
        if any(words[slot + AGREED + 1] != sequence for slot in slots):
            return None
        a, b, c, d, e, f = (min(words[slot + place] for slot in slots) for place in range(AGREED))
        return a, b, c, d, e, f

    def addresses(self) -> tuple[int, ...]:
        """Return the address that each rank published."""
        turn = self.turn
        return tuple(self._words[self._slot(rank, turn) + AGREED] for rank in range(self._size))

    def arrive(self, spins: int) -> bool:
        """Take a step; say whether all other ranks took as many before, whatever `spins` is.

        The step is what comes last, so that who notes the result notes that it is taken.
        """
        own, words = self._rank * _WORDS, self._words
        step = max(words[own], self.sequence << STEP_BITS) + 1
        is_last = all(
            words[rank * _WORDS] >= step for rank in range(self._size) if rank != self._rank
        )
        words[own] = step
        return is_last

    def arrived(self) -> bool:
        """Return whether all ranks took as many steps as this one."""
        words, step = self._words, self._words[self._rank * _WORDS]
        return all(words[rank * _WORDS] >= step for rank in range(self._size))

    def behind(self) -> list[int]:
        """Return the ranks that have not come as far as this one."""
        words, sequence = self._words, self.sequence
        step = words[self._rank * _WORDS]
        step = step if step > sequence << STEP_BITS else 0
        return [
            rank
            for rank in range(self._size)
            if words[self._slot(rank, sequence & 1) + AGREED + 1] != sequence
            or words[rank * _WORDS] < step
        ]

    def enter(self) -> int:
        """Begin what follows the agreement; return who has called it off, or -1."""
        if self._said_by(self._rank) == _GOES_ON:
            self._say(_ENTERED)
        return self.called_off_by()

    def called_off_by(self) -> int:
        """Return who has called off the operation at hand, or -1; see [Note: calling off]."""
        for rank in range(self._size):
            until = time.monotonic() + _DECIDES_S
            while (said := self._said_by(rank)) == _DECIDING and time.monotonic() < until:
                time.sleep(_SEEN_AFTER_S / 10)
            if said in (_OFF, _OFF_FOR_A_DEATH):
                return rank + (said == _OFF_FOR_A_DEATH) * OF_A_DEATH
        return -1

    def call_off(self, of_a_death: bool) -> bool:
        """Return whether nobody does anything in the operation at hand; False: some rank may."""
        if self.called_off_by() >= 0:
            return True
        if self._has_entered():
            return False
        try:
            self._say(_DECIDING)
            time.sleep(_SEEN_AFTER_S)
            off = _OFF_FOR_A_DEATH if of_a_death else _OFF
            self._say(_GOES_ON if self._has_entered() else off)
        except BaseException:
            if self._said_by(self._rank) == _DECIDING:
                self._say(_GOES_ON)
            raise
        return self.called_off_by() >= 0

    def _has_entered(self) -> bool:
        return any(self._said_by(rank) == _ENTERED for rank in range(self._size))

    def _said_by(self, rank: int) -> int:
        """Return what a rank says of the operation at hand."""
        sequence = self.sequence
        number, said = divmod(self._words[rank * _WORDS + 1 + (sequence & 1)], _SAYINGS)
        return said if number == sequence and sequence else _GOES_ON

    def _say(self, what: int) -> None:
        sequence = self.sequence
        self._words[self._rank * _WORDS + 1 + (sequence & 1)] = sequence * _SAYINGS + what

    def break_off(self) -> None:
        """Never go on with the operation at hand, which all ranks are in."""
        self._words[self._rank * _WORDS] = (self.sequence << STEP_BITS) + _BEYOND

    def broken_by(self) -> int:
        """Return the rank that has broken the operation at hand, or -1."""
        broken = self.inside(_BEYOND) if self.sequence else range(self._size)
        return next((rank for rank in range(self._size) if rank not in broken), -1)

    def inside(self, steps: int) -> list[int]:
        """Return the ranks that have not taken so many steps in the operation at hand."""
        last = (self.sequence << STEP_BITS) + steps
        return [rank for rank in range(self._size) if self._words[rank * _WORDS] < last]

    def _slot(self, rank: int, turn: int) -> int:
        return (self._size * (1 + turn) + rank) * _WORDS


def _spin(look: Callable[[], Any], spins: int) -> Any:
    """Check repeatedly, about as long as the compiled control block does."""
    found = look()
    until = time.monotonic_ns() + spins * _POLLS_PER_SPIN
    while not found and time.monotonic_ns() < until:
        found = look()
    return found
