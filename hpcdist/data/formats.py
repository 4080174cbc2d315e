"""`Format`: how the records of a file become `Columns`; `TABLE` has a row for each kind of file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import BinaryIO, cast, final

from hpcdist.data.arrow import read_arrow, read_parquet
from hpcdist.data.bad_records import BadRecord as BadRecord, BadRecords
from hpcdist.data.columns import Columns
from hpcdist.data.lines import newlines_before
from hpcdist.data.npy import read_npy
from hpcdist.data.packed import FAULTS, packing_of, refuse_packed
from hpcdist.data.pipe import piped
from hpcdist.data.slots import Slot as Slot, slots_of as slots_of
from hpcdist.data.source import Settings as Settings, Source
from hpcdist.data.tar import read_tar
from hpcdist.data.text import read_csv, read_jsonl, read_multislot
from hpcdist.errors import DatasetError, UsageError
from hpcdist.fs.urls import file_system, is_url, open as open_url
from hpcdist.named_tuple import NamedTuple


class Kind(NamedTuple):
    """A row of the table."""

    read: Callable[[Source, Settings, BadRecords], Iterator[Columns]]
    has_lines: bool = False
    """Whether records are lines, by whose numbers errors name them."""
    is_stream: bool = False
    """Whether it can be read from the front only: through a command, or unpacked."""
    is_compact: bool = False
    """Whether what it returns keeps no more memory than its rows take."""


TABLE: dict[str, Kind] = {
    "multislot": Kind(read_multislot, has_lines=True, is_stream=True),
    "csv": Kind(read_csv, has_lines=True, is_stream=True),
    "jsonl": Kind(read_jsonl, has_lines=True, is_stream=True),
    "parquet": Kind(read_parquet, is_compact=True),
    "arrow": Kind(read_arrow),
    "npy": Kind(read_npy, is_stream=True),
    "tar": Kind(read_tar, is_stream=True),
}


@final
class Format:
    r"""Reads files of one kind.

    Args:
        name: a row of `TABLE`.
        settings: the columns and the rest.

    Raises:
        UsageError: there is no such kind, or the settings do not go with it.

    Example:
        >>> import io
        >>> from hpcdist.data.formats import open_format
        >>> from hpcdist.data.slots import slots_of
        >>> from hpcdist.data.source import Settings
        >>> lines = open_format("jsonl", Settings(slots_of([("x", "int64", ())])))
        >>> sum(len(records["x"]) for records in lines.read(io.BytesIO(b'{"x": 1}\n{"x": 2}\n')))
        2

    """

    def __init__(self, name: str, settings: Settings) -> None:
        if name not in TABLE:
            raise UsageError(f"format must be one of {', '.join(map(repr, TABLE))}, got {name!r}")
        for field in ("max_line_bytes", "block_bytes"):
            value = getattr(settings, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{field} must be a number of bytes, got {value!r}")
        self.name = name
        self.settings = settings._replace(slots=tuple(settings.slots or ()))
        self.bad = BadRecords(settings.on_bad)
        """What was left out so far."""
        self._kind = TABLE[name]
        if self._is_piped and not self._kind.is_stream:
            raise UsageError(
                f"{name} files are not read from front to back, so they cannot go through "
                f"pipe_command {settings.pipe_command!r}"
            )

    def __repr__(self) -> str:
        return f"Format({self.name!r}, {self.settings})"

    @property
    def is_compact(self) -> bool:
        """Whether what `read` returns keeps no more memory than its rows take."""
        return self._kind.is_compact

    @property
    def _is_piped(self) -> bool:
        return self.settings.pipe_command.strip() not in ("", "cat")

    def can_cut(self, path: str) -> bool:
        """Return whether several ranks can read parts of such a file; a packed file is read by one.

        Args:
            path: of the file.

        """
        return not self._is_piped and packing_of(path, piped=False) is None

    def read(
        self,
        source: BinaryIO | str | os.PathLike[str],
        first_line: int = 1,
        *,
        start: int = 0,
        stop: int | None = None,
        name: str | None = None,
    ) -> Iterator[Columns]:
        """Return the records that begin in bytes `start` to `stop`, some thousands at a time.

        A file whose name ends in .gz is unpacked, then it goes through the `pipe_command`. Without
        one, so are .bz2, .xz, .zst and .lz4; a command gets these as they are.

        Args:
            source: a path, a URL, or an open file.
            first_line: number of the first line, where the source is an open file.
            start: first byte; see `files.deal`.
            stop: behind the last byte; None: the end.
            name: what messages call an open file.

        Raises:
            DatasetError: the file cannot be read, its command has failed, or a record is
                malformed and ``on_bad`` is "raise".

        """
        path = os.fsdecode(source) if isinstance(source, (str, os.PathLike)) else None
        name = name or path or str(getattr(source, "name", "an open file"))
        if path is not None and not self.can_cut(path):
            if start:
                return
            stop = None
        with ExitStack() as stack:
            try:
                file, local = self._opened(source, path, name, stack)
                if self.settings.allow_empty and _is_empty(file):
                    return
                number = partial(self._line_at, path, start) if start else partial(int, first_line)
                piece = Source(file, name, start, stop, local, number)
                yield from self._kind.read(piece, self.settings, self.bad)
            except FAULTS as error:
                raise DatasetError(f"{name}: {type(error).__name__}: {error}") from error

    def _opened(
        self,
        source: BinaryIO | str | os.PathLike[str],
        path: str | None,
        name: str,
        stack: ExitStack,
    ) -> tuple[BinaryIO, str | None]:
        """Return what the reader reads, and the path of a local file that it may read as it is."""
        local = file_system(path)[1] if path is not None and not is_url(path) else None
        packing = None if path is None else packing_of(path, piped=self._is_piped)
        if self._is_piped and local is not None and packing is None:
            return stack.enter_context(self._through(local, name)), None
        if path is None:
            file = cast(BinaryIO, source)
        else:
            file = cast(BinaryIO, stack.enter_context(open_url(path, "rb")))
            if packing is not None:
                file, local = cast(BinaryIO, stack.enter_context(packing.unpack(file))), None
        if self._is_piped:
            return stack.enter_context(self._through(file, name)), None
        if packing is None and self._kind.has_lines and file.seekable():
            refuse_packed(file, name)
        if not self._kind.is_stream and not file.seekable():
            raise DatasetError(
                f"{name}: {self.name} files are not read from front to back, so this one cannot "
                "be unpacked while it is read; unpack it first"
            )
        return file, local

    def _through(self, source: BinaryIO | str, name: str) -> BinaryIO:
        settings = self.settings
        return piped(
            settings.pipe_command,
            source,
            name=name,
            timeout=settings.pipe_timeout,
            allow_empty=settings.allow_empty,
        )

    def _line_at(self, path: str | None, start: int) -> int:
        """Return the number of the first line that begins at `start` or behind it."""
        if path is None or not self._kind.has_lines:
            return 1
        with open_url(path, "rb") as file:
            before = newlines_before(cast(BinaryIO, file), start)
            file.seek(start - 1)
            return before + 1 + bool(file.read(1) != b"\n")


def _is_empty(file: BinaryIO) -> bool:
    """Return whether nothing comes from a file; some that can be sought do not tell."""
    peek = getattr(file, "peek", None)
    return peek is not None and not peek(1)


def open_format(name: str, settings: Settings | None = None) -> Format:
    """Return the reader for files of a kind: a row of `TABLE`. Local.

    Args:
        name: the kind: ``"multislot"``, ``"csv"``, ``"jsonl"``, ``"parquet"``, ``"arrow"``,
            ``"npy"`` or ``"tar"``.
        settings: the columns and the rest; None for the defaults.

    Raises:
        UsageError: there is no such kind, or the settings do not go with it.

    Example:
        >>> from hpcdist.data.formats import open_format
        >>> open_format("jsonl").name
        'jsonl'

    """
    return Format(name, settings or Settings())
