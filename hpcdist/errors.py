"""Every exception and warning hpcdist raises on purpose.

`HpcdistError` is the root. A message says what happened, what was got and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any


class HpcdistError(RuntimeError):
    """Base of all hpcdist errors."""

    def __repr__(self) -> str:
        fields = "".join(
            f", {name}={value!r}"
            for name, value in vars(self).items()
            if name[0] != "_" and name not in ("traceback", "call_sites") and value != ()
        )
        return f"{type(self).__name__}({str(self)!r}{fields})"


class UsageError(HpcdistError, ValueError):
    """The arguments are wrong; found before anything was sent."""

    nested = False
    """Whether it refuses an operation in the middle of another one of the same group."""
    held = False
    """Whether it has left a signal handler, and is raised at the end of the one it interrupted."""
    inside = False
    """Whether an operation that had its turn was left by it."""
    told = False
    """Whether the other ranks hear of it in the operation that it refuses."""
    remedy = ""
    """The end of the message, where it is more than what follows its first semicolon."""


class UsageTypeError(UsageError, TypeError):
    """An argument of a wrong kind, where programs of Paddle catch a `TypeError`."""


class UsageAssertionError(UsageError, AssertionError):
    """A condition that does not hold, where programs of Paddle catch an `AssertionError`."""


class MismatchError(HpcdistError):
    """The ranks of a group disagree about the operation, its shape, dtype, op or root.

    `call_sites` maps world ranks to the line that called it, as ``file:line``, if all ranks
    reported it.
    """

    call_sites: Mapping[int, str] = MappingProxyType({})


class CollectiveTimeout(HpcdistError, TimeoutError):
    """An operation was not joined by every rank in time.

    `missing` holds the world ranks that had not entered it. `call_sites` maps world ranks to the
    line at which each was, or had last called hpcdist; it has the ranks whose flight recorders are
    on this node.
    """

    call_sites: Mapping[int, str] = MappingProxyType({})

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class RemoteError(HpcdistError):
    """Another rank failed; `rank` is its world rank, `traceback` its traceback.

    `in_step` says that every rank of the group has ended the operation with an error, so that all
    of them can take part in the next one. It is False if the rank has left, or if that is not
    known.
    """

    in_step = False

    def __init__(
        self, message: str, rank: int = -1, traceback: str = "", *, in_step: bool = False
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        if in_step:
            self.in_step = True

    def __reduce__(self) -> tuple[type[RemoteError], tuple[Any, ...], dict[str, Any]]:
        return type(self), (str(self), self.rank, self.traceback), self.__dict__


class RankFailure(RemoteError):
    """Ranks have died; `ranks` holds their world ranks, and `rank` is the first of them.

    `ranks` is empty where this rank knows of none, but another one has left the operation in order
    to recover. Where MPI goes on after a death, all ranks that are left call `recover`.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message, ranks[0] if ranks else -1)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[type[RankFailure], tuple[Any, ...], dict[str, Any]]:
        return type(self), (str(self), self.ranks), self.__dict__


def is_secondary(error: BaseException | None) -> bool:
    """Return whether an error came of another rank's failure, or while one was handled."""
    return came_of(error, RemoteError)


def came_of(error: BaseException | None, kind: type[BaseException]) -> bool:
    """Return whether an error is of a kind, or came of one that is, or while it was handled."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error is not None


def add_note(error: BaseException, words: str) -> None:
    """Add a note (PEP 678) to an error; before Python 3.11 `notes_of` alone tells of it."""
    if hasattr(error, "add_note"):
        error.add_note(words)
    else:
        error.__dict__.setdefault("__notes__", []).append(words)


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of an error."""
    return [*getattr(error, "__notes__", ())]


ENDS_ALL = (CollectiveTimeout, RankFailure)
"""Errors after which what belongs together with an operation is not begun: some rank is missing."""


class TransportError(HpcdistError):
    """MPI, or another transport below hpcdist, failed; the message carries its text."""


class CheckpointError(HpcdistError):
    """A checkpoint or a file of arrays cannot be written or read: a full disk, damaged data.

    Raised on every rank of the group. What was there before the call is unchanged.
    """


class CheckpointWarning(UserWarning):
    """A checkpoint and a state differ; with ``strict=False`` the common entries were loaded."""


class DatasetError(HpcdistError):
    """A dataset cannot be read: a file is missing, a record malformed, a pipe has failed.

    The message names the file, and the line where there is one.
    """


class DatasetWarning(UserWarning):
    """Records of a dataset were malformed; ``on_bad`` asks to leave them out."""


class NotInGroupWarning(UserWarning):
    """A rank called an operation of a group it does not belong to; nothing was done."""


class ExecuteError(HpcdistError, OSError):
    """A file system could not carry out an operation."""


class FSFileExistsError(ExecuteError, FileExistsError):
    """The path exists already, or something is in the way."""


class FSFileNotExistsError(ExecuteError, FileNotFoundError):
    """There is no such file or folder."""


class FSTimeOut(ExecuteError, TimeoutError):
    """A file system did not answer in time."""


class FSShellCmdAborted(ExecuteError):
    """A file system aborted an operation."""
