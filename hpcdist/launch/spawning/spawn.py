"""`spawn`: run a function on several ranks from within a program.

`spawn` starts a job on this machine whose ranks run `hpcdist.launch.spawning.worker`, and returns a
`MultiprocessContext`, which waits for them and has their results.
"""

from __future__ import annotations

import operator
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hpcdist.errors
from hpcdist.errors import UsageError
from hpcdist.launch.command import Command, Launcher, Options, build_command, shell_text
from hpcdist.launch.job.job import Job
from hpcdist.launch.job.output import Console
from hpcdist.launch.launchers import find_site
from hpcdist.launch.spawning.context import MultiprocessContext
from hpcdist.launch.spawning.pickled_call import importing_main, pack, write_call
from hpcdist.runtime.process import snapshot

_OPTIONS = ("start_method", "gpus", "xpus", "ips", "backend", "print_config")
_START_METHODS = (None, "spawn", "fork", "forkserver")


def spawn(
    func: Callable[..., Any],
    args: Iterable[Any] = (),
    nprocs: int = -1,
    join: bool = True,
    daemon: bool = False,
    **options: Any,
) -> MultiprocessContext:
    """Run `func(*args)` on `nprocs` new ranks of this machine, as one MPI job.

    Every rank is a fresh interpreter under `mpiexec`. Functions and classes of the calling script
    are found by importing it again, so its own start belongs under `if __name__ == "__main__":`.

    Args:
        func: the function; it does not get the rank as an argument: call `hpcdist.get_rank()`.
        args: its positional arguments.
        nprocs: the number of ranks; -1 for one per device in `gpus`, else per usable CPU.
        join: wait for the end, and raise if a rank failed.
        daemon: do not keep the caller's program alive: at its end the job is ended. A job never
            outlives the program, however that ends.
        **options: Paddle's. `gpus`, `xpus`: the devices the ranks may use ("0,1"). `backend`:
            handed to `init_parallel_env` of the ranks. `print_config`: print the command.
            `start_method` is accepted; all ranks start afresh, whatever it says. `ips`: only this
            machine.

    Returns:
        The context, with `results` by rank after the end, `processes` and `join`.

    Raises:
        UsageError: a wrong number or option, something that cannot be pickled, or no `mpiexec`.
        RemoteError: with `join`: a rank failed; all others have been ended.

    Example:
        >>> spawn(max, (1, 2), nprocs=1).results  # doctest: +SKIP
        [2]

    """
    if importing_main():
        raise UsageError(
            "spawn was called while a rank imports the script that spawned it: put the start of"
            ' the script under `if __name__ == "__main__":`'
        )
    environ = snapshot()
    _check_options(options)
    devices = _devices(options)
    wanted = Options(
        program=(),
        nprocs=_count(nprocs, devices),
        devices=devices,
        launcher=Launcher.MPIEXEC,
        here=True,
        env=_variables(options, environ),
    )
    site = find_site(environ)

    def command(program: tuple[str, ...]) -> Command:
        return build_command(replace(wanted, program=program), site, environ)

    payload = pack(func, _arguments(args))
    directory = tempfile.mkdtemp(prefix="hpcdist-")
    try:
        write_call(directory, payload)
        program = _worker_program(directory)
        if options.get("print_config"):
            print(shell_text(command(program)))
        said: list[bytes] = []
        console = Console(label=False)

        def write(rank: int, stream: int, data: bytes) -> None:
            console.write(rank, stream, data) if rank >= 0 else said.append(data)

        sys.stdout.flush()
        sys.stderr.flush()
        job = Job(command, program, environ, write, directory=directory)
        context = MultiprocessContext(job, directory, said, daemon)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    if join:
        context.join()
    return context


def _worker_program(directory: str) -> tuple[str, ...]:
    root = str(Path(hpcdist.errors.__file__).parents[1])
    code = (
        f"import sys; sys.path.insert(0, {root!r});"
        f" from hpcdist.launch.spawning.worker import main; main({directory!r})"
    )
    return (sys.executable, "-c", code)


def _check_options(options: dict[str, Any]) -> None:
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise UsageError(
            f"spawn got the unknown options {', '.join(unknown)}; it knows {', '.join(_OPTIONS)}"
        )
    method = options.get("start_method")
    if method not in _START_METHODS:
        known = ", ".join(str(name) for name in _START_METHODS[1:])
        raise UsageError(f"start_method={method!r} is unknown: use one of {known}")
    hosts = {part.strip() for part in str(options.get("ips") or "").split(",")}
    if hosts - {"", "localhost", "127.0.0.1"}:
        raise UsageError(
            f"ips={options['ips']!r} names other machines, and spawn starts ranks on this one: use"
            " `hpcdist run --hosts`"
        )


def _devices(options: dict[str, Any]) -> str | None:
    named = [options[kind] for kind in ("gpus", "xpus") if options.get(kind) is not None]
    if not named:
        return None
    given = named[0]
    parts = (
        given.split(",") if isinstance(given, str) else [given] if isinstance(given, int) else given
    )
    return ",".join(str(part).strip() for part in parts)


def _arguments(args: Any) -> tuple[Any, ...]:
    try:
        arguments = iter(args)
    except TypeError:
        raise UsageError(
            f"args must be a tuple of the function's arguments, got {type(args).__name__}"
            f" {args!r}: put a single one into a tuple, as args=(value,)"
        ) from None
    return tuple(arguments)


def _count(given: Any, devices: str | None) -> int:
    try:
        nprocs = 0 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        nprocs = 0
    if nprocs == 0 or nprocs < -1:
        raise UsageError(
            f"nprocs={given!r} was asked for: give a number of ranks, or -1 for one per CPU"
        )
    if devices is None:
        return len(os.sched_getaffinity(0)) if nprocs == -1 else nprocs
    count = len(devices.split(","))
    if nprocs not in (-1, count):
        raise UsageError(
            f"{nprocs} ranks were asked for, but the devices {devices} are {count}: name one for"
            " each rank, or leave nprocs out"
        )
    return count


def _variables(options: dict[str, Any], environ: dict[str, str]) -> dict[str, str]:
    variables = {} if "PYTHONUNBUFFERED" in environ else {"PYTHONUNBUFFERED": "1"}
    backend = options.get("backend")
    if backend is not None:
        variables["PADDLE_DISTRI_BACKEND"] = str(backend)
    return variables
