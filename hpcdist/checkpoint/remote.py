"""Folders of checkpoints on other file systems, by URL: what `storage` does with files of this one.

Data files are written here and uploaded under their own names, then the manifest, which a store
puts in the place of the old one at once. A file system that cannot (HDFS) gets the new one beside,
then loses the old one: between these two moments the new one is the one that counts. There are no
locks: of two jobs that save at once both checkpoints are whole, and the one that ends last stands;
what a killed save has uploaded stays until its folder is removed.
"""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from typing import final

from hpcdist.checkpoint.blocks import write_file
from hpcdist.checkpoint.claim import Claim
from hpcdist.fs import FileSystem, file_system, is_url as is_url

_NEW = re.compile(r"checkpoint\.json\.[0-9a-f]{12}\.new")


def join(url: str, name: str) -> str:
    """Return the URL of an entry of a folder."""
    return f"{url.rstrip('/')}/{name}"


def folders(url: str) -> list[str]:
    """Return the names of the folders in a folder."""
    fs, inside = file_system(url)
    return fs.ls_dir(inside)[0]


def files(url: str) -> list[str]:
    """Return the names of the files in a folder."""
    fs, inside = file_system(url)
    return fs.ls_dir(inside)[1]


def manifest_of(url: str, name: str) -> str | None:
    """Return what the manifest in a folder is called: `name`, unless it is just being replaced."""
    found = files(url)
    if name in found:
        return name
    return next((each for each in found if _NEW.fullmatch(each)), None)


def content(url: str, name: str, most: int) -> bytes:
    """Return the bytes of a file, `most` at most."""
    fs, inside = file_system(join(url, name))
    with fs.open(inside, "rb") as file:
        return bytes(file.read(most))


def claim(url: str) -> Claim:
    """Make a folder, unless it is there; return what names of a new checkpoint begin with."""
    fs, inside = file_system(url)
    fs.mkdirs(inside)
    return Claim(url, secrets.token_hex(6), -1)


def write(
    url: str, name: str, first: bytes, contents: Iterable[tuple[int, Iterable[memoryview]]]
) -> list[bytes]:
    """Write a new file; return the checksums of its contents, as `write_file` does."""
    with tempfile.TemporaryDirectory(prefix="hpcdist-") as here:
        path = os.path.join(here, name)
        sums = write_file(path, first, contents)
        fs, inside = file_system(join(url, name))
        fs.upload(path, inside)
    return sums


def commit(mine: Claim, name: str, manifest: bytes) -> None:
    """Put a manifest in the place of the old one; remove those that killed saves have left."""
    fs, inside = file_system(mine.folder)
    if not fs.replaces_by_rename():
        _put(fs, join(inside, name), manifest)
        return
    new = join(inside, f"{name}.{mine.token}.new")
    _put(fs, new, manifest)
    fs.mv(new, join(inside, name), overwrite=True)
    remove(mine.folder, [each for each in files(mine.folder) if _NEW.fullmatch(each)])


def _put(fs: FileSystem, path: str, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(prefix="hpcdist-") as file:
        file.write(data)
        file.flush()
        fs.upload(file.name, path, overwrite=True)


def remove(url: str, names: Iterable[str]) -> None:
    """Remove files, as far as possible."""
    fs, inside = file_system(url)
    for name in names:
        with suppress(OSError):
            fs.delete(join(inside, name))


def remove_folder(url: str) -> None:
    """Remove a folder that has become empty, as far as possible."""
    fs, inside = file_system(url)
    with suppress(OSError):
        if fs.ls_dir(inside) == ([], []):
            fs.delete(inside)


@final
class RemoteFile:
    """A data file, open for reading."""

    def __init__(self, url: str) -> None:
        fs, inside = file_system(url)
        self.size = fs.size(inside)
        self._file = fs.open(inside, "rb")

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Read from byte `offset` on; return how many bytes there were."""
        self._file.seek(offset)
        data = self._file.read(memory.nbytes)
        memory[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close it."""
        self._file.close()
