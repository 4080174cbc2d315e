"""Commands that measure: they run on all ranks of a job, and may start its ranks themselves.

Rank 0 alone prints, and what stops it stops all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from hpcdist.bench.request import spread_against
from hpcdist.comm.environment import init_parallel_env
from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.runtime.failure import wait_for_output
from hpcdist.runtime.place import read_place
from hpcdist.runtime.process import snapshot

_WRONG_USE = 2
_WORDS = "hpcdist.bench.words"


class RankCommand(click.Command):
    """Reports what is wrong with the command line once, and ends all ranks."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line; what only shows something does so on rank 0."""
        ctx.meta[_WORDS] = list(args)
        if read_place(snapshot()).rank > 0 and {"-h", "--help", "--list"} & set(args):
            ctx.exit(0)
        with _reported_once():
            return super().parse_args(ctx, spread_against(args))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with _reported_once():
            return super().invoke(ctx)


@contextmanager
def _reported_once() -> Iterator[None]:
    """Report a user's mistake on rank 0 alone, and exit on all ranks."""
    try:
        yield
    except (click.ClickException, UsageError) as error:
        shown = error if isinstance(error, click.ClickException) else click.UsageError(str(error))
        if read_place(snapshot()).size == 1:
            raise shown from error
        world = init_parallel_env()
        if world.rank == 0:
            shown.show()
            wait_for_output()
        world.mpi_comm.Barrier()
        sys.exit(_WRONG_USE)


def start_ranks(ctx: click.Context, nprocs: int | None) -> None:
    """Run this same command on `nprocs` ranks and exit, unless it runs on them already."""
    size = read_place(snapshot()).size
    if not nprocs or nprocs == size:
        return
    if size > 1:
        raise UsageError(f"-n {nprocs}, but this job has {size} ranks: use --ranks for fewer")
    from hpcdist.launch.command import Options
    from hpcdist.launch.launchers import find_site
    from hpcdist.launch.run import RunOptions, run_job

    environ = snapshot()
    words = ctx.meta[_WORDS]
    if ctx.params["progress"] is None and sys.stderr.isatty():  # which the ranks do not see
        words = [*words, "--progress"]
    program = (sys.executable, "-m", "hpcdist", str(ctx.command.name), *words)
    options = Options(program, nprocs=nprocs)
    try:
        sys.exit(run_job(options, RunOptions(label=False), find_site(environ), environ))
    except OSError as error:
        raise click.ClickException(str(error)) from error


def on_rank_0(world: Group, do: Callable[[], Any]) -> Any:
    """Call a function on rank 0 and return its result on all; its `UsageError` is everyone's."""
    done: tuple[Any, str] = (None, "")
    if world.rank == 0:
        try:
            done = (do(), "")
        except UsageError as error:
            done = (None, str(error))
    result, complaint = world.mpi_comm.bcast(done)
    if complaint:
        raise UsageError(complaint)
    return result
