"""`OverlapPolicy`: whether gradients travel while the backward pass computes, and what was hidden.

[Note: overlap] Communication on a thread of its own hides behind a device that computes. Where
the backward pass itself keeps all of a rank's cores busy, such a thread only takes a core away:
reducing each bucket at once is faster. So the first backward passes run inline and measure how many
cores they want; after that the policy decides. Time a thread was ready to run and had no core,
because another process had it, counts as wanted.

This module computes with clocks only; `averager` does the communication.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from time import perf_counter
from typing import Literal, final

from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime.process import demand_s

Overlap = Literal["auto", "always", "never"]

SPARE_CORES = 0.5
"""A communication thread pays off if the backward pass leaves this many cores idle."""

_WARM_UP, _MEASURED = 1, 3
"""Backward passes that allocate and warm up, and those after which `OverlapPolicy` decides."""


class CommStats(NamedTuple):
    """The cost of exchanging a model's gradients so far, on this rank; times in seconds.

    Where buckets are overlapped, the first backward passes, which only measure, are not counted.
    """

    backwards: int = 0
    """Backward passes whose gradients were averaged."""
    buckets: int = 0
    """Buckets sent, over all backward passes."""
    nbytes: int = 0
    """Bytes this rank has put into them."""
    comm_s: float = 0.0
    """Time during which a bucket was under way, waiting for other ranks included."""
    exposed_s: float = 0.0
    """The part of `comm_s` during which the backward pass did nothing but wait."""
    overlapped: bool = False
    """Whether buckets now travel while the backward pass computes."""

    @property
    def hidden(self) -> float:
        """The share of `comm_s` that was hidden behind computing, from 0 to 1."""
        return max(0.0, 1.0 - self.exposed_s / self.comm_s) if self.comm_s else 0.0


class Transfer(NamedTuple):
    """One bucket: when it was launched and when it had arrived."""

    launched: float
    ended: float


def transfer_times(transfers: Sequence[Transfer], computed: float) -> tuple[float, float]:
    """Return (time under way, time under way after `computed`) of transfers in order, without gaps.

    A bucket is under way from its launch, or from the arrival of the bucket before it.
    """
    total = exposed = 0.0
    free = float("-inf")
    for launched, ended in transfers:
        began = max(launched, free)
        free = max(ended, began)
        total += free - began
        exposed += max(0.0, free - max(began, computed))
    return total, exposed


def core_share(mine: Collection[int], everyone: Sequence[Collection[int]]) -> float:
    """Return how many cores a rank has for itself.

    `everyone` holds, for each rank on its node, the cores that rank may run on; `mine` is one
    of them. A core that k ranks may run on counts 1/k.
    """
    return sum(1.0 / sum(core in cores for cores in everyone) for core in mine)


class Clock(NamedTuple):
    """What time it is, and how many seconds of cores this process has wanted so far."""

    now: Callable[[], float] = perf_counter
    wanted: Callable[[], float] = demand_s


_MACHINE = Clock()


@final
class OverlapPolicy:
    """Times one model's backward passes; `cores` is the rank's share of its node."""

    def __init__(self, cores: float, overlap: Overlap = "auto", clock: Clock = _MACHINE) -> None:
        self._cores = cores
        self._clock = clock
        self._undecided = overlap == "auto"
        self.inline = overlap != "always"
        """Whether buckets are reduced at once, not on a thread."""
        self._transfers: list[Transfer] = []
        self._began = self._began_wanted = 0.0
        self._away = self._away_cpu = 0.0
        self._busy = 0.0
        self._computed = float("inf")
        self._sums = CommStats()
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Start the clocks: a backward pass whose gradients are averaged begins."""
        self._settle()
        if self._undecided:
            self._began_wanted = self._clock.wanted()
        self._began = self._clock.now()
        self._away = self._away_cpu = 0.0
        self._computed = float("inf")

    def record_transfer(self, launched: float, ended: float, nbytes: int) -> None:
        """Note one bucket that has arrived; called by the threads of the groups' queues."""
        with self._lock:
            self._transfers.append(Transfer(launched, ended))
            sums = self._sums
            self._sums = sums._replace(buckets=sums.buckets + 1, nbytes=sums.nbytes + nbytes)

    def paused(self, wall_s: float, cpu_s: float) -> None:
        """Note time the backward pass spent in an inline exchange."""
        self._away += wall_s
        self._away_cpu += cpu_s

    def computed(self) -> None:
        """Note that the last gradient is there: what follows is waiting."""
        self._computed = self._clock.now()
        backwards = self._sums.backwards + 1
        self._sums = self._sums._replace(backwards=backwards)
        if self._undecided and backwards > _WARM_UP:
            self._measure(decide=backwards == _MEASURED)

    def _measure(self, *, decide: bool) -> None:
        """Note how many cores this backward pass wanted; the busiest one counts."""
        # Without the inline exchange: its waiting would count as idle cores, its copying as busy.
        wall = self._computed - self._began - self._away
        wanted = self._clock.wanted() - self._began_wanted - self._away_cpu
        self._busy = max(self._busy, wanted / max(wall, 1e-9))
        if decide:
            self._undecided = False
            self.inline = self._cores - self._busy < SPARE_CORES
            if not self.inline:
                self._transfers.clear()
                self._sums = CommStats()

    def stats(self) -> CommStats:
        """Return the sums over all backward passes that have ended."""
        self._settle()
        return self._sums._replace(overlapped=not self.inline)

    def _settle(self) -> None:
        """Add the transfers of the last backward pass to the sums."""
        transfers, self._transfers = self._transfers, []
        comm, exposed = transfer_times(sorted(transfers), self._computed)
        if self.inline:  # the backward pass stands still meanwhile
            exposed = comm
        sums = self._sums
        self._sums = sums._replace(comm_s=sums.comm_s + comm, exposed_s=sums.exposed_s + exposed)
