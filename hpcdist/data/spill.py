"""`Room`: memory for rows that can be given back piece by piece, in memory or in a file.

Nothing has a name for longer than it takes to open it: memory is an anonymous file
(`memfd_create`), a file is unlinked before anything is written. So no half-written cache can be
found by a later job, and whatever ends a process, nothing is left on the disk or in /dev/shm.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm.together import Together
from hpcdist.data.nodes import Nodes
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime.process import snapshot
from hpcdist.transport.shm.segment import Segment, forget, open_segment, own_memory

_HALF = 2


class Spill(NamedTuple):
    """Where rows go that have no room in memory, and how many bytes a node keeps in memory."""

    folder: str
    nbytes: int


def read_spill(value: Any) -> Spill | None:
    """Return what the setting ``spill=`` says.

    Raises:
        UsageError: it is none of the forms; there is no such folder.

    """
    if value is None or value is False:
        return None
    parts = value if isinstance(value, (tuple, list)) else [value]
    folders = [each for each in parts if isinstance(each, (str, os.PathLike))]
    limits = [each for each in parts if isinstance(each, int) and not isinstance(each, bool)]
    flags = [each for each in parts if each is True]
    known = len(folders) + len(limits) + len(flags) == len(parts)
    if (
        not known
        or max(len(folders), len(limits), len(parts) - 1) > 1
        or min(limits, default=0) < 0
    ):
        raise UsageError(
            "spill must be a folder, the bytes that a node keeps in memory, (folder, bytes), True "
            f"for $SLURM_TMPDIR and half of the free memory, or None, got {value!r}"
        )
    folder = (
        os.fspath(folders[0])
        if folders
        else snapshot().get("SLURM_TMPDIR") or tempfile.gettempdir()
    )
    if not Path(folder).is_dir():
        raise UsageError(
            f"spill names the folder {folder!r}, which is not one on this node; make it, or "
            "name a folder on a disk of the node"
        )
    return Spill(folder, limits[0] if limits else available_nbytes() // _HALF)


def available_nbytes() -> int:
    """Return how many bytes of memory the system, or the job's cgroup, still has to give."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            found = int(line.split()[1]) << 10
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdigit():
        found = min(found, max(int(limit[0]) - int(used[0]), 0))
    return found


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


@final
class Room:
    """So many bytes of zeros: `memory`, flat, which others of the node map too if they are `open`.

    Memory is used where it is touched, until it is forgotten. A file has its blocks from the
    start, so that a full disk is an error here and not a signal later.
    """

    def __init__(self, nbytes: int, folder: str | None = None) -> None:
        self._descriptor = _in_memory(nbytes) if folder is None else _in_file(nbytes, folder)
        try:
            inode = os.fstat(self._descriptor).st_ino
            self.segment = Segment(os.getpid(), self._descriptor, max(nbytes, 1), inode)
            self.memory = open_segment(self.segment)[:nbytes]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file, so that nobody else can open it; what is mapped stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _in_memory(nbytes: int) -> int:
    descriptor = os.memfd_create("hpcdist-rows", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, max(nbytes, 1))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _in_file(nbytes: int, folder: str) -> int:
    descriptor, path = tempfile.mkstemp(prefix=".hpcdist-", dir=folder)
    try:
        os.unlink(path)
        os.posix_fallocate(descriptor, 0, max(nbytes, 1))
    except OSError as error:
        os.close(descriptor)
        raise OSError(
            error.errno,
            f"{error.strerror}: no room for {nbytes} bytes of rows, which spill= sends there; "
            "name another folder, or fewer rows per node",
            folder,
        ) from error
    return descriptor


def private_memory(nbytes: int, folder: str | None = None) -> NumpyArray:
    """Return memory of this process alone, of which runs can be forgotten."""
    if folder is None:
        return own_memory(nbytes)
    room = Room(nbytes, folder)
    room.close()
    return room.memory


def node_memory(
    nbytes: int, ranks: Together, nodes: Nodes, folder: str | None = None
) -> NumpyArray | str:
    """Return memory that the ranks of each node share, or why some cannot. Collective.

    Args:
        nbytes: of this node.
        ranks: the ranks.
        nodes: theirs.
        folder: where it is a file; None: nowhere.

    Raises:
        OSError: the first rank of a node has no room; `RemoteError` on the others.

    """
    rooms: list[Room] = []
    own: list[NumpyArray] = []
    first, *others = nodes.members[ranks.rank]

    def make() -> Segment | None:
        if first != ranks.rank:
            return None
        if not others:
            own.append(private_memory(nbytes, folder))
            return None
        rooms.append(Room(nbytes, folder))
        own.append(rooms[0].memory)
        return rooms[0].segment

    segment = ranks.share(make)[first]
    memory = own[0] if own else None
    why = ""
    try:
        if segment is not None and memory is None:
            memory = open_segment(segment)[:nbytes]
    except OSError as error:
        why = str(error)
    reasons = [each for each in ranks.share(lambda: why) if each]
    for room in rooms:
        room.close()
    return reasons[0] if memory is None or reasons else memory


def give_back(runs: Sequence[NumpyArray]) -> None:
    """Give the memory of these runs back to the system, as far as whole pages are in them."""
    for run in runs:
        forget(run)
