"""`Harness`: the ranks and libraries at hand, and the functions that measure one point on them."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np

from hpcdist.bench import overlap, startup
from hpcdist.bench.interleaved import Call, Candidates, Interleaved, interleave
from hpcdist.bench.libraries import torch as torch_peer
from hpcdist.bench.memcpy_bound import limits
from hpcdist.bench.memory_kinds import Memory, memory_of
from hpcdist.bench.messages import Pattern, pairs_of
from hpcdist.bench.networks import Network, numpy_step, random_batch, random_weights
from hpcdist.bench.rows import LIMITS, OWN, Point, Row, row_of
from hpcdist.bench.startup import Started
from hpcdist.bench.task import Library, Task, make_task, read_dtype
from hpcdist.bench.unavailable import Unavailable, complaint
from hpcdist.comm.group import Group
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.model import DataParallel

_NAP_S = 1e-3


class Effort(NamedTuple):
    """How long to measure; see `interleave`."""

    rounds: int
    single: int
    sample_s: float


class Harness(NamedTuple):
    """The ranks that measure and what they measure with.

    Attributes:
        group: the ranks.
        comm: an mpi4py communicator of theirs, for the barriers between samples.
        nodes: how many nodes they are on.
        whole: whether these are all ranks of the job.
        libraries: hpcdist first.
        op: the name of the reduction.
        effort: how long to measure.
        started: what starting took on this rank.
        notes: filled with sentences about what was left out.

    """

    group: Group
    comm: Any
    nodes: int
    whole: bool
    libraries: list[Library]
    op: str
    effort: Effort
    started: Started
    notes: list[str]

    def task(self, point: Point, case: str | None = None) -> Task:
        """Return the task at `point` (of another case, for its arrays). Collective."""
        dtype = read_dtype(point.dtype or "float32")
        memory = point.memory or "ordinary"
        return make_task(case or point.case, self.group, point.nbytes or 0, dtype, memory, self.op)

    def interleave(
        self, candidates: Candidates, memory: Memory, patience: float = 1
    ) -> Interleaved:
        """Time the candidates, in samples `patience` times as long as usual. Collective.

        What they put on the device of `memory` is waited for.
        """
        rounds, single, sample_s = self.effort
        return interleave(
            self.comm,
            candidates,
            rounds=rounds,
            single=single,
            sample_s=patience * sample_s,
            wait=memory.waiter(),
        )

    def row(
        self, found: Interleaved, candidate: str, library: str, point: Point, parts: int = 1
    ) -> Row:
        """Return the row of one candidate, and how hpcdist compares with it."""
        row = row_of(
            found, candidate, library, point, ranks=self.group.nranks, nodes=self.nodes, parts=parts
        )
        own = candidate.replace(library, OWN, 1)
        return row | ({"ratio": found.ratio(own, to=candidate)} if own in found.seconds else {})


def wait_quietly(comm: Any) -> None:
    """Wait until all ranks of `comm` have called this, and leave the core to others."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(_NAP_S)


def willing(stage: Harness, point: Point, candidates: dict[str, Call]) -> dict[str, Call]:
    """Call each once, and return those that can do it; hpcdist must. Collective."""
    found = {}
    wait = memory_of(point.memory).waiter()
    for name, call in candidates.items():
        ended = call if wait is None else _then(call, wait)
        reason = "" if name == OWN else complaint(ended)
        if name == OWN:
            ended()
        reasons = [each for each in stage.comm.allgather(reason) if each]
        if reasons:
            stage.notes.append(f"{name} has no row of {point.case}: {reasons[0]}")
        else:
            found[name] = call
    return found


def _then(call: Call, wait: Call) -> Call:
    def call_and_wait() -> None:
        call()
        wait()

    return call_and_wait


# ---- calls, messages


def measure_calls(stage: Harness, point: Point) -> list[Row]:
    """Measure the libraries' own calls of this case."""
    task = stage.task(point)
    return _compare(stage, point, lambda each: _made(each, point.case, task), 1)


def _made(library: Library, case: str, task: Task) -> Call | None:
    make = library.calls.get(case)
    return make(task) if make else None


def measure_messages(
    pattern: Pattern, parts: Callable[[int], int], stage: Harness, point: Point
) -> list[Row]:
    """Measure calls made of messages; `parts` says how many one after the other, by size."""
    task = stage.task(point)
    rows = _compare(
        stage, point, lambda each: pattern(task, each.messages), parts(point.nbytes or 0)
    )
    if point.case != "message_rate":
        return rows
    pairs = pairs_of(stage.group.nranks)
    return [row | {"rate": pairs / row["median_s"]} for row in rows if row["library"] not in LIMITS]


def _compare(
    stage: Harness, point: Point, make: Callable[[Library], Call | None], parts: int
) -> list[Row]:
    made = {library.name: make(library) for library in stage.libraries}
    known = {name: call for name, call in made.items() if call is not None}
    candidates, memory = willing(stage, point, known), memory_of(point.memory)
    if not point.nbytes:
        found = stage.interleave(candidates, memory)
        return [stage.row(found, name, name, point, parts) for name in candidates]
    with limits(memory, point.nbytes, stage.group) as copies:
        found = stage.interleave(candidates | copies, memory)
    rows = [stage.row(found, name, name, point, parts) for name in candidates]
    once = [stage.row(found, name, name, point) for name in copies]
    return rows + [row | {"ratio": row["ratio"] / parts} for row in once]


# ---- overlap


def measure_overlap(computing: str, stage: Harness, point: Point) -> list[Row]:
    """Measure an all_reduce that is begun before computing and waited for after it."""
    task, memory = stage.task(point, "all_reduce"), memory_of(point.memory)
    runs = {library.name: library.calls["all_reduce"](task) for library in stage.libraries}
    runs = willing(stage, point, runs)
    place = overlap.Place(stage.comm, stage.group, memory)
    alone = place.interleave({OWN: runs[OWN]}).median(OWN)
    try:
        compute = overlap.COMPUTING[computing](place, overlap.COMPUTE_SHARE * alone)
    except Unavailable as reason:
        stage.notes.append(f"{point.case} is left out: {reason}")
        return []
    candidates: dict[str, Call] = {"compute": compute}
    for library in stage.libraries:
        if library.name in runs:
            candidates[library.name] = runs[library.name]
            candidates[f"{library.name} both"] = overlap.both(library.begin(task), compute)
    found = stage.interleave(candidates, memory, patience=5)
    return [
        stage.row(found, f"{name} both", name, point)
        | {
            "alone_s": found.median(name),
            "compute_s": found.median("compute"),
            "hidden": overlap.hidden(found, name),
        }
        for name in runs
    ]


# ---- training


def measure_step(stage: Harness, point: Point) -> list[Row]:
    """Measure a training step: of a torch module where torch is, else of NumPy arrays.

    On a device it is always a torch module, there.
    """
    memory = memory_of(point.memory)
    where = "cpu" if memory.device is None else memory.device.torch
    torch_is_here = all(stage.comm.allgather(_can_train_on(where)))
    if memory.device is not None and not torch_is_here:
        stage.notes.append(
            f"{point.case} is left out: it needs a torch that can use {point.memory}"
        )
        return []
    steps = _torch_steps(stage, where) if torch_is_here else _array_steps(stage)
    found = stage.interleave(steps, memory)
    return [
        stage.row(found, name, name, point)
        | {
            "alone_s": found.median("alone"),
            "communication_s": found.added(name, to="alone"),
            "engine": "torch" if torch_is_here else "arrays",
        }
        for name in steps
        if name != "alone"
    ]


def _can_train_on(device: str) -> bool:
    return bool(device) and startup.importable("torch") and torch_peer.can_use(device)


def _torch_steps(stage: Harness, device: str) -> dict[str, Call]:
    network = torch_peer.torch_network(random_weights(), device)
    batch = random_batch(stage.group.rank)
    models = {"alone": deepcopy(network)}
    for library in stage.libraries:
        if library.parallel is not None:
            models[library.name] = library.parallel(deepcopy(network))
    return {name: torch_peer.torch_step(model, batch, device) for name, model in models.items()}


def _array_steps(stage: Harness) -> dict[str, Call]:
    batch = random_batch(stage.group.rank)
    alone, network = Network(random_weights()), Network(random_weights())
    make: Any = DataParallel
    parallel = make(network, group=stage.group)
    return {
        "alone": numpy_step(alone, alone, batch),
        OWN: numpy_step(parallel, network, batch),
    }


# ---- start


def measure_start(which: str, stage: Harness, point: Point) -> list[Row]:
    """Report what `which` of `Started` took when this job began; known of the whole job only."""
    own = getattr(stage.started, which)
    everyone = stage.comm.allgather(own)
    if not stage.whole or None in everyone:
        return []
    slowest = max(everyone)
    row = _rows_of_seconds(stage, point, {OWN: [slowest]})[0]
    return [row | {"straggler": slowest / float(np.median(everyone))}]


def measure_import(stage: Harness, point: Point) -> list[Row]:
    """Measure, on rank 0, the import of each library in fresh interpreters, in turns."""
    told: dict[str, list[float]] = {}
    if stage.group.rank == 0:
        names = [each.name for each in stage.libraries if each.name in startup.IMPORTS]
        names = [name for name in names if startup.importable(name)]
        told = _import_times(names, max(3, stage.effort.rounds // 3))
    wait_quietly(stage.comm)
    told = stage.comm.bcast(told)
    return _rows_of_seconds(stage, point, told)


def _import_times(names: list[str], rounds: int) -> dict[str, list[float]]:
    for name in names:
        startup.import_s(name)  # warms the file cache
    turns = [{name: startup.import_s(name) for name in names} for _ in range(rounds)]
    return {name: [turn[name] for turn in turns] for name in names}


def _rows_of_seconds(stage: Harness, point: Point, told: dict[str, list[float]]) -> list[Row]:
    """Return the rows of libraries that were timed on one rank, in turns."""
    seconds = {name: np.array(taken) for name, taken in told.items()}
    by_rank = {name: taken[np.newaxis] for name, taken in seconds.items()}
    found = Interleaved(seconds, by_rank, seconds)
    return [stage.row(found, name, name, point) for name in seconds]
