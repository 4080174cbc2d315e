"""Mailboxes: small messages between the ranks of a group on one node, without MPI.

The segment of the group has a box for each pair of ranks and direction, a ring of bytes that the
sender writes and the receiver reads (`native/mail.h`). A message that fits is copied into it whole,
so its send has ended; it stays there until it is received. All while a box is full are left to MPI,
so no send ever waits because of a box.

A large message that its receiver is just waiting for is copied from where it lies, by the receiver
or by both, if ranks can read each other's memory (`attached`). Other large ones are left to MPI.

[Note: one order] Messages of one sender are received in the order sent, whichever way they go. So a
message goes into the box only if all earlier ones to this rank that went by MPI are known to have
been received: the receiver counts them in the box. Hence what is in a box is older than what is on
its way by MPI, and a receive looks into the boxes first, and once more when it has found something
in MPI.

Without the compiled kernel there are no boxes, and MPI carries all messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.transport.shm.kernel import MOST, compiled
from hpcdist.transport.shm.segment import Bytes
from hpcdist.transport.waiting.work import Done

_LARGEST = 64 << 10
_SMALLEST = 4 << 10
_ALL = 64 << 20
"""Bytes of one box at most and at least, and of all boxes as long as these allow it."""


class Mailboxes(Protocol):
    """The boxes as one rank sees them; `compiled.Mailboxes`. Ranks are of the group. Local."""

    posted: int
    """Receives that wait for their messages: new ones must not overtake them."""
    last_tag: int
    """The largest tag that MPI allows."""
    attaches: bool
    """Whether ranks can read each other's memory."""
    patience: int
    """How often the compiled functions look before they leave a wait to Python."""
    pause_ns: int
    """If not 0, a message goes by MPI now and then, so that the sender hears of deaths."""

    @property
    def most(self) -> int:
        """The bytes of the largest message that goes into a box."""

    def put(self, rank: int, tag: int, data: Any) -> bool:
        """Send a message; return False if MPI is to carry it."""

    def find(self, rank: int, tag: int) -> tuple[int, int] | None:
        """Return the sender and the bytes of the first message; of any rank if it is negative."""

    def left(self) -> list[tuple[int, int, int]]:
        """Return sender, tag and bytes of each message that has not been taken."""

    def take(self, rank: int, tag: int, buffers: list[NumpyArray]) -> None:
        """Receive the first message, which is as large as `buffers` together."""

    def sent(self, rank: int) -> None:
        """Note that a message is sent by MPI."""

    def received(self, rank: int) -> None:
        """Note that a message that was sent by MPI has got its receive."""

    def written(self, rank: int) -> int:
        """Return the bytes that this rank has ever put into the box to `rank`."""

    def arrived(self, rank: int) -> int:
        """Return the bytes that `rank` has ever put into the box to this rank."""

    def is_settled(self, rank: int) -> bool:
        """Return whether `rank` reads no large message of this one any more."""

    def is_copied(self, rank: int) -> bool:
        """Return whether `rank` writes nothing of a large message to this one any more."""


def box_bytes(size: int) -> int:
    """Return the bytes of each box in a group of `size` ranks."""
    fair = _ALL // size**2
    return max(_SMALLEST, min(_LARGEST, 1 << fair.bit_length() - 1)) if fair else _SMALLEST


def mail_bytes(size: int) -> int:
    """Return the bytes of all boxes; memory is used where messages come by."""
    return size**2 * box_bytes(size) if size <= MOST else 0


def open_mail(
    memory: Bytes,
    rank: int,
    ranks: Sequence[int],
    pids: Sequence[int],
    lock: Any,
) -> Mailboxes | None:
    """Return this rank's view of the boxes; None without the compiled kernel.

    Args:
        memory: `mail_bytes`, shared by all ranks, of zeros at first.
        rank: this one, of the group.
        ranks: the world ranks of the group.
        pids: their processes.
        lock: held by whoever receives.

    """
    if compiled is None or not memory.nbytes:
        return None
    works = tuple(Done(each) for each in ranks)
    size = box_bytes(len(ranks))
    mail = compiled.Mailboxes(memory, rank, size, tuple(ranks), tuple(pids), works, lock)
    return cast(Mailboxes, mail)
