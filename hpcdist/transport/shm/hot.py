"""The hot path, seen from the transports: what one has for it, and the dtypes that it knows.

`shm/native/hot.c` runs a small collective of ordinary arrays on one node in one compiled call, and
leaves to Python whatever is unusual. A transport that can be used so is a `HotTransport`, and has a
`Hot` (`open_hot`), through which both count alike. `comm.hot` has the calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Protocol, cast, final

import numpy as np

from hpcdist.arrays.dtypes import CODE_BITS, OBJECT_CODE, Dtype, dtype_row
from hpcdist.errors import UsageError
from hpcdist.transport.call.call import Call, Message
from hpcdist.transport.call.kinds import ARRAYS, Kind
from hpcdist.transport.call.reduction import ReduceOp, rule_for
from hpcdist.transport.shm.kernel import compiled, loop_number
from hpcdist.transport.shm.mail import Mailboxes
from hpcdist.transport.shm.node import SharedNode, slice_bytes
from hpcdist.transport.tuning import STAGED_UP_TO, Algorithm, TuningTable
from hpcdist.transport.waiting.queue import CollectiveQueue
from hpcdist.transport.waiting.work import Work

FACTS = {kind.name: int(kind) for kind in Kind} | {
    "AVG": int(ReduceOp.AVG),
    "CODE_BITS": CODE_BITS,
    "OBJECT_MESSAGE": OBJECT_CODE,
}
"""The numbers that the hot path takes from here, by the names in `shm/native/facts.h`."""

if compiled is not None:
    compiled.learn_facts(FACTS)


@final
class Tally:
    """What an agreement counts; `_kernel.Hot` is the same where the hot path counts, too."""

    __slots__ = (
        *("eager_calls", "failure", "limit_ns", "missed", "posted", "sequence", "unfinished"),
    )

    def __init__(self) -> None:
        self.sequence = 0
        """Operations that this rank has begun."""
        self.unfinished = 0
        """Exchanges to be completed before the next operation: this rank gave up on them."""
        self.limit_ns = 0
        """The time limit of an operation."""
        self.eager_calls = self.missed = 0
        """Eager operations so far, and operations that only other ranks have begun."""
        self.posted = 0
        """Operations that the hot path has posted in slots."""
        self.failure: Exception | None = None
        """What MPI has raised in the last of these."""

    def all_give(self, nbytes: int) -> bool:
        """Return False: nobody gives to the root of a reduction before all agree."""
        return False

    def give(self, number: int, detail: int, data: Any, words: tuple[str, str]) -> None:
        """Give to the root, or do what it does itself, and count that."""

    def has_all(self, number: int, detail: int) -> bool | None:
        """Return whether all have given to this rank; None: some never will, and all agree."""
        return None

    def not_given(self) -> list[int]:
        """Return the ranks that have not given to this one."""
        return []

    def take_all(self, out: Any) -> None:
        """Copy what all have given, one after the other."""

    def finds_given(self, number: int, detail: int, root: int) -> bool:
        """Return False: roots give nothing before all agree."""
        return False

    def take_given(
        self, number: int, detail: int, root: int, out: Any, first: int, words: tuple[str, str]
    ) -> None:
        """Take what has been found, and keep in words what it was, and where."""

    def earlier(self) -> tuple[Any, ...]:
        """Return what was done between the last two agreements: nothing."""
        return ()


class GroupState:
    """The base of groups. `_kernel.GroupState` has `transport`, `issued` and `flight` for C."""


if not TYPE_CHECKING and compiled is not None:
    GroupState = compiled.GroupState


class HotTransport(Protocol):
    """What the hot path asks of the transport of a group whose `hot` or `mail` it has used.

    It has taken the turn of the group, which `start_posted` hands on.
    """

    hot: Tally | None
    mail: Mailboxes | None

    def end_posted(self, call: Call, state: int = 0) -> None:
        """End `call`, which the hot path has posted; `state`: see `shm/native/hot_large.c`."""

    def start_posted(self, call: Call, state: int, kept: tuple[Any, ...]) -> Work:
        """Let the queue's thread end `call`, which the hot path has begun; what is `kept` stays."""

    def take_back(self, call: Call) -> None:
        """Take back what the hot path has lent to `call`, which has failed."""

    def await_copied(self, call: Message) -> None:
        """Wait while the other rank copies a large message that the hot path has begun."""


def open_hot(node: SharedNode, table: TuningTable, queue: CollectiveQueue) -> Tally | None:
    """Return what a group on one node has for the hot path, or None where that cannot be used.

    Args:
        node: the memory of the group.
        table: which way its operations take.
        queue: where they take their turn.

    """
    control = node.control
    if not is_here() or type(control) is not compiled.ControlBlock:
        return None
    hot = compiled.Hot(control, tuple(node.ranks), queue.queued, queue.turn)
    learn_ways(hot, node, table)
    return cast(Tally, hot)


def learn_ways(hot: Any, node: SharedNode, table: TuningTable) -> None:
    """Tell the hot path of a group which way its operations take from now on. Local.

    Args:
        hot: what `open_hot` returned.
        node: the memory of the group.
        table: the same on all ranks.

    """
    heaps = node.bases, node.heap.capacity
    slices = node.pipe_stages, slice_bytes(node.size)
    copies = node.copy_stages, STAGED_UP_TO
    hot.learn_large(node, node.rights, tuple(node.pids), *heaps, *slices, *copies, _all_ways(table))


_Range = tuple[int, int] | None


@lru_cache(maxsize=16)  # groups of as many ranks have the same table
def _all_ways(table: TuningTable) -> tuple[tuple[int | _Range, ...], ...]:
    return tuple((int(kind), *_ways(table, kind)) for kind in Kind if kind.family in ARRAYS)


def _ways(table: TuningTable, kind: Kind) -> tuple[_Range, ...]:
    """Return of how many bytes arrays are that take the ways of the hot path.

    Ordinary ones go by attaching, or are reduced in the pipe, each of wide numbers and of short
    ones, or are copied to staging memory; those in the heap are read where they are.
    """
    attached, piped, staged, direct = (
        [table.first_range(kind, way, short=short, shared=shared) for short in (False, True)]
        for way, shared in _LEARNT
    )
    alike = (wide if wide == short else None for wide, short in (staged, direct))
    return *attached, *piped, *alike


_LEARNT = (
    (Algorithm.ATTACHED, False),
    (Algorithm.PIPELINED, False),
    (Algorithm.STAGED, False),
    (Algorithm.DIRECT, True),
)


@contextmanager
def switched_off() -> Iterator[None]:
    """Leave every operation of this process to Python inside the block. Local."""
    before = is_here() and compiled.hot_switch(False)
    try:
        yield
    finally:
        if before:
            compiled.hot_switch(True)


@cache
def is_here() -> bool:
    """Return whether the hot path was compiled, and sees NumPy's arrays as they are."""
    if compiled is None or not all(_sees(array) for array in _PROBES):
        return False
    for char in _CHARS:
        _learn(np.dtype(char))
    return True


_PROBES = np.arange(6.0).reshape(2, 3), np.ones((), np.int32), np.ones((4, 4), "?")[:, ::2]
_CHARS = "?bhilqBHILQefdFD"


def _sees(array: Any) -> bool:
    data = array.__array_interface__["data"][0]
    first, last = (array.shape[0], array.strides[-1]) if array.ndim else (0, 0)
    expected = data, array.ndim, first, last, array.flags.num, array.dtype
    return bool(compiled.hot_shows(array) == expected)


def _learn(dtype: np.dtype) -> None:
    """Tell the hot path of one of NumPy's own dtypes."""
    row = dtype_row(dtype)
    if row.plain:
        loops = tuple(_loop(op, row) for op in ReduceOp)
        name = _DLPACK.get(dtype.kind, _NONE)
        compiled.hot_learn(dtype, row.code, dtype.itemsize, dtype.alignment, name, loops)


_DLPACK = {"i": 0, "u": 1, "f": 2, "b": 6}
"""DLPack's codes of kinds of dtypes; complex numbers may be meant to be conjugated."""
_NONE = 255


def meet(cls: type) -> tuple[Any, str] | None:
    """Return how the hot path sees the objects of a class, if it does.

    That is the C interface of DLPack, and the name of a method: it returns False where the numbers
    in the memory are the array's.
    """
    odd = _FOREIGN.get((cls.__module__, cls.__qualname__))
    exchange = vars(cls).get("__dlpack_c_exchange_api__")
    return None if odd is None or exchange is None else (exchange, odd)


_FOREIGN = {("torch", "Tensor"): "is_neg"}


def _loop(op: ReduceOp, row: Dtype) -> int:
    """Return the number of the compiled loop for `op`, -1 where there is none."""
    try:
        number = loop_number(op, row, rule_for(op, row))
    except UsageError:
        return -1
    return -1 if number is None else number
