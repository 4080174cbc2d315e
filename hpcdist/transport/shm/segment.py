"""Memory that several processes of one node map.

A segment is an anonymous file (`memfd_create`), opened by others through ``/proc``. It has no
name, so nothing can be left behind: the kernel frees it with the last process that maps it,
however that process ends. It does not live in /dev/shm and is not bounded by its size.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from typing import Any

import numpy as np

from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime.process import stat_of

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MADV_REMOVE = 9  # frees what lies behind a mapping; `mmap` has no name for it
_MADV_DONTNEED, _MADV_HUGEPAGE = 4, 14
_FAILED = ctypes.c_void_p(-1).value


class Segment(NamedTuple):
    """Where others find a segment: the process that made it, its descriptor there, its bytes.

    `inode` tells whether what they find is this segment: in another container the same numbers
    may mean another process.
    """

    pid: int
    descriptor: int
    nbytes: int
    inode: int = 0


class _Mapping:
    """A mapped file, until the last array that shows it is gone.

    Python's own `mmap` would hold a descriptor for each: one for every rank of the node.
    """

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, descriptor: int, nbytes: int, flags: int) -> None:
        address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        weakref.finalize(self, _libc.munmap, address, nbytes).atexit = False
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


def make_segment(nbytes: int, name: str) -> Segment:
    """Make a segment of zeros; memory is used where it is touched. Local.

    Raises:
        OSError: the system has no `memfd_create`, or no descriptor left.

    """
    descriptor = os.memfd_create(f"hpcdist-{name}", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        return Segment(os.getpid(), descriptor, nbytes, os.fstat(descriptor).st_ino)
    except OSError:
        os.close(descriptor)
        raise


def create_segment(nbytes: int, name: str) -> tuple[Segment, Bytes]:
    """Make and map a segment of zeros; memory is used where it is touched. Local.

    Raises:
        OSError: the system has no `memfd_create`, or no descriptor left.

    """
    segment = make_segment(nbytes, name)
    try:
        return segment, map_segment(segment.descriptor, nbytes)
    except OSError:
        os.close(segment.descriptor)
        raise


def map_segment(descriptor: int, nbytes: int) -> Bytes:
    """Map an open segment; memory is used where it is touched. Local.

    Raises:
        OSError: there is no room.

    """
    return np.asarray(_Mapping(descriptor, nbytes, mmap.MAP_SHARED))


def own_memory(nbytes: int) -> Bytes:
    """Map zeros of this process alone, in huge pages where the system has some. Local.

    Its first touch costs a tenth of that of a segment, whose pages the system makes one by one.

    Raises:
        OSError: there is no room.

    """
    memory = np.asarray(_Mapping(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    in_huge_pages(memory)
    return memory[:nbytes]


def in_huge_pages(run: Bytes) -> None:
    """Let memory that was not touched so far be made in huge pages, where the system has some."""
    start = run.__array_interface__["data"][0]
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    if start + run.nbytes > first:
        _libc.madvise(first, start + run.nbytes - first, _MADV_HUGEPAGE)


def map_descriptor(descriptor: int, nbytes: int) -> Bytes:
    """Map all pages of an open segment at once; they are shared with whoever maps it, too. Local.

    Raises:
        OSError: there is no room.

    """
    return np.asarray(_Mapping(descriptor, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE))


def open_segment(segment: Segment, *, private: bool = False) -> Bytes:
    """Map a segment of another process, which must still hold its descriptor. Local.

    Args:
        segment: as its maker got it; all of it if it is said to have no bytes.
        private: what is written here is seen by nobody else, and costs memory page by page.

    Raises:
        OSError: it lives in another container, the system hides its processes, or it is empty.

    """
    path = f"/proc/{segment.pid}/fd/{segment.descriptor}"
    descriptor = os.open(path, os.O_RDONLY if private else os.O_RDWR)
    try:
        found = os.fstat(descriptor)
        if segment.inode and found.st_ino != segment.inode:
            raise OSError(f"{path} is not the memory of another rank: do they share a container?")
        nbytes = segment.nbytes or found.st_size
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        return np.asarray(_Mapping(descriptor, nbytes, flags))
    finally:
        os.close(descriptor)


def forget(run: Bytes) -> None:
    """Give back what lies behind the whole pages of a run: they are zeros from now on. Local.

    Where a run is of a file whose system cannot, nothing happens.

    Args:
        run: of a segment, or of `own_memory`.

    """
    start = run.__array_interface__["data"][0]
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    nbytes = (start + run.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if nbytes <= 0 or not _libc.madvise(first, nbytes, _MADV_REMOVE):
        return
    if ctypes.get_errno() == errno.EINVAL:  # there is no file behind it
        _libc.madvise(first, nbytes, _MADV_DONTNEED)


def is_dead(pid: int) -> bool:
    """Return whether a process of this node has ended, or is about to be buried."""
    _, fields = stat_of(pid)
    return not fields or fields[0] in "ZX"
