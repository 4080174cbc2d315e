"""The command `hpcdist`: a row of `COMMANDS` for each subcommand, imported when it is called."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from hpcdist.compiled import what_is_missing
from hpcdist.lazy import load

if TYPE_CHECKING:
    from hpcdist.launch.survival import Survive

# Name: where the click command is, and its line in `hpcdist --help`.
COMMANDS = {
    "run": ("hpcdist.launch.cli:run", "Start a script on several ranks."),
    "submit": (
        "hpcdist.launch.submit.command:submit",
        "Write a batch script, submit it, follow its log.",
    ),
    "bench": (
        "hpcdist.bench.command:bench",
        "Measure collectives, messages and training beside other libraries.",
    ),
    "tune": (
        "hpcdist.bench.tune.command:tune",
        "Measure by which algorithm each operation is fastest here, and write it down.",
    ),
    "checkpoint": (
        "hpcdist.checkpoint.command:checkpoint",
        "Show checkpoints, verify them, make one file of them.",
    ),
    "ps": (
        "hpcdist.diagnostics.flight.commands:ps",
        "Show what the ranks of a job do, and who waits for whom.",
    ),
    "top": (
        "hpcdist.diagnostics.flight.commands:top",
        "Show again and again what the ranks of a job do, and how much they move.",
    ),
    "dump": (
        "hpcdist.diagnostics.flight.commands:dump",
        "Write what the ranks of a job have done last, and a timeline.",
    ),
    "doctor": (
        "hpcdist.diagnostics.doctor:doctor",
        "Say what this installation and this job would do, and why.",
    ),
    "module": ("hpcdist.launch.modulefile:module", "Print a modulefile for an installation."),
}

# Options of Paddle's launcher that have nothing to do under MPI, and why.
_MASTER = "MPI's launcher connects the ranks"
_PADDLE_ONLY = {
    "master": _MASTER,
    "start_port": _MASTER,
    "host": "MPI's launcher knows this host",
    "sort_ip": "MPI's launcher numbers the ranks",
    "job_id": "log files are told apart by their folder",
    "log_level": "the launcher has no log of its own",
    "enable_gpu_log": "the launcher has no log of its own",
    "auto_parallel_config": "layouts are given in the script",
    "auto_cluster_config": "the cluster is described by its scheduler",
    "auto_tuner_json": "nothing is tuned at the start",
    "elastic_level": "an MPI job has a fixed size; --max_restart starts it again",
    "elastic_timeout": "an MPI job has a fixed size; --max_restart starts it again",
}


class _Commands(click.Group):
    """A group whose commands are imported when they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        try:
            command = load(COMMANDS[cmd_name][0])
        except RuntimeError as error:  # mpi4py finds no MPI
            raise click.ClickException(_why_no_mpi(error)) from error
        return command if isinstance(command, click.Command) else None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            told = f"{error.format_message()} Options follow a command: hpcdist run -n 4 train.py"
            raise click.UsageError(told, ctx) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        near = difflib.get_close_matches(args[0], COMMANDS, 1)
        if args[0] in COMMANDS or not near:
            return super().resolve_command(ctx, args)
        raise click.UsageError(f"no such command {args[0]!r}; did you mean {near[0]!r}?", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _why_no_mpi(error: RuntimeError) -> str:
    from hpcdist.errors import TransportError
    from hpcdist.runtime.mpi import load_mpi

    try:
        load_mpi()
    except TransportError as told:
        return str(told)
    return str(error)


def _show_version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"hpcdist {load('hpcdist:__version__')}")
        for sentence in what_is_missing():
            click.echo(sentence)
        ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version, and which compiled parts are missing.",
)
def main() -> None:
    """MPI collectives and distributed training for NumPy, torch and JAX: errors, not hangs.

    Run and examine jobs.
    """
    for number in range(3):  # closed, as for a daemon: what is opened next would take its place
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _with_paddle_options(command: Any) -> Any:
    for name in _PADDLE_ONLY:
        command = click.option(f"--{name}", hidden=True)(command)
    return command


_OF_SURVIVAL = (
    click.option("--survive", is_flag=True,
                 help="Go on when a rank dies: the others call hpcdist.recover()."),
    click.option("--spares", type=click.IntRange(0), default=0,
                 help="With --survive: this many processes wait to take the places of the dead."),
    click.option("--min-ranks", type=click.IntRange(1), default=1,
                 help="With --survive: end the job when fewer processes are left."),
)  # fmt: skip


def with_survival(command: Any) -> Any:
    """Give a command the options of jobs that survive."""
    for option in reversed(_OF_SURVIVAL):
        command = option(command)
    return command


@main.command(
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
)
@click.option("-n", "-np", "--nprocs", type=int, help="Number of ranks in all.")
@click.option(
    "--nproc_per_node", "--nproc-per-node", type=int, help="Number of ranks on each node."
)
@click.option("--nnodes", "-N", help="Number of nodes.")
@click.option("--hosts", "--ips", help="Nodes to run on, as a,b,c; without Slurm.")
@click.option("--devices", "--gpus", "--xpus", help="Devices for the ranks, as 0,1,2,3.")
@click.option("-m", "--module", is_flag=True, help="PROGRAM is the name of a Python module.")
@click.option("--log_dir", "--log-dir", help="Folder for one file workerlog.N per rank.")
@click.option("--log_overwrite", "--log-overwrite", is_flag=True, help="Begin log files anew.")
@click.option("--label/--no-label", default=None, help="Begin each line with its rank, as in [2].")
@click.option("--max_restart", "--max-restart", "--restarts", type=click.IntRange(0), default=0,
              help="Start the job again up to this many times when it fails.")  # fmt: skip
@with_survival
@click.option("--launcher", type=click.Choice(["auto", "srun", "mpiexec"]), default="auto",
              help="What starts the ranks.")  # fmt: skip
@click.option("--mpi", help="The --mpi= of srun, where the choice made for this MPI is wrong.")
@click.option("--backend", help="Handed to init_parallel_env of the ranks.")
@click.option("--dry-run", is_flag=True, help="Print the command and do nothing.")
@click.option("--rank", type=int, default=-1, hidden=True)
@click.option("--run_mode", default="collective", hidden=True)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
@_with_paddle_options
def run(program: tuple[str, ...], **given: Any) -> None:
    """Start PROGRAM, a Python script with its arguments, on several ranks.

    Inside a Slurm allocation srun starts them, elsewhere the mpiexec of the installed MPI. The exit
    code is that of the first rank that failed.
    """
    from hpcdist.errors import UsageError

    try:
        code = _run(program, given)
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(code)


def _run(program: tuple[str, ...], given: dict[str, Any]) -> int:
    from hpcdist.errors import UsageError
    from hpcdist.launch.command import Launcher, Options, build_command, shell_text
    from hpcdist.launch.launchers import find_site
    from hpcdist.launch.run import RunOptions, run_job
    from hpcdist.runtime.process import snapshot

    for name, reason in _PADDLE_ONLY.items():
        if given[name] is not None:
            _note(f"--{name} is not needed: {reason}")
    if given["run_mode"] not in ("collective", "rpc"):
        raise UsageError(f"--run_mode {given['run_mode']} is unknown here: use collective or rpc")
    nnodes = _node_count(given["nnodes"])
    if given["rank"] > 0 and (nnodes or 1) > 1:
        _note("one launcher starts the ranks of all nodes, that of --rank 0: nothing to do here")
        return 0
    nprocs = given["nprocs"]
    if given["devices"] and not nprocs and not given["nproc_per_node"]:
        given["nproc_per_node"] = len(given["devices"].split(","))
    options = Options(
        program=program_words(program, given["module"]),
        nprocs=nprocs,
        nprocs_per_node=given["nproc_per_node"],
        nnodes=nnodes,
        hosts=tuple(part.strip() for part in (given["hosts"] or "").split(",") if part.strip()),
        devices=given["devices"],
        launcher=Launcher(given["launcher"]),
        mpi=given["mpi"],
        survive=survival_of(given),
        env={"PADDLE_DISTRI_BACKEND": given["backend"]} if given["backend"] else {},
    )
    environ = snapshot()
    site = find_site(environ)
    shown = shell_text(build_command(options, site, environ))
    if given["dry_run"]:
        click.echo(shown)
        return 0
    script = program[0]
    is_elsewhere = given["hosts"] or given["module"]
    if not (is_elsewhere or os.path.exists(script) or shutil.which(script)):
        raise UsageError(f"there is no file {script} in {os.getcwd()}")
    manner = RunOptions(
        given["label"], given["log_dir"], given["log_overwrite"], given["max_restart"]
    )
    return run_job(options, manner, site, environ)


def survival_of(given: Mapping[str, Any]) -> Survive | None:
    """Return what these options ask for, None for a job that ends when a rank dies.

    Args:
        given: values of the options of `with_survival`, by name.

    Raises:
        UsageError: one of the others was given without ``--survive``.

    """
    from hpcdist.errors import UsageError
    from hpcdist.launch.survival import Survive

    if given["survive"]:
        return Survive(given["spares"], given["min_ranks"])
    if given["spares"] or given["min_ranks"] > 1:
        raise UsageError("--spares and --min-ranks are for a job that survives: add --survive")
    return None


def _node_count(text: str | None) -> int | None:
    from hpcdist.errors import UsageError

    if text is None:
        return None
    if not text.isdigit():
        raise UsageError(
            f"--nnodes {text} is not a number: an MPI job has a fixed number of nodes, and"
            " --max_restart starts it again when one fails"
        )
    return int(text)


def program_words(words: tuple[str, ...], module: bool) -> tuple[str, ...]:
    """Return the argv of a rank: Python's for scripts and modules, else the program itself."""
    if module:
        return (sys.executable, "-m", *words)
    name = words[0]
    is_script = name.endswith((".py", ".pyc", ".pyz")) or os.path.isdir(name)
    found = None if is_script else shutil.which(name)
    return words if found else (sys.executable, *words)


def _note(text: str) -> None:
    click.echo(f"hpcdist run: {text}", err=True)
