"""`measure`: every algorithm that each operation can use, timed in turns on the ranks of a job.

A group of its own is made for each number of ranks. Its transport is told before every call which
algorithm to use, by a `TuningTable` of rules that force it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from hpcdist.bench.harness import wait_quietly
from hpcdist.bench.interleaved import Call, Interleaved, interleave
from hpcdist.bench.libraries.hpcdist import start_own
from hpcdist.bench.plan import LARGEST
from hpcdist.bench.task import Task, make_task, read_dtype, result_bytes
from hpcdist.bench.tune.rules import NUMBERS, REDUCING, Arrays, Nodes, Timing, link_cost
from hpcdist.comm import collectives
from hpcdist.comm.group import Group
from hpcdist.comm.groups import destroy_process_group, new_group
from hpcdist.comm.memory import zeros
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.base import LinkCost
from hpcdist.transport.call.reduction import ReduceOp
from hpcdist.transport.shm.control import PAYLOAD
from hpcdist.transport.tuning import (
    OPERATIONS,
    STAGED_UP_TO,
    Algorithm,
    TuningRule,
    TuningTable,
    possible_algorithms,
)

LARGEST_ON_NODE = 16 << 30
"""What would give the ranks together more bytes than this is left out."""

_ARRAYS: tuple[Arrays, ...] = ("ordinary", "shared")
_CASES = {"alltoall": "alltoall_single"}
"""The benchmark's names of operations, where it has others."""


class Effort(NamedTuple):
    """How many rounds, and how long a sample is in each."""

    rounds: int
    sample_s: float


class Plan(NamedTuple):
    """What is to be measured; `ranks` are numbers of ranks."""

    operations: Sequence[str]
    sizes: Sequence[int]
    ranks: Sequence[int]
    effort: Effort


class Point(NamedTuple):
    """One operation on one kind of arrays, at one size."""

    operation: str
    arrays: Arrays
    dtype: str
    nbytes: int


class BenchGroup(NamedTuple):
    """The ranks that measure, whether they reduce in parts, and read each other's memory."""

    group: Group
    host: Any
    nodes: Nodes
    can_pipeline: bool
    attaches: bool


# ---- what is possible


def points_of(plan: Plan, ranks: int, nodes: Nodes) -> list[Point]:
    """Return where `ranks` ranks have a choice to measure."""
    several = nodes == "several"
    return [
        Point(operation, arrays, dtype, nbytes)
        for operation in plan.operations
        for arrays in (_ARRAYS[:1] if several else _ARRAYS)
        if arrays == "ordinary"
        or Algorithm.DIRECT in possible_algorithms(operation, arrays, several_nodes=False)
        for dtype in (NUMBERS if operation in REDUCING else ["float32"])
        for nbytes in plan.sizes
        if _has_choice(operation, nbytes, several)
        and result_bytes(_case(operation), nbytes, ranks) <= min(LARGEST, LARGEST_ON_NODE // ranks)
    ]


def _case(operation: str) -> str:
    return _CASES.get(operation, operation)


def _has_choice(operation: str, nbytes: int, several: bool) -> bool:
    """Return whether there is one; inside a node, what fits in the control block goes there."""
    algorithms = possible_algorithms(operation, "shared", several_nodes=several)
    return len(algorithms) > 1 and (several or nbytes > PAYLOAD)


def algorithms_at(
    point: Point, nodes: Nodes, *, can_pipeline: bool, attaches: bool
) -> list[Algorithm]:
    """Return the algorithms that can be used at `point`, MPI first."""
    algorithms = possible_algorithms(
        point.operation, point.arrays, several_nodes=nodes == "several"
    )
    impossible = set()
    if point.nbytes > STAGED_UP_TO:
        impossible.add(Algorithm.STAGED)
    if not can_pipeline:
        impossible.add(Algorithm.PIPELINED)
    if not attaches or point.arrays == "shared":
        impossible.add(Algorithm.ATTACHED)
    return [algorithm for algorithm in algorithms if algorithm not in impossible]


def forced(algorithm: Algorithm, ranks: int, nodes: Nodes) -> TuningTable:
    """Return the selection under which every operation takes `algorithm` where it can, else MPI."""
    rules = [
        TuningRule(
            operation,
            arrays,
            algorithm if arrays == "shared" or algorithm is not Algorithm.DIRECT else Algorithm.MPI,
            nodes="any",
        )
        for operation in OPERATIONS
        for arrays in _ARRAYS
    ]  # fmt: skip
    return TuningTable(rules, ranks, several_nodes=nodes == "several")


# ---- measuring


def measure(
    world: Group,
    plan: Plan,
    notes: list[str],
    at: Callable[[int, int, str], Any] = lambda done, total, text: None,
) -> list[Timing]:
    """Measure every algorithm of `plan`. Collective over the world.

    Args:
        world: all ranks of the job.
        plan: the same on all ranks.
        notes: filled with sentences about what was left out.
        at: told how much of how much is done, and what comes next.

    Returns:
        The timings, on rank 0; other ranks may have some of them.

    """
    timings: list[Timing] = []
    for ranks in plan.ranks:
        if world.rank < ranks:
            team = _gather(world, ranks, notes)
            if team.host is not None:
                points = points_of(plan, ranks, team.nodes)
                for number, point in enumerate(points):
                    at(number, len(points), f"{point.operation} on {ranks} ranks")
                    timings += _measure_spot(team, point, plan.effort, notes)
            destroy_process_group(team.group)
        wait_quietly(world.mpi_comm)
    return timings


def measure_costs(world: Group, ranks: Sequence[int], effort: Effort) -> dict[Nodes, LinkCost]:
    """Measure what moving data costs between the first so many ranks. Collective over the world.

    Args:
        world: all ranks of the job.
        ranks: numbers of ranks, ascending; of those that are on one node, or on several, the last
            one counts.
        effort: how many rounds.

    """
    found: dict[Nodes, LinkCost] = {}
    for count in ranks:
        if world.rank < count:
            group = new_group(world.ranks[:count])
            nodes: Nodes = "one" if group.one_node else "several"
            found[nodes] = _link_cost(group, effort)
            destroy_process_group(group)
        wait_quietly(world.mpi_comm)
    return found


def _link_cost(group: Group, effort: Effort) -> LinkCost:
    large = min(_LARGE, min(LARGEST, LARGEST_ON_NODE // group.nranks) // group.nranks)
    nbytes, candidates = {"small": 8, "large": large}, {}
    for name, each in nbytes.items():
        x, out = zeros(each, np.uint8, group), zeros(each * group.nranks, np.uint8, group)
        candidates[name] = partial(collectives.all_gather, out, x, group)
    found = interleave(group.mpi_comm, candidates, rounds=effort.rounds, sample_s=effort.sample_s)
    return link_cost(found.best("small"), found.best("large"), group.nranks, large)


_LARGE = 4 << 20
"""Bytes of each rank's part, from which what a byte costs is measured; less on many ranks."""


def _gather(world: Group, ranks: int, notes: list[str]) -> BenchGroup:
    """Make a group of the first ranks; its `host` is None where they have no choice."""
    group = new_group(world.ranks[:ranks])
    host = cast(Any, group.transport)
    nodes: Nodes = "one" if host.one_node else "several"
    node = host.context.node if host.one_node else host.hierarchical
    if node is not None:
        pipelines, attaches = (
            bool(getattr(node, name, False)) for name in ("can_pipeline", "attaches")
        )
        return BenchGroup(group, host, nodes, pipelines, attaches)
    why = "one rank has nobody to talk to" if ranks == 1 else "they do not share memory"
    notes.append(f"{ranks} ranks have no choice: {why} (see `hpcdist doctor`)")
    return BenchGroup(group, None, nodes, can_pipeline=False, attaches=False)


def _measure_spot(team: BenchGroup, point: Point, effort: Effort, notes: list[str]) -> list[Timing]:
    """Time the algorithms at one point, in turns. Collective over the group."""
    group, host = team.group, team.host
    case = _case(point.operation)
    task = make_task(case, group, point.nbytes, read_dtype(point.dtype), point.arrays, "SUM")
    in_heap = point.arrays == "ordinary" or host.context.heap.offset_of(task.x) is not None
    if not all(group.mpi_comm.allgather(in_heap)):
        notes.append(
            f"shared arrays of {point.nbytes} bytes are left out: they do not fit into "
            "HPCDIST_SHARED_HEAP_MB"
        )
        return []
    call = _maker(group, point.operation)(task)
    algorithms = algorithms_at(
        point, team.nodes, can_pipeline=team.can_pipeline, attaches=team.attaches
    )
    candidates = {
        algorithm.value: _by(host, forced(algorithm, group.nranks, team.nodes), call)
        for algorithm in algorithms
    }
    found = interleave(group.mpi_comm, candidates, rounds=effort.rounds, sample_s=effort.sample_s)
    return [_timing(found, point, group.nranks, team.nodes, algorithm) for algorithm in algorithms]


def _maker(group: Group, operation: str) -> Callable[[Task], Call]:
    """Return what makes the call; arrays are handed in whole, so that they may stay in place."""
    verbs, at_root = collectives, group.rank == 0

    def scatter(task: Task) -> Call:
        return partial(verbs.scatter, task.out, task.x if at_root else None, task.root, group)

    def gather(task: Task) -> Call:
        return partial(verbs.gather, task.x, task.out if at_root else None, task.root, group)

    def exscan(task: Task) -> Call:
        return partial(verbs.exscan, task.x, ReduceOp.SUM, group)

    own = {make.__name__: make for make in (scatter, gather, exscan)}
    return own.get(operation) or start_own(group).calls[_case(operation)]


def _by(host: Any, tuning_table: TuningTable, call: Call) -> Call:
    def run() -> None:
        if host.context.tuning_table is not tuning_table:
            host.use_rules(tuning_table)
        call()

    return run


def _timing(
    found: Interleaved, point: Point, ranks: int, nodes: Nodes, algorithm: Algorithm
) -> Timing:
    name, mpi = algorithm.value, Algorithm.MPI.value
    return Timing(
        *point,
        ranks,
        nodes,
        algorithm,
        ratio=found.ratio(name, to=mpi),
        min_ratio=found.best(name) / found.best(mpi),
        median_s=found.median(name),
        min_s=found.best(name),
    )
