"""`Plan`: what is to be measured, and `measure`, which does it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

from hpcdist.bench.cases import CASES, QUICK_SIZES
from hpcdist.bench.harness import Effort, Harness, wait_quietly
from hpcdist.bench.libraries import start_peers
from hpcdist.bench.libraries.hpcdist import start_own
from hpcdist.bench.memory_kinds import are_on_device
from hpcdist.bench.rows import Point, Row
from hpcdist.bench.startup import Started
from hpcdist.bench.task import read_dtype, result_bytes
from hpcdist.comm.group import Group
from hpcdist.comm.groups import destroy_process_group, new_group
from hpcdist.named_tuple import NamedTuple
from hpcdist.text import volume

LARGEST = 1 << 30
"""A measurement that would give a rank more bytes than this is left out."""


class Plan(NamedTuple):
    """What is to be measured; `sizes` and `ranks` are None for the usual ones."""

    cases: Sequence[str]
    sizes: Sequence[int] | None = None
    ranks: Sequence[int] | None = None
    dtypes: Sequence[str] = ("float32",)
    memories: Sequence[str] = ("ordinary",)
    op: str = "SUM"
    against: Sequence[str] = ()
    rounds: int | None = None
    quick: bool = False

    def effort(self) -> Effort:
        """Return how long to measure."""
        usual = Effort(3, 20, 1e-3) if self.quick else Effort(21, 200, 4e-3)
        return usual._replace(rounds=self.rounds or usual.rounds)

    @property
    def on_device(self) -> bool:
        """Whether the arrays are in the memory of a device."""
        return are_on_device(self.memories)


class Progress(NamedTuple):
    """Whom to tell: `at` before each measurement, `found` after each case on some ranks."""

    at: Callable[[int, int, str], Any] = lambda done, total, text: None
    found: Callable[[str, list[Row]], Any] = lambda case, rows: None


def points_of(plan: Plan, case: str, size: int) -> list[Point]:
    """Return where `case` is measured on `size` ranks; none where it needs more."""
    row = CASES[case]
    if size < row.least:
        return []
    dtypes: Sequence[str | None] = plan.dtypes if row.typed else [None]
    placed = row.typed or (row.moved and plan.on_device)
    memories: Sequence[str | None] = plan.memories if placed else [None]
    return [
        Point(case, dtype, memory, nbytes)
        for dtype in dtypes
        for memory in memories
        for nbytes in _sizes(plan, case, dtype)
        if result_bytes(case, nbytes or 0, size) <= LARGEST
    ]


def _sizes(plan: Plan, case: str, dtype: str | None) -> Sequence[int | None]:
    """Return the sizes of a case; whole elements only."""
    usual = CASES[case].sizes
    if usual is None:
        return [None]
    short = [size for size in QUICK_SIZES if size in usual] or usual[:2]
    sizes = plan.sizes or (short if plan.quick else usual)
    item = read_dtype(dtype).itemsize if dtype else 1
    return [size for size in sizes if size % item == 0]


def measure(
    world: Group, plan: Plan, started: Started, notes: list[str], tell: Progress | None = None
) -> list[Row]:
    """Measure everything in `plan`. Collective over the world.

    Args:
        world: all ranks of the job.
        plan: the same on all ranks.
        started: what starting took on this rank.
        notes: filled with sentences about what was left out.
        tell: whom to tell how far it is.

    Returns:
        The rows, on rank 0; other ranks may have some of them.

    """
    sizes = plan.ranks or [world.nranks]
    points = {size: {case: points_of(plan, case, size) for case in plan.cases} for size in sizes}
    total = sum(len(each) for by_case in points.values() for each in by_case.values())
    rows: list[Row] = []
    done = 0
    for size in sizes:
        if world.rank < size:
            stage = _enter(world, size, plan, started, notes)
            for case, each in points[size].items():
                found = _measure_case(stage, each, tell or Progress(), done, total)
                (tell or Progress()).found(case, found)
                rows += found
                done += len(each)
            _leave(stage)
        wait_quietly(world.mpi_comm)
    return rows


def _measure_case(
    stage: Harness, points: list[Point], tell: Progress, done: int, total: int
) -> list[Row]:
    rows: list[Row] = []
    for number, point in enumerate(points):
        size = "" if point.nbytes is None else f" of {volume(point.nbytes)}"
        where = f" on {stage.group.nranks} rank{'s' * (stage.group.nranks > 1)}"
        tell.at(done + number, total, f"{point.case}{size}{where}")
        rows += CASES[point.case].measure(stage, point)
    return rows


def _enter(world: Group, size: int, plan: Plan, started: Started, notes: list[str]) -> Harness:
    """Gather the first `size` ranks and the libraries. Collective over these ranks."""
    whole = size == world.nranks
    group = world if whole else new_group(world.ranks[:size])
    comm = group.mpi_comm
    peers, missing = start_peers(plan.against, comm, whole, on_device=plan.on_device)
    notes += [f"{name} is left out on {size} ranks: {why}" for name, why in missing.items()]
    nodes = len(set(comm.allgather(socket.gethostname())))
    libraries = [start_own(group), *peers]
    return Harness(group, comm, nodes, whole, libraries, plan.op, plan.effort(), started, notes)


def _leave(stage: Harness) -> None:
    for library in stage.libraries:
        library.close()
    if not stage.whole:
        destroy_process_group(stage.group)
