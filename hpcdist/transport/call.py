"""`Call`: everything a transport needs to know about one operation, described but not begun."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from hpcdist.arrays.device import DeviceRuntime, device_runtime_of
from hpcdist.arrays.dtypes import Dtype
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.arrays.pickled import Pickled
from hpcdist.errors import UsageError
from hpcdist.transport.reduction import ReduceOp, ReductionRule

ANY_SOURCE = -1
"""As `root` of a receive: take the message from whichever rank sent one."""

PROC_NULL = -1000
"""No rank at all: what is sent to it is gone, what is received from it leaves the array as it is.

The neighbour of the ranks at the edge of a grid; mpi4py's ``MPI.PROC_NULL`` means the same.
"""

UNDEFINED = -32766
"""As a color: no group. It is MPI_UNDEFINED of Open MPI, of MPICH, and of MPI's standard ABI."""


class Kind(IntEnum):
    """The operations; the lower-case name is the public one."""

    __hash__ = int.__hash__  # Enum's own is a Python function, and these are looked up a lot

    BARRIER = 0
    ALL_REDUCE = 1
    REDUCE = 2
    REDUCE_SCATTER = 3
    SCAN = 4
    EXSCAN = 5
    BROADCAST = 6
    ALL_GATHER = 7
    GATHER = 8
    SCATTER = 9
    ALLTOALL = 10
    BROADCAST_OBJECT_LIST = 11
    ALL_GATHER_OBJECT = 12
    GATHER_OBJECT = 13
    SCATTER_OBJECT_LIST = 14
    ALL_TO_ALL_OBJECT = 15
    SEND = 16
    RECV = 17
    SEND_OBJECT_LIST = 18
    RECV_OBJECT_LIST = 19
    BATCH_ISEND_IRECV = 20


Shape = tuple[int, ...]


class Block(NamedTuple):
    """What one rank contributed to a gather: flat memory and its shape."""

    data: NumpyArray
    shape: Shape


class Call(NamedTuple):
    """One operation of one rank.

    `send` and `recv` are C-contiguous; `recv` alone means in place. `root` is a rank of the
    group (the peer of a message). `shape` must be equal on all ranks, except for the kinds in
    `LOOSE`, whose ranks compare `detail` instead; of an uneven reduce_scatter it holds the shapes
    of all blocks. `counts` are elements per peer, sent and received (None: whatever comes), where
    blocks may differ. `pickles` are pickled objects. `error` says that this rank
    cannot take part; it is then raised on every rank, as a `RemoteError` that is `in_step` on the
    others. `begin` is called when the operation's turn has come, `finish` gets what the transport
    returns; `ended` is told once how the operation ended, None for well. `device` is where `send`
    and `recv` are, None for host memory;
    `on_current` puts the operation on the caller's current stream itself. `sends` and `receives`
    are flat runs of host memory, one per rank of the group, instead of `send` and `recv` where
    these would be copies; `shapes` are those of a list's arrays, where they differ.
    """

    kind: Kind
    send: NumpyArray | None = None
    recv: NumpyArray | None = None
    dtype: Dtype | None = None
    shape: tuple[int, ...] = ()
    root: int = 0
    op: ReduceOp | None = None
    rule: ReductionRule | None = None
    detail: int = 0
    counts: tuple[Sequence[int], Sequence[int] | None] | None = None
    tag: int = 0
    pickles: Sequence[Pickled] = ()
    finish: Callable[[Any], Any] | None = None
    ended: Callable[[BaseException | None], None] | None = None
    error: Exception | None = None
    begin: Callable[[], Any] | None = None
    device: DeviceRuntime | None = None
    on_current: bool = False
    sends: Sequence[NumpyArray] = ()
    receives: Sequence[NumpyArray] = ()
    shapes: Sequence[Shape] = ()


def locate(call: Call) -> Call:
    """Note in `call` on which device its arrays are; `UsageError` if on several."""
    found = [device_runtime_of(each) for each in (call.send, call.recv) if each is not None]
    if not found or all(each is None for each in found):
        return call
    if len(set(found)) > 1:
        places = " and ".join("the host" if each is None else each.name for each in found)
        raise UsageError(
            f"the arrays of one {call.kind.name.lower()} are in the memory of {places}; move them "
            "to one place"
        )
    return call._replace(device=found[0])


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
"""Operations whose ranks may bring different shapes or sizes; see `Call.detail`."""

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

MAKERS = frozenset({Kind.ALL_GATHER, Kind.GATHER, Kind.ALLTOALL})
"""Operations that make their result themselves where a rank gives no memory for it."""

MESSAGES = int(Kind.SEND)
"""From this kind on: point-to-point operations; `Call.root` is the peer."""

END_OF_BLOCK = 1
"""`root` of the all_gather_object at the end of a block of `together`: no other one matches it."""

UNEVEN = 1
"""`detail` of an operation whose blocks differ on this rank; hashes of shapes are larger."""

_POSITIVE = (1 << 62) - 1
_EVEN = _POSITIVE - 1


def fingerprint(call: Call) -> int:
    """Return a number from 0 to 2^62 that is equal on ranks whose calls match."""
    kind, _, _, dtype, shape, root, op = call[:7]
    code = -1 if dtype is None else dtype.code
    number = -1 if op is None else op  # the hash of None differs between processes
    if call.device is not None:
        code = ~code
    return hash((kind, number, root, code, () if kind in LOOSE else shape)) & _POSITIVE


def shape_detail(shape: Shape) -> int:
    """Return an even number above `UNEVEN` that is equal on ranks with equal shapes.

    A rank whose arrays lie apart sets the last bit; see `is_apart`.
    """
    return (hash(shape) & _EVEN) + UNEVEN + 1


def is_even(detail: tuple[int, int]) -> bool:
    """Return whether all blocks of an operation are alike, from the range of `detail`."""
    return detail[0] != UNEVEN and detail[0] | 1 == detail[1] | 1


def is_apart(detail: tuple[int, int]) -> bool:
    """Return whether the arrays of some rank lie apart, where all blocks are alike."""
    return bool(detail[1] & 1)


def bytes_of(call: Call) -> int:
    """Return how many bytes a rank contributes; where it only receives, how many it does."""
    data = call.send if call.send is not None else call.recv
    if data is not None and not call.sends:
        return int(data.nbytes)
    return sum(each.nbytes for each in call.sends or call.receives or call.pickles)


def even_blocks(gathered: NumpyArray, call: Call, size: int) -> list[Block]:
    """Cut what was gathered from `size` ranks alike; nothing if it is the caller's own memory."""
    if call.recv is not None:
        return []
    flat = gathered.reshape(-1)
    step = flat.size // size
    return [Block(flat[rank * step : (rank + 1) * step], call.shape) for rank in range(size)]


def label(call: Call, ranks: Sequence[int]) -> str:
    """Say in words what `call` is, for messages; `ranks` are the group's world ranks."""
    if call.kind is Kind.ALL_GATHER_OBJECT and call.root == END_OF_BLOCK:
        return "end of a block of hpcdist.together"
    words = []
    if call.dtype is not None:
        words = [f"shape {call.shape}", call.dtype.name]
        words += [] if call.device is None else ["on a GPU"]
    elif call.shape:
        words = [f"{call.shape[0]} objects"]
    if call.op is not None:
        words.append(call.op.name)
    if call.kind in ROOTED:
        words.append(f"root {ranks[call.root]}")
    return f"{call.kind.name.lower()}({', '.join(words)})"
