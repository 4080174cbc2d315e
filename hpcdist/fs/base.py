"""`FileSystem`: the verbs that every file system understands; they are those of Paddle's fleet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import IO, Any

from hpcdist.errors import FSFileExistsError, FSFileNotExistsError


class FileSystem(ABC):
    """Files and folders somewhere. Paths are text, separated by ``/``.

    Errors are those of Python (`PermissionError`, ...) and, where a path is there or missing
    against the caller's will, `FSFileExistsError` and `FSFileNotExistsError`.
    """

    @abstractmethod
    def ls_dir(self, fs_path: str) -> tuple[list[str], list[str]]:
        """Return the names of the folders and of the files in a folder, sorted; none if missing.

        Args:
            fs_path: the folder.

        """

    @abstractmethod
    def is_file(self, fs_path: str) -> bool:
        """Return whether there is a file of this name.

        Args:
            fs_path: what is asked for.

        """

    @abstractmethod
    def is_dir(self, fs_path: str) -> bool:
        """Return whether there is a folder of this name.

        Args:
            fs_path: what is asked for.

        """

    @abstractmethod
    def mkdirs(self, fs_path: str) -> None:
        """Make a folder and those above it, unless they are there.

        Args:
            fs_path: the folder.

        Raises:
            FSFileExistsError: it is a file.

        """

    @abstractmethod
    def delete(self, fs_path: str) -> None:
        """Remove a file, or a folder with all that is in it, if it is there.

        Args:
            fs_path: what is removed.

        """

    @abstractmethod
    def rename(self, fs_src_path: str, fs_dst_path: str) -> None:
        """Give a file or a folder another name; see `mv` for one that is careful.

        Args:
            fs_src_path: its name.
            fs_dst_path: its new name.

        """

    @abstractmethod
    def open(self, fs_path: str, mode: str = "rb") -> IO[Any]:
        """Open a file, as Python's `open` does.

        Args:
            fs_path: the file.
            mode: as of Python's `open`.

        """

    @abstractmethod
    def upload(
        self, local_path: str, fs_path: str, multi_processes: int = 5, overwrite: bool = False
    ) -> None:
        """Copy a file or a folder of this machine to `fs_path`, several files at a time.

        Args:
            local_path: what is copied.
            fs_path: where to.
            multi_processes: how many files at a time.
            overwrite: replace what is there.

        Raises:
            FSFileNotExistsError: there is nothing to copy.
            FSFileExistsError: there is something already, and `overwrite` is False.

        """

    @abstractmethod
    def download(
        self, fs_path: str, local_path: str, multi_processes: int = 5, overwrite: bool = False
    ) -> None:
        """Copy a file or a folder to this machine, several files at a time.

        Args:
            fs_path: what is copied.
            local_path: where to.
            multi_processes: how many files at a time.
            overwrite: replace what is there.

        Raises:
            FSFileNotExistsError: there is nothing to copy.
            FSFileExistsError: there is something already, and `overwrite` is False.

        """

    @abstractmethod
    def need_upload_download(self) -> bool:
        """Return whether other programs of this machine cannot read its files by name."""

    def replaces_by_rename(self) -> bool:
        """Return whether a file that is there must be removed before another one gets its name.

        Object stores put a new file in the place of an old one at once.
        """
        return True

    def is_exist(self, fs_path: str) -> bool:
        """Return whether there is a file or a folder of this name.

        Args:
            fs_path: what is asked for.

        """
        return self.is_file(fs_path) or self.is_dir(fs_path)

    def list_dirs(self, fs_path: str) -> list[str]:
        """Return the names of the folders in a folder, sorted; none if it is missing.

        Args:
            fs_path: the folder.

        """
        return self.ls_dir(fs_path)[0]

    def upload_dir(self, local_dir: str, dest_dir: str, overwrite: bool = False) -> None:
        """Copy a folder of this machine to `dest_dir`; see `upload`.

        Args:
            local_dir: what is copied.
            dest_dir: where to.
            overwrite: replace what is there.

        """
        self.upload(local_dir, dest_dir, overwrite=overwrite)

    def touch(self, fs_path: str, exist_ok: bool = True) -> None:
        """Make an empty file, unless there is something.

        Args:
            fs_path: the file.
            exist_ok: False: what is there is an error.

        Raises:
            FSFileExistsError: there is something, and `exist_ok` is False.

        """
        if not self.is_exist(fs_path):
            self.open(fs_path, "wb").close()
        elif not exist_ok:
            raise FSFileExistsError(f"{fs_path} is there already; pass exist_ok=True to keep it")

    def mv(
        self,
        fs_src_path: str,
        fs_dst_path: str,
        overwrite: bool = False,
        test_exists: bool = True,
    ) -> None:
        """Give a file or a folder another name.

        Args:
            fs_src_path: what to move.
            fs_dst_path: its new name; onto itself nothing happens.
            overwrite: remove what has this name.
            test_exists: of no effect: what is missing, or in the way, is always an error.

        Raises:
            FSFileNotExistsError: there is nothing to move.
            FSFileExistsError: something has this name, and `overwrite` is False.

        """
        if not self.is_exist(fs_src_path):
            raise FSFileNotExistsError(f"{fs_src_path} is not there, so it cannot be moved")
        if self._is_same(fs_src_path, fs_dst_path):
            return
        if self._is_inside(fs_dst_path, fs_src_path) or self._is_inside(fs_src_path, fs_dst_path):
            raise FSFileExistsError(f"{fs_src_path} and {fs_dst_path} lie one inside the other")
        if self.is_exist(fs_dst_path):
            if not overwrite:
                raise FSFileExistsError(
                    f"{fs_dst_path} is there already; pass overwrite=True to replace it"
                )
            self.delete(fs_dst_path)
        self.rename(fs_src_path, fs_dst_path)

    def cat(self, fs_path: str | None = None) -> str:
        """Return the text of a file, read as UTF-8; "" if there is none.

        Args:
            fs_path: the file; None: "" is returned.

        """
        if fs_path is None or not self.is_file(fs_path):
            return ""
        with self.open(fs_path, "rb") as file:
            return str(file.read(), "utf-8")

    def list_files_info(self, path_list: list[str]) -> list[dict[str, Any]]:
        """Return the path and the size in bytes of each file.

        Args:
            path_list: the files.

        """
        return [{"path": path, "size": self.size(path)} for path in path_list]

    @abstractmethod
    def size(self, fs_path: str) -> int:
        """Return how many bytes a file has.

        Args:
            fs_path: the file.

        Raises:
            FSFileNotExistsError: there is none.

        """

    def _is_same(self, one: str, other: str) -> bool:
        return one.rstrip("/") == other.rstrip("/")

    def _is_inside(self, one: str, other: str) -> bool:
        return one.rstrip("/").startswith(other.rstrip("/") + "/")
