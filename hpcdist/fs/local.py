"""`LocalFS`: the files of this machine, and what is mounted on it."""

from __future__ import annotations

import builtins
import os
import shutil
from typing import IO, Any, final

from hpcdist.errors import FSFileExistsError, FSFileNotExistsError
from hpcdist.fs.base import FileSystem


@final
class LocalFS(FileSystem):
    """The files of this machine. Links to folders are removed and moved, not followed.

    Example:
        >>> import tempfile
        >>> from hpcdist.fs import LocalFS
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fs = LocalFS()
        ...     fs.mkdirs(f"{folder}/runs")
        ...     fs.touch(f"{folder}/notes")
        ...     print(fs.ls_dir(folder))
        (['runs'], ['notes'])

    """

    def __repr__(self) -> str:
        return "LocalFS()"

    def ls_dir(self, fs_path: str) -> tuple[list[str], list[str]]:
        if not os.path.isdir(fs_path):
            return [], []
        with os.scandir(fs_path) as entries:
            found = sorted((entry.name, entry.is_dir()) for entry in entries)
        return [name for name, folder in found if folder], [n for n, folder in found if not folder]

    def is_file(self, fs_path: str) -> bool:
        return os.path.isfile(fs_path)

    def is_dir(self, fs_path: str) -> bool:
        return os.path.isdir(fs_path)

    def is_exist(self, fs_path: str) -> bool:
        return os.path.exists(fs_path)

    def mkdirs(self, fs_path: str) -> None:
        if os.path.isfile(fs_path):
            raise FSFileExistsError(f"{fs_path} is a file, so no folder can have this name")
        os.makedirs(fs_path, exist_ok=True)

    def delete(self, fs_path: str) -> None:
        if os.path.isdir(fs_path) and not os.path.islink(fs_path):
            shutil.rmtree(fs_path)
        elif os.path.lexists(fs_path):
            os.unlink(fs_path)

    def mv(
        self, src_path: str, dst_path: str, overwrite: bool = False, test_exists: bool = False
    ) -> None:
        """Give a file or a folder another name.

        Args:
            src_path: what to move.
            dst_path: its new name; onto itself nothing happens.
            overwrite: remove what has this name.
            test_exists: of no effect: what is missing, or in the way, is always an error.

        Raises:
            FSFileNotExistsError: there is nothing to move.
            FSFileExistsError: something has this name, and `overwrite` is False.

        """
        super().mv(src_path, dst_path, overwrite, test_exists)

    def rename(self, fs_src_path: str, fs_dst_path: str) -> None:
        if not os.path.lexists(fs_src_path):
            raise FSFileNotExistsError(f"{fs_src_path} is not there, so it cannot be renamed")
        move = shutil.move if _crosses(fs_src_path, fs_dst_path) else os.rename
        move(fs_src_path, fs_dst_path)

    def open(self, fs_path: str, mode: str = "rb") -> IO[Any]:
        return builtins.open(fs_path, mode)

    def upload(
        self, local_path: str, fs_path: str, multi_processes: int = 5, overwrite: bool = False
    ) -> None:
        if not os.path.exists(local_path):
            raise FSFileNotExistsError(f"{local_path} is not there, so it cannot be copied")
        if os.path.exists(fs_path) and os.path.samefile(local_path, fs_path):
            return
        if os.path.lexists(fs_path):
            if not overwrite:
                raise FSFileExistsError(
                    f"{fs_path} is there already; pass overwrite=True to replace it"
                )
            self.delete(fs_path)
        copy = shutil.copytree if os.path.isdir(local_path) else shutil.copy2
        copy(local_path, fs_path)

    def download(
        self, fs_path: str, local_path: str, multi_processes: int = 5, overwrite: bool = False
    ) -> None:
        self.upload(fs_path, local_path, multi_processes, overwrite)

    def need_upload_download(self) -> bool:
        return False

    def size(self, fs_path: str) -> int:
        if not os.path.isfile(fs_path):
            raise FSFileNotExistsError(f"{fs_path} is no file")
        return os.path.getsize(fs_path)

    def _is_same(self, one: str, other: str) -> bool:
        return os.path.exists(other) and os.path.samefile(one, other)

    def _is_inside(self, one: str, other: str) -> bool:
        inner, outer = os.path.abspath(one), os.path.abspath(other)
        return os.path.commonpath([inner, outer]) == outer


def _crosses(source: str, target: str) -> bool:
    """Return whether two paths are on different file systems, where no rename is possible."""
    above = os.path.dirname(os.path.abspath(target))
    return os.path.isdir(above) and os.lstat(source).st_dev != os.stat(above).st_dev
