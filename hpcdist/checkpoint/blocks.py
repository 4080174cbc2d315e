"""Data files: runs of bytes with a checksum for each block, written and read in place.

Each block is checked while it is in the processor's cache, so the checksum costs little beside the
copy: XXH3 of 64 bits makes 20 GB/s where CRC32 makes 1. A part of a piece is read without the rest,
but for the blocks that it begins or ends in.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, final

import xxhash

from hpcdist.checkpoint.boxes import Box
from hpcdist.errors import CheckpointError
from hpcdist.named_tuple import NamedTuple

BLOCK = 1 << 20
"""Bytes per checksum."""

CHECKSUM = "xxh3_64"
"""What the manifest calls the checksum; 8 bytes, little-endian, per block."""

checksum = xxhash.xxh3_64_intdigest

_OPEN = 64
"""So many data files are open at a time: a process may have few, and ranks have saved many."""

Progress = Callable[[int], Any]
"""Is told how many bytes have just been read or written."""


class Piece(NamedTuple):
    """A box of an array in C order, in a file: a number of the manifest, and an offset in bytes."""

    file: int
    offset: int
    box: Box
    checksums: bytes


def write_file(
    path: str, first: bytes, contents: Iterable[tuple[int, Iterable[memoryview]]]
) -> list[bytes]:
    """Write a new file and bring it to disk; return the checksums of each of its contents.

    Args:
        path: a file that does not exist.
        first: the bytes it begins with.
        contents: where something begins in the file, and its blocks: all but the last one of
            `BLOCK` bytes.

    Raises:
        OSError: it cannot be written; there may be a part of it.

    """
    found = []
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW) as fd:
        write_at(fd, memoryview(first), 0)
        for offset, blocks in contents:
            sums = bytearray()
            for block in blocks:
                sums += _PACK(checksum(block))
                write_at(fd, block, offset)
                offset += block.nbytes
            found.append(bytes(sums))
        os.fsync(fd)
    return found


def blocks_of(memory: memoryview) -> Iterator[memoryview]:
    """Cut memory into blocks; that of an empty array has none."""
    for start in range(0, memory.nbytes, BLOCK):
        yield memory[start : start + BLOCK]


_PACK = struct.Struct("<Q").pack


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` to an open file, from byte `offset` on."""
    while data.nbytes:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


@contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    """Open a file for the block; errors name it."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield fd
    except OSError as error:
        error.filename = error.filename or path
        raise
    finally:
        os.close(fd)


def open_regular(path: str) -> int:
    """Open a file for reading; return its descriptor.

    Anything else than a file of its own (a link, a FIFO, a device) could lead elsewhere, or let
    the one who opens it wait for ever.

    Raises:
        CheckpointError: it is not a regular file.
        OSError: it cannot be opened.

    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    _check_regular(path, os.lstat(path).st_mode)  # opening a device can change it
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise CheckpointError(_NOT_REGULAR % path) from error
        raise
    try:
        _check_regular(path, os.fstat(fd).st_mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


_NOT_REGULAR = (
    "%s is a link or a device, not a file: it was not opened; put the file itself there, or load "
    "another checkpoint"
)


def _check_regular(path: str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise CheckpointError(_NOT_REGULAR % path)


@final
class LocalFile:
    """A data file of this machine, open for reading."""

    def __init__(self, path: str) -> None:
        self._fd = open_regular(path)
        self.size = os.fstat(self._fd).st_size

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Read from byte `offset` on; return how many bytes there were."""
        return os.preadv(self._fd, [memory], offset)

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)


class DataFile(Protocol):
    """What `Files` reads from, wherever it lies."""

    size: int

    def read_into(self, memory: memoryview, offset: int, /) -> int:
        """Read from byte `offset` on; return how many bytes there were."""

    def close(self) -> None:
        """Close it."""


def _read_at(file: DataFile, offset: int, nbytes: int) -> bytes:
    """Return bytes of a file, fewer where it ends."""
    memory, done = memoryview(bytearray(nbytes)), 0
    while done < nbytes and (got := file.read_into(memory[done:], offset + done)):
        done += got
    return bytes(memory[:done])


@final
class Files:
    """The data files of a checkpoint in a folder, open for reading until `close`."""

    def __init__(
        self,
        folder: str,
        files: Iterable[tuple[str, int]],
        progress: Progress | None = None,
        open_file: Callable[[str], DataFile] = LocalFile,
    ) -> None:
        self._folder = folder
        self._files = list(files)
        self._progress = progress
        self._open_file = open_file
        self._open: dict[int, DataFile] = {}
        self._scratch = memoryview(bytearray(BLOCK))
        self._in_scratch: tuple[int, int] | None = None
        """File and offset of the block that is there."""

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def head(self, number: int) -> bytes:
        """Return the header of a file, which has no checksum; as much of it as there is."""
        file = self._file(number)
        length = int.from_bytes(_read_at(file, 0, 8), "little")
        return _read_at(file, 8, min(length, file.size))

    def path(self, number: int) -> str:
        """Return where a file is."""
        return os.path.join(self._folder, self._files[number][0])

    def measure(self, numbers: Iterable[int]) -> None:
        """Compare the sizes of these files with what was saved, before memory is taken for them.

        Raises:
            CheckpointError: one is missing, of another size, or no regular file.

        """
        for number in numbers:
            self._file(number)

    def read(self, name: str, piece: Piece, nbytes: int) -> Iterator[memoryview]:
        """Read a piece of `nbytes` bytes block by block; the next one overwrites what is given.

        Raises:
            CheckpointError: the file is missing, or too short, or a checksum differs.

        """
        for number in range(-(-nbytes // BLOCK)):
            block = self.block(name, piece, nbytes, number)
            yield block
            if self._progress is not None:
                self._progress(block.nbytes)

    def block(
        self, name: str, piece: Piece, nbytes: int, number: int, into: memoryview | None = None
    ) -> memoryview:
        """Read one block of a piece of `nbytes` bytes, and compare it with its checksum.

        It lies in `into`, or where the next block will overwrite it; the last one of these is not
        read again.

        Raises:
            CheckpointError: the file is missing, or too short, or the checksum differs.

        """
        begin = number * BLOCK
        where = (piece.file, piece.offset + begin)
        block = self._scratch[: min(BLOCK, nbytes - begin)] if into is None else into
        if into is not None:
            self._read_block(block, name, piece, number)
        elif where != self._in_scratch:
            self._in_scratch = None
            self._read_block(block, name, piece, number)
            self._in_scratch = where
        return block

    def _read_block(self, block: memoryview, name: str, piece: Piece, number: int) -> None:
        file, offset, done = self._file(piece.file), piece.offset + number * BLOCK, 0
        while done < block.nbytes:
            got = file.read_into(block[done:], offset + done)
            if got == 0:
                raise CheckpointError(self._too_short(piece.file, offset + done))
            done += got
        if _PACK(checksum(block)) != piece.checksums[number * 8 : number * 8 + 8]:
            raise CheckpointError(
                f"{self.path(piece.file)} is damaged: its bytes {offset} to "
                f"{offset + block.nbytes - 1}, of {name!r}, are not those that were saved; load "
                "another checkpoint"
            )

    def _file(self, file: int) -> DataFile:
        if file not in self._open:
            if len(self._open) >= _OPEN:
                self._open.pop(next(iter(self._open))).close()
            path = self.path(file)
            with self._naming(path):
                self._open[file] = self._open_file(path)
            self._check_size(file, self._open[file].size)
        return self._open[file]

    @contextmanager
    def _naming(self, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path} is missing: the checkpoint is not complete; bring the file back, or load "
                "another checkpoint"
            ) from error

    def _check_size(self, file: int, size: int) -> None:
        if size != self._files[file][1]:
            raise CheckpointError(self._too_short(file, size))

    def _too_short(self, file: int, size: int) -> str:
        return (
            f"{self.path(file)} is damaged: it has {size} bytes, but {self._files[file][1]} were "
            "saved; load another checkpoint"
        )
