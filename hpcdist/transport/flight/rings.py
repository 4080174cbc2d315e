"""Where the files of the flight recorder are on a node, and whether their processes live.

They are in memory (``/dev/shm``) where that is possible: a mapped file on a disk can hold up the
process that writes to it while the system writes it back. Each user has a folder that nobody else
can read, alike for all shells and jobs of the node, so that a reader finds it whatever its
environment. A ring is removed at an orderly end; that of a process that was killed stays for
`KEPT_S`, so that one can still see what it did.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcdist.runtime.process import stat_of
from hpcdist.transport.flight import layout

ROOTS = ("/dev/shm", "/tmp")
KEPT_S = 3600.0
MOST_RINGS = 128
"""Where more than so many lie, of whatever processes, some of the dead go: they take memory."""
KEPT_RINGS = 64
"""So many of them are kept then, those of the newest jobs: a job whole or not at all, and the
newest one always."""
LEFT_BYTES = 64 << 20
"""Where less would be free than this, no ring is made: MPI libraries need the place, too."""
_SUFFIX = ".ring"


def folders(roots: Iterable[str] = ROOTS) -> list[Path]:
    """Return the folders in which rings of this user may lie, the preferred one first."""
    return [Path(root) / f"flight-{os.getuid()}" for root in roots]


def is_ours(folder: Path) -> bool:
    """Return whether a folder is this user's alone, and no link that another one has put there."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def make_ring(nbytes: int, name: str, roots: Iterable[str] = ROOTS) -> tuple[int, Path] | None:
    """Make a file of zeros with room reserved for it; return its descriptor and path.

    None where no folder can have it: full, or not writable.
    """
    for folder in folders(roots):
        with suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            if not is_ours(folder) or _free_bytes(folder) < nbytes + LEFT_BYTES:
                continue
            path = folder / f"{name}{_SUFFIX}"
            path.unlink(missing_ok=True)  # of a process that had the same number
            opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(opened, 0, nbytes)  # else a full file system is a SIGBUS
            except OSError:
                os.close(opened)
                path.unlink(missing_ok=True)
                raise
            return opened, path
    return None


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def remove(path: Path) -> None:
    """Remove a ring, and its folder if that was the last one."""
    with suppress(OSError):
        path.unlink()
    with suppress(OSError):
        path.parent.rmdir()


def find_rings(roots: Iterable[str] = ROOTS) -> list[Path]:
    """Return the rings of this user on this node."""
    return [path for folder in folders(roots) if is_ours(folder) for path in _rings_in(folder)]


def _rings_in(folder: Path) -> list[Path]:
    with suppress(OSError):  # it may go with its last ring
        return [folder / name for name in sorted(os.listdir(folder)) if name.endswith(_SUFFIX)]
    return []


def read_ring(path: Path) -> bytes | None:
    """Return what is in a ring now; None if it is gone, or none of this version."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    return raw if _is_whole(raw) else None


def about_of(raw: bytes | mmap.mmap) -> dict[str, Any]:
    """Return what a ring says of its job and its node."""
    *_, place, nbytes, _ = layout.HEADER.unpack_from(raw)
    start = layout.TEXT_AT + place
    try:
        return dict(json.loads(raw[start : start + nbytes]))
    except ValueError:  # nothing yet
        return {}


def born(pid: int) -> int:
    """Return when a process began, in ticks since the node started; 0 if there is none."""
    _, fields = stat_of(pid)
    return int(fields[19]) if fields else 0


def condition(pid: int, since: int) -> str:
    """Return how the process that began at `since` is: "running", "stopped" or "dead"."""
    _, fields = stat_of(pid)
    if not fields or int(fields[19]) != since or fields[0] in "ZXx":
        return "dead"
    return "stopped" if fields[0] in "Tt" else "running"


def ancestors(pid: int) -> list[int]:
    """Return the processes that have started this one, the nearest first, without the first."""
    found: list[int] = []
    while (fields := stat_of(pid)[1]) and (pid := int(fields[1])) > 1:
        found.append(pid)
    return found


def sweep(roots: Iterable[str] = ROOTS) -> None:
    """Remove the rings of processes that are long dead, and of many all but the newest jobs'.

    Only what may have to go is read: every start of a job is as late as this takes.
    """
    dead: dict[str, list[tuple[float, Path]]] = {}
    found = find_rings(roots)
    are_many = len(found) > MOST_RINGS
    for path in found if are_many else filter(_is_old, found):
        raw = _map_ring(path)
        if raw is None:
            continue
        head = layout.HEADER.unpack_from(raw)
        if condition(head[1], head[2]) == "dead":
            job = str(about_of(raw).get("job", path))  # one that has not begun is its own
            dead.setdefault(job, []).append((_idle_s(path, raw), path))
    kept = 0
    for rings in sorted(dead.values(), key=min):
        too_many = are_many and kept and kept + len(rings) > KEPT_RINGS
        kept += 0 if too_many else len(rings)
        for idle_s, path in rings:
            if too_many or idle_s > KEPT_S:
                remove(path)


def _is_old(path: Path) -> bool:
    """Return whether a ring was made so long ago that its process may be long dead."""
    with suppress(OSError):
        return time.time() - os.stat(path).st_mtime > KEPT_S
    return False


def _map_ring(path: Path) -> mmap.mmap | None:
    """Return what `read_ring` does without reading it: a node may have a ring for each core."""
    try:
        with path.open("rb") as ring:
            raw = mmap.mmap(ring.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # which says that it is empty
        return None
    return raw if _is_whole(raw) else None


def _is_whole(raw: bytes | mmap.mmap) -> bool:
    return len(raw) == layout.TOTAL and raw[: len(layout.MAGIC)] == layout.MAGIC


def _idle_s(path: Path, raw: mmap.mmap) -> float:
    """Return for how many seconds nothing has been recorded in a ring.

    Records have the node's monotonic clock, which begins anew when the node boots, and elsewhere in
    another time namespace. Where there is none, or one of a clock that is not ours, the file tells.
    """
    head = layout.HEADER.unpack_from(raw)
    place = layout.RECORDS_AT + (head[6] & (head[5] - 1)) * layout.RECORD.size
    _, began, ended, *_ = layout.RECORD.unpack_from(raw, place)
    last_s = max(began, ended) / 1e9
    now_s = time.monotonic()
    ages = [now_s - last_s] if 0 < last_s <= now_s else []
    with suppress(OSError):
        ages.append(time.time() - path.stat().st_mtime)
    return min(ages, default=0.0)
