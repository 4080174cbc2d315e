"""`Together` for checkpoints: what all ranks raise, whichever of them a file system fails."""

from __future__ import annotations

from hpcdist.comm.group import Group
from hpcdist.comm.session import current_session, resolve_group
from hpcdist.comm.together import Together, together
from hpcdist.errors import CheckpointError, MismatchError, UsageError

_CHECKPOINT = "hpcdist.checkpoint"
_SAME_EVERYWHERE = (UsageError, MismatchError, CheckpointError)


def writing_together(
    group: Group | None, first: int | None = None, words: str = _CHECKPOINT
) -> Together:
    """Return the ranks of `group`, or this process, if it is alone; `words` say what they do.

    Raises:
        UsageError: the launcher started several ranks, but they are not connected yet.

    """
    if group is not None or current_session() is not None:
        return of_group(resolve_group(group), first, words)
    return of_group(together().group, words=words)


def reading_together(
    group: Group | None, first: int | None = None, words: str = _CHECKPOINT
) -> Together:
    """Return the ranks of `group`; without a session this process alone, which does no harm."""
    is_alone = group is None and current_session() is None
    return of_group(None) if is_alone else writing_together(group, first, words)


def of_group(group: Group | None, first: int | None = None, words: str = _CHECKPOINT) -> Together:
    """Return the members of `group`, led by world rank `first`; None for this process alone."""
    return Together(group, first, _for_all, words)


def _for_all(error: BaseException) -> Exception | None:
    """Return what all ranks raise for the error of one; None where the others get `RemoteError`."""
    if isinstance(error, OSError):
        return CheckpointError(_describe_error(error))
    return error if isinstance(error, Exception) and type(error) in _SAME_EVERYWHERE else None


def _describe_error(error: OSError) -> str:
    if error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
