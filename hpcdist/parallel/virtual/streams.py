"""`Streams`: the random numbers of each virtual rank, which go wherever it goes.

A library's generator belongs to the process. While a virtual rank computes, the generator has that
one's state, and afterwards its own again.
"""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, final

import numpy as np
import numpy.typing as npt

from hpcdist.checkpoint.local_slice import LocalSlice
from hpcdist.named_tuple import NamedTuple

Row = npt.NDArray[np.uint8]


class Generator(NamedTuple):
    """What is done with a library's generator of random numbers.

    Attributes:
        make: returns the state that a seed gives, an integer below 2**63.
        swap: lets the generator go on from a state, and returns the one it had.
        pack: returns a state as bytes, equally many for all states.
        unpack: returns the state that bytes mean.

    """

    make: Callable[[int], Any]
    swap: Callable[[Any], Any]
    pack: Callable[[Any], bytes]
    unpack: Callable[[bytes], Any]


@final
class Streams:
    """The streams of the virtual ranks that live here.

    Each begins with a seed made of the number of its virtual rank and of `seed`.

    Args:
        own: the virtual ranks that live here.
        count: how many there are on all ranks.
        seed: an integer.
        generators: by name.

    """

    def __init__(
        self, own: range, count: int, seed: int, generators: Mapping[str, Generator]
    ) -> None:
        self._own, self._count, self._generators = own, count, generators
        self._states = {
            name: [each.make(_seed(f"{name} {rank} {seed}")) for rank in own]
            for name, each in generators.items()
        }

    @contextmanager
    def turn(self) -> Iterator[Callable[[int], None]]:
        """Yield what gives the generators to one virtual rank after the other.

        Afterwards they have their own states again.
        """
        turn = _Turn(self._generators, self._states)
        _TURNS.take(turn)
        try:
            yield lambda rank: turn.give(rank - self._own.start)
        finally:
            _TURNS.end(turn)

    def state_dict(self) -> dict[str, LocalSlice]:
        """Return the states as rows of arrays of all virtual ranks, of which some are here."""
        return {name: self._slice_of(self._rows(name)) for name in self._generators}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the streams go on from what `state_dict` has returned, on any number of ranks."""
        for name, each in self._generators.items():
            given = state[name]
            rows = given.data if isinstance(given, LocalSlice) else given[self._own.start :]
            self._states[name] = [
                each.unpack(bytes(row)) for row, _ in zip(rows, self._own, strict=False)
            ]

    def _rows(self, name: str) -> Row:
        packed = [self._generators[name].pack(state) for state in self._states[name]]
        rows: Row = np.frombuffer(b"".join(packed), np.uint8).reshape(len(packed), -1).copy()
        return rows

    def _slice_of(self, rows: Row) -> LocalSlice:
        return LocalSlice(rows, (self._count, rows.shape[1]), (self._own.start, 0))


@final
class _Turn:
    """Gives generators to virtual ranks, by their places in the lists of states."""

    def __init__(self, generators: Mapping[str, Generator], states: dict[str, list[Any]]) -> None:
        self._generators, self._states = generators, states
        self._before: dict[str, Any] = {}
        self._place: int | None = None
        self.thread = threading.current_thread()

    def give(self, place: int) -> None:
        self._swap({name: states[place] for name, states in self._states.items()})
        self._place = place

    def end(self) -> None:
        if self._place is not None:
            self._swap(self._before)

    def _swap(self, following: Mapping[str, Any]) -> None:
        for name, each in self._generators.items():
            found = each.swap(following[name])
            if self._place is None:
                self._before[name] = found
            else:
                self._states[name][self._place] = found


@final
class _Turns:
    """Simulated ranks are threads that share the generators: their virtual ranks take turns.

    A rank that has left its loop by an error keeps its turn for as long as somebody looks at that
    error. So whoever comes takes the turn of a thread that has ended, or its own of before.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken: _Turn | None = None

    def take(self, turn: _Turn) -> None:
        """Wait until no other rank has its turn."""
        with self._changed:
            while self._is_taken_from(turn.thread):
                self._changed.wait(_LOOK_S)
            self._taken = turn

    def end(self, turn: _Turn) -> None:
        """End a turn, unless another rank has taken it, and let others have theirs."""
        with self._changed:
            if self._taken is turn:
                turn.end()
                self._taken = None
                self._changed.notify_all()

    def _is_taken_from(self, thread: threading.Thread) -> bool:
        taken = self._taken
        return taken is not None and taken.thread is not thread and taken.thread.is_alive()


_LOOK_S = 0.1
_TURNS = _Turns()


def _seed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


# ---- Python's generator, and NumPy's


def _swap_python(state: Any) -> Any:
    before = random.getstate()
    random.setstate(state)
    return before


def _pack_python(state: Any) -> bytes:
    _, words, gauss = state
    held = (0, 0.0) if gauss is None else (1, gauss)
    return np.array(words, np.uint32).tobytes() + struct.pack("<qd", *held)


def _unpack_python(content: bytes) -> Any:
    held, gauss = struct.unpack("<qd", content[-16:])
    words = np.frombuffer(content[:-16], np.uint32).tolist()
    return 3, tuple(words), gauss if held else None


def _swap_numpy(generator: Any) -> Any:
    # Replaced, not filled: that is faster by far. NumPy forgets a second normal number that it has
    # kept back, whenever a turn begins or ends, and so on any number of ranks.
    numbers: Any = np.random  # whose types lack these
    before = numbers.get_bit_generator()
    numbers.set_bit_generator(generator)
    return before


def _pack_numpy(generator: Any) -> bytes:
    state = generator.state["state"]
    content: bytes = state["key"].astype(np.uint32).tobytes() + struct.pack("<q", state["pos"])
    return content


def _unpack_numpy(content: bytes) -> Any:
    generator: Any = np.random.MT19937(0)
    key = np.frombuffer(content[:-8], np.uint32)
    inner = {"key": key, "pos": struct.unpack("<q", content[-8:])[0]}
    generator.state = {"bit_generator": "MT19937", "state": inner}
    return generator


GENERATORS: Mapping[str, Generator] = {
    "python": Generator(
        lambda seed: random.Random(seed).getstate(), _swap_python, _pack_python, _unpack_python
    ),
    "numpy": Generator(np.random.MT19937, _swap_numpy, _pack_numpy, _unpack_numpy),
}
"""Those of every process."""
