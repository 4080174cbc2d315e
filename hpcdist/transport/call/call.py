"""`Call`: everything a transport needs to know about one operation, described but not begun.

There is one type for each family of operations (`kinds.py`), which has what these operations have
and nothing else; `Call` is any of them.

[Note: fields] What several families have means the same in all of them:

- Arrays (`send`, `recv`, `data`) are C-contiguous, and on `device`, None for host memory. `sends`
  and `receives` are flat runs of host memory, one per rank of the group, instead of `send` and
  `recv` where these would be copies.
- `root` is a rank of the group, of a message the peer.
- `shape` must be equal on all ranks, except for the kinds in `LOOSE`, whose ranks compare `detail`
  instead; of an uneven reduce_scatter it holds the shapes of all blocks. `shapes` are those of a
  list's arrays, where they differ, and `counts` the elements per peer, sent and received (None:
  whatever comes).
- `words` say what an operation stands for or is a part of, where that is not what its kind says:
  it agrees with no other one.
- `begin` is called when the operation's turn has come, `finish` gets what the transport returns;
  `ended` is told once how the operation ended, None for well.
- `on_current` puts the operation on the caller's current stream itself.

What a family does not have, but those who handle any call ask for, is None in its class.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, final

from hpcdist.arrays.device import DeviceRuntime, device_runtime_of
from hpcdist.arrays.dtypes import Dtype
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.arrays.pickled import Pickled
from hpcdist.boxes import Slices, volume_of
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.text import counted
from hpcdist.transport.call.kinds import LOOSE, ROOTED, Kind
from hpcdist.transport.call.reduction import ReduceOp, ReductionRule

ANY_SOURCE = -1
"""As `root` of a receive: take the message from whichever rank sent one."""

PROC_NULL = -1000
"""No rank at all: what is sent to it is gone, what is received from it leaves the array as it is.

The neighbour of the ranks at the edge of a grid; mpi4py's ``MPI.PROC_NULL`` means the same.
"""

UNDEFINED = -32766
"""As a color: no group. It is MPI_UNDEFINED of Open MPI, of MPICH, and of MPI's standard ABI."""


Shape = tuple[int, ...]
Finish = Callable[[Any], Any]
Ended = Callable[[BaseException | None], None]
Counts = tuple[Sequence[int], Sequence[int] | None]


class Block(NamedTuple):
    """What one rank contributed to a gather: flat memory and its shape."""

    data: NumpyArray
    shape: Shape


class _Reduction(NamedTuple):
    kind: Kind
    send: NumpyArray | None
    recv: NumpyArray
    dtype: Dtype
    shape: Shape
    root: int
    op: ReduceOp
    rule: ReductionRule
    detail: int = 0
    counts: Counts | None = None
    finish: Finish | None = None
    ended: Ended | None = None
    begin: Callable[[], Any] | None = None
    device: DeviceRuntime | None = None
    on_current: bool = False
    sends: Sequence[NumpyArray] = ()
    beside: bool = False


class Reduction(_Reduction):
    """all_reduce, reduce, reduce_scatter, scan, exscan.

    `recv` is reduced in place; by a reduce on the root, and other ranks only give it. A
    reduce_scatter reduces what is in `send` (or `sends`) into `recv`. This rank computes `beside`.
    """

    __slots__ = ()
    error: ClassVar[None] = None
    receives: ClassVar[tuple[()]] = ()

    def fingerprint(self) -> int:
        """Return a number from 0 to 2^62 that is equal on ranks whose calls match."""
        kind, _, _, dtype, shape, root, op = self[:7]
        code = dtype.code + (0 if self.device is None else _ON_DEVICE)
        return hash((kind, op, root, code, shape)) & _POSITIVE

    @property
    def nbytes(self) -> int:
        """How many bytes this rank contributes."""
        if self.sends:
            return sum(each.nbytes for each in self.sends)
        return int((self.recv if self.send is None else self.send).nbytes)


class _Distribution(NamedTuple):
    kind: Kind
    send: NumpyArray | None
    recv: NumpyArray
    dtype: Dtype
    shape: Shape
    root: int
    detail: int = 0
    counts: Counts | None = None
    finish: Finish | None = None
    ended: Ended | None = None
    begin: Callable[[], Any] | None = None
    device: DeviceRuntime | None = None
    on_current: bool = False
    sends: Sequence[NumpyArray] = ()
    shapes: Sequence[Shape] = ()


class Distribution(_Distribution):
    """broadcast, scatter: the root's data go to all.

    `recv` is where they arrive; a broadcast's root sends it, a scatter's root sends `send` (or
    `sends`).
    """

    __slots__ = ()
    error: ClassVar[None] = None
    receives: ClassVar[tuple[()]] = ()

    def fingerprint(self) -> int:
        """Return a number from 0 to 2^62 that is equal on ranks whose calls match."""
        return _fingerprint(self)

    @property
    def nbytes(self) -> int:
        """How many bytes this rank contributes; where it only receives, how many it does."""
        if self.sends:
            return sum(each.nbytes for each in self.sends)
        return int((self.recv if self.send is None else self.send).nbytes)


class _Gathering(NamedTuple):
    kind: Kind
    send: NumpyArray
    recv: NumpyArray | None
    dtype: Dtype
    shape: Shape
    root: int = 0
    detail: int = 0
    counts: Counts | None = None
    finish: Finish | None = None
    ended: Ended | None = None
    begin: Callable[[], Any] | None = None
    device: DeviceRuntime | None = None
    on_current: bool = False
    sends: Sequence[NumpyArray] = ()
    receives: Sequence[NumpyArray] = ()
    shapes: Sequence[Shape] = ()
    words: str = ""


class Gathering(_Gathering):
    """all_gather, gather, alltoall: the data of all ranks are collected.

    They come from `send`, which is empty where they are in `sends`, and go to `recv` or `receives`.
    Where there is neither, the operation makes its result itself. An alltoall with `words` stands
    for an exchange, whose `key` is its `root`.
    """

    __slots__ = ()
    error: ClassVar[None] = None

    def fingerprint(self) -> int:
        """Return a number from 0 to 2^62 that is equal on ranks whose calls match."""
        return _fingerprint(self)

    @property
    def nbytes(self) -> int:
        """How many bytes this rank contributes."""
        return sum(each.nbytes for each in self.sends) if self.sends else int(self.send.nbytes)


class Read(NamedTuple):
    """Take the box `source` of the array, of `shape`, of rank `rank` into the box `target`.

    With `combine` it is combined with what is there, else it is written.
    """

    rank: int
    shape: Shape
    source: Slices
    target: Slices
    combine: bool = False


class Give(NamedTuple):
    """Rank `rank` reads the box `source` of this rank's array."""

    rank: int
    source: Slices


class _Exchange(NamedTuple):
    kind: Kind
    send: NumpyArray
    recv: NumpyArray
    dtype: Dtype
    shape: Shape
    reads: Sequence[Read]
    gives: Sequence[Give]
    rule: ReductionRule | None
    op: ReduceOp | None
    key: int
    words: str
    detail: int = 0
    finish: Finish | None = None
    ended: Ended | None = None
    begin: Callable[[], Any] | None = None


class Exchange(_Exchange):
    """exchange: each rank takes boxes of the arrays of the ranks of the group.

    `send`, of `shape`, is the array of this rank, `recv` the one that is filled; both have a
    further axis where an element is several of their memory. `reads` are done in their order. What
    they take is combined by `rule`, that of `op` (None: nothing is combined). `gives` are the same
    boxes seen from their owner; those for one rank are in the order of its reads. `key` is equal
    where ranks mean the same exchange, `words` say which. `detail` is the larger of the numbers of
    bytes that go to other ranks and come from them. Arrays of a device are exchanged by an
    alltoall.
    """

    __slots__ = ()
    device: ClassVar[None] = None
    on_current: ClassVar[bool] = False
    error: ClassVar[None] = None
    root: ClassVar[int] = 0

    def fingerprint(self) -> int:
        """Return a number from 0 to 2^62 that is equal on ranks whose calls match."""
        return hash((self.kind, -1, self.key, self.dtype.code)) & _POSITIVE

    @property
    def nbytes(self) -> int:
        """How many bytes this rank gives."""
        volume = sum(volume_of(give.source) for give in self.gives)
        return volume * int(self.dtype.numpy.itemsize)


class _Objects(NamedTuple):
    kind: Kind
    pickles: Sequence[Pickled]
    shape: Shape = ()
    root: int = 0
    detail: int = 0
    finish: Finish | None = None
    ended: Ended | None = None
    begin: Callable[[], Any] | None = None
    words: str = ""


class Objects(_Objects):
    """The collectives on objects; `detail` has the bytes of the largest of `pickles`."""

    __slots__ = ()
    device: ClassVar[None] = None
    on_current: ClassVar[bool] = False
    error: ClassVar[None] = None
    send: ClassVar[None] = None
    recv: ClassVar[None] = None
    dtype: ClassVar[None] = None

    def fingerprint(self) -> int:
        """Return a number from 0 to 2^62 that is equal on ranks whose calls match."""
        purpose = zlib.crc32(self.words.encode()) if self.words else -1
        shape = () if self.kind in LOOSE else self.shape
        return hash((self.kind, purpose, self.root, shape)) & _POSITIVE

    @property
    def nbytes(self) -> int:
        """How many bytes this rank contributes."""
        return sum(each.nbytes for each in self.pickles)


class _Barrier(NamedTuple):
    kind: Kind = Kind.BARRIER
    root: int = 0
    detail: int = 0
    finish: Finish | None = None
    ended: Ended | None = None
    begin: Callable[[], Any] | None = None
    device: DeviceRuntime | None = None
    words: str = ""


class Barrier(_Barrier):
    """A barrier, or an agreement on anything else that ranks do together, maybe on a `device`.

    With `words` its `root` is a key, equal where ranks mean the same.
    """

    __slots__ = ()
    on_current: ClassVar[bool] = False
    error: ClassVar[None] = None
    send: ClassVar[None] = None
    recv: ClassVar[None] = None
    dtype: ClassVar[None] = None
    shape: ClassVar[Shape] = ()
    nbytes: ClassVar[int] = 0

    def fingerprint(self) -> int:
        """Return a number from 0 to 2^62 that is equal on ranks whose calls match."""
        return hash((self.kind, -1, self.root) if self.words else (self.kind, -1)) & _POSITIVE


class _Refusal(NamedTuple):
    kind: Kind
    root: int
    error: Exception
    detail: int = 0
    finish: Finish | None = None
    ended: Ended | None = None
    begin: Callable[[], Any] | None = None


class Refusal(_Refusal):
    """A collective in which this rank cannot take part.

    `error` is raised on every rank, as a `RemoteError` that is `in_step` on the others.
    """

    __slots__ = ()
    device: ClassVar[None] = None
    on_current: ClassVar[bool] = False
    send: ClassVar[None] = None
    recv: ClassVar[None] = None
    dtype: ClassVar[None] = None
    shape: ClassVar[Shape] = ()
    nbytes: ClassVar[int] = 0

    def fingerprint(self) -> int:
        """Return a number that is no call's fingerprint: ranks that refuse agree with nobody."""
        return -1


class _Message(NamedTuple):
    kind: Kind
    data: NumpyArray
    dtype: Dtype
    shape: Shape
    root: int
    tag: int = 0
    finish: Finish | None = None
    ended: Ended | None = None
    begin: Callable[[], Any] | None = None
    device: DeviceRuntime | None = None
    on_current: bool = False


@final
class Message(_Message):
    """send, recv: `data` goes to or comes from `root`, the peer."""

    __slots__ = ()
    detail: ClassVar[int] = 0
    error: ClassVar[None] = None

    @property
    def send(self) -> NumpyArray | None:
        """What is sent."""
        return self.data if self.kind is Kind.SEND else None

    @property
    def recv(self) -> NumpyArray | None:
        """Where it arrives."""
        return self.data if self.kind is Kind.RECV else None

    @property
    def nbytes(self) -> int:
        """How many bytes are sent or received."""
        return int(self.data.nbytes)


class _ObjectMessage(NamedTuple):
    kind: Kind
    root: int
    tag: int = 0
    pickles: Sequence[Pickled] = ()
    finish: Finish | None = None
    ended: Ended | None = None
    begin: Callable[[], Any] | None = None


@final
class ObjectMessage(_ObjectMessage):
    """send_object_list, recv_object_list: `pickles` go to `root`, the peer; or come from there."""

    __slots__ = ()
    device: ClassVar[None] = None
    on_current: ClassVar[bool] = False
    detail: ClassVar[int] = 0
    error: ClassVar[None] = None
    send: ClassVar[None] = None
    recv: ClassVar[None] = None
    dtype: ClassVar[None] = None
    shape: ClassVar[Shape] = ()

    @property
    def nbytes(self) -> int:
        """How many bytes are sent; 0 of a receive."""
        return sum(each.nbytes for each in self.pickles)


AnyArrays = Reduction | Distribution | Gathering
Collective = AnyArrays | Exchange | Objects | Barrier | Refusal
AnyMessage = Message | ObjectMessage
Call = Collective | AnyMessage
"""One operation of one rank; see [Note: fields] for what its fields mean."""

MESSAGES = (Message, ObjectMessage)
"""For `isinstance`."""

WITH_ARRAYS = (Reduction, Distribution, Gathering, Message)
"""For `isinstance`: what may be in the memory of a device."""


PLACES = {
    Reduction: (3, 4, 5, -1, -1),
    Distribution: (3, 4, 5, -1, -1),
    Gathering: (3, 4, 5, -1, -1),
    Exchange: (3, 4, -1, -2, -1),
    Objects: (-1, 2, 3, 4, -1),
    Barrier: (-1, -1, -1, -1, -1),
    Refusal: (-1, -1, 1, -1, -1),
    Message: (2, 3, 4, -1, 5),
    ObjectMessage: (-1, -1, 1, -2, 2),
}
"""Where the tuple of a family has dtype, shape, root, bytes and tag, for the flight recorder.

-1 is for what it has not (its bytes are those of dtype and shape), -2 for bytes to be asked of it.
"""


def locate(call: Call) -> Call:
    """Note in `call` on which device its arrays are; `UsageError` if on several."""
    if not isinstance(call, WITH_ARRAYS):
        return call
    found = [device_runtime_of(each) for each in (call.send, call.recv) if each is not None]
    if all(each is None for each in found):
        return call
    if len(set(found)) > 1:
        places = " and ".join("the host" if each is None else each.name for each in found)
        raise UsageError(
            f"the arrays of one {call.kind.name.lower()} are in the memory of {places}; move them "
            "to one place"
        )
    return call._replace(device=found[0])


def refused(call: Collective, error: Exception) -> Refusal:
    """Return what stands for `call` on a rank that cannot take part in it."""
    return Refusal(call.kind, call.root, error, ended=call.ended)


def making(call: Collective, ranks: Sequence[int]) -> Barrier | Refusal:
    """Return what ranks agree on when they make a plan of `call`: nothing but such makings."""
    if isinstance(call, Refusal):
        return call
    return Barrier(root=call.fingerprint(), words=f"plan_{label(call, ranks)}")


UNEVEN = 1
"""`detail` of an operation whose blocks differ on this rank; hashes of shapes are larger."""

_POSITIVE = (1 << 62) - 1
_EVEN = _POSITIVE - 1
_ON_DEVICE = 1 << 40
"""Beyond the codes of all dtypes. Not the codes below 0: the hashes of -1 and -2 are equal."""


def _fingerprint(call: Distribution | Gathering) -> int:
    kind, _, _, dtype, shape, root = call[:6]
    code = dtype.code + (0 if call.device is None else _ON_DEVICE)
    return hash((kind, -1, root, code, () if kind in LOOSE else shape)) & _POSITIVE


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


def even_blocks(gathered: NumpyArray, call: Gathering, size: int) -> list[Block]:
    """Cut what was gathered from `size` ranks alike; nothing if it is the caller's own memory."""
    if call.recv is not None:
        return []
    flat = gathered.reshape(-1)
    step = flat.size // size
    return [Block(flat[rank * step : (rank + 1) * step], call.shape) for rank in range(size)]


def apart(call: Collective) -> Collective:
    """Return a call on copies of its arrays, of whose end nobody is told."""
    if isinstance(call, (Barrier, Refusal)):
        return call
    if isinstance(call, Objects):
        pickles = [each.copy() for each in call.pickles]
        return call._replace(pickles=pickles, finish=None, ended=None)
    copies = {name: _copied(getattr(call, name)) for name in _ARRAYS if name in call._fields}
    return call._replace(**copies, finish=None, ended=None)


_ARRAYS = "send", "recv", "sends", "receives"


def _copied(arrays: Any) -> Any:
    if isinstance(arrays, (list, tuple)):
        return [each.copy() for each in arrays]
    return None if arrays is None else arrays.copy()


def label(call: Call, ranks: Sequence[int]) -> str:
    """Return in words what `call` is; `ranks` are the group's world ranks."""
    if isinstance(call, (Barrier, Objects)) and call.words:
        return call.words
    words: list[str] = []
    if call.dtype is not None:
        words = [exchanged_in(call) or f"shape {call.shape}", call.dtype.name]
        words += [] if call.device is None else ["on a GPU"]
    elif call.shape:
        words = [counted(call.shape[0], "object")]
    if isinstance(call, Reduction):
        words.append(call.op.name)
    if call.kind in ROOTED:
        words.append(f"root {ranks[call.root]}")
    return f"{name_of(call)}({', '.join(words)})"


def name_of(call: Call) -> str:
    """Return the public name of the operation that `call` is, or stands for."""
    return (Kind.EXCHANGE if exchanged_in(call) else call.kind).name.lower()


def exchanged_in(call: Call) -> str:
    """Return what is exchanged, in words; empty where `call` is no exchange."""
    return call.words if isinstance(call, (Exchange, Gathering)) else ""
