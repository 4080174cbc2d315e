"""Which file system a path or URL means: ``/data/x``, ``s3://bucket/x``, ``webhdfs://host:9870/x``."""

from __future__ import annotations

import os
import re
from typing import IO, Any

from hpcdist.errors import UsageError
from hpcdist.fs.base import FileSystem
from hpcdist.fs.hdfs import HDFSClient
from hpcdist.fs.local import LocalFS
from hpcdist.fs.remote import RemoteFS, parts_of

_URL = re.compile(r"([a-z][a-z0-9+.-]+)://(.*)", re.IGNORECASE | re.DOTALL)
TIME_OUT_MS = 300_000
"""For so long a connection that fails is tried again."""

_HADOOP = ("hdfs", "webhdfs", "swebhdfs")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL of a file system that is not this machine's.

    Args:
        path: what is looked at; nothing is opened.

    Example:
        >>> from hpcdist import fs
        >>> fs.is_url("s3://bucket/day.csv"), fs.is_url("/data/day.csv")
        (True, False)

    """
    match = _URL.fullmatch(os.fsdecode(path))
    return match is not None and match[1].lower() not in ("file", "local")


def file_system(path: str | os.PathLike[str]) -> tuple[FileSystem, str]:
    """Return the file system of a path or a URL, and the path in it.

    Credentials come from where the library of a store looks for them (such as the variables and
    files of AWS for s3), never from the URL.

    Args:
        path: a path of this machine, or a URL such as ``s3://bucket/x``.

    Raises:
        UsageError: fsspec does not know the protocol, a package for it is missing, or the URL has
            a password or lacks a host.

    Example:
        >>> import tempfile
        >>> from hpcdist import fs
        >>> system, path = fs.file_system(tempfile.gettempdir())
        >>> system.is_dir(path)
        True

    """
    text = os.fsdecode(path)
    match = _URL.fullmatch(text)
    if match is None or not is_url(text):
        return LocalFS(), match[2] if match else text
    protocol, rest = match[1].lower(), match[2]
    if protocol not in _HADOOP:
        options, inside = parts_of(protocol, text)
        return RemoteFS(protocol, time_out_s=TIME_OUT_MS / 1e3, **options), inside
    host, slash, inside = rest.partition("/")
    if not host:
        raise UsageError(f"{text!r} names no host; write {protocol}://host:port/path")
    return HDFSClient("", {"fs.default.name": f"{protocol}://{host}"}, TIME_OUT_MS), slash + inside


def open(path: str | os.PathLike[str], mode: str = "rb") -> IO[Any]:
    """Open the file at a path or a URL, as Python's `open` does.

    Args:
        path: a path of this machine, or a URL such as ``s3://bucket/x``.
        mode: as in Python's `open`.

    Example:
        >>> import os, tempfile
        >>> from hpcdist import fs
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with fs.open(os.path.join(folder, "notes.txt"), "w") as file:
        ...         _ = file.write("as to any file")

    """
    found, inside = file_system(path)
    return found.open(inside, mode)
