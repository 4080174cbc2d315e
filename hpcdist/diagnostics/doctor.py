"""The command `hpcdist doctor`: what this installation and this job would do, and why.

It runs alone and on all ranks of a job; rank 0 alone prints. The exit code is 1 if something
makes the job wrong or hang.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import click
from rich.console import Console
from rich.table import Table

from hpcdist.comm.environment import init_parallel_env
from hpcdist.comm.group import Group
from hpcdist.config import Config, read_config
from hpcdist.diagnostics.facts import (
    Job,
    Setting,
    compiled_dtypes,
    look,
    mpi_library,
    recorded,
    settings_of,
    versions,
)
from hpcdist.diagnostics.problems import Problem, problems_of, refused
from hpcdist.diagnostics.sizes import read_sizes, volume
from hpcdist.diagnostics.ways import Row, folded, meanings, way_rows
from hpcdist.errors import TransportError, UsageError
from hpcdist.runtime.environ import snapshot
from hpcdist.runtime.mpi import abort
from hpcdist.runtime.place import read_place
from hpcdist.transport.select import OPERATIONS

_WRONG, _WRONG_USE = 1, 2
_PAUSE_S = 1.0
"""Seconds for which the other ranks leave it to the first one to speak."""


class Report(NamedTuple):
    """What the doctor tells; `job` is None where MPI does not start."""

    versions: Mapping[str, str]
    dtypes: list[str]
    settings: Sequence[Setting]
    problems: Sequence[Problem]
    job: Job | None = None
    ways: Sequence[Row] = ()

    @property
    def code(self) -> int:
        """The exit code."""
        return _WRONG if any(problem.stops for problem in self.problems) else 0


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--op", "operations", multiple=True, metavar="NAME", help="Only these operations.")
@click.option("--sizes", default="1K,64K,1M,16M", show_default=True,
              help="Bytes of the largest contribution of a rank.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def doctor(operations: tuple[str, ...], sizes: str, as_json: bool) -> None:
    """Say what this installation and this job would do, and why; name problems and remedies.

    Run it alone, or on the ranks of a job as in `srun -n 4 hpcdist doctor`. The exit code is 1 if
    something makes the job wrong or hang.
    """
    rank = _own_rank()
    try:
        report = examine(_known(operations), _sizes(sizes))
    except UsageError as error:
        if rank == 0:
            raise click.UsageError(str(error)) from error
        time.sleep(_PAUSE_S)
        sys.exit(_WRONG_USE)
    if isinstance(report, int):
        sys.exit(report)
    if report.job is None and rank > 0:
        time.sleep(_PAUSE_S)  # the first rank has most likely reported the same, and ended the job
        click.echo(f"rank {rank}: {report.problems[0].what}", err=True)
    else:
        click.echo(json.dumps(as_plain(report), indent=1) if as_json else in_words(report))
    if report.job is None and _others_wait():
        abort(report.code)
    sys.exit(report.code)


def _own_rank() -> int:
    """Return what the launcher says of this process."""
    try:
        return read_place(snapshot()).rank
    except UsageError:  # its variables contradict each other, which is a finding of its own
        return 0


def _others_wait() -> bool:
    """Say whether MPI has started, with other ranks, who may be waiting for this one."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.COMM_WORLD.size > 1


def _known(operations: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [name for name in operations if name not in OPERATIONS]
    if unknown:
        raise UsageError(f"{unknown[0]!r} has no choice of ways; there is {', '.join(OPERATIONS)}")
    return operations or OPERATIONS


def _sizes(text: str) -> tuple[int, ...]:
    sizes = read_sizes(text)
    if 0 in sizes:
        raise UsageError("nothing is sent in 0 bytes: write sizes as 8,64K,2M")
    return sizes


def examine(operations: Iterable[str], sizes: Sequence[int]) -> Report | int:
    """Return the report of this process and its job, on other ranks its exit code. Collective.

    Args:
        operations: whose ways are asked for.
        sizes: bytes of their largest contributions.

    """
    dtypes, config = compiled_dtypes(), Config()
    try:
        config = read_config()
        with recorded():
            world = init_parallel_env()
        job = look(world, config)
    except (UsageError, TransportError) as error:
        settings = settings_of(config, snapshot())
        return Report(versions(), dtypes, settings, [refused(error)])
    report = None if job is None else _report(world, job, config, dtypes, operations, sizes)
    code: int = world.mpi_comm.bcast(0 if report is None else report.code)
    return code if report is None else report


def _report(
    world: Group,
    job: Job,
    config: Config,
    dtypes: list[str],
    operations: Iterable[str],
    sizes: Sequence[int],
) -> Report:
    return Report(
        {**versions(), "MPI library": mpi_library()},
        dtypes,
        settings_of(config, snapshot()),
        problems_of(job, config, dtypes),
        job,
        way_rows(job, cast(Any, world.transport).selection, operations, sizes),
    )


# ---- the report for machines and for people


def as_plain(report: Report) -> dict[str, Any]:
    """Return the report as JSON has it."""
    job = report.job
    return {
        "versions": dict(report.versions),
        "kernel": report.dtypes,
        "job": None if job is None else _plain_job(job),
        "settings": [setting._asdict() for setting in report.settings],
        "problems": [problem._asdict() for problem in report.problems],
        "ways": [{**row._asdict(), "outcome": row.outcome._asdict()} for row in report.ways],
    }


def _plain_job(job: Job) -> dict[str, Any]:
    tuning = {
        "path": job.tuning.path,
        "rules": len(job.tuning.rules),
        "fitting": job.tuning.fitting,
    }
    return {
        **job._asdict(),
        "loads": [load._asdict() for load in job.loads],
        "memory": job.memory._asdict(),
        "tuning": tuning,
    }


def in_words(report: Report) -> str:
    """Return the report as text."""
    lines = [{"what": what, "": version} for what, version in report.versions.items()]
    console = Console(width=130, force_terminal=False, highlight=False, markup=False)
    with console.capture() as captured:
        _print(console, "Versions", lines)
        _print(console, "Installation and job", job_rows(report))
        _print(console, "Settings", (setting._asdict() for setting in report.settings))
        if report.job is not None and report.job.ranks > 1:
            _print(console, "Which way an operation takes, and why", folded(report.ways))
            _print(console, "What the ways are", meanings(report.ways))
        _print(console, "Problems", problem_rows(report.problems))
        console.print("no problem found" if not report.problems else "")
    return captured.get().rstrip()


def job_rows(report: Report) -> list[dict[str, str]]:
    """Return what there is to say about installation and job, line by line."""
    carried = ", ".join(report.dtypes)
    rows = {"compiled kernel": f"reduces {carried}" if carried else "none: NumPy reduces"}
    job = report.job
    if job is not None:
        rows |= {
            "launcher": job.launcher,
            "ranks": f"{job.ranks} on {job.nodes} node{'s' * (job.nodes > 1)}",
            "cores": _cores(job),
            "MPI threads": job.thread_level,
            "memory of the node": _memory(job),
            "shared arrays": f"{volume(job.memory.used)} of {volume(job.memory.limit)} on rank 0",
            "tuning file": _tuning(job),
            **job.system,
        }
    return [{"what": what, "": text} for what, text in rows.items()]


def _cores(job: Job) -> str:
    full = max(job.loads, key=lambda load: load.ranks / load.cores)
    return f"{full.cores} for the {full.ranks} rank{'s' * (full.ranks > 1)} on {full.host}"


def _memory(job: Job) -> str:
    memory = job.memory
    if memory.shared is None:
        return "one rank: nothing to share"
    return "shared" if memory.shared else f"not shared: {memory.why_not or 'unknown reason'}"


def _tuning(job: Job) -> str:
    path, rules, fitting = job.tuning
    if path is None:
        return "none: the default rules hold (see `hpcdist tune`)"
    return f"{path}: {len(rules)} rules, {fitting} of them for this job"


def problem_rows(problems: Iterable[Problem]) -> list[dict[str, str]]:
    """Return the problems as text."""
    kinds = {True: "wrong", False: "slow"}
    return [
        {"kind": kinds[stops], "problem": what, "remedy": remedy}
        for stops, what, remedy in problems
    ]


def _print(console: Console, title: str, rows: Iterable[Mapping[str, str]]) -> None:
    lines = list(rows)
    if not lines:
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in lines[0]:
        table.add_column(heading, overflow="fold")
    for line in lines:
        table.add_row(*line.values())
    console.print(table)
    console.print()
