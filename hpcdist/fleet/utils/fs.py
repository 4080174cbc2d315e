"""Paddle's ``fleet.utils.fs``: file systems, and their errors."""

from hpcdist.errors import (
    ExecuteError as ExecuteError,
    FSFileExistsError as FSFileExistsError,
    FSFileNotExistsError as FSFileNotExistsError,
    FSTimeOut as FSTimeOut,
)
from hpcdist.fs import FileSystem, HDFSClient as HDFSClient, LocalFS as LocalFS

FS = FileSystem

__all__ = [
    "FS",
    "ExecuteError",
    "FSFileExistsError",
    "FSFileNotExistsError",
    "FSTimeOut",
    "HDFSClient",
    "LocalFS",
]
