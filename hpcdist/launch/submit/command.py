"""The command `hpcdist submit`: write a batch script, submit it, follow its log."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from hpcdist.errors import UsageError
from hpcdist.launch.cli import program_words, survival_of, with_survival
from hpcdist.launch.command import Site, srun_mpi
from hpcdist.launch.launchers import find_site
from hpcdist.launch.submit.arguments import Arguments, split_arguments
from hpcdist.launch.submit.job import Follower, ask_slurm, kept_script, submit as hand_in
from hpcdist.launch.submit.script import Batch, build_script, full_options, log_folder
from hpcdist.launch.survival import check_launcher
from hpcdist.runtime.process import snapshot

_STOPPED = 130


class _Submit(click.Command):
    """A command that leaves sbatch's options alone."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            words = split_arguments(args)
        except UsageError as error:
            raise click.UsageError(str(error), ctx) from error
        ctx.obj = words, list(args)
        return super().parse_args(ctx, list(words.own))

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["PROGRAM [OPTIONS, also of sbatch] [-- ARGUMENTS]"]


@click.command(cls=_Submit, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--dry-run", is_flag=True, help="Print the script and do nothing.")
@click.option("--follow/--no-follow", default=True, show_default=True,
              help="Show the log until the job ends, and exit with its exit code.")  # fmt: skip
@click.option("-m", "--module", is_flag=True, help="PROGRAM is the name of a Python module.")
@click.option("--mpi", help="The --mpi= of srun, where the choice made for this MPI is wrong.")
@with_survival
@click.option("--restarts", type=click.IntRange(0), default=0,
              help="Start the job again up to this many times when it fails.")  # fmt: skip
@click.pass_context
def submit(ctx: click.Context, /, dry_run: bool, follow: bool, **given: Any) -> None:
    """Write a batch script for PROGRAM, submit it, and follow its log.

    All options of sbatch can be given: -N 2 --gpus-per-node 4 --time 2:00:00 --partition gpu. With
    GPUs there is one rank for each, unless --ntasks or --ntasks-per-node says otherwise. The script
    is kept beside the log. Ctrl-C ends the following, not the job.
    """
    words, args = ctx.obj
    try:
        batch = _batch(words, args, given)
        if dry_run:
            click.echo(build_script(batch), nl=False)
            return
        _look_for(words.program[0], given["module"])
        code = _run(batch, follow)
    except UsageError as error:
        raise click.UsageError(str(error), ctx) from error
    except OSError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(code)


def _batch(words: Arguments, args: list[str], given: Mapping[str, Any]) -> Batch:
    if not words.program:
        raise UsageError("name the program: hpcdist submit train.py -N 2 --time 1:00:00")
    environ = snapshot()
    site = find_site(environ)
    survive = survival_of(given)
    if survive and site.mpiexec is not None:
        check_launcher("auto", site.family and site.family.value, site.version)
    name = words.program[0]
    return Batch(
        words.slurm,
        program_words(words.program, given["module"]),
        name.rpartition(".")[2] if given["module"] else Path(name).stem,
        os.getcwd(),
        given["mpi"] or _mpi(environ, site),
        ("hpcdist", "submit", *args),
        environ.get("LOADEDMODULES", ""),
        survive,
        given["restarts"],
        sys.executable,
    )


def _look_for(program: str, module: bool) -> None:
    """Warn of a program that is not here; it may be where the job runs."""
    if not (module or os.path.exists(program) or shutil.which(program)):
        _note(f"there is no file {program} in {os.getcwd()}; the job needs it on its nodes")


def _mpi(environ: Mapping[str, str], site: Site) -> str | None:
    """Return the `--mpi=` that the environment has chosen, else that of the MPI found here."""
    chosen = environ.get("SLURM_MPI_TYPE", "none")
    return chosen if chosen not in ("", "none") else srun_mpi(site.family)


def _run(batch: Batch, follow: bool) -> int:
    environ = snapshot()
    name = dict(full_options(batch))["job-name"] or batch.name
    folder = log_folder(batch) or Path(batch.folder)
    job = hand_in(build_script(batch), name, folder, environ)
    tasks = ask_slurm(job, environ)
    log = tasks[0].log if tasks and not tasks[0].array else str(folder)
    _note(f"job {job}")
    _note(f"script: {kept_script(folder, name, job)}")
    _note(f"log: {log}")
    if not follow:
        return 0
    follower = Follower(
        lambda: ask_slurm(job, environ),
        lambda text: click.echo(text, nl=False),
        lambda text: _note(f"job {job} {text}"),
    )
    try:
        code = follower.follow()
    except KeyboardInterrupt:
        _note(f"job {job} goes on. Its log: tail -F {shlex.quote(log)}; to end it: scancel {job}")
        return _STOPPED
    _note(f"job {job} has ended with exit code {code}")
    return code


def _note(text: str) -> None:
    click.echo(f"hpcdist submit: {text}", err=True)
