"""The command `hpcdist doctor`: what this installation and this job would do, and why.

It runs alone and on all ranks of a job; rank 0 alone prints. Its exit code is 1 if something
makes the job wrong or hang; it is the last to end, so that no launcher ends it for another's code.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import click
from rich.console import Console
from rich.table import Table

from hpcdist.comm.environment import init_parallel_env
from hpcdist.comm.group import Group
from hpcdist.compiled import what_is_missing
from hpcdist.config import Config, read_config
from hpcdist.diagnostics.algorithms import Row as WayRow, algorithm_rows, folded, meanings
from hpcdist.diagnostics.checks import Row as CheckRow, check_rows
from hpcdist.diagnostics.installation import (
    Setting,
    compiled_dtypes,
    settings_of,
    surroundings,
    versions,
)
from hpcdist.diagnostics.launcher import (
    Starter,
    describe_starter as starting_words,
    find_starter,
    starter_problems,
)
from hpcdist.diagnostics.probe import Job, Tuning, look, recorded
from hpcdist.diagnostics.problem import Problem, refused
from hpcdist.diagnostics.problems import problems_of
from hpcdist.errors import TransportError, UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime.failure import wait_for_output, wait_for_output_at_exit
from hpcdist.runtime.mpi import abort, finalize
from hpcdist.runtime.place import read_place
from hpcdist.runtime.process import snapshot
from hpcdist.text import read_sizes
from hpcdist.transport.tuning import OPERATIONS

_WRONG, _WRONG_USE = 1, 2
_PAUSE_S = 1.0
"""Seconds for which the other ranks leave it to the first one to speak."""


class Report(NamedTuple):
    """What the doctor tells; `job` is None where MPI does not start.

    `starter` says what would start ranks from here, where the doctor runs alone; `seconds` is what
    all of it took.
    """

    versions: Mapping[str, str]
    dtypes: list[str]
    settings: Sequence[Setting]
    problems: Sequence[Problem]
    job: Job | None = None
    algorithms: Sequence[WayRow] = ()
    starter: str = ""
    seconds: float = 0.0

    @property
    def code(self) -> int:
        """The exit code."""
        return _WRONG if any(problem.stops for problem in self.problems) else 0

    @property
    def checks(self) -> list[CheckRow]:
        """What was looked at, line by line."""
        return check_rows(self.job, self.dtypes, self.problems, self.starter)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--op", "operations", multiple=True, metavar="NAME", help="Only these operations.")
@click.option("--sizes", default="1K,64K,1M,16M", show_default=True,
              help="Bytes of the largest contribution of a rank.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def doctor(operations: tuple[str, ...], sizes: str, as_json: bool) -> None:
    """Print what this installation and this job would do, and why; name problems and remedies.

    Run it alone, or on the ranks of a job as in `srun -n 4 hpcdist doctor`. The exit code is 1 if
    something makes the job wrong or hang.
    """
    rank = _own_rank()
    try:
        report = examine(_known(operations), _sizes(sizes))
    except UsageError as error:
        if rank == 0:
            wait_for_output_at_exit()
            raise click.UsageError(str(error)) from error
        time.sleep(_PAUSE_S)
        sys.exit(_WRONG_USE)
    if report is None:
        return
    if report.job is None and rank > 0:
        time.sleep(_PAUSE_S)  # the first rank has most likely reported the same, and ended the job
        click.echo(f"rank {rank}: {report.problems[0].what}", err=True)
    else:
        click.echo(json.dumps(as_plain(report), indent=1) if as_json else describe_report(report))
    if report.code:
        _let_others_end(report)
        wait_for_output()
    if report.job is None and _others_wait():
        abort(report.code)
    sys.exit(report.code)


def _own_rank() -> int:
    """Return this process's rank as the launcher gives it."""
    try:
        return read_place(snapshot()).rank
    except UsageError:  # its variables contradict each other, which is a finding of its own
        return 0


def _let_others_end(report: Report) -> None:
    """End MPI together with the other ranks, where all of them have been found."""
    if report.job is not None:
        finalize()


def _others_wait() -> bool:
    """Return whether MPI has started, with other ranks, who may be waiting for this one."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.COMM_WORLD.size > 1


def _known(operations: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [name for name in operations if name not in OPERATIONS]
    if unknown:
        raise UsageError(
            f"{unknown[0]!r} has no choice of algorithms; there is {', '.join(OPERATIONS)}"
        )
    return operations or OPERATIONS


def _sizes(text: str) -> tuple[int, ...]:
    sizes = read_sizes(text)
    if 0 in sizes:
        raise UsageError("nothing is sent in 0 bytes: write sizes as 8,64K,2M")
    return sizes


def examine(operations: Iterable[str], sizes: Sequence[int]) -> Report | None:
    """Return the report of this process and its job, None on other ranks. Collective.

    Args:
        operations: whose algorithms are asked for.
        sizes: bytes of their largest contributions.

    """
    began = time.perf_counter()
    dtypes, config = compiled_dtypes(), Config()
    try:
        config = read_config()
        with recorded():
            world = init_parallel_env()
        without_mpi = None if world.transport is None else world.transport.without_mpi
        if without_mpi is not None:  # alone, as a job of one rank may be
            settings = settings_of(config, snapshot())
            return Report(_versions(), dtypes, settings, [refused(without_mpi, stops=False)])
        job = look(world, config)
    except (UsageError, TransportError) as error:
        settings = settings_of(config, snapshot())
        return Report(_versions(), dtypes, settings, [refused(error)])
    if job is None:
        return None
    report = _report(world, job, config, dtypes, operations, sizes)
    return report._replace(seconds=time.perf_counter() - began)


def _versions(more: Mapping[str, str] | None = None) -> dict[str, str]:
    return {**versions(), **(more or {}), **surroundings()}


def _report(
    world: Group,
    job: Job,
    config: Config,
    dtypes: list[str],
    operations: Iterable[str],
    sizes: Sequence[int],
) -> Report:
    starter = find_starter(snapshot()) if job.launch.launcher == "none" else Starter()
    problems = [
        *starter_problems(starter, job.library.vendor),
        *problems_of(job, config, dtypes, what_is_missing()),
    ]
    return Report(
        _versions({"MPI library": job.library.text}),
        dtypes,
        settings_of(config, snapshot()),
        problems,
        job,
        algorithm_rows(job, cast(Any, world.transport).context.tuning_table, operations, sizes),
        starting_words(starter) if job.launch.launcher == "none" else "",
    )


# ---- the report for machines and for people


def as_plain(report: Report) -> dict[str, Any]:
    """Return the report as JSON has it."""
    job = report.job
    return {
        "versions": dict(report.versions),
        "kernel": report.dtypes,
        "checks": [row._asdict() for row in report.checks],
        "job": None if job is None else plain(job),
        "settings": [setting._asdict() for setting in report.settings],
        "problems": [{**row._asdict(), "check": row.check.value} for row in report.problems],
        "algorithms": [plain(row) for row in report.algorithms],
        "seconds": report.seconds,
    }


def plain(value: Any) -> Any:
    """Return tuples with names as dictionaries, at any depth; rules of the tuning file as a number.

    Example:
        >>> plain((Setting("A", "1", "default"),))
        [{'variable': 'A', 'value': '1', 'source': 'default'}]

    """
    if isinstance(value, Tuning):
        return {**value._asdict(), "rules": len(value.rules)}
    if hasattr(value, "_asdict"):
        return {name: plain(each) for name, each in value._asdict().items()}
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def describe_report(report: Report) -> str:
    """Return the report as text."""
    lines = [{"what": what, "": version} for what, version in report.versions.items()]
    console = Console(width=130, force_terminal=False, highlight=False, markup=False)
    with console.capture() as captured:
        _print(console, "Versions", lines)
        _print(console, "Settings", (setting._asdict() for setting in report.settings))
        if report.job is not None and report.job.ranks > 1:
            _print(
                console, "Which algorithm an operation takes, and why", folded(report.algorithms)
            )
            _print(console, "What the algorithms are", meanings(report.algorithms))
        _print(console, "Checks", (row._asdict() for row in report.checks))
        console.print(summary(report.problems))
    return captured.get().rstrip()


def summary(problems: Sequence[Problem]) -> str:
    """Return the last line of the report.

    Example:
        >>> summary([])
        'no problem found'

    """
    wrong = sum(problem.stops for problem in problems)
    told = [f"{wrong} wrong"] * bool(wrong)
    warnings = len(problems) - wrong
    told += [f"{warnings} warning{'s' * (warnings > 1)}"] * bool(warnings)
    return ", ".join(told) or "no problem found"


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
