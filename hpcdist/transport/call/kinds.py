"""`Kind`: the operations that there are, by families, and the tables that have a row for each.

Which operations a table has to have rows for is told by `Kind.family` and checked by `table_for`,
so that a new operation cannot be forgotten anywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import Enum, IntEnum, auto
from typing import TypeVar


class Family(Enum):
    """The families of operations; `call.py` has a type for each."""

    BARRIER = auto()
    REDUCTION = auto()
    DISTRIBUTION = auto()
    GATHERING = auto()
    OBJECTS = auto()
    MESSAGE = auto()
    EXCHANGE = auto()


class Kind(IntEnum):
    """The operations; the lower-case name is the public one, the second value the family."""

    family: Family

    def __new__(cls, number: int, family: Family) -> Kind:
        """Make the number, which knows its family."""
        kind = int.__new__(cls, number)
        kind._value_, kind.family = number, family
        return kind

    __hash__ = int.__hash__  # Enum's own is a Python function, and these are looked up a lot

    BARRIER = 0, Family.BARRIER
    ALL_REDUCE = 1, Family.REDUCTION
    REDUCE = 2, Family.REDUCTION
    REDUCE_SCATTER = 3, Family.REDUCTION
    SCAN = 4, Family.REDUCTION
    EXSCAN = 5, Family.REDUCTION
    BROADCAST = 6, Family.DISTRIBUTION
    ALL_GATHER = 7, Family.GATHERING
    GATHER = 8, Family.GATHERING
    SCATTER = 9, Family.DISTRIBUTION
    ALLTOALL = 10, Family.GATHERING
    BROADCAST_OBJECT_LIST = 11, Family.OBJECTS
    ALL_GATHER_OBJECT = 12, Family.OBJECTS
    GATHER_OBJECT = 13, Family.OBJECTS
    SCATTER_OBJECT_LIST = 14, Family.OBJECTS
    ALL_TO_ALL_OBJECT = 15, Family.OBJECTS
    SEND = 16, Family.MESSAGE
    RECV = 17, Family.MESSAGE
    SEND_OBJECT_LIST = 18, Family.MESSAGE
    RECV_OBJECT_LIST = 19, Family.MESSAGE
    BATCH_ISEND_IRECV = 20, Family.MESSAGE
    EXCHANGE = 21, Family.EXCHANGE


ARRAYS = frozenset({Family.REDUCTION, Family.DISTRIBUTION, Family.GATHERING})
"""Collectives on arrays."""

COLLECTIVES = ARRAYS | {Family.BARRIER, Family.OBJECTS}
"""What all ranks of a group call."""

OPTIONAL = frozenset({Family.EXCHANGE})
"""Collectives that a transport may leave out; see `Transport.takes_exchanges`."""

LOOSE = frozenset(
    {
        Kind.ALL_GATHER,
        Kind.GATHER,
        Kind.SCATTER,
        Kind.ALLTOALL,
        Kind.ALL_GATHER_OBJECT,
        Kind.GATHER_OBJECT,
        Kind.SCATTER_OBJECT_LIST,
        Kind.ALL_TO_ALL_OBJECT,
    }
)
"""Operations whose ranks may bring different shapes or sizes; see `detail` of a `Call`."""

ROOTED = frozenset(
    {
        Kind.REDUCE,
        Kind.BROADCAST,
        Kind.GATHER,
        Kind.SCATTER,
        Kind.BROADCAST_OBJECT_LIST,
        Kind.GATHER_OBJECT,
        Kind.SCATTER_OBJECT_LIST,
    }
)
"""Operations that one rank is the root of."""

Row = TypeVar("Row")


def table_for(
    name: str,
    families: Collection[Family],
    rows: Mapping[Kind, Row],
    without: Iterable[Kind] = (),
) -> dict[Kind, Row]:
    """Return `rows` if there is one for each operation of `families` that is not in `without`.

    Called when a module is imported, so that an operation that nobody has thought of is found
    there and then, and not as a rank that hangs.

    Args:
        name: what the table is called in the error.
        families: which operations it must have.
        rows: what it has.
        without: operations of these families that it leaves to others.

    Raises:
        TypeError: an operation has no row, or a row is of no use; the message names them.

    """
    wanted = {kind for kind in Kind if kind.family in families} - set(without)
    wrong = [
        f"{words} {', '.join(kind.name for kind in sorted(kinds))}"
        for words, kinds in (("lacks", wanted - set(rows)), ("must not have", set(rows) - wanted))
        if kinds
    ]
    if wrong:
        families_in_words = ", ".join(sorted(each.name.lower() for each in families))
        raise TypeError(
            f"the table {name}, of the operations of {families_in_words}, {' and '.join(wrong)}: "
            "give it one row for each operation of these families, or name it in `without`"
        )
    return dict(rows)
