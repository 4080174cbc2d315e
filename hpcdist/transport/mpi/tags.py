"""The tags of all messages between the ranks of a group."""

from __future__ import annotations

from enum import IntEnum

CODE_BITS = 5
"""Low bits of a tag on the communicator for messages that hold the code of the dtype."""


class Tag(IntEnum):
    """What a message on the communicator for collectives is part of.

    On the other one, for messages, the user's tag and a dtype make the tag: `wire_tag`.
    """

    NEWS = 1
    """What ranks tell and ask each other beside their operations: `news`."""
    PART = 2
    """A run of an array of a collective: `collectives`."""
    PICKLED = 3
    """An object of a collective: `objects`."""
    REPORT = 4
    """A member of a new group has come: `rendezvous`."""
    ANSWER = 5
    """The first member answers it."""
    LETTER = 6
    """What two ranks mean to do with each other: `handshake`."""


def wire_tag(tag: int, code: int) -> int:
    """Return the tag on the wire of a user's message; `code` is that of its dtype."""
    return tag << CODE_BITS | code


def read_tag(wire: int) -> tuple[int, int]:
    """Return the user's tag and the code of the dtype."""
    return wire >> CODE_BITS, wire & ((1 << CODE_BITS) - 1)
