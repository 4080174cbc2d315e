"""One job under way: `Job(command, ...).run() -> Outcome`.

The launcher starts each rank through `shim.py` where all ranks are on this machine:
then the job reads every rank's output from a named pipe of its own, hears how each rank ends, and
sends signals to the ranks themselves. On other machines the launcher's labels and messages must do,
and the shim tells of the end of its rank on a line of its output. No job has ended well before all
ranks have said so: an `mpiexec` that loses a node may say 0.
The job ends as a whole: a failing rank takes the others along, at the latest after a grace time,
unless the job is one that survives, see `deaths.py`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping

from hpcdist.launch.command import Command
from hpcdist.launch.job.deaths import Deaths
from hpcdist.launch.job.input import Pump
from hpcdist.launch.job.outcome import Outcome, conclude, read_failure
from hpcdist.launch.job.output import (
    ABORTED,
    Write,
    in_lines,
    in_lines_without_banner,
    read_label,
)
from hpcdist.launch.job.processes import (
    Rank,
    placed_program,
    quietly,
    reporting_program,
    shim_program,
)
from hpcdist.launch.job.starting import meeting_point, start_launcher
from hpcdist.launch.job.streams import Streams
from hpcdist.launch.survival import Survive

_REPORT = re.compile(rb" exit (\d+) (-?\d+) ?(.*)")
"""What a rank tells of its end, behind the word of its job."""

# Seconds: for the launcher to end a job in which a rank failed, for the runtime of a rank that
# raised to do so, for ranks that hear of one that did not come, after Ctrl-C, after SIGTERM (a job
# may save its state: Slurm's own default), for spares to end when the ranks have ended, and between
# a request to end and the end by force, here and where a launcher must ask other nodes.
_FAILED_GRACE_S = 1.0
_RAISED_GRACE_S = 1.5
_ABSENT_GRACE_S = 3.0
_INTERRUPT_GRACE_S = 1.5
TERM_GRACE_S = 30.0
_SPARES_GRACE_S = 10.0
_KILL_GRACE_S = 2.0
_REMOTE_KILL_GRACE_S = 10.0
# Seconds for the last words of ranks after those of the launcher, and where it said all is well.
_TOLD_S = 0.2
_LATE_S = 5.0


class Job:
    """A job from its start to its end; `run` does everything, `signal` and `stop` interfere.

    Args:
        command: makes the command of a program's argv.
        program: what each rank runs.
        environ: the environment the job inherits.
        write: takes what ranks and launcher print.
        whole_lines: cut the output into lines; else pass it on byte for byte.
        stdin: a descriptor with the input of rank 0; None for no input.
        directory: a folder for the named pipes; the caller removes it.
        survive: for a job that goes on when a rank dies.

    """

    def __init__(
        self,
        command: Callable[[tuple[str, ...]], Command],
        program: tuple[str, ...],
        environ: Mapping[str, str],
        write: Write,
        *,
        whole_lines: bool = True,
        stdin: int | None = None,
        directory: str,
        survive: Survive | None = None,
    ) -> None:
        plain = command(program)
        self._word = f"hpcdist-{secrets.token_hex(8)}"
        if plain.local:
            program = shim_program(directory, program)
        elif plain.checked:
            program = placed_program(program)
        else:
            program = reporting_program(self._word, program)
        self.command = command(program)
        self.ranks: dict[int, Rank] = {}
        self.deaths = Deaths(survive, self.command.size, time.monotonic) if survive else None
        self._told: dict[int, int] = {}
        self._environ = environ
        self._write = write
        self._whole_lines = whole_lines
        self._stdin = stdin
        self._directory = directory
        self._first: tuple[int, int] | None = None
        self._interrupted = 0
        self._stopped = False
        self._overdue: tuple[int, ...] | None = None
        self._stages: list[tuple[float, Callable[[], None]]] = []
        self._requests: deque[int] = deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._streams = Streams()
        self._pump: Pump | None = None
        self._launcher: subprocess.Popen[bytes] | None = None
        self._port: socket.socket | None = None

    def run(self) -> Outcome:
        """Start the job and return when nothing of it is left.

        Raises:
            OSError: the launcher could not be started.

        """
        try:
            self._listen()
            launcher = self._launcher = self._start()
            try:
                self._follow(launcher)
            finally:
                self._end(launcher)
        finally:
            if self._port is not None:
                self._port.close()
            self._streams.close()
            wake, self._wake_write = self._wake_write, -1
            os.close(wake)
        return self._with_killed(self._conclude(launcher.returncode))

    def signal(self, number: int) -> None:
        """Pass a signal on to the job; from any thread or signal handler."""
        self._requests.append(number)
        with contextlib.suppress(OSError):  # not running, or so many that it wakes anyway
            os.write(self._wake_write, b"!")

    def stop(self) -> None:
        """End the job, if need be by force; from any thread. `run` returns soon after."""
        self.signal(0)

    def _conclude(self, launcher: int) -> Outcome:
        if self.deaths is not None:
            return self.deaths.outcome(launcher, self._interrupted)
        exits = {rank: each.code for rank, each in self.ranks.items() if each.code is not None}
        told_of = 0 if self.command.checked else self.command.size
        exits = {**self._told, **exits}
        return conclude(
            self._first, exits, launcher, self._interrupted, told_of, stopped=self._stopped
        )

    def _with_killed(self, outcome: Outcome) -> Outcome:
        """Say which ranks had to be killed after SIGTERM: the launcher's own code says nothing."""
        if self._overdue is None or self._interrupted != signal.SIGTERM or outcome.code == 0:
            return outcome
        killed = tuple(rank for rank in self._overdue if outcome.exits.get(rank) != 0)
        if self._overdue and not killed:  # they have ended well after all
            return outcome
        code = 128 + signal.SIGTERM if self._first is None else outcome.code
        return outcome._replace(code=code, killed=killed)

    # Starting and listening.

    def _listen(self) -> None:
        self._streams.read(self._wake_read, lambda _: None, ends=False)
        if not self.command.local:
            return
        # Opened for writing too, so that it has no end while shims come and go.
        events = os.open(self._make_pipe("events"), os.O_RDWR | os.O_NONBLOCK)
        self._streams.read(events, in_lines(self._on_event), ends=False)
        if self._stdin is not None:
            path = self._make_pipe("0.in")
            self._pump = Pump(self._stdin, functools.partial(os.open, path, os.O_WRONLY))
        for rank in range(self.command.size):
            for stream, name in ((1, "out"), (2, "err")):
                pipe = os.open(self._make_pipe(f"{rank}.{name}"), os.O_RDONLY | os.O_NONBLOCK)
                put = functools.partial(self._put, rank, stream)
                self._streams.read(pipe, in_lines(put) if self._whole_lines else put)

    def _make_pipe(self, name: str) -> str:
        path = f"{self._directory}/{name}"
        os.mkfifo(path, 0o600)
        return path

    def _start(self) -> subprocess.Popen[bytes]:
        unset = set(self.command.unset)
        env = {name: value for name, value in self._environ.items() if name not in unset}
        if self.command.local:
            point, self._port = meeting_point(env)
            env |= point
        pumped = None if self.command.local else self._stdin
        launcher = start_launcher(self.command, env, pumped is not None)
        if launcher.stdin is not None and pumped is not None:
            to_launcher = os.dup(launcher.stdin.fileno())
            launcher.stdin.close()
            self._pump = Pump(pumped, lambda: to_launcher)
        for stream, pipe in ((1, launcher.stdout), (2, launcher.stderr)):
            if pipe is not None:
                fd = os.dup(pipe.fileno())
                pipe.close()
                os.set_blocking(fd, False)
                put: Callable[[bytes], None] = functools.partial(self._put_launchers, stream)
                if self._whole_lines and self.command.local and self.deaths is None:
                    put = in_lines_without_banner(put)
                elif self._whole_lines or not self.command.local:
                    put = in_lines(put)
                self._streams.read(fd, put)
        with contextlib.suppress(OSError):  # else the timeout of `_follow` notices the end
            self._streams.wake_for(os.pidfd_open(launcher.pid))
        return launcher

    # Following.

    def _follow(self, launcher: subprocess.Popen[bytes]) -> None:
        while launcher.poll() is None:
            due = self._stages[0][0] - time.monotonic() if self._stages else 0.2
            self._streams.turn(min(due, 0.2))
            while self._requests:
                self._obey(self._requests.popleft())
            while self._stages and self._stages[0][0] <= time.monotonic():
                self._stages.pop(0)[1]()

    def _on_event(self, line: bytes) -> None:
        kind, rank, *rest = line.decode().rstrip().split(maxsplit=3)
        if kind == "start":
            self.ranks[int(rank)] = Rank(*map(int, rest))
        elif kind == "exit":
            code = self.ranks[int(rank)].code = int(rest[0])
            self._on_exit(int(rank), code, _FAILED_GRACE_S, "".join(rest[1:]))
        elif kind == "raise":
            # Its own runtime ends the job by MPI's means, if it is there and can.
            self._fail(int(rank), 1, _RAISED_GRACE_S)

    def _on_exit(self, rank: int, code: int, grace_s: float, report: str) -> None:
        if self.deaths is None:
            if code:
                self._fail(rank, code, grace_s)
        elif self.deaths.note(rank, code, report) and not self._stages:
            self._end_after(TERM_GRACE_S)  # those that are left end by themselves, with a reason
        elif self.deaths.lacks_one() and not self._stages:
            self._end_after(_ABSENT_GRACE_S)
        elif self.deaths.only_spares_wait() and not self._stages:
            self._end_after(_SPARES_GRACE_S)

    def _fail(self, rank: int, code: int, grace_s: float) -> None:
        if self._first is None and self._overdue is None:  # else it was we who ended it
            self._first = rank, code
            if not self._stages:
                self._end_after(grace_s)

    def _put_launchers(self, stream: int, line: bytes) -> None:
        failure = None if self.command.local else read_failure(line.decode(errors="replace"))
        if failure is not None:
            self._fail(*failure, TERM_GRACE_S)  # srun itself ends the others
        if self.deaths is not None and ABORTED in line:  # ULFM ends nobody, nor tells anybody
            self._end_after(_FAILED_GRACE_S)
        labels = self.command.labels
        rank, stream, text = read_label(labels, stream, line) if labels else (-1, stream, line)
        text, word, told = text.partition(self._word.encode())
        if word:
            self._on_report(told)
        if text:
            self._put(rank, stream, text + b"\n" if word else text)

    def _on_report(self, told: bytes) -> None:
        found = _REPORT.match(told)
        if found is None:  # cut off, as by a daemon that was killed: it has told nothing
            return
        rank, code = int(found[1]), int(found[2])
        self._told[rank] = code
        # The launcher itself ends the others.
        self._on_exit(rank, code, TERM_GRACE_S, found[3].decode(errors="replace"))

    def _put(self, rank: int, stream: int, data: bytes) -> None:
        if not data:
            return  # the end of a stream that is not read by lines
        if rank < 0 and self._first is not None and self.command.local:
            return  # we know better than the launcher what happened
        try:
            self._write(rank, stream, data)
        except BrokenPipeError:
            self._write = lambda *_: None
            self._interrupted = signal.SIGPIPE
            self.stop()

    # Ending.

    def _obey(self, number: int) -> None:
        if number == 0:
            self._stopped = True
            self._end_after(0.0)
        elif number == signal.SIGINT:
            again, self._interrupted = self._interrupted == number, number
            self._ask_launcher(number)
            self._end_after(0.0 if again else _INTERRUPT_GRACE_S)
        else:
            self._send(number) if self.ranks else self._ask_launcher(number)
            if number == signal.SIGTERM:
                self._interrupted = self._interrupted or number
                self._stages = self._stages or [
                    (time.monotonic() + TERM_GRACE_S, self._note_overdue),
                    *self._stages_after(TERM_GRACE_S),
                ]

    def _note_overdue(self) -> None:
        self._overdue = tuple(rank for rank, each in self.ranks.items() if each.code is None)

    def _end_after(self, grace_s: float) -> None:
        """End everything after a grace time, by force after another."""
        self._stages = self._stages_after(grace_s)

    def _stages_after(self, grace_s: float) -> list[tuple[float, Callable[[], None]]]:
        def ask() -> None:
            self._ask_launcher(signal.SIGTERM)
            self._send(signal.SIGTERM)

        def force() -> None:
            self._kill_ranks()
            if self._launcher is not None and self._launcher.poll() is None:
                quietly(os.killpg, self._launcher.pid, signal.SIGKILL)

        at = time.monotonic() + grace_s
        more_s = _KILL_GRACE_S if self.command.local else _REMOTE_KILL_GRACE_S
        return [(at, ask), (at + more_s, force)]

    def _ask_launcher(self, number: int) -> None:
        if self._launcher is not None:
            quietly(self._launcher.send_signal, number)

    def _send(self, number: int) -> None:
        for rank in list(self.ranks.values()):
            rank.send(number)

    def _kill_ranks(self) -> None:
        for rank in list(self.ranks.values()):
            rank.kill()

    def _end(self, launcher: subprocess.Popen[bytes]) -> None:
        """Read what is still to be read and leave nothing behind."""
        if launcher.poll() is None:  # an exception is under way
            quietly(os.killpg, launcher.pid, signal.SIGKILL)
        launcher.wait()
        self._stages = []
        if self._pump is not None:
            self._pump.stop()
        self._kill_ranks_once_told(_LATE_S if launcher.returncode == 0 else _TOLD_S)
        self._streams.read_rest(1.0)

    def _kill_ranks_once_told(self, longest_s: float) -> None:
        until = time.monotonic() + longest_s
        while any(each.code is None for each in self.ranks.values()):
            left = until - time.monotonic()
            if left <= 0:
                break
            self._streams.turn(left)
        self._kill_ranks()
