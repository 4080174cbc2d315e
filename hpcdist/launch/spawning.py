"""`spawn`: run a function on several ranks from within a program.

`spawn` starts a job of this machine whose ranks run `hpcdist.launch.worker`, and returns a
`MultiprocessContext`, which waits for them and has their results. The job itself lives in a thread.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hpcdist.errors
from hpcdist.errors import RemoteError, UsageError
from hpcdist.launch.command import Command, Launcher, Options, build_command, shell_text
from hpcdist.launch.job import Job, make_directory, remove_directory
from hpcdist.launch.outcome import Outcome, describe_exit
from hpcdist.launch.output import Console
from hpcdist.launch.payload import importing_main, load_result, pack, read_answers, write_call
from hpcdist.launch.site import find_site
from hpcdist.runtime.environ import snapshot

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
        func: The function; it gets no rank as argument, `hpcdist.get_rank()` knows.
        args: Its positional arguments.
        nprocs: The number of ranks; -1 for one per device in `gpus`, else per usable CPU.
        join: Wait for the end, and raise if a rank failed.
        daemon: Do not keep the caller's program alive: at its end the job is ended. A job never
            outlives the program, however that ends.
        **options: Paddle's. `gpus`, `xpus`: the devices the ranks may use ("0,1"). `backend`:
            handed to `init_parallel_env` of the ranks. `print_config`: print the command.
            `start_method` is accepted; all ranks start afresh, whatever it says. `ips`: only this
            machine.

    Returns:
        The context, with `results` by rank after the end, `processes` and `join`.

    Raises:
        UsageError: A wrong number or option, something that cannot be pickled, or no `mpiexec`.
        RemoteError: With `join`: a rank failed; all others have been ended.

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

    payload = pack(func, tuple(args))
    directory = make_directory()
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
        remove_directory(directory)
        raise
    if join:
        context.join()
    return context


class SpawnedProcess:
    """One rank of a spawned job, in the manner of `multiprocessing.Process`."""

    def __init__(self, rank: int, context: MultiprocessContext) -> None:
        self.rank = rank
        self.name = f"rank {rank}"
        self._context = context

    @property
    def pid(self) -> int | None:
        """The process number; waits until the rank has started, None if it never did."""
        while self.rank not in self._context.job.ranks and self._context.alive():
            time.sleep(0.005)
        known = self._context.job.ranks.get(self.rank)
        return None if known is None else known.pid

    @property
    def exitcode(self) -> int | None:
        """The exit code, -n after signal n, None while the rank runs.

        A rank that was ended because another failed may count as ended by SIGKILL.
        """
        known = self._context.job.ranks.get(self.rank)
        if known is not None and known.code is not None:
            return known.code
        return None if self._context.alive() else -signal.SIGKILL

    def is_alive(self) -> bool:
        """Tell whether the rank has not ended."""
        return self.exitcode is None

    def terminate(self) -> None:
        """Send SIGTERM to the rank, which takes the job along."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the rank, which takes the job along."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.pid is not None:
            self._context.job.ranks[self.rank].send(number)


class ReturnQueue:
    """Gives what one rank's function returned, as Paddle's queue of the rank does."""

    def __init__(self, rank: int, context: MultiprocessContext) -> None:
        self._rank = rank
        self._context = context

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the end of the job and return the rank's result.

        Args:
            timeout: The longest wait in seconds.

        Raises:
            TimeoutError: The job was still running after `timeout`.
            RemoteError: A rank failed.

        """
        if not self._context.join(timeout):
            raise TimeoutError(f"the job was still running after {timeout} s")
        return self._context.results[self._rank]


class MultiprocessContext:
    """A spawned job: `join` waits for it, `results` has what the ranks returned, by rank."""

    def __init__(self, job: Job, directory: str, said: list[bytes], daemon: bool) -> None:
        size = job.command.size
        self.job = job
        self.results: list[Any] = []
        self.processes = [SpawnedProcess(rank, self) for rank in range(size)]
        self.return_queues = [ReturnQueue(rank, self) for rank in range(size)]
        self._directory = directory
        self._said = said
        self._outcome: Outcome | None = None
        self._failure: BaseException | None = None
        self._answers: tuple[dict[int, bytes], dict[int, str]] = ({}, {})
        self._thread = threading.Thread(target=self._run, name="hpcdist spawn", daemon=daemon)
        self._thread.start()
        if daemon:
            atexit.register(self.terminate)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for all ranks, and raise if one failed.

        Args:
            timeout: The longest wait in seconds; None for any time.

        Returns:
            True when all ranks have ended, False after `timeout`.

        Raises:
            RemoteError: A rank failed; `rank` and `traceback` tell which and how.
            KeyboardInterrupt: After Ctrl-C; the job has been ended.

        """
        try:
            self._thread.join(timeout)
        except KeyboardInterrupt:
            self.terminate()
            raise
        if self.alive():
            return False
        self._raise_failure()
        if not self.results:
            bodies = self._answers[0]
            self.results = [load_result(bodies.get(p.rank)) for p in self.processes]
        return True

    def alive(self) -> bool:
        """Tell whether the job has not ended."""
        return self._thread.is_alive()

    def terminate(self) -> None:
        """End all ranks and return when they have ended."""
        self.job.stop()
        self._thread.join()
        atexit.unregister(self.terminate)

    def _run(self) -> None:
        try:
            self._outcome = self.job.run()
            self._answers = read_answers(self._directory, self.job.command.size)
        except BaseException as error:
            self._failure = error
        finally:
            remove_directory(self._directory)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        outcome, errors = self._outcome, self._answers[1]
        if outcome is None or outcome.code == 0:
            return
        rank, code = outcome.first or (-1, outcome.code)
        if rank < 0 and errors:
            rank = min(errors)
        if rank in errors:
            text = f"Process {rank} terminated with the following error:\n\n{errors[rank]}"
            raise RemoteError(text, rank, errors[rank])
        if rank >= 0:
            raise RemoteError(f"Process {rank} terminated with {describe_exit(code)}.", rank)
        said = b"".join(self._said).decode(errors="replace").strip()
        raise RemoteError(
            f"The ranks were ended, or could not be started: {self.job.command.argv[0]} ended with"
            f" {describe_exit(outcome.launcher)}.\n{said}"
        )


def _worker_program(directory: str) -> tuple[str, ...]:
    root = str(Path(hpcdist.errors.__file__).parents[1])
    code = (
        f"import sys; sys.path.insert(0, {root!r});"
        f" from hpcdist.launch.worker import main; main({directory!r})"
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


def _count(nprocs: int, devices: str | None) -> int:
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or nprocs == 0 or nprocs < -1:
        raise UsageError(
            f"nprocs={nprocs!r} was asked for: give a number of ranks, or -1 for one per CPU"
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
