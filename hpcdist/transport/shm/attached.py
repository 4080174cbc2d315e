"""`Attached`: ordinary memory of another rank of the node, which the kernel copies from and to.

Cross-memory attach (process_vm_readv(2)): one copy, where staging memory takes two, and any rank
may make it. Containers and security modules can forbid it, and memory of devices cannot be read so:
therefore ranks try it when they come to share a node, and `attach` before it offers an array.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.errors import TransportError
from hpcdist.transport.kernel import address_of, compiled


class Attached(NamedTuple):
    """Where a contribution lies: a process, and the address there."""

    pid: int
    address: int

    @property
    def base(self) -> int:
        """0: this is in no segment that this process maps."""
        return 0

    def at(self, offset: int) -> Attached:
        """Return the place `offset` bytes further on."""
        return self._replace(address=self.address + offset)

    def read(self, out: NumpyArray) -> None:
        """Copy what is here into `out`, a contiguous array."""
        if self.pid != os.getpid():
            _move(compiled.read_from, self, out)
        elif self.address != address_of(out):
            compiled.fetch(out, self.address)

    def write(self, data: NumpyArray) -> None:
        """Copy `data`, a contiguous array, to here."""
        _move(compiled.write_to, self, data)


def _move(move: object, place: Attached, data: NumpyArray) -> None:
    try:
        move(place.pid, place.address, data)  # type: ignore[operator] # a compiled function
    except OSError as error:
        raise TransportError(
            f"the memory of process {place.pid} of this node cannot be copied ({error}), which it "
            "could before; look whether that rank has ended"
        ) from error


class Sample(NamedTuple):
    """What another rank reads in order to see whether it can: a place, and the bytes there."""

    place: Attached
    content: bytes

    def is_read(self) -> bool:
        """Return whether this process can read it, and finds what is there."""
        out = np.zeros(len(self.content), np.uint8)
        try:
            compiled.read_from(*self.place, out)
        except OSError:
            return False
        return out.tobytes() == self.content


def attach(data: NumpyArray) -> int:
    """Return the address of an array that other ranks can read and write; 0 for any other."""
    return address_of(data) if compiled.is_attachable(data) else 0


def make_sample() -> tuple[Sample | None, NumpyArray]:
    """Return what others try to read, which is to be kept until they have; None if none can."""
    content = np.frombuffer(os.urandom(16), np.uint8).copy()
    if compiled is None or not compiled.is_attachable(content):
        return None, content
    return Sample(Attached(os.getpid(), address_of(content)), content.tobytes()), content
