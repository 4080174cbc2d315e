"""What the ranks print, on its way to the console and to one log file per rank.

`Lines` makes whole lines of pieces. `read_label` takes off the label that a launcher put before a
line, by the table `LABELS`. `Console` is where lines end: labelled, unlabelled or byte for byte.
"""

from __future__ import annotations

import os
import re
import select
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from hpcdist.named_tuple import NamedTuple

# A line longer than this is passed on in pieces.
_LONGEST = 1 << 20

# How the launchers label a line: the rank, and the stream where they tell it.
LABELS = {
    "srun": re.compile(rb" *(?P<rank>\d+): ?"),
    "hydra": re.compile(rb"\[(?P<rank>\d+)\] ?"),
    "openmpi": re.compile(rb"\[\d+,(?P<rank>\d+)\]<std(?P<stream>out|err)>: ?"),
}

ABORTED = b"MPI_ABORT was invoked on rank"
"""What Open MPI prints at an abort."""

_RULE = b"-" * 70

Write = Callable[[int, int, bytes], None]
"""Takes the rank (-1 for the launcher itself), 1 or 2 for the stream, and bytes."""


class Labelled(NamedTuple):
    """A line without the launcher's label; rank -1 where it had none."""

    rank: int
    stream: int
    text: bytes


class Lines:
    """Cuts a stream of pieces into whole lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        r"""Take the next piece and return the lines that are now whole, with their ends.

        Args:
            piece: bytes as they came.

        Example:
            >>> lines = Lines()
            >>> lines.feed(b"a"), lines.feed(b"b\nc")
            ([], [b'ab\n'])

        """
        whole = (self._rest + piece).splitlines(keepends=True) if piece else []
        # splitlines also cuts at lone carriage returns, which progress bars end their lines with.
        if whole and not whole[-1].endswith(b"\n") and len(whole[-1]) < _LONGEST:
            self._rest = whole.pop()
        elif whole:
            self._rest = b""
        return whole

    def end(self) -> list[bytes]:
        """Return what is left when the stream has ended, made a line."""
        rest, self._rest = self._rest, b""
        return [rest + b"\n"] if rest else []


def in_lines(put: Callable[[bytes], None]) -> Callable[[bytes], None]:
    r"""Return a function that takes pieces, b"" at the end, and gives whole lines to `put`.

    Args:
        put: takes a line.

    Example:
        >>> take = in_lines(print)
        >>> take(b"a"), take(b"")
        b'a\n'
        (None, None)

    """
    lines = Lines()

    def take(piece: bytes) -> None:
        for line in lines.feed(piece) if piece else lines.end():
            put(line)

    return take


def in_lines_without_banner(put: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Like `in_lines`, of a launcher; leaves out what Open MPI says of an abort, between two rules.

    It says nothing that the rank has not said, and where help texts are missing, that they are.

    Args:
        put: takes a line.

    """
    held: list[bytes] = []

    def release() -> None:
        if not any(word in line for line in held for word in (ABORTED, b"mpi-abort")):
            for line in held:
                put(line)
        held.clear()

    def hold(line: bytes) -> None:
        is_rule = line.startswith(_RULE)
        if not held and not is_rule:
            put(line)
            return
        held.append(line)
        if is_rule and len(held) > 1:
            release()

    take = in_lines(hold)

    def take_all(piece: bytes) -> None:
        take(piece)
        if not piece:
            release()

    return take_all


def read_label(launcher: str, stream: int, line: bytes) -> Labelled:
    r"""Return the line without its launcher's label, and what the label said.

    Args:
        launcher: a row of `LABELS`.
        stream: 1 or 2, for labels that do not tell.
        line: a whole line.

    Example:
        >>> read_label("srun", 1, b" 3: hello\n")
        Labelled(rank=3, stream=1, text=b'hello\n')

    """
    match = LABELS[launcher].match(line)
    if match is None:
        return Labelled(-1, stream, line)
    told = match.groupdict().get("stream")
    stream = stream if told is None else (2 if told == b"err" else 1)
    return Labelled(int(match["rank"]), stream, line[match.end() :])


class Console:
    """Writes lines to our own output, and to `workerlog.N` files where a folder is given.

    With `label` each line begins with its rank, as in `[2] text`.
    """

    def __init__(self, label: bool, log_dir: str | None = None, overwrite: bool = False) -> None:
        self._label = label
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._mode = os.O_TRUNC if overwrite else os.O_APPEND
        self._logs: dict[int, int] = {}
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for log in self._logs.values():
            os.close(log)
        self._logs.clear()

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Write one line, or a piece where lines are not asked for, of a rank.

        Args:
            rank: whose; -1 for the launcher itself, which gets neither label nor file.
            stream: 1 for output, 2 for errors.
            data: the bytes.

        Raises:
            BrokenPipeError: nobody reads our output any more.

        """
        label = b"[%d] " % rank if self._label and rank >= 0 else b""
        if label and data.endswith(b"\r"):
            data = data[:-1] + b"\n"
        _write_all(stream, label + data)
        if self._log_dir is not None and rank >= 0:
            _write_all(self._log(self._log_dir, rank), data)

    def _log(self, log_dir: Path, rank: int) -> int:
        if rank not in self._logs:
            flags = os.O_WRONLY | os.O_CREAT | self._mode
            self._logs[rank] = os.open(log_dir / f"workerlog.{rank}", flags, 0o666)
        return self._logs[rank]


def _write_all(fd: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # whoever shares our output has made it so
            select.select([], [fd], [])
