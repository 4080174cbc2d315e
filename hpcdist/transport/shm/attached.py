"""`Attached`: ordinary memory of another rank of the node, which the kernel copies from and to.

Cross-memory attach (process_vm_readv(2)): one copy, where staging memory takes two, and any rank
may make it. `reduce_attached` makes a reduction of such copies (`native/reduce_attached.c`).
Containers and security modules can forbid it, and memory of devices cannot be read so: therefore
ranks try it when they come to share a node, and `attach` before it offers an array.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from time import perf_counter_ns

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.errors import TransportError
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.shm.kernel import address_of, compiled
from hpcdist.transport.tuning import Copies


class Attached(NamedTuple):
    """Where a contribution lies: a process, and the address there."""

    pid: int
    address: int

    @property
    def base(self) -> int:
        """0: this is in no segment that this process maps."""
        return 0

    def at(self, offset: int) -> Attached:
        """Return the place `offset` bytes further on."""
        return self._replace(address=self.address + offset)

    def read(self, out: NumpyArray) -> None:
        """Copy what is here into `out`, a contiguous array."""
        if self.pid != os.getpid():
            _move(compiled.read_from, self, out)
        elif self.address != address_of(out):
            compiled.fetch(out, self.address)

    def write(self, data: NumpyArray) -> None:
        """Copy `data`, a contiguous array, to here."""
        _move(compiled.write_to, self, data)


def _move(move: object, place: Attached, data: NumpyArray) -> None:
    try:
        move(place.pid, place.address, data)  # type: ignore[operator] # a compiled function
    except OSError as error:
        raise unreachable(f"process {place.pid}", error) from error


def unreachable(whose: str, cause: OSError) -> TransportError:
    """Return the error of memory that the kernel does not copy any more."""
    error = TransportError(
        f"the memory of {whose} of this node cannot be copied ({cause}), which it "
        "could before; look whether that rank has ended"
    )
    error.__cause__ = cause
    return error


def reduce_attached(
    code: int,
    rank: int,
    sources: Sequence[Attached],
    targets: Sequence[int],
    count: int,
    divisor: float,
    room: NumpyArray,
) -> None:
    """Combine the share of this rank, of everyone's contributions, into the targets.

    Args:
        code: the compiled loop.
        rank: this one.
        sources: where the share begins, for each rank.
        targets: where its result goes, in the same processes; 0: nowhere.
        count: the numbers of the share.
        divisor: what the sum is divided by.
        room: memory for some blocks of it, which nobody else uses.

    Raises:
        TransportError: it was stopped on its way; what is in the targets is unknown.

    """
    pids, addresses = zip(*sources, strict=True)
    try:
        compiled.reduce_attached(
            code, rank, pids, addresses, tuple(targets), count, divisor, room, room.nbytes
        )
    except OSError as error:
        raise unreachable("another process", error) from error


class Sample(NamedTuple):
    """What another rank reads in order to see whether it can: a place, and the bytes there."""

    place: Attached
    content: bytes

    def is_read(self) -> bool:
        """Return whether this process can read it, and finds what is there."""
        out = np.zeros(len(self.content), np.uint8)
        try:
            compiled.read_from(*self.place, out)
        except OSError:
            return False
        return out.tobytes() == self.content


def attach(data: NumpyArray) -> int:
    """Return the address of an array that other ranks can read and write; 0 for any other."""
    return address_of(data) if compiled.is_attachable(data) else 0


def make_sample() -> tuple[Sample | None, NumpyArray]:
    """Return what others try to read, which is to be kept until they have; None if none can."""
    content = np.frombuffer(os.urandom(16), np.uint8).copy()
    if compiled is None or not compiled.is_attachable(content):
        return None, content
    return Sample(Attached(os.getpid(), address_of(content)), content.tobytes()), content


_TRIED_BYTES = 128 << 10, 32 << 10
"""More would be little more exact, and each new page takes time."""
_TRIED_RANKS = 4
"""Among more ranks no rule asks."""
UNTRIED = (math.inf,) * len(_TRIED_BYTES)
_FAST = 1.0, 1.4
"""Below these the kernel copies fast. What we copy to another core takes longer than to our own."""


def copying_takes(ranks: int) -> tuple[float, ...]:
    """Return what one copy by the kernel takes, of another process's memory, by two of ours.

    That of 128 KiB and that of 32 KiB. It depends on the caches, and on what a system call takes:
    0.85 and 1.15 were found; of 512 KiB, 0.6 to 1.2, and 2. Local; tried once in a process, among
    few ranks.
    """
    return _copying_takes() if ranks <= _TRIED_RANKS else UNTRIED


def copies_of(takes: Iterable[float]) -> Copies:
    """Return how the kernel copies by what `copying_takes` has found, in the mean of ranks."""
    large, small = (each < fast for each, fast in zip(takes, _FAST, strict=True))
    return "any" if not large else "early" if small else "fast"


@cache
def _copying_takes() -> tuple[float, ...]:
    return tuple(map(_one_by_two, _TRIED_BYTES))


def _one_by_two(nbytes: int) -> float:
    given, between, taken = (np.full(nbytes, 1, np.uint8) for _ in range(3))
    here = os.getpid(), address_of(given)

    def twice() -> None:
        compiled.fetch(between, here[1])
        compiled.fetch(taken, address_of(between))

    ways = partial(compiled.read_from, *here, taken), twice
    by_kernel, by_us = zip(*([_least_ns(way) for way in ways] for _ in range(2)), strict=True)
    return float(min(by_kernel) / min(by_us))


def _least_ns(copy: Callable[[], object]) -> int:
    """Return how long the fastest of a few runs takes, with warm caches, in nanoseconds."""
    found = []
    for _ in range(3):
        begun = perf_counter_ns()
        copy()
        found.append(perf_counter_ns() - begun)
    return min(found)
