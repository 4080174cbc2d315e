"""What readers of files get: `Settings`, the same for all files, and a `Source`, a piece of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO

from hpcdist.data.slots import Slot
from hpcdist.named_tuple import NamedTuple


class Settings(NamedTuple):
    """What is wanted of the files."""

    slots: tuple[Slot, ...] = ()
    """The columns, `slots_of(use_var)`; none: all that the file has, where it tells."""
    on_bad: str = "raise"
    """What becomes of malformed records: see `BadRecords`."""
    max_line_bytes: int = 64 << 20
    """A longer line is a malformed record. It is never held in memory."""
    block_bytes: int = 4 << 20
    """So much text is read and parsed at a time."""
    pipe_command: str = "cat"
    """A shell command through which each file goes before it is parsed; "cat" and "": none."""
    pipe_timeout: float | None = None
    """Seconds after which a command that writes nothing more has failed; None: no limit."""
    allow_empty: bool = False
    """Allow empty files, and commands that write nothing at all: there are no records then."""
    separator: str = ","
    """Between the fields of csv files."""
    header: bool = True
    """Whether the first line of a csv file has the names of its columns."""


class Source(NamedTuple):
    """The records of an open file that begin in bytes `start` to `stop`."""

    file: BinaryIO
    name: str
    """For messages."""
    start: int = 0
    stop: int | None = None
    """None: the end."""
    path: str | None = None
    """Where it is a file of this machine, read as it is."""
    first_line: Callable[[], int] = lambda: 1
    """Returns the number of the line at `start`."""

    def has(self, begin: int) -> bool:
        """Return whether what begins at this byte is of the piece."""
        return self.start <= begin and (self.stop is None or begin < self.stop)
