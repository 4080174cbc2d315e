"""Device memory over NCCL: every array collective on the group's communication stream.

All ranks have agreed on an operation, on the host, before it is put on the stream; so a rank that
is missing or means another operation is an error and not a kernel that waits for ever.

NCCL's functions are taken from `cupy.cuda.nccl`. They are few and have integers for
pointers and streams, so another binding can take their place in `_Binding`.

Sources: NCCL user guide (collectives, groups, communicators, error handling).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from hpcdist.arrays.device import DeviceArray, Engine, Event, Stream
from hpcdist.errors import CollectiveTimeout, HpcdistError, TransportError
from hpcdist.runtime import gpu
from hpcdist.transport.call import UNEVEN, Block, Call, Kind, label
from hpcdist.transport.mpi_collectives import (
    agree_on_counts,
    even_blocks,
    exchange_shapes,
    room_for,
)
from hpcdist.transport.nccl_codes import BYTES, Reduction, plan_reduction
from hpcdist.transport.patience import poll

if TYPE_CHECKING:
    from hpcdist.transport.mpi_host import MpiHost

_OLDEST = 21000
"""NCCL 2.10, the first with the operator AVG."""


def why_not() -> str:
    """Say why this process cannot use NCCL; empty if it can. Local."""
    try:
        binding = _binding()
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        return f"CuPy has no NCCL ({error}): pip install nvidia-nccl-cu12 (or nvidia-nccl-cu13)"
    version = binding.version()
    if version < _OLDEST:
        return f"NCCL {version} is older than {_OLDEST}"
    return ""


def version() -> int:
    """Return the version of the NCCL library in use, as 22809 for 2.28.9; 0 if there is none."""
    return 0 if why_not() else int(_binding().version())


class _Binding(NamedTuple):
    """The functions of NCCL that are not methods of a communicator."""

    version: Callable[[], int]
    unique_id: Callable[[], bytes]
    communicator: Callable[[int, bytes, int], Any]
    group_start: Callable[[], None]
    group_end: Callable[[], None]


def _binding() -> _Binding:
    from cupy.cuda import nccl

    if not nccl.available:
        raise ImportError("libnccl.so.2 was not found")
    return _Binding(
        nccl.get_version,
        nccl.get_unique_id,
        nccl.NcclCommunicator,
        nccl.groupStart,
        nccl.groupEnd,
    )


@final
class Nccl:
    """NCCL's communicator for the ranks of a group on one device each. Collective to create.

    It is made from an id of its own and not by ncclCommSplit, which all ranks of the parent
    would have to call: a group is made by its members alone.
    """

    def __init__(self, host: MpiHost, engine: Engine) -> None:
        self._host, self.engine = host, engine
        self._nccl = _binding()
        self.stream, key = self._prepared()
        with engine.on(self.stream), _told("creating a communicator"):
            self._comm: Any = self._nccl.communicator(host.size, key, host.rank)

    def _prepared(self) -> tuple[Stream, Any]:
        """Make stream and id, and make sure that all ranks can go on: NCCL would wait for ever."""
        host, stream, key, trouble = self._host, None, None, ""
        gpu.order_launches()
        try:
            stream = self.engine.new_stream()
            key = self._nccl.unique_id() if host.rank == 0 else None
        except (RuntimeError, KeyError) as error:
            trouble = f"rank {host.ranks[host.rank]}: {error or type(error).__name__}"
        told = host.comm.allgather((trouble, key))
        troubles = [each for each, _ in told if each]
        if troubles:
            raise TransportError(f"NCCL's communicator cannot be made: {'; '.join(troubles)}")
        return stream, told[0][1]

    def can(self, call: Call) -> bool:
        """Say whether NCCL has what `call` needs; equal on all ranks."""
        if call.kind in _REDUCED:
            return self._reduction(call) is not None
        return call.kind in _VERBS

    def is_plain(self, call: Call) -> bool:
        """Say whether NCCL reads and writes the caller's arrays themselves, and nothing else.

        Only then may a CUDA graph repeat it: other memory is used anew after the capture.
        """
        if call.finish is not None or not self.can(call):
            return False
        if call.kind in (Kind.ALL_GATHER, Kind.GATHER) and call.recv is None:
            return call.kind is Kind.GATHER and self._rank != call.root
        given, out = call.send, call.recv
        if given is not None and out is not None and np.may_share_memory(given, out):
            return call.kind is Kind.ALL_GATHER and self._is_in_place(given, out)
        plan = self._reduction(call) if call.kind in _REDUCED else None
        assert call.dtype is not None
        return plan is None or not (
            plan.encoded or plan.decoded or plan.wire.itemsize != call.dtype.numpy.itemsize
        )

    def perform(self, call: Call, detail: tuple[int, int], stream: Stream) -> Any:
        """Put `call`, on which all ranks have agreed, on `stream`; the host does not wait."""
        try:
            with self.engine.on(stream), _told(label(call, self._host.ranks)):
                return _VERBS[call.kind](self, call, detail, stream)
        except TransportError:
            self.abort()  # so that the others do not wait for this rank's kernel
            raise

    def await_on_host(self, event: Event, call: Call) -> None:
        """Block the host until `event`; look for errors of NCCL meanwhile.

        Raises:
            TransportError: NCCL has failed; the communicator is gone.
            CollectiveTimeout: the time limit of the group is over; the communicator is gone.

        """

        def attend(_: float) -> None:
            self.check()
            self._host.progress()

        if not poll(lambda: self.engine.is_done(event), self._host.timeout_s, attend):
            self.abort()
            raise CollectiveTimeout(
                f"{label(call, self._host.ranks)} was started on all ranks but has not ended on "
                f"the GPU within {self._host.timeout_s:g} s; NCCL was aborted. Look for a rank "
                "whose stream is held up, and run with NCCL_DEBUG=WARN"
            )

    def check(self) -> None:
        """Raise what NCCL reports about the operations under way; `TransportError`."""
        if self._comm is None:
            raise TransportError("NCCL was aborted in this group; make a new group")
        try:
            with _told("an operation under way"):
                self._comm.check_async_error()
        except TransportError:
            self.abort()
            raise

    def abort(self) -> None:
        """End what is under way, on this rank; the communicator cannot be used any more."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort()

    def close(self) -> None:
        """Free the communicator; collective, after all operations have ended."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.destroy()

    # ---- the operations

    @property
    def _size(self) -> int:
        return self._host.size

    @property
    def _rank(self) -> int:
        return self._host.rank

    def _reduction(self, call: Call) -> Reduction | None:
        assert call.op is not None
        assert call.dtype is not None
        assert call.recipe is not None
        native = self._host.site.config.nccl_sums == "native"
        return plan_reduction(call.op, call.dtype, call.recipe, self._size, native=native)

    def all_reduce(self, call: Call, _: Any, stream: Stream) -> None:
        data = _flat(call.recv)
        plan, wire = self._encoded(call, data)
        at, count = self.engine.address(wire), wire.size * plan.per_element
        self._comm.allReduce(at, at, count, plan.code, plan.op, stream.ptr)
        self._decode(call, plan, wire, data)

    def reduce(self, call: Call, _: Any, stream: Stream) -> None:
        at_root = self._rank == call.root
        data = _flat(call.recv if at_root else call.send)
        plan, wire = self._encoded(call, data)
        at, count = self.engine.address(wire), wire.size * plan.per_element
        self._comm.reduce(
            at, at if at_root else 0, count, plan.code, plan.op, call.root, stream.ptr
        )
        if at_root:
            self._decode(call, plan, wire, data)

    def reduce_scatter(self, call: Call, _: Any, stream: Stream) -> None:
        given, out = _apart(call)
        plan, wire = self._encoded(call, given)
        direct = not plan.encoded and out.dtype.itemsize == wire.dtype.itemsize
        into = out if direct else np.empty_like(wire, shape=out.size)
        count = out.size * plan.per_element
        self._comm.reduceScatter(
            self.engine.address(wire),
            self.engine.address(into),
            count,
            plan.code,
            plan.op,
            stream.ptr,
        )
        self._decode(call, plan, into, out)

    def _encoded(self, call: Call, data: DeviceArray) -> tuple[Reduction, DeviceArray]:
        """Return how `data` is reduced, and what travels: itself, or other memory."""
        plan, recipe = self._reduction(call), call.recipe
        assert plan is not None
        assert recipe is not None
        if plan.encoded and recipe.encode is not None:
            data = recipe.encode(data)
        if data.dtype.itemsize != plan.wire.itemsize:
            data = data.astype(plan.wire)
        return plan, data

    def _decode(self, call: Call, plan: Reduction, wire: DeviceArray, out: DeviceArray) -> None:
        """Write what has been reduced to `out`, unless it is there already."""
        recipe = call.recipe
        assert recipe is not None
        if plan.encoded and plan.wire.itemsize != recipe.wire.itemsize:
            wire = wire.astype(recipe.wire)
        if plan.decoded and recipe.decode is not None:
            recipe.decode(wire, out, self._size)
        elif wire is not out:
            out[...] = wire

    def broadcast(self, call: Call, _: Any, stream: Stream) -> None:
        at = self.engine.address(call.recv)
        assert call.recv is not None
        self._comm.broadcast(at, at, call.recv.nbytes, BYTES, call.root, stream.ptr)

    def all_gather(self, call: Call, detail: tuple[int, int], stream: Stream) -> list[Block]:
        send, recv = _flat(call.send), call.recv
        if detail[0] != detail[1]:
            blocks = self._uneven_room(call, everywhere=True)
            with self._together():
                self._send_to_all(send, stream)
                self._receive_from_all([block.data for block in blocks], stream)
            return blocks
        if recv is None:
            recv = np.empty_like(send, shape=self._size * send.size)
        flat = _flat(recv)
        if np.may_share_memory(send, flat) and not self._is_in_place(send, flat):
            send = send.copy()
        from_, into = self.engine.address(send), self.engine.address(flat)
        self._comm.allGather(from_, into, send.nbytes, BYTES, stream.ptr)
        return even_blocks(recv, call, self._size)

    def _is_in_place(self, send: DeviceArray, recv: DeviceArray) -> bool:
        """Say whether this rank's part of a gather is where the gather would put it."""
        own = self.engine.address(recv) + self._rank * send.nbytes
        return bool(self.engine.address(send) == own)

    def gather(self, call: Call, detail: tuple[int, int], stream: Stream) -> list[Block] | None:
        send, recv, at_root = _flat(call.send), call.recv, self._rank == call.root
        blocks: list[Block] = []
        parts: list[DeviceArray] = []
        if detail[0] != detail[1]:
            blocks = self._uneven_room(call, everywhere=at_root)
            parts = [block.data for block in blocks]
        elif at_root:
            if recv is None:
                recv = np.empty_like(send, shape=self._size * send.size)
            elif np.may_share_memory(send, recv):
                send = send.copy()
            blocks, parts = even_blocks(recv, call, self._size), np.split(_flat(recv), self._size)
        with self._together():
            self._send(send, call.root, stream)
            if at_root:
                self._receive_from_all(parts, stream)
        return blocks if at_root else None

    def scatter(self, call: Call, _: Any, stream: Stream) -> None:
        out = _flat(call.recv)
        with self._together():
            if self._rank == call.root:
                given, _ = _apart(call)
                for rank, part in enumerate(np.split(given, self._size)):
                    self._send(part, rank, stream)
            self._receive(out, call.root, stream)

    def alltoall(self, call: Call, detail: tuple[int, int], stream: Stream) -> None:
        given, out = _apart(call)
        if detail[0] == detail[1] != UNEVEN:
            sent, received = np.split(given, self._size), np.split(out, self._size)
        else:
            counts = call.counts or ([given.size // self._size] * self._size,) * 2
            out_counts, in_counts, _ = agree_on_counts(self._host, call, counts, large=False)
            sent, received = _cut(given, out_counts), _cut(out, in_counts)
        with self._together():
            for rank, part in enumerate(sent):
                self._send(part, rank, stream)
            self._receive_from_all(received, stream)

    # ---- messages inside a collective

    def _uneven_room(self, call: Call, *, everywhere: bool) -> list[Block]:
        shapes = exchange_shapes(self._host, call, bound=call.recv is not None)
        return room_for(call, shapes) if everywhere else []

    def _send_to_all(self, part: DeviceArray, stream: Stream) -> None:
        for rank in range(self._size):
            self._send(part, rank, stream)

    def _receive_from_all(self, parts: list[DeviceArray], stream: Stream) -> None:
        for rank, part in enumerate(parts):
            self._receive(part, rank, stream)

    def _send(self, part: DeviceArray, rank: int, stream: Stream) -> None:
        if part.size:
            self._comm.send(self.engine.address(part), part.nbytes, BYTES, rank, stream.ptr)

    def _receive(self, part: DeviceArray, rank: int, stream: Stream) -> None:
        if part.size:
            self._comm.recv(self.engine.address(part), part.nbytes, BYTES, rank, stream.ptr)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Issue messages as one operation: none waits for another."""
        self._nccl.group_start()
        try:
            yield
        finally:
            self._nccl.group_end()


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn NCCL's and CUDA's errors into `TransportError`."""
    try:
        yield
    except (
        KeyError,
        MemoryError,
        RuntimeError,
    ) as error:  # CuPy's NcclError fails to be made for some codes
        if isinstance(error, HpcdistError):
            raise
        raise TransportError(
            f"NCCL failed in {what}: {error or type(error).__name__}; run with NCCL_DEBUG=WARN "
            "to see why, or set HPCDIST_DEVICE_WAY=staged to go on without NCCL"
        ) from error


def _flat(array: Any) -> DeviceArray:
    return array.reshape(-1)


def _apart(call: Call) -> tuple[DeviceArray, DeviceArray]:
    """Return what is sent and what is received, flat and in different memory."""
    send, recv = _flat(call.send), _flat(call.recv)
    return (send.copy() if np.may_share_memory(send, recv) else send), recv


def _cut(flat: DeviceArray, counts: Any) -> list[DeviceArray]:
    parts: list[DeviceArray] = np.split(flat, np.cumsum(counts)[:-1].tolist())
    return parts


_REDUCED = frozenset({Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER})
_VERBS: dict[Kind, Callable[[Nccl, Call, tuple[int, int], Stream], Any]] = {
    Kind.ALL_REDUCE: Nccl.all_reduce,
    Kind.REDUCE: Nccl.reduce,
    Kind.REDUCE_SCATTER: Nccl.reduce_scatter,
    Kind.BROADCAST: Nccl.broadcast,
    Kind.ALL_GATHER: Nccl.all_gather,
    Kind.GATHER: Nccl.gather,
    Kind.SCATTER: Nccl.scatter,
    Kind.ALLTOALL: Nccl.alltoall,
}
