"""`Claim`: the right to save into a folder, which a process has while it lives.

A save holds a small file of a random name, ``<token>.saving``, which says who it is, and a lock
on it. The kernel gives the lock back when the process ends, however it ends, so that nobody waits
for the dead. Where a file system has no locks, or those of one node only, nobody is refused, and
the files of a save that may be under way are left alone for a day: then two jobs that save at once
are still whole both, and the one that ends last stands.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import socket
import time
from contextlib import suppress
from enum import Enum

from hpcdist.checkpoint.blocks import open_regular
from hpcdist.errors import CheckpointError
from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime.process import snapshot

CLAIM_FILE = re.compile(r"([0-9a-f]{12})\.saving")
NEW_CLAIM = re.compile(r"([0-9a-f]{12})\.saving\.new")
"""A claim that does not tell yet whose it is, or never will; it is none."""


_TRIES = 5
_PAUSE_S = 0.2
"""Two that see each other give way, and come back after a pause of random length."""

_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")

_DAY_S = 86_400
_LONGEST = 4096
"""Bytes of a claim that are read."""


class Claim(NamedTuple):
    """What a process holds in `folder`: an open file with a lock on it. `token` begins its names.

    Plain data, so that it can pass through messages of this process to itself.
    """

    folder: str
    token: str
    fd: int


class Holder(Enum):
    """What is known of the save that a claim belongs to."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


def claim(folder: str) -> Claim:
    """Take the right to save into `folder`.

    Raises:
        CheckpointError: another process is saving there; it is named.
        OSError: the folder cannot be written.

    """
    who = "?"
    for _ in range(_TRIES):
        mine = _put(folder)
        if mine is not None:  # first put, then look: of two at once, at least one sees the other
            try:
                rivals = [each for each in tokens_claimed(folder) if each != mine.token]
                alive = [each for each in rivals if judge(folder, each) is Holder.ALIVE]
            except BaseException:
                release(mine)
                raise
            if not alive:
                return mine
            release(mine)
            who = _holder(folder, alive[0])
        time.sleep(_PAUSE_S * (0.5 + secrets.randbelow(1000) / 1000))
    raise CheckpointError(
        f"{folder} is being saved to by {who}; let one job at a time save into a folder, or give "
        "each its own"
    )


def check(mine: Claim) -> None:
    """Check that a claim still stands: that no other process has removed its save.

    Raises:
        CheckpointError: it is gone.

    """
    if not _stands(mine):
        raise CheckpointError(
            f"another process has removed what was being saved to {mine.folder}; let one job at a "
            "time save into a folder"
        )


def release(mine: Claim) -> None:
    """Give the right back, as far as possible. Again, it does nothing."""
    with suppress(OSError):
        if _stands(mine):  # unlink before unlocking: what is seen without a lock is taken for dead
            os.unlink(_path(mine.folder, mine.token))
            fcntl.flock(mine.fd, fcntl.LOCK_UN)  # a forked process may have the file open, too
            os.close(mine.fd)


def tokens_claimed(folder: str) -> list[str]:
    """Return the tokens of all saves that have a claim in `folder`, be they dead."""
    return [match[1] for name in os.listdir(folder) if (match := CLAIM_FILE.fullmatch(name))]


def judge(folder: str, token: str, bury: bool = False) -> Holder:
    """Return whether a save is under way: without a claim, it is over.

    `bury` removes the claim of a dead one, which cannot come to life meanwhile.
    """
    path = _path(folder, token)
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return Holder.DEAD
    except (OSError, CheckpointError):
        return Holder.UNKNOWN
    try:
        locked = _is_locked(fd)  # shared, if it is free, until the file is closed
        if locked:
            return Holder.ALIVE
        # Some file systems lock on one node only: elsewhere a free lock proves nothing.
        here = locked is False and _read(fd).get("machine") == _machine()
        if not here and time.time() - os.fstat(fd).st_mtime < _DAY_S:
            return Holder.UNKNOWN
        if bury:
            os.unlink(path)
    except OSError:
        return Holder.UNKNOWN
    else:
        return Holder.DEAD
    finally:
        os.close(fd)


def _put(folder: str) -> Claim | None:
    """Make a claim, whole and locked from the first; None if another process has removed it."""
    token = secrets.token_hex(6)
    path = _path(folder, token)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    mine = Claim(folder, token, os.open(f"{path}.new", flags, 0o666))
    try:
        os.write(mine.fd, json.dumps(_myself()).encode())
        _lock(mine.fd, fcntl.LOCK_EX)
        os.rename(f"{path}.new", path)
    except BaseException as error:
        os.close(mine.fd)
        with suppress(FileNotFoundError):
            os.unlink(f"{path}.new")
        if isinstance(error, FileNotFoundError):
            return None
        raise
    return mine


def _stands(mine: Claim) -> bool:
    try:
        found = os.lstat(_path(mine.folder, mine.token))
    except FileNotFoundError:
        return False
    own = os.fstat(mine.fd)
    return (found.st_ino, found.st_dev) == (own.st_ino, own.st_dev)


def _is_locked(fd: int) -> bool | None:
    """Return whether another open file has the lock; None if nobody can know.

    If not, this one has it, shared with others that look: the file is open for reading.
    """
    got = _lock(fd, fcntl.LOCK_SH)
    return None if got is None else not got


def _lock(fd: int, kind: int) -> bool | None:
    """Return whether the lock was free; None on a file system without locks."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _holder(folder: str, token: str) -> str:
    """Describe who has a claim, for a message."""
    found: dict[str, object] = {}
    with suppress(OSError, CheckpointError):
        fd = open_regular(_path(folder, token))
        try:
            found = _read(fd)
        finally:
            os.close(fd)
    words = f"process {found.get('process', '?')} on {found.get('host', '?')}"
    job = found.get("job")
    since = f", since {found['since']}" if "since" in found else ""
    return words + (f" (job {job})" if job else "") + since


def _read(fd: int) -> dict[str, object]:
    try:
        found = json.loads(os.pread(fd, _LONGEST, 0))
    except (ValueError, RecursionError):
        return {}
    return {str(key): str(each)[:80] for key, each in found.items()} if type(found) is dict else {}


def _myself() -> dict[str, object]:
    environ = snapshot()
    return {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "machine": _machine(),
        "job": next((environ[name] for name in _JOBS if name in environ), ""),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _machine() -> str:
    """Return what tells this boot of this machine from all others."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def _path(folder: str, token: str) -> str:
    return os.path.join(folder, f"{token}.saving")
