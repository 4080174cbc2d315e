"""Memory that several processes of one node map.

A segment is an anonymous file (`memfd_create`), opened by others through ``/proc``. It has no
name, so nothing can be left behind: the kernel frees it with the last process that maps it,
however that process ends. It does not live in /dev/shm and is not bounded by its size.
"""

from __future__ import annotations

import mmap
import os
import resource
from typing import NamedTuple


class Segment(NamedTuple):
    """Where others find a segment: the process that made it, its descriptor there, its bytes.

    `inode` tells whether what they find is this segment: in another container the same numbers
    may mean another process.
    """

    pid: int
    descriptor: int
    nbytes: int
    inode: int = 0


def create_segment(nbytes: int, name: str) -> tuple[Segment, mmap.mmap]:
    """Make and map a segment of zeros; memory is used where it is touched. Local.

    Raises:
        OSError: the system has no `memfd_create`, or no descriptor left.

    """
    descriptor = os.memfd_create(f"hpcdist-{name}", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        memory = mmap.mmap(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return Segment(os.getpid(), descriptor, nbytes, os.fstat(descriptor).st_ino), memory


def open_segment(segment: Segment, *, private: bool = False) -> mmap.mmap:
    """Map a segment of another process, which must still hold its descriptor. Local.

    Args:
        segment: as its maker got it.
        private: what is written here is seen by nobody else, and costs memory page by page.

    Raises:
        OSError: it lives in another container, or the system hides its processes.

    """
    path = f"/proc/{segment.pid}/fd/{segment.descriptor}"
    descriptor = os.open(path, os.O_RDONLY if private else os.O_RDWR)
    flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    try:
        if segment.inode and os.fstat(descriptor).st_ino != segment.inode:
            raise OSError(f"{path} is not the memory of another rank: do they share a container?")
        return mmap.mmap(descriptor, segment.nbytes, flags=flags)
    finally:
        os.close(descriptor)


def descriptors_are_few() -> bool:
    """Say whether this process has opened three quarters of the files that it may open. Local."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return len(os.listdir("/proc/self/fd")) >= limit * 3 // 4
