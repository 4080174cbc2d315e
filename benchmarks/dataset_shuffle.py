"""A global shuffle of text in memory: ``mpiexec -n 2 python dataset_shuffle.py``.

hpcdist beside what one writes in an afternoon: lists of bytes, drawn by random ranks, and sent as
batches of pickles through `all_to_all_object`. Once as on one node, where the rows lie in memory
that the ranks share, and once as between nodes, where they are exchanged.

Megabytes are those of the text, per second of processor time of the slowest rank; memory is the
most that a rank had beyond what it had before, shared pages counted by halves, thirds and so on.
To look at the memory takes time, so it is done in a round of its own.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from report import Report, read_options

import hpcdist as dist
from hpcdist.comm.together import together
from hpcdist.data import store as stores
from hpcdist.data.columns import Columns, Ragged, offsets_of
from hpcdist.data.nodes import Nodes
from hpcdist.data.order import Shuffled
from hpcdist.data.settle import settle
from hpcdist.data.shares import plan_shares
from hpcdist.data.store import Hoard, Parts
from hpcdist.text import times, volume

BATCH = 512
PICKLES = 8 << 20
"""Bytes of rows in one round of pickles."""


def text_of(rank: int, nbytes: int) -> Columns:
    """Return rows of about 300 bytes, other ones on each rank."""
    random = np.random.default_rng(rank)
    lengths = random.integers(40, 560, nbytes // 300)
    offsets = offsets_of(lengths)
    values = random.integers(97, 123, offsets[-1], np.uint8)
    return Columns({"text": Ragged(values, offsets, "string")})


class Watch:
    """The most memory that this rank had meanwhile."""

    def __enter__(self) -> Watch:
        gc.collect()
        self._before = self._most = _proportional_nbytes()
        self._going = True
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._going = False
        self._thread.join()
        self._look_once()
        self.nbytes = self._most - self._before

    def _look(self) -> None:
        while self._going:
            self._look_once()
            time.sleep(0.02)

    def _look_once(self) -> None:
        self._most = max(self._most, _proportional_nbytes())


def _proportional_nbytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def by_pickles(rows: Columns, comm: MPI.Intracomm) -> tuple[list[bytes], list[int]]:
    """Shuffle lists of bytes through pickles."""
    column = rows["text"]
    values, ends = column.values.tobytes(), column.offsets.tolist()
    lines = [values[start:stop] for start, stop in pairwise(ends)]
    random = np.random.default_rng(comm.rank)
    goes_to = random.integers(0, comm.size, len(lines)).tolist()
    step = max(1, PICKLES // 300)
    rounds = comm.allreduce(-(-len(lines) // step), MPI.MAX)
    found: list[bytes] = []
    for first in range(0, rounds * step, step):
        parts: list[list[bytes]] = [[] for _ in range(comm.size)]
        for line, rank in zip(lines[first : first + step], goes_to[first:], strict=False):
            parts[rank].append(line)
        got: list[Any] = []
        dist.all_to_all_object(got, parts)
        for each in got:
            found += each
    order = random.permutation(len(found)).tolist()
    return [found[index] for index in order], order


def hoarded(rows: Columns) -> list[Columns]:
    """Return rows as they are after loading, in blocks as a reader gives them."""
    hoard = Hoard()
    step = max(1, len(rows) * (4 << 20) // rows.nbytes)
    for first in range(0, len(rows), step):
        hoard.add(rows.slice(first, first + step))
    return hoard.parts()


class Race:
    """The ranks, and what they look at: their processor time or their memory."""

    def __init__(self, ranks: Any, comm: MPI.Intracomm, *, memory: bool) -> None:
        self.ranks, self.comm, self._memory = ranks, comm, memory

    def measured(self, name: str, do: Callable[[], Any]) -> dict[str, Any]:
        """Return what one contestant has taken."""
        self.comm.Barrier()
        if self._memory:
            with Watch() as watch:
                kept = do()
            found = {"peak": self.comm.allreduce(watch.nbytes, MPI.MAX)}
        else:
            began = time.process_time()
            kept = do()
            found = {"cpu": self.comm.allreduce(time.process_time() - began, MPI.MAX)}
        del kept
        return {"shuffle": name, **found}


def main() -> None:
    options = read_options(__doc__, rounds=5)
    world = dist.init_parallel_env()
    comm = MPI.COMM_WORLD.Dup()
    report = Report("dataset_shuffle", options, comm)
    nbytes = (32 if options.quick else 256) << 20
    ranks = together(world)
    rows: list[dict[str, Any]] = []
    for number in range(options.rounds + 1):
        rows += _round(text_of(comm.rank, nbytes), Race(ranks, comm, memory=not number))
    found = [_median([row for row in rows if row["shuffle"] == name]) for name in _NAMES]
    data = text_of(comm.rank, nbytes).nbytes
    shown = [
        {
            **row,
            "MB per CPU-s": data / 1e6 / row["cpu"],
            "/ pickles": found[0]["cpu"] / row["cpu"],
            "data": data,
        }
        for row in found
    ]
    columns: dict[str, Any] = {"shuffle": str, "MB per CPU-s": _rounded, "/ pickles": times}
    columns |= {"data": volume, "peak": volume}
    report.table("Shuffles of text, per rank", columns, shown)
    batches = {"rows": str, "us": _rounded}
    report.table(f"A batch of {BATCH} rows", batches, [_batches(text_of(comm.rank, nbytes), ranks)])
    report.close()


def _round(text: Columns, race: Race) -> list[dict[str, Any]]:
    return [
        race.measured("pickles", lambda: by_pickles(text, race.comm)),
        _between_nodes(text, race),
        _inside_a_node(text, race),
    ]


_NAMES = ("pickles", "exchanged", "in shared memory")


def _between_nodes(text: Columns, race: Race) -> dict[str, Any]:
    ranks, comm = race.ranks, race.comm
    source = stores.Loaded(hoarded(text), sum(comm.allgather(len(text))[: comm.rank]))
    total = comm.allreduce(len(text))
    parts = Parts(source, text.schema(), ranks, Nodes.apart(ranks.size))
    del source
    order, shares = Shuffled(total, 1, 0), plan_shares(total, 0, comm.size, "pad")
    return race.measured("exchanged", lambda: parts.arrange(order, shares, {}))


def _inside_a_node(text: Columns, race: Race) -> dict[str, Any]:
    ranks, comm = race.ranks, race.comm
    settled = settle(hoarded(text), ranks, None)
    total = sum(settled.rows)
    order, shares = Shuffled(total, 1, 0), plan_shares(total, 0, comm.size, "pad")

    def shuffle() -> None:
        settled.store.arrange(order, shares, {})
        for first in range(0, len(shares.positions(comm.rank)), 1 << 13):
            settled.store.batch(first, first + 1)  # so that all places have been computed

    return race.measured("in shared memory", shuffle)


def _batches(text: Columns, ranks: Any) -> dict[str, Any]:
    settled = settle(hoarded(text), ranks, None)
    total = sum(settled.rows)
    shares = plan_shares(total, 0, ranks.size, "drop")
    settled.store.arrange(Shuffled(total, 1, 0), shares, {})
    count = len(shares.positions(ranks.rank)) // BATCH
    began = time.process_time()
    for step in range(count):
        settled.store.batch(step * BATCH, (step + 1) * BATCH)
    return {"rows": f"text, {BATCH}", "us": (time.process_time() - began) / count * 1e6}


def _median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the memory of the first round, and the processor time of the others."""
    cpu_s = float(np.median([row["cpu"] for row in rows[1:]]))
    return {**rows[0], "cpu": cpu_s}


def _rounded(number: float) -> str:
    return f"{number:.0f}"


if __name__ == "__main__":
    main()
