"""`RemoteFS`: any file system that `fsspec` knows: object stores, HDFS, SSH and others.

A connection that fails is tried again until the time limit; what a file system refuses is not.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from secrets import token_hex
from typing import IO, Any, TypeVar, final

from hpcdist.errors import (
    FSFileExistsError,
    FSFileNotExistsError,
    FSShellCmdAborted,
    FSTimeOut,
    UsageError,
)
from hpcdist.fs.base import FileSystem

T = TypeVar("T")


class _DeclinedError(FSShellCmdAborted):
    """A file system answered, but did nothing, or cannot do it."""


_FINAL = (
    _DeclinedError,
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
)
"""Answers, which asking again does not change."""


class Fsspec(FileSystem):
    """A file system of fsspec; what it is, and how long it is waited for, is told by `_begin`."""

    _fs: Any
    _time_out_s: float
    _interval_s: float
    _whole_by_rename: bool

    def _begin(
        self, fs: Any, time_out_s: float, interval_s: float, *, whole_by_rename: bool
    ) -> None:
        self._fs = fs
        self._time_out_s, self._interval_s = time_out_s, interval_s
        self._whole_by_rename = whole_by_rename

    def ls_dir(self, fs_path: str) -> tuple[list[str], list[str]]:
        found = self._ask("list", fs_path, self._entries)
        folders = sorted(name for name, kind in found if kind == "directory")
        return folders, sorted(name for name, kind in found if kind != "directory")

    def _entries(self, path: str) -> list[tuple[str, str]]:
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        own = self._fs._strip_protocol(path).rstrip("/")
        return [
            (os.path.basename(entry["name"].rstrip("/")), entry["type"])
            for entry in entries
            if self._fs._strip_protocol(entry["name"]).rstrip("/") != own
        ]

    def is_file(self, fs_path: str) -> bool:
        return bool(self._ask("look at", fs_path, lambda path: self._kind(path) == "file"))

    def is_dir(self, fs_path: str) -> bool:
        return bool(self._ask("look at", fs_path, lambda path: self._kind(path) == "directory"))

    def is_exist(self, fs_path: str) -> bool:
        return bool(self._ask("look at", fs_path, lambda path: self._kind(path) is not None))

    def _kind(self, path: str) -> str | None:
        self._fs.invalidate_cache()
        try:
            return str(self._fs.info(path)["type"])
        except (FileNotFoundError, NotADirectoryError):
            return None

    def mkdirs(self, fs_path: str) -> None:
        if self.is_file(fs_path):
            raise FSFileExistsError(f"{fs_path} is a file, so no folder can have this name")
        self._ask("make", fs_path, lambda path: self._fs.makedirs(path, exist_ok=True))

    def delete(self, fs_path: str) -> None:
        def delete(path: str) -> None:
            with suppress(FileNotFoundError):  # an answer was lost, and it is asked for again
                self._fs.rm(path, recursive=True)

        if self.is_exist(fs_path):
            self._ask("remove", fs_path, delete)

    def rename(self, fs_src_path: str, fs_dst_path: str) -> None:
        if not self.is_exist(fs_src_path):
            raise FSFileNotExistsError(f"{fs_src_path} is not there, so it cannot be renamed")
        self._ask("rename", fs_src_path, lambda path: self._move(path, fs_dst_path))

    def _move(self, source: str, target: str) -> None:
        """Rename; where that is copying and removing, file by file: folders are names only."""
        if self._whole_by_rename or self._kind(source) != "directory":
            self._rename(source, target)
            return
        for name in self._files_below(source):
            self._fs.cp_file(_join_path(source, name), _join_path(target, name))
        self._fs.rm(source, recursive=True)

    def _rename(self, source: str, target: str) -> None:
        """Rename, and look for it: fsspec drops WebHDFS's answer that nothing was renamed."""
        self._fs.mv(source, target)
        if self._whole_by_rename and self._kind(target) is None:
            raise _DeclinedError(
                f"the file system has not renamed {source} to {target}; is there a folder for it?"
            )

    def open(self, fs_path: str, mode: str = "rb") -> IO[Any]:
        opened: IO[Any] = self._ask("open", fs_path, lambda path: self._fs.open(path, mode))
        if mode == "rb" and isinstance(opened, io.BytesIO):
            return io.BytesIO(opened.getvalue())  # fsspec's memory gives all readers one position
        return opened

    def size(self, fs_path: str) -> int:
        if not self.is_file(fs_path):
            raise FSFileNotExistsError(f"{fs_path} is no file")
        return int(self._ask("look at", fs_path, lambda path: self._fs.info(path)["size"]))

    def upload(
        self, local_path: str, fs_path: str, multi_processes: int = 5, overwrite: bool = False
    ) -> None:
        if not os.path.exists(local_path):
            raise FSFileNotExistsError(f"{local_path} is not there, so it cannot be uploaded")
        if self.is_exist(fs_path):
            if not overwrite:
                raise FSFileExistsError(
                    f"{fs_path} is there already; pass overwrite=True to replace it"
                )
            if os.path.isdir(local_path):
                self.delete(fs_path)
        if os.path.isdir(local_path):
            self.mkdirs(fs_path)
        pairs = [(one, _join_path(fs_path, rest)) for one, rest in _local_files(local_path)]
        _side_by_side(self._put, pairs, multi_processes)

    def _put(self, local: str, remote: str) -> None:
        """Copy one file so that it is there whole, or not at all."""

        def put(path: str) -> None:
            if not self._whole_by_rename:
                self._fs.put_file(local, path)
                return
            self._fs.makedirs(os.path.dirname(path.rstrip("/")), exist_ok=True)
            part = f"{path}.{token_hex(6)}.part"
            try:
                self._fs.put_file(local, part)
                if self._kind(path) is not None:
                    self._fs.rm(path)
                self._rename(part, path)
            except BaseException:
                if self._kind(part) is not None:
                    self._fs.rm(part)
                raise

        self._ask("upload to", remote, put)

    def download(
        self, fs_path: str, local_path: str, multi_processes: int = 5, overwrite: bool = False
    ) -> None:
        if not self.is_exist(fs_path):
            raise FSFileNotExistsError(f"{fs_path} is not there, so it cannot be downloaded")
        if os.path.lexists(local_path) and not overwrite:
            raise FSFileExistsError(
                f"{local_path} is there already; pass overwrite=True to replace it"
            )
        names = [""] if self.is_file(fs_path) else self._files_below(fs_path)
        if names != [""]:
            os.makedirs(local_path, exist_ok=True)
        pairs = [(_join_path(fs_path, name), os.path.join(local_path, name)) for name in names]
        _side_by_side(self._get, pairs, multi_processes)

    def _files_below(self, folder: str) -> list[str]:
        start = len(self._fs._strip_protocol(folder).rstrip("/")) + 1
        found = self._ask("list", folder, self._fs.find)
        return [self._fs._strip_protocol(each)[start:] for each in found]

    def _get(self, remote: str, local: str) -> None:
        local = local.rstrip("/")
        os.makedirs(os.path.dirname(os.path.abspath(local)), exist_ok=True)
        part = f"{local}.{token_hex(6)}.part"
        try:
            self._ask("download", remote, lambda path: self._fs.get_file(path, part))
            os.replace(part, local)
        finally:
            if os.path.lexists(part):
                os.unlink(part)

    def need_upload_download(self) -> bool:
        return True

    def replaces_by_rename(self) -> bool:
        return self._whole_by_rename

    def _ask(self, verb: str, path: str, ask: Callable[[str], T]) -> T:
        """Ask until there is an answer or the time is over."""
        until = time.monotonic() + self._time_out_s
        while True:
            try:
                with _translated(verb, path):
                    return ask(path)
            except _FINAL:
                raise
            except (OSError, EOFError) as error:
                if time.monotonic() + self._interval_s >= until:
                    raise FSTimeOut(
                        f"could not {verb} {path} within {self._time_out_s:g} s: "
                        f"{type(error).__name__}: {error}. Is {self!r} up, is its address right?"
                    ) from error
                time.sleep(self._interval_s)


@final
class RemoteFS(Fsspec):
    """A file system of fsspec.

    Args:
        fs: one that is made, or the name of its protocol: "s3", "gs", "abfs", "sftp", "memory".
        time_out_s: seconds for which a connection that fails is tried again.
        interval_s: seconds between two tries.
        options: for fsspec, where a name is given.

    Raises:
        UsageError: fsspec does not know the protocol, or what it needs for it is not installed.

    Example:
        >>> from hpcdist.fs import RemoteFS
        >>> fs = RemoteFS("memory")
        >>> with fs.open("/notes/today", "wb") as file:
        ...     _ = file.write(b"hello")
        >>> fs.ls_dir("/notes"), fs.cat("/notes/today")
        (([], ['today']), 'hello')

    """

    def __init__(
        self, fs: Any, *, time_out_s: float = 300.0, interval_s: float = 1.0, **options: Any
    ) -> None:
        if isinstance(fs, str):
            fs = fsspec_of(fs, **options)
        self._begin(fs, time_out_s, interval_s, whole_by_rename=_can_rename(fs))

    def __repr__(self) -> str:
        return f"RemoteFS({type(self._fs).__name__})"


_RENAMING = frozenset(
    ("sftp", "ssh", "smb", "file", "local", "hdfs", "arrow_hdfs", "webhdfs", "webHDFS")
)
"""Protocols of file systems, which rename; others are stores, whose files are there when whole."""

_REFUSED = {
    "ftp": "it has one connection, on which several files cannot travel at once; use sftp, or a "
    "file system that is mounted",
}


def _can_rename(fs: Any) -> bool:
    names = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    return not _RENAMING.isdisjoint(names)


def fsspec_of(protocol: str, **options: Any) -> Any:
    """Return fsspec's file system of a protocol.

    Raises:
        UsageError: there is none, a package is missing, or an option; the message says which.
        FSTimeOut: it is not there.

    """
    _class_of(protocol)
    import fsspec

    try:
        return fsspec.filesystem(protocol, **options)
    except (ImportError, ValueError, TypeError) as error:
        raise UsageError(f"the file system {protocol!r} cannot be used: {error}") from error
    except OSError as error:
        raise FSTimeOut(
            f"no connection to the file system {protocol!r} of {options.get('host', 'no host')}: "
            f"{type(error).__name__}: {error}. Is it up, is its address right?"
        ) from error


def _class_of(protocol: str) -> Any:
    try:
        import fsspec
    except ImportError as error:
        raise UsageError(
            "file systems other than the local one need fsspec: pip install 'hpcdist[fs]'"
        ) from error
    if protocol in _REFUSED:
        raise UsageError(f"the file system {protocol!r} cannot be used: {_REFUSED[protocol]}")
    try:
        return fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise UsageError(f"the file system {protocol!r} cannot be used: {error}") from error


def parts_of(protocol: str, url: str) -> tuple[dict[str, Any], str]:
    """Return the options in a URL for its file system (such as a host), and the path in it.

    Raises:
        UsageError: it has a password, which logs would show; or see `fsspec_of`.

    """
    found = _class_of(protocol)
    options = dict(found._get_kwargs_from_urls(url))
    if options.get("password"):
        shown = url.replace(f":{options['password']}@", ":...@")
        raise UsageError(
            f"{shown!r} has a password, which all who see the URL would know; leave it out, and "
            f"set the environment variable FSSPEC_{protocol.upper()}_PASSWORD, or use a key"
        )
    return options, found._strip_protocol(url) if "host" in options else url


@contextmanager
def _translated(verb: str, path: str) -> Iterator[None]:
    """Give errors of file systems the names that Paddle's users catch."""
    try:
        yield
    except (FSTimeOut, _DeclinedError):
        raise
    except FileNotFoundError as error:
        raise FSFileNotExistsError(f"could not {verb} {path}: it is not there") from error
    except FileExistsError as error:
        raise FSFileExistsError(f"could not {verb} {path}: it is there already") from error
    except NotImplementedError as error:
        raise _DeclinedError(f"could not {verb} {path}: {type(error).__name__}: {error}") from error
    except (ValueError, RuntimeError) as error:
        raise FSShellCmdAborted(
            f"could not {verb} {path}: {type(error).__name__}: {error}"
        ) from error


def _join_path(path: str, rest: str) -> str:
    return f"{path.rstrip('/')}/{rest}" if rest else path


def _local_files(path: str) -> list[tuple[str, str]]:
    """Return the files at and below a path, and their names from there."""
    if os.path.isfile(path):
        return [(path, "")]
    return [
        (os.path.join(folder, name), os.path.relpath(os.path.join(folder, name), path))
        for folder, _, names in sorted(os.walk(path))
        for name in sorted(names)
    ]


def _side_by_side(
    copy: Callable[[str, str], None], pairs: Iterable[tuple[str, str]], at_once: int
) -> None:
    """Copy files, some at a time; the first error ends it when those under way are over."""
    if isinstance(at_once, bool) or not isinstance(at_once, int) or at_once < 1:
        raise UsageError(f"multi_processes must be a number from 1 on, got {at_once!r}")
    with ThreadPoolExecutor(at_once) as pool:
        under_way = [pool.submit(copy, *pair) for pair in pairs]
        try:
            for each in under_way:
                each.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
