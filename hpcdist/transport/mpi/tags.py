"""The tags of all messages between the ranks of a group."""

from __future__ import annotations

from enum import IntEnum, unique

from hpcdist.arrays.dtypes import CODE_BITS, OBJECT_CODE, Dtype, code_in_tag, name_of_code


@unique
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
    IN_TURN = 7
    """What the nodes before have come to: `hierarchical.lanes`."""
    TOTAL = 8
    """What a node has made of its share: `hierarchical.lanes`."""


def wire_tag(tag: int, dtype: Dtype | None) -> int:
    """Return the tag on the wire of a user's message of `dtype`, None for objects."""
    code = OBJECT_CODE if dtype is None else code_in_tag(dtype)
    return tag << CODE_BITS | code


def wire_tags(tag: int) -> range:
    """Return the tags on the wire of all dtypes."""
    return range(tag << CODE_BITS, tag + 1 << CODE_BITS)


def user_tag(wire: int) -> int:
    """Return the user's tag of a message."""
    return wire >> CODE_BITS


def name_of_dtype(wire: int) -> str:
    """Return what a message is made of."""
    code = wire & ((1 << CODE_BITS) - 1)
    return "pickled objects" if code == OBJECT_CODE else name_of_code(code)
