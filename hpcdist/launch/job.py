"""One job under way: `Job(command, ...).run() -> Outcome`.

The launcher starts each rank through `hpcdist/runtime/shim.py` where all ranks are on this machine:
then the job reads every rank's output from a named pipe of its own, hears how each rank ends, and
sends signals to the ranks themselves. On other machines the launcher's labels and messages must do.
The job ends as a whole: a failing rank takes the others along, at the latest after a grace time.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping

from hpcdist.launch.command import Command
from hpcdist.launch.input import Pump
from hpcdist.launch.outcome import Outcome, conclude
from hpcdist.launch.output import Lines, Write, read_label
from hpcdist.launch.rank import Rank, quietly, shim_program
from hpcdist.runtime import shim

# Seconds: for the launcher to end a job in which a rank failed, for the runtime of a rank that
# raised to do so, after Ctrl-C, after SIGTERM (a job may save its state: Slurm's own default), and
# between a request to end and the end by force.
_FAILED_GRACE_S = 1.0
_RAISED_GRACE_S = 1.5
_INTERRUPT_GRACE_S = 1.5
_TERM_GRACE_S = 30.0
_KILL_GRACE_S = 2.0

_PIECE = 1 << 16

# srun's own words for the end of a rank, and for signals.
_SRUN_FAILURE = re.compile(
    r"srun: error: \S+ tasks? (\d+)[^:]*: (?:Exited with exit code (\d+)|([^(\n]*))"
)
_SIGNALS = {signal.strsignal(number): number for number in signal.valid_signals()}


class Job:
    """A job from its start to its end; `run` does everything, `signal` and `stop` interfere.

    Args:
        command: Makes the command of a program's argv.
        program: What each rank runs.
        environ: The environment the job inherits.
        write: Takes what ranks and launcher print.
        whole_lines: Cut the output into lines; else pass it on byte for byte.
        stdin: A descriptor with the input of rank 0; None for no input.
        directory: A folder for the named pipes; the caller removes it.

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
    ) -> None:
        plain = command(program)
        self.command = command(shim_program(directory, program)) if plain.local else plain
        self.ranks: dict[int, Rank] = {}
        self._environ = environ
        self._write = write
        self._whole_lines = whole_lines
        self._stdin = stdin
        self._directory = directory
        self._first: tuple[int, int] | None = None
        self._interrupted = 0
        self._stages: list[tuple[float, Callable[[], None]]] = []
        self._requests: deque[int] = deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._open_streams = 0
        self._pump: Pump | None = None
        self._launcher: subprocess.Popen[bytes] | None = None

    def run(self) -> Outcome:
        """Start the job and return when nothing of it is left.

        Raises:
            OSError: The launcher could not be started.

        """
        try:
            self._listen()
            launcher = self._launcher = self._start()
            try:
                self._follow(launcher)
            finally:
                self._end(launcher)
        finally:
            self._selector.close()
            os.close(self._wake_read)
            wake, self._wake_write = self._wake_write, -1
            os.close(wake)
        exits = {rank: each.code for rank, each in self.ranks.items() if each.code is not None}
        return conclude(self._first, exits, launcher.returncode, self._interrupted)

    def signal(self, number: int) -> None:
        """Pass a signal on to the job; from any thread or signal handler."""
        self._requests.append(number)
        if self._wake_write >= 0:
            quietly(os.write, self._wake_write, b"!")

    def stop(self) -> None:
        """End the job, if need be by force; from any thread. `run` returns soon after."""
        self.signal(0)

    # Starting and listening.

    def _listen(self) -> None:
        self._register(self._wake_read, self._on_wake)
        if not self.command.local:
            return
        events = f"{self._directory}/events"
        os.mkfifo(events, 0o600)
        # Opened for writing too, so that it has no end while shims come and go.
        self._register(os.open(events, os.O_RDWR | os.O_NONBLOCK), self._on_events(Lines()))
        if self._stdin is not None:
            path = f"{self._directory}/0.in"
            os.mkfifo(path, 0o600)
            self._pump = Pump(self._stdin, functools.partial(os.open, path, os.O_WRONLY))
        for rank in range(self.command.size):
            for stream, name in ((1, "out"), (2, "err")):
                path = f"{self._directory}/{rank}.{name}"
                os.mkfifo(path, 0o600)
                pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                self._register(pipe, self._on_output(rank, stream, Lines()))
                self._open_streams += 1

    def _start(self) -> subprocess.Popen[bytes]:
        unset = set(self.command.unset)
        env = {name: value for name, value in self._environ.items() if name not in unset}
        argv = list(self.command.argv)
        if not self.command.local:
            leash = [sys.executable, "-I", "-S", shim.__file__, "leash", str(os.getpid())]
            argv = leash + argv
        pumped = None if self.command.local else self._stdin
        launcher = subprocess.Popen(
            argv,
            env={**env, **self.command.env},
            stdin=subprocess.DEVNULL if pumped is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        if pumped is not None and launcher.stdin is not None:
            to_launcher = os.dup(launcher.stdin.fileno())
            launcher.stdin.close()
            self._pump = Pump(pumped, lambda: to_launcher)
        for stream, pipe in ((1, launcher.stdout), (2, launcher.stderr)):
            if pipe is not None:
                fd = os.dup(pipe.fileno())
                pipe.close()
                os.set_blocking(fd, False)
                self._register(fd, self._on_launcher_output(stream, Lines()))
                self._open_streams += 1
        with contextlib.suppress(OSError):  # else the timeout of `_follow` notices the end
            self._register(os.pidfd_open(launcher.pid), self._unregister)
        return launcher

    def _register(self, fd: int, action: Callable[[int], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, action)

    def _unregister(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)

    # Following.

    def _on_wake(self, fd: int) -> None:
        _drain(fd)

    def _follow(self, launcher: subprocess.Popen[bytes]) -> None:
        while launcher.poll() is None:
            self._turn(0.2)
            while self._requests:
                self._obey(self._requests.popleft())
            while self._stages and self._stages[0][0] <= time.monotonic():
                self._stages.pop(0)[1]()

    def _turn(self, longest_s: float) -> bool:
        """Wait for something to read and read it; False if there was nothing."""
        due = self._stages[0][0] - time.monotonic() if self._stages else longest_s
        ready = self._selector.select(max(0.0, min(longest_s, due)))
        for key, _ in ready:
            key.data(key.fd)
        return bool(ready)

    def _on_events(self, lines: Lines) -> Callable[[int], None]:
        def read(fd: int) -> None:
            for line in lines.feed(_drain(fd)):
                kind, rank, *numbers = line.split()
                self._on_event(kind.decode(), int(rank), [int(number) for number in numbers])

        return read

    def _on_event(self, kind: str, rank: int, numbers: list[int]) -> None:
        if kind == "start":
            self.ranks[rank] = Rank(*numbers)
        elif kind == "exit":
            self.ranks[rank].code = numbers[0]
            if numbers[0]:
                self._fail(rank, numbers[0], _FAILED_GRACE_S)
        elif kind == "raise":
            # Its own runtime ends the job by MPI's means, if it is there and can.
            self._fail(rank, 1, _RAISED_GRACE_S)

    def _fail(self, rank: int, code: int, grace_s: float) -> None:
        if self._first is None:
            self._first = rank, code
            if not self._stages:
                self._end_after(grace_s)

    def _on_output(self, rank: int, stream: int, lines: Lines) -> Callable[[int], None]:
        def read(fd: int) -> None:
            data = _read(fd)
            if data is None:
                return
            if not self._whole_lines:
                self._put(rank, stream, data)
            else:
                for line in lines.feed(data) if data else lines.end():
                    self._put(rank, stream, line)
            if not data:
                self._open_streams -= 1
                self._unregister(fd)

        return read

    def _on_launcher_output(self, stream: int, lines: Lines) -> Callable[[int], None]:
        labels = self.command.labels

        def put(line: bytes) -> None:
            if not self.command.local:
                self._heed(line.decode(errors="replace"))
            self._put(*(read_label(labels, stream, line) if labels else (-1, stream, line)))

        def read(fd: int) -> None:
            data = _read(fd)
            if data is None:
                return
            if not labels and not self._whole_lines:
                self._put(-1, stream, data)
            else:
                for line in lines.feed(data) if data else lines.end():
                    put(line)
            if not data:
                self._open_streams -= 1
                self._unregister(fd)

        return read

    def _heed(self, said: str) -> None:
        """Learn from srun that a rank failed; srun itself ends the others."""
        failure = _SRUN_FAILURE.match(said)
        if failure:
            code = int(failure[2]) if failure[2] else -_SIGNALS.get(failure[3].strip(), 0)
            if code:
                self._fail(int(failure[1]), code, _TERM_GRACE_S)

    def _put(self, rank: int, stream: int, data: bytes) -> None:
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
            self._end_after(0.0)
        elif number == signal.SIGINT:
            again, self._interrupted = self._interrupted == number, number
            self._ask_launcher(number)
            self._end_after(0.0 if again else _INTERRUPT_GRACE_S)
        else:
            self._send(number) if self.ranks else self._ask_launcher(number)
            if number == signal.SIGTERM:
                self._interrupted = self._interrupted or number
                self._stages = self._stages or self._stages_after(_TERM_GRACE_S)

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
        return [(at, ask), (at + _KILL_GRACE_S, force)]

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
        self._kill_ranks_once_told()
        # Grandchildren may keep the pipes open for ever: read on only while there is something.
        until = time.monotonic() + 1.0
        while self._open_streams and time.monotonic() < until and self._turn(0.05):
            pass
        for key in list(self._selector.get_map().values()):
            if key.fd != self._wake_read:
                self._unregister(key.fd)

    def _kill_ranks_once_told(self) -> None:
        until = time.monotonic() + 0.2
        while any(each.code is None for each in self.ranks.values()):
            left = until - time.monotonic()
            if left <= 0:
                break
            self._turn(left)
        self._kill_ranks()


def make_directory() -> str:
    """Return a new folder of our own for a job's pipes and files; `remove_directory` removes it."""
    return tempfile.mkdtemp(prefix="hpcdist-")


def remove_directory(directory: str) -> None:
    """Remove the folder of a job, with what is in it."""
    shutil.rmtree(directory, ignore_errors=True)


def _read(fd: int) -> bytes | None:
    """Read a piece: b"" at the end, None where there is nothing yet."""
    try:
        return os.read(fd, _PIECE)
    except BlockingIOError:
        return None


def _drain(fd: int) -> bytes:
    return _read(fd) or b""
