"""The command `hpcdist bench`: read the options, measure, report, compare, predict.

It runs on all ranks of a job. Rank 0 alone prints, and what stops it stops all ranks.
"""

from __future__ import annotations

import socket
import sys
import time
from typing import Any

import click

from hpcdist.bench.cases import CASES
from hpcdist.bench.libraries import PEERS
from hpcdist.bench.libraries.mpi4py import version
from hpcdist.bench.memory_kinds import HOST, check_devices, devices
from hpcdist.bench.output import Output, print_predictions
from hpcdist.bench.plan import Progress, measure
from hpcdist.bench.plots import check_plot
from hpcdist.bench.progress import on_terminal, progress_option
from hpcdist.bench.rank_command import RankCommand, on_rank_0, start_ranks
from hpcdist.bench.request import Request, check_request, read_request
from hpcdist.bench.runfile import describe_setting, read_run
from hpcdist.bench.startup import Started, busy, process_age
from hpcdist.bench.tables import plain_console, print_table
from hpcdist.comm.environment import init_parallel_env
from hpcdist.runtime.place import read_place
from hpcdist.runtime.process import snapshot
from hpcdist.text import volume


@click.command(cls=RankCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("cases", nargs=-1)
@click.option("--list", "listed", is_flag=True, help="Show the cases and stop.")
@click.option("--sizes", help="Bytes a rank hands in: 8,64K,2M or 8:64M (doubling) or 8:64M:8.")
@click.option("--ranks", help="Measure on the first 2, on the first 4 ranks ..., as 2,4.")
@click.option("--dtype", default="float32", show_default=True, help="One or more, as a,b.")
@click.option("--device", default=HOST, show_default=True,
              help=f"Where the arrays are: {' or '.join(devices())}.")  # fmt: skip
@click.option("--memory", help="Of the host: ordinary (the default), shared, or both, as a,b.")
@click.option("--op", default="SUM", show_default=True, help="What reductions compute.")
@click.option("--against", multiple=True, help=f"Libraries to measure beside: {' '.join(PEERS)}.")
@click.option("--rounds", type=click.IntRange(1), help="Samples of each measurement (21).")
@click.option("--quick", is_flag=True, help="Few samples and sizes, to see that it works.")
@click.option("--json", "json_file", metavar="FILE", help="Save the run.")
@click.option("--plot", metavar="FILE.png|svg", help="Draw the run; needs matplotlib.")
@click.option("--baseline", metavar="FILE", help="Compare with a saved run; exit 1 if slower.")
@click.option("--tolerance", type=click.FloatRange(1), default=1.25, show_default=True,
              help="How many times as slow counts as slower.")  # fmt: skip
@click.option("--predict", metavar="8,64,...", help="Tell what it would take on so many ranks.")
@click.option("--from", "source", metavar="FILE", help="Predict from this saved run.")
@click.option("-n", "--nprocs", type=click.IntRange(1), help="Start so many ranks.")
@progress_option
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    nprocs: int | None,
    listed: bool,
    progress: bool | None,
    **given: Any,
) -> None:
    """Measure messages, collectives, training and start-up on the ranks of this job.

    Start it like any program, as in `srun -n 8 hpcdist bench all_reduce --against mpi4py torch`, or
    let it start its ranks by -n. CASES are names of cases or of sets of cases (see --list).
    """
    if listed:
        _print_cases()
        return
    request = read_request(given)
    start_ranks(ctx, nprocs)
    code = _predict_saved(request) if request.source else _measure(request, on_terminal(progress))
    if code:
        sys.exit(code)


def _print_cases() -> None:
    def sizes(name: str) -> str:
        found = CASES[name].sizes or ()
        return " to ".join(dict.fromkeys(map(volume, (*found[:1], *found[-1:]))))

    rows = [
        {
            "case": name,
            "set": case.kind,
            "measures": case.text,
            "sizes": sizes(name),
            "usual": ", ".join(case.usual),
        }
        for name, case in CASES.items()
    ]
    columns = dict.fromkeys(rows[0], str)
    print_table(plain_console(), "Cases; name one, a set, or all", columns, rows)


def _predict_saved(request: Request) -> int:
    """Predict from a saved run; on one process."""
    if read_place(snapshot()).rank == 0:
        if request.plot:
            check_plot(request.plot)
        run = read_run(str(request.source))
        print_predictions(plain_console(), request, run["rows"], run.get("setting", {}))
    return 0


def _measure(request: Request, progress: bool) -> int:
    """Measure and report; return the exit code. Collective."""
    began = time.perf_counter()
    world = init_parallel_env()
    started = Started(time.perf_counter() - began, process_age())
    baseline = on_rank_0(world, lambda: check_request(request, world.nranks))
    comm = world.mpi_comm
    device = check_devices(comm, request.plan.memories)
    nodes = len(set(comm.allgather(socket.gethostname())))
    setting = describe_setting(version(), world.nranks, nodes, device)
    notes = busy(comm)
    if world.rank > 0:
        measure(world, request.plan, started, notes)
        return int(on_rank_0(world, lambda: 0))
    output = Output(setting, progress)
    try:
        rows = measure(world, request.plan, started, notes, Progress(output.at, output.found))
    finally:
        output.close()
    return int(on_rank_0(world, lambda: output.finish(request, rows, baseline, notes)))
