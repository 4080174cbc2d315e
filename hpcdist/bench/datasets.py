"""Datasets: a global shuffle beside batches of pickles, and a batch of rows."""

from __future__ import annotations

from itertools import count, pairwise
from typing import Any

import numpy as np

from hpcdist.bench.harness import Harness
from hpcdist.bench.interleaved import Call
from hpcdist.bench.memory_kinds import memory_of
from hpcdist.bench.rows import OWN, Point, Row
from hpcdist.comm.group import Group
from hpcdist.comm.objects import all_to_all_object
from hpcdist.comm.together import together
from hpcdist.data.columns import Columns, Ragged, offsets_of
from hpcdist.data.order import Shuffled
from hpcdist.data.settle import settle
from hpcdist.data.shares import plan_shares
from hpcdist.data.store import Hoard, Store

_ROW_NBYTES = 300
_BATCH = 512
_PICKLED_ROWS = 1 << 14
"""Rows in one round of pickles."""


def measure_shuffle(stage: Harness, point: Point) -> list[Row]:
    """Measure a shuffle of all ranks' rows, up to the first batch. Collective."""
    rows = _text(stage.group.rank, point.nbytes or 0)
    store, total = _stored(rows, stage.group)
    epochs = count()

    def shuffle() -> None:
        shares = plan_shares(total, 0, stage.group.nranks, "pad")
        store.arrange(Shuffled(total, 0, next(epochs)), shares, {})
        store.batch(0, min(_BATCH, len(shares.positions(stage.group.rank))))

    return _rows(stage, point, {OWN: shuffle, "pickles": _by_pickles(rows, stage.group)})


def measure_batch(stage: Harness, point: Point) -> list[Row]:
    """Measure how long it takes to gather the rows of a batch. Collective."""
    store, total = _stored(_text(stage.group.rank, point.nbytes or 0), stage.group)
    shares = plan_shares(total, 0, stage.group.nranks, "pad")
    store.arrange(Shuffled(total, 0, 0), shares, {})
    own = len(shares.positions(stage.group.rank))
    steps = count()

    def batch() -> None:
        first = next(steps) * _BATCH % max(own - _BATCH, 1)
        store.batch(first, min(first + _BATCH, own))

    return _rows(stage, point, {OWN: batch})


def _rows(stage: Harness, point: Point, candidates: dict[str, Call]) -> list[Row]:
    found = stage.interleave(candidates, memory_of(point.memory))
    return [stage.row(found, name, name, point) for name in candidates]


def _text(rank: int, nbytes: int) -> Columns:
    random = np.random.default_rng(rank)
    lengths = random.integers(40, 2 * _ROW_NBYTES - 40, max(nbytes // _ROW_NBYTES, 1))
    offsets = offsets_of(lengths)
    values = random.integers(97, 123, int(offsets[-1]), np.uint8)
    return Columns({"text": Ragged(values, offsets, "string")})


def _stored(rows: Columns, group: Group) -> tuple[Store, int]:
    hoard = Hoard()
    hoard.add(rows)
    settled = settle(hoard.parts(), together(group), None)
    return settled.store, sum(settled.rows)


def _by_pickles(rows: Columns, group: Group) -> Call:
    """Return what sends lists of bytes to random ranks, as one writes it in an afternoon."""
    column = rows["text"]
    assert isinstance(column, Ragged)
    ends, values = column.offsets.tolist(), column.values.tobytes()
    lines = [values[start:stop] for start, stop in pairwise(ends)]
    random = np.random.default_rng(group.rank)
    rounds = max(together(group).share(lambda: -(-len(lines) // _PICKLED_ROWS)))

    def shuffle() -> Any:
        goes_to = random.integers(0, group.nranks, len(lines)).tolist()
        found: list[bytes] = []
        for first in range(0, rounds * _PICKLED_ROWS, _PICKLED_ROWS):
            parts: list[list[bytes]] = [[] for _ in range(group.nranks)]
            some = slice(first, first + _PICKLED_ROWS)
            for line, rank in zip(lines[some], goes_to[some], strict=True):
                parts[rank].append(line)
            got: list[list[bytes]] = []
            all_to_all_object(got, parts, group)
            for each in got:
                found += each
        return [found[index] for index in random.permutation(len(found)).tolist()]

    return shuffle
