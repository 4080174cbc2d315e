"""`run_job`: start a job, stand in for it towards whoever started us, and return its exit code.

Signals we get go to the job, lines of the ranks go to our output, our input goes to rank 0, and a
failing job is started again where that was asked for.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hpcdist.launch.command import Command, Options, Site, build_command
from hpcdist.launch.job.input import readable_input
from hpcdist.launch.job.job import TERM_GRACE_S, Job
from hpcdist.launch.job.outcome import Outcome, describe_exit
from hpcdist.launch.job.output import Console
from hpcdist.runtime.failure import LABELLED

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_NOBODY_READS = 128 + signal.SIGPIPE


@dataclass(frozen=True)
class RunOptions:
    """How to run: label the lines (None: where there are several ranks), log files, restarts."""

    label: bool | None = None
    log_dir: str | None = None
    log_overwrite: bool = False
    max_restart: int = 0


def run_job(options: Options, manner: RunOptions, site: Site, environ: Mapping[str, str]) -> int:
    """Run a job to its end, again where it fails and `manner` allows.

    Args:
        options: what to start.
        manner: how to run it.
        site: what this machine has.
        environ: the environment the job inherits.

    Returns:
        The exit code as a shell counts: that of the first rank that failed, 128 + n for signal n.

    Raises:
        UsageError: there is no command for these options.
        OSError: the launcher could not be started.

    Example:
        >>> run_job(Options(("true",), nprocs=2), Manner(), site, environ)  # doctest: +SKIP
        0

    """
    if "PYTHONUNBUFFERED" not in environ:  # else lines would come late: the ranks see no terminal
        options = replace(options, env={"PYTHONUNBUFFERED": "1", **options.env})
    for restart in range(manner.max_restart + 1):
        again = {"HPCDIST_RESTART_COUNT": str(restart)} if manner.max_restart else {}
        outcome, asked = _run_once(
            replace(options, env={**options.env, **again}), manner, site, environ
        )
        if outcome.code == 0:
            break
        _report(outcome, asked, options.survive is not None)
        if asked or outcome.code == _NOBODY_READS:
            break
        if restart < manner.max_restart:
            _note(f"restart {restart + 1} of {manner.max_restart}")
    return outcome.code


def _run_once(
    options: Options, manner: RunOptions, site: Site, environ: Mapping[str, str]
) -> tuple[Outcome, bool]:
    """Return the outcome, and whether somebody asked us to end."""

    def command(program: tuple[str, ...]) -> Command:
        return build_command(replace(options, program=program), site, environ)

    size = command(options.program).size
    label = size > 1 if manner.label is None else manner.label
    if label and not options.survive:  # there, ranks get other numbers
        environ = {**environ, LABELLED: "1"}
    with (
        tempfile.TemporaryDirectory(prefix="hpcdist-", ignore_cleanup_errors=True) as directory,
        Console(label, manner.log_dir, manner.log_overwrite) as console,
    ):
        job = Job(
            command,
            options.program,
            environ,
            console.write,
            whole_lines=label or size > 1,
            stdin=readable_input(),
            directory=directory,
            survive=options.survive,
        )
        with _forwarding(job) as got:
            outcome = job.run()
        for line in job.deaths.summary() if job.deaths is not None else ():
            _note(line)
    return outcome, bool({signal.SIGINT, signal.SIGTERM, signal.SIGHUP} & set(got))


@contextlib.contextmanager
def _forwarding(job: Job) -> Iterator[list[int]]:
    """Pass signals on to the job; the list fills with those that came."""
    got: list[int] = []

    def forward(number: int, _frame: object) -> None:
        got.append(number)
        job.signal(signal.SIGTERM if number == signal.SIGHUP else number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(outcome: Outcome, asked: bool, survives: bool) -> None:
    if outcome.killed is not None:
        _note(
            f"{_named(outcome.killed)} had not ended {TERM_GRACE_S:g} s after SIGTERM, and the job "
            "was killed: let the program end soon after this signal"
        )
    if asked or outcome.code == _NOBODY_READS:
        return
    if outcome.lost and not (outcome.first and outcome.first[1] > 0):
        lost = ", ".join(map(str, outcome.lost))
        _note(
            f"{_named(outcome.lost)} did not end well, though the "
            "launcher says so (exit code 0): the node or the launcher's daemon there was lost, or "
            "another rank ended without MPI_Finalize (os._exit) while they waited for it"
            if outcome.launcher == 0
            else f"nothing was heard of the end of process {lost}: the node or the launcher's "
            f"daemon there was lost (the launcher's exit code is {outcome.launcher})"
        )
    elif outcome.left:
        _note(
            f"{_named(outcome.left)} ended with exit code 0, but without ending MPI (os._exit), "
            "and the job with it: return from the script, or call sys.exit(0)"
        )
    elif outcome.first is None:
        _note(f"the job was aborted, or could not be run: exit code {outcome.code}")
    else:
        rank, code = outcome.first
        end = "nobody has recovered from it" if survives else "the job with it"
        _note(f"rank {rank} ended with {describe_exit(code)}, and {end}")


def _named(ranks: Sequence[int]) -> str:
    words = "rank" if len(ranks) == 1 else "ranks"
    return f"{words} {', '.join(map(str, sorted(ranks)))}" if ranks else "the ranks"


def _note(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.write(f"hpcdist run: {text}\n")
        sys.stderr.flush()
