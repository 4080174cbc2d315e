"""Packed files: which they are by the ends of their names, and what unpacks them."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, final

from hpcdist.errors import DatasetError, UsageError
from hpcdist.named_tuple import NamedTuple

FAULTS = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""What a file that cannot be unpacked raises."""


def _by_arrow(codec: str, end: str, command: str) -> Callable[[BinaryIO], Any]:
    def unpack(file: BinaryIO) -> Any:
        try:
            import pyarrow
        except ImportError as error:
            raise UsageError(
                f"{end} files need pyarrow: pip install 'hpcdist[data]', or pass "
                f"pipe_command={command!r}"
            ) from error
        return io.BufferedReader(
            pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), codec)
        )

    return unpack


@final
class _Streams(io.RawIOBase):
    """What one packed stream after the other holds, as some programs pack a file in parts.

    Python's own readers take what cannot be unpacked after the first stream for the end. Zeros
    between streams are padding. Seeking backward unpacks from the beginning again.
    """

    def __init__(self, file: BinaryIO, make: Callable[[], Any]) -> None:
        self._file, self._make = file, make
        self._begin()

    def _begin(self) -> None:
        self._at, self._part = 0, self._make()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file.seekable()

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            while self.read(io.DEFAULT_BUFFER_SIZE):
                pass
        target = offset if whence == io.SEEK_SET else self._at + offset
        if target < self._at:
            self._file.seek(0)
            self._begin()
        while self._at < target and self.read(min(target - self._at, 1 << 20)):
            pass
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        while not self._part.eof or self._goes_on():
            if self._part.eof:  # a stream of nothing
                continue
            packed = self._file.read(1 << 16) if self._part.needs_input else b""
            if self._part.needs_input and not packed:
                raise EOFError("the file ends within what is packed")
            data = self._part.decompress(packed, len(view))
            if data:
                view[: len(data)] = data
                self._at += len(data)
                return len(data)
        return 0

    def _goes_on(self) -> bool:
        """Begin with the stream after one that has ended; False where there is none."""
        rest = self._part.unused_data.lstrip(b"\0")
        while not rest:
            more = self._file.read(1 << 16)
            if not more:
                return False
            rest = more.lstrip(b"\0")
        self._part = self._make()
        self._part.decompress(rest, 0)  # it keeps them
        return True


def _in_streams(make: Callable[[], Any]) -> Callable[[BinaryIO], Any]:
    return lambda file: io.BufferedReader(_Streams(file, make))


class Packing(NamedTuple):
    """A way to pack files.

    Attributes:
        ends: of their names; the first is the usual one.
        magic: how they begin.
        unpack: returns the unpacked file.
        command: unpacks them for a pipe.

    """

    ends: tuple[str, ...]
    magic: bytes | tuple[bytes, ...]
    unpack: Callable[[BinaryIO], Any]
    command: str


PACKINGS = (
    Packing((".gz", ".tgz"), b"\x1f\x8b", lambda file: gzip.GzipFile(fileobj=file), "gzip -dc"),
    Packing(
        (".bz2", ".tbz2"),
        tuple(b"BZh%d1AY&SY" % level for level in range(1, 10)),
        _in_streams(bz2.BZ2Decompressor),
        "bzip2 -dc",
    ),
    Packing((".xz", ".txz"), b"\xfd7zXZ\0", _in_streams(lzma.LZMADecompressor), "xz -dc"),
    Packing(
        (".zst", ".tzst"), b"\x28\xb5\x2f\xfd", _by_arrow("zstd", ".zst", "zstd -dc"), "zstd -dc"
    ),
    Packing((".lz4",), b"\x04\x22\x4d\x18", _by_arrow("lz4", ".lz4", "lz4 -dc"), "lz4 -dc"),
)
_ALWAYS = PACKINGS[0]
"""Unpacked before the file goes through a command; the others go to the command as they are."""
_MOST_MAGIC = 10


def packing_of(path: str, *, piped: bool) -> Packing | None:
    """Return how a file is packed that is to be unpacked, by its name."""
    name = path.lower()
    found = next((each for each in PACKINGS if name.endswith(each.ends)), None)
    return None if piped and found is not _ALWAYS else found


def refuse_packed(file: BinaryIO, name: str) -> None:
    """Raise a `DatasetError` if a file of lines is packed, though its name does not say so."""
    at = file.tell()
    file.seek(0)
    begin = file.read(_MOST_MAGIC)
    file.seek(at)
    for each in PACKINGS:
        if begin.startswith(each.magic):
            raise DatasetError(
                f"{name}: is packed, as {each.ends[0]} files are, but its name does not end so; "
                f"rename it, or pass pipe_command={each.command!r}"
            )
