"""The commands `hpcdist ps`, `top` and `dump`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from hpcdist.diagnostics.flight import across, jobs
from hpcdist.diagnostics.flight.activity import between
from hpcdist.diagnostics.flight.jobs import Job
from hpcdist.diagnostics.flight.timeline import as_json, as_trace
from hpcdist.errors import UsageError
from hpcdist.runtime.process import snapshot

_JOB = click.argument("job", required=False)
_SETTINGS = {"help_option_names": ["-h", "--help"]}


@click.command(context_settings=_SETTINGS)
@_JOB
@click.option("--gather", is_flag=True, hidden=True)
def ps(job: str | None, gather: bool) -> None:
    """Show what the ranks of JOB do, at which line, and who waits for whom.

    JOB is a job of Slurm, or the number of a process: of a rank, or of what has started the ranks.
    It may be left out where one job of yours runs on this node. No rank has to answer: this works
    while they hang, and for an hour after they were killed. In a job of Slurm it asks all nodes,
    and names those that do not answer.
    """
    if gather:
        for line in across.packed(jobs.snapshots(), snapshot().get("SLURMD_NODENAME", "")):
            click.echo(line)
        return
    click.echo(jobs.report(_find(job)))


@click.command(context_settings=_SETTINGS)
@_JOB
@click.option("--every", default=2.0, type=click.FloatRange(0.1), show_default=True,
              help="Seconds between two looks.")  # fmt: skip
@click.option("--times", default=0, help="Looks before it ends; 0 for no end.")
def top(job: str | None, every: float, times: int) -> None:
    """Show again and again what the ranks of JOB do, and how much they move.

    JOB is what `hpcdist ps` takes. For each operation: how many end in a second, their bytes, and
    the share of the time that ranks spend in them.
    """
    before, looked = _find(job), 0
    while not times or looked < times:
        began = time.monotonic()
        time.sleep(every)
        after = _find(job)
        screen = between(before, after, time.monotonic() - began)
        if not times:
            click.clear()
        click.echo(f"{screen}\n{jobs.of_ranks(after)}")
        before, looked = after, looked + 1


@click.command(context_settings=_SETTINGS)
@_JOB
@click.option("-o", "--output", default="flight", show_default=True,
              help="Beginning of the names of the files.")  # fmt: skip
def dump(job: str | None, output: str) -> None:
    """Write what the ranks of JOB have done last: all of it as JSON, and a timeline.

    JOB is what `hpcdist ps` takes. OUTPUT.json has the records of all ranks, OUTPUT.trace.json is
    for chrome://tracing and https://ui.perfetto.dev, with all ranks on one clock.
    """
    found = _find(job)
    for name, content in (
        (f"{output}.json", as_json(found)),
        (f"{output}.trace.json", as_trace(found)),
    ):
        Path(name).write_text(json.dumps(content))
        click.echo(f"wrote {name}")


def _find(wanted: str | None) -> Job:
    """Return the job that is meant, with its ranks on all nodes where Slurm can reach them."""
    try:
        found = jobs.choose(jobs.jobs_of(jobs.snapshots()), wanted)
        slurm = found.slurm if found is not None else (wanted or "")
        if slurm and not (found is not None and found.is_whole):
            told = across.gather(slurm)
            everywhere = jobs.jobs_of(told.snapshots)
            found = jobs.choose(everywhere, found.name if found else wanted) or found
            found = found and found._replace(silent=tuple(told.silent))
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    if found is None:
        raise click.ClickException(_nothing(wanted))
    return found


def _nothing(wanted: Any) -> str:
    which = "no job of yours" if wanted is None else f"no job {wanted} of yours"
    return (
        f"{which} has a flight recorder on this node; it has one from init_parallel_env on, unless "
        "HPCDIST_RECORDER=off. Call this on a node of the job, as the same user; in Slurm, name "
        "the job"
    )
