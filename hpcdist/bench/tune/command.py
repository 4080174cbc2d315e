"""The command `hpcdist tune`: measure all algorithms, and write the best ones down.

It runs on all ranks of a job. Rank 0 alone prints and writes; what stops it stops all ranks.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from hpcdist.bench.libraries.mpi4py import version
from hpcdist.bench.progress import Bar, on_terminal, progress_option
from hpcdist.bench.rank_command import RankCommand, on_rank_0, start_ranks
from hpcdist.bench.runfile import check_writable, describe_setting
from hpcdist.bench.startup import busy
from hpcdist.bench.tables import plain_console, print_table
from hpcdist.bench.tune.measure import Effort, Plan, measure, measure_costs
from hpcdist.bench.tune.rules import Nodes, Series, Timing, costs_of, timings_as_json, tuned
from hpcdist.comm.environment import init_parallel_env
from hpcdist.diagnostics.installation import own_version
from hpcdist.errors import UsageError
from hpcdist.runtime.place import read_place
from hpcdist.runtime.process import snapshot
from hpcdist.text import bandwidth, duration, read_counts, read_sizes, volume
from hpcdist.transport.base import LinkCost
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.tuning import (
    FORMAT,
    OPERATIONS,
    Algorithm,
    TuningRule,
    TuningTable,
    rules_as_json,
)

_USUAL, _QUICK = Effort(15, 4e-3), Effort(3, 1e-3)
_CAPTION = (
    "the algorithm chosen, and how many times as fast as MPI it was there; short numbers are "
    "float16 and bfloat16, the slower of both"
)


@click.command(cls=RankCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("operations", nargs=-1)
@click.option("-o", "--output", metavar="FILE.json", help="Write the tuning file.")
@click.option("--sizes", default="16K:64M:4", show_default=True,
              help="Bytes of the largest contribution: 64K,2M or 16K:64M (doubling).")  # fmt: skip
@click.option("--ranks", help="Measure the first 2, the first 4 ranks ..., as 2,4,8; usually all.")
@click.option("--rounds", type=click.IntRange(1), help="Samples of each measurement (15).")
@click.option("--quick", is_flag=True, help="Few samples, to see that it works.")
@click.option("-n", "--nprocs", type=click.IntRange(1), help="Start so many ranks.")
@progress_option
@click.pass_context
def tune(
    ctx: click.Context,
    /,
    nprocs: int | None,
    output: str | None,
    progress: bool | None,
    **given: Any,
) -> None:
    """Measure by which algorithm each operation is fastest on the ranks of this job.

    Start it like any program, as in `srun -N1 -n 8 hpcdist tune -o site.json`, or let it start its
    ranks by -n. HPCDIST_TUNING=site.json puts the result in force. OPERATIONS are names such as
    all_reduce; without a name all that have a choice.
    """
    plan = read_plan(given, nprocs or read_place(snapshot()).size)
    start_ranks(ctx, nprocs)
    _tune(plan, output, on_terminal(progress))


def read_plan(given: dict[str, Any], nranks: int) -> Plan:
    """Turn the values of the options into a plan for a job of `nranks` ranks.

    Raises:
        UsageError: names what is wrong.

    """
    unknown = [name for name in given["operations"] if name not in OPERATIONS]
    if unknown:
        raise UsageError(
            f"{unknown[0]!r} has no choice of algorithms; there is {', '.join(OPERATIONS)}"
        )
    ranks = sorted(set(read_counts(given["ranks"].split(",")))) if given["ranks"] else [nranks]
    if ranks[-1] > nranks:
        raise UsageError(f"--ranks {ranks[-1]}, but this job has {nranks} ranks")
    if ranks[0] < 2:
        raise UsageError("one rank has nobody to talk to: start more by -n, srun or mpiexec")
    effort = _QUICK if given["quick"] else _USUAL
    effort = effort._replace(rounds=given["rounds"] or effort.rounds)
    operations = tuple(dict.fromkeys(given["operations"])) or OPERATIONS
    return Plan(operations, read_sizes(given["sizes"]), ranks, effort)


def _tune(plan: Plan, output: str | None, progress: bool) -> None:
    """Measure, print and write. Collective."""
    world = init_parallel_env()
    if output is not None:
        on_rank_0(world, lambda: check_writable(output))
    nodes = len(set(world.mpi_comm.allgather(socket.gethostname())))
    setting = describe_setting(version(), world.nranks, nodes)
    notes = busy(world.mpi_comm)
    bar = Bar(progress and world.rank == 0)
    try:
        timings = measure(world, plan, notes, bar.at)
        costs = measure_costs(world, plan.ranks, plan.effort)
    finally:
        bar.clear()
    on_rank_0(world, lambda: _report(timings, costs, setting, notes, output))


# ---- the result


def _report(
    timings: Sequence[Timing],
    costs: Mapping[Nodes, LinkCost],
    setting: dict[str, Any],
    notes: Sequence[str],
    output: str | None,
) -> None:
    console = plain_console()
    rules = tuned(timings)
    for ranks, nodes in dict.fromkeys((each.ranks, each.nodes) for each in timings):
        own = [each for each in timings if (each.ranks, each.nodes) == (ranks, nodes)]
        tuning_table = TuningTable(rules, ranks, several_nodes=nodes == "several")
        rows = chosen_rows(own, tuning_table)
        columns = dict.fromkeys(rows[0], str)
        where = f"{ranks} ranks on {nodes} node{'s' * (nodes == 'several')}"
        print_table(console, where, columns, rows, _CAPTION)
    for nodes, cost in costs.items():
        console.print(
            f"between ranks on {nodes} node{'s' * (nodes == 'several')}: "
            f"{duration(cost.alpha)} a message, {bandwidth(1 / cost.beta)}"
        )
    for note in dict.fromkeys(notes):
        console.print(note)
    if output is not None and timings:
        write_tuning(output, setting, rules, timings, costs)
        console.print(f"wrote {output}: {len(rules)} rules; use it by HPCDIST_TUNING={output}")


def chosen_rows(timings: Sequence[Timing], tuning_table: TuningTable) -> list[dict[str, str]]:
    """Return, by operation and kind of arrays, the algorithm of each size and its gain."""
    sizes = sorted({each.nbytes for each in timings})
    rows = []
    for series, by_size in costs_of(timings).items():
        row = {"operation": series.operation, "arrays": _describe_series(series)}
        for nbytes in sizes:
            algorithm = _chosen(tuning_table, series, nbytes)
            cost = by_size.get(nbytes, {}).get(algorithm)
            row[volume(nbytes)] = "" if cost is None else _gain(algorithm, cost.ratio)
        rows.append(row)
    return rows


def _describe_series(series: Series) -> str:
    return series.arrays if series.numbers == "any" else f"{series.arrays}, {series.numbers}"


def _chosen(tuning_table: TuningTable, series: Series, nbytes: int) -> Algorithm:
    shared, short = series.arrays == "shared", series.numbers == "short"
    return tuning_table.algorithm(
        Kind[series.operation.upper()], nbytes, short=short, shared=shared
    )


def _gain(algorithm: Algorithm, ratio: float) -> str:
    return algorithm.value if algorithm is Algorithm.MPI else f"{algorithm.value} {1 / ratio:.3g}"


def write_tuning(
    path: str,
    setting: dict[str, Any],
    rules: Sequence[TuningRule],
    timings: Sequence[Timing],
    costs: Mapping[Nodes, LinkCost],
) -> None:
    """Write a tuning file, complete or not at all."""
    tuning = {
        "format": FORMAT,
        "made": {"hpcdist": own_version(), **setting},
        "rules": rules_as_json(rules),
        "costs": {nodes: cost._asdict() for nodes, cost in costs.items()},
        "measured": timings_as_json(timings),
    }
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    partial.write_text(json.dumps(tuning, indent=1) + "\n")
    partial.replace(target)
