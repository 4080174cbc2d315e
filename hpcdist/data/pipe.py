"""`piped`: what a shell command makes of a file, with the command's failure as an error.

The command has a process group of its own, and a watcher beside it that holds one end of a pipe to
this process: when this process ends, however, the watcher sees the pipe close and kills the group.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import shutil
import signal
import subprocess
import threading
from collections import deque
from typing import BinaryIO, cast, final

from hpcdist.errors import DatasetError

_WATCH = 'read -r _; kill -s KILL -- "-$1" 2>/dev/null'
_START = 'read -r _ && { [ -z "$1" ] || exec <"/dev/fd/$1"; } && shift && exec "$@"'
"""A command begins when its watcher is there, so that no death of this process leaves it behind."""
_LAST_LINES, _LINE_CHARS = 5, 500
_EXIT_S = 10.0
"""For so long a command may go on after it has closed its output, where no limit is set."""
_BROKEN_PIPE = 128 + signal.SIGPIPE
"""A part of a pipeline has read enough, such as head, and the part before it has noticed."""


def piped(
    command: str,
    source: BinaryIO | str,
    *,
    name: str = "",
    timeout: float | None = None,
    allow_empty: bool = False,
) -> BinaryIO:
    """Return what `command` writes when it reads `source` from its standard input.

    The command runs in the shell (bash with ``pipefail``, where there is bash). Closing the result
    early ends it.

    Args:
        command: for the shell.
        source: a file of this machine by its path, or what is open; the latter is read by a thread.
        name: what messages call the source.
        timeout: seconds after which a command that has written nothing more has failed; None: no
            limit.
        allow_empty: let the command write nothing at all.

    Raises:
        DatasetError: when it is read: the command has failed, hangs, or writes nothing. The
            message has the last lines of its standard error.

    """
    raw = _Piped(command, source, name or str(source), timeout, allow_empty)
    return cast(BinaryIO, io.BufferedReader(raw, 1 << 20))


@final
class _Piped(io.RawIOBase):
    """The output of a command."""

    def __init__(
        self,
        command: str,
        source: BinaryIO | str,
        name: str,
        timeout: float | None,
        allow_empty: bool,
    ) -> None:
        self._what = f"{name}: pipe_command {command!r}"
        self._timeout, self._allow_empty = timeout, allow_empty
        self._count = 0
        self._feed_error: BaseException | None = None
        bash = shutil.which("bash")
        shell = [bash, "-o", "pipefail", "-c"] if bash else ["/bin/sh", "-c"]
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(source, "rb"))] if isinstance(source, str) else []
            numbers = [file.fileno() for file in files]
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _START, "sh", "".join(map(str, numbers)), *shell, command],
                pass_fds=numbers,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", _WATCH, "sh", str(self._process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")
        if files:
            self._process.stdin.close()
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._threads = [threading.Thread(target=self._listen, daemon=True)]
        if not isinstance(source, str):
            self._threads.append(threading.Thread(target=self._feed, args=(source,), daemon=True))
        for thread in self._threads:
            thread.start()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        if not select.select([output], [], [], self._timeout)[0]:
            raise self._failed(f"has written nothing for {self._timeout:g} s, and was ended")
        data = os.read(output, len(view))
        view[: len(data)] = data
        self._count += len(data)
        if not data:
            self._check_end()
        return len(data)

    def _check_end(self) -> None:
        try:
            code = self._process.wait(self._timeout or _EXIT_S)
        except subprocess.TimeoutExpired:
            raise self._failed("has closed its output, but does not end") from None
        if self._feed_error is not None:
            raise self._failed(
                f"could not be given the file: {type(self._feed_error).__name__}: "
                f"{self._feed_error}"
            ) from self._feed_error
        if code < 0:
            raise self._failed(f"was ended by {signal.Signals(-code).name}")
        if code not in (0, _BROKEN_PIPE):
            raise self._failed(f"ended with exit code {code}")
        if not self._count and not self._allow_empty:
            raise self._failed("has written nothing; pass allow_empty=True if it may")

    def _failed(self, what: str) -> DatasetError:
        self.close()
        tail = "\n".join(self._last_lines)
        said = f". The last it wrote to standard error:\n{tail}" if tail else ""
        return DatasetError(f"{self._what} {what}{said}")

    def _listen(self) -> None:
        """Keep the last lines of standard error."""
        assert self._process.stderr is not None
        while line := self._process.stderr.readline(_LINE_CHARS):
            self._last_lines.append(line.decode("utf-8", "backslashreplace").rstrip())

    def _feed(self, source: BinaryIO) -> None:
        assert self._process.stdin is not None
        try:
            with self._process.stdin as stdin:
                shutil.copyfileobj(source, stdin, 1 << 20)
        except BrokenPipeError:
            pass  # the command has read enough
        except Exception as error:
            self._feed_error = error

    def close(self) -> None:
        """End the command, if it has not ended."""
        if self.closed:
            return
        super().close()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._watcher.kill()
        self._watcher.wait()
        for thread in self._threads:
            thread.join(_EXIT_S)
        for stream in (self._process.stdout, self._process.stderr, self._watcher.stdin):
            if stream is not None:
                stream.close()
