"""Device memory over NCCL: every array collective on the group's communication stream.

All ranks have agreed on an operation, on the host, before it is put on the stream; so a rank that
is missing or means another operation is an error and not a kernel that waits for ever.

NCCL's functions come from a small table (`binding`), the communicator from `bootstrap`.

Sources: NCCL user guide (collectives, groups, communicators, error handling).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import numpy as np

from hpcdist.arrays.device import DeviceArray, DeviceRuntime, Event, Stream
from hpcdist.arrays.dtypes import Dtype
from hpcdist.config import Config
from hpcdist.errors import CollectiveTimeout, HpcdistError, TransportError
from hpcdist.runtime import gpu
from hpcdist.transport.call.call import (
    AnyArrays,
    Block,
    Call,
    Distribution,
    Gathering,
    Reduction as ReductionCall,
    even_blocks,
    is_even,
    label,
)
from hpcdist.transport.call.kinds import ARRAYS, Kind, table_for
from hpcdist.transport.call.reduction import ReduceOp, ReductionRule
from hpcdist.transport.call.runs import counts_of, cut, from_each, new_blocks, to_each, with_room
from hpcdist.transport.device.backend import DeviceBackend, Launch
from hpcdist.transport.device.choose import Candidate, Release, Standing
from hpcdist.transport.device.nccl.binding import (
    SHARES_GPUS,
    binding,
    failure,
    version,
    why_not,
)
from hpcdist.transport.device.nccl.bootstrap import connect
from hpcdist.transport.device.nccl.dtypes import BYTES, Reduction, plan_reduction
from hpcdist.transport.device.nccl.guard import guard, has_lost
from hpcdist.transport.device.nccl.matching import Transfer
from hpcdist.transport.mpi.collectives import agree_on_counts, exchange_shapes
from hpcdist.transport.mpi.ordered import keeps_order
from hpcdist.transport.waiting.polling import poll

if TYPE_CHECKING:
    from hpcdist.transport.mpi.context import MpiContext

CANDIDATE = Candidate(
    "nccl",
    "NCCL is there on all ranks",
    shares=Release(SHARES_GPUS, f"NCCL {SHARES_GPUS} (2.30)"),
)


def standing(config: Config, runtime: DeviceRuntime, uuid: str) -> Standing:
    """Return whether NCCL can be used on a device, and which one it is. Local."""
    reason = why_not(config.nccl_binding) if uuid else f"{runtime.name} is no CUDA device"
    return Standing(reason, 0 if reason else version(config.nccl_binding))


@final
class Nccl(DeviceBackend):
    """NCCL's communicator for the ranks of a group on one device each. Collective to create."""

    def __init__(self, context: MpiContext, runtime: DeviceRuntime) -> None:
        config = context.site.config
        gpu.order_launches()
        if config.share_gpu and config.device_backend == "nccl":
            gpu.let_nccl_share()
        self._context, self.runtime = context, runtime
        self._rank, self._size = context.rank, context.size
        self._native = config.nccl_sums == "native"
        self._plans: dict[tuple[ReduceOp, int], Reduction | None] = {}
        self._nccl = binding(config.nccl_binding)
        self.stream, self._comm = connect(context, runtime, self._nccl)
        self._is_over = False
        guard(context, lambda: self._is_over, self.abort)

    def can(self, call: AnyArrays) -> bool:
        """Return whether NCCL has what `call` needs; equal on all ranks."""
        if isinstance(call, ReductionCall) and call.kind in _REDUCED:
            ordered = keeps_order(self._context.site.config, call.rule)
            return not ordered and self._reduction(call) is not None
        return call.kind in _VERBS

    def can_capture(self, call: Call) -> bool:
        """Return whether NCCL reads and writes the caller's arrays themselves, and nothing else.

        Only then may a CUDA graph repeat it: other memory is used anew after the capture.
        """
        if not isinstance(call, AnyArrays) or call.finish is not None or not self.can(call):
            return False
        if isinstance(call, ReductionCall) and call.counts is not None:
            return False
        if call.kind in (Kind.ALL_GATHER, Kind.GATHER) and call.recv is None:
            return call.kind is Kind.GATHER and self._rank != call.root
        given, out = call.send, call.recv
        if given is not None and out is not None and self._overlap(given, out):
            return call.kind is Kind.ALL_GATHER and self._is_in_place(given, out)
        plan = self._reduction(call) if isinstance(call, ReductionCall) else None
        return plan is None or not (
            plan.encoded or plan.decoded or plan.wire.itemsize != call.dtype.numpy.itemsize
        )

    def home(self) -> DeviceRuntime:
        """Return the device that the communicator was made for."""
        return self.runtime

    def run(self, launch: Launch, detail: tuple[int, int]) -> tuple[Any, Stream]:
        """Put the operation on the group's stream or the caller's; the host does not wait."""
        call = launch.call
        # In a capture `launch.streams` are only those that record: the last is one of them.
        stream = launch.streams[-1] if call.on_current else self.stream
        return launch.put(stream, self.check, lambda: self.perform(call, detail, stream)), stream

    def perform(self, call: AnyArrays, detail: tuple[int, int], stream: Stream) -> Any:
        """Put `call`, on which all ranks have agreed, on `stream`; the host does not wait."""
        try:
            with self.runtime.on(stream):
                return _VERBS[call.kind](self, call, detail, stream)
        except self._nccl.failures as error:
            if isinstance(error, HpcdistError):
                raise  # ranks that mean different things; all of them know
            raise self._failed(label(call, self._context.ranks), error) from error

    def exchange(self, transfers: Sequence[Transfer], stream: Stream) -> None:
        """Put the messages of a batch on `stream`, as one operation; their peers do the same.

        The nth send to a rank meets its nth receive from this one; see `matching`.
        """
        try:
            with self.runtime.on(stream), self._together():
                for each in transfers:
                    verb = self._send if each.sends else self._receive
                    verb(_flat(each.data), each.peer, stream)
        except self._nccl.failures as error:
            raise self._failed("batch_isend_irecv", error) from error

    def await_on_host(self, event: Event, call: Call, timeout_s: float) -> None:
        """Block the host until `event`, the end of `call`; look for errors of NCCL meanwhile.

        Raises:
            TransportError: NCCL has failed; the communicator is gone.
            RankFailure: a rank has died; the communicator is gone.
            CollectiveTimeout: `timeout_s` is over; the communicator is gone.

        """

        def attend(_: float) -> None:
            self.check()
            self._context.progress()

        if not poll(lambda: self.runtime.is_done(event), timeout_s, attend):
            self.abort()
            raise CollectiveTimeout(
                f"{label(call, self._context.ranks)} was started on all ranks but has not ended "
                f"on the GPU within {timeout_s:g} s; NCCL was aborted. Look for a rank "
                "whose stream is held up, and run with NCCL_DEBUG=WARN"
            )
        if self._is_over:
            self.check()  # it was aborted, which ends it, too

    def check(self) -> None:
        """Raise what NCCL reports about the operations under way; `TransportError`."""
        if self._is_over and has_lost(self._context):
            raise self._context.site.deaths.failure("an operation on the GPU")
        if self._is_over:
            raise TransportError("NCCL was aborted in this group; make a new group")
        try:
            self._comm.check()
        except self._nccl.failures as error:
            raise self._failed("an operation under way", error) from error

    def _failed(self, what: str, error: Exception) -> HpcdistError:
        """End what is under way, so that no rank waits for this one; return what is raised."""
        self.abort()
        if has_lost(self._context):
            return self._context.site.deaths.failure(what)
        return failure(what, error)

    def abort(self) -> None:
        """End what is under way, on this rank; the communicator cannot be used any more."""
        over, self._is_over = self._is_over, True
        if not over:
            self._comm.abort()

    def close(self) -> None:
        """Free the communicator; collective, after all operations have ended."""
        over, self._is_over = self._is_over, True
        if not over:
            self._comm.destroy()

    # ---- the operations

    def _reduction(self, call: ReductionCall) -> Reduction | None:
        key = call.op, call.dtype.code
        if key not in self._plans:
            self._plans[key] = self._planned(call.op, call.dtype, call.rule)
        return self._plans[key]

    def _planned(self, op: ReduceOp, dtype: Dtype, rule: ReductionRule) -> Reduction | None:
        return plan_reduction(op, dtype, rule, self._size, native=self._native)

    def all_reduce(self, call: ReductionCall, _: Any, stream: Stream) -> None:
        data = _flat(call.recv)
        plan, wire = self._encoded(call, data)
        at, count = self.runtime.address(wire), wire.size * plan.per_element
        self._comm.all_reduce(at, at, count, plan.code, plan.op, stream.ptr)
        self._decode(call, plan, wire, data)

    def reduce(self, call: ReductionCall, _: Any, stream: Stream) -> None:
        at_root = self._rank == call.root
        data = _flat(call.recv)
        plan, wire = self._encoded(call, data)
        at, count = self.runtime.address(wire), wire.size * plan.per_element
        self._comm.reduce(
            at, at if at_root else 0, count, plan.code, plan.op, call.root, stream.ptr
        )
        if at_root:
            self._decode(call, plan, wire, data)

    def reduce_scatter(self, call: ReductionCall, _: Any, stream: Stream) -> None:
        given, out = self._apart(call)
        plan, wire = self._encoded(call, given)
        if call.counts is not None:
            self._reduce_to_each(call, call.counts[0], plan, wire, out, stream)
            return
        direct = not plan.encoded and out.dtype.itemsize == wire.dtype.itemsize
        into = out if direct else np.empty_like(wire, shape=(out.size,))
        count = out.size * plan.per_element
        self._comm.reduce_scatter(
            self.runtime.address(wire),
            self.runtime.address(into),
            count,
            plan.code,
            plan.op,
            stream.ptr,
        )
        self._decode(call, plan, into, out)

    def _reduce_to_each(
        self,
        call: ReductionCall,
        counts: Sequence[int],
        plan: Reduction,
        wire: DeviceArray,
        out: DeviceArray,
        stream: Stream,
    ) -> None:
        """Reduce the blocks of a reduce_scatter, which differ, each to its rank."""
        into = np.empty_like(wire, shape=(out.size,))
        with self._together():
            for root, part in enumerate(cut(wire, counts)):
                if part.size:
                    at, to = self.runtime.address(part), self.runtime.address(into)
                    self._comm.reduce(
                        at,
                        to if root == self._rank else 0,
                        part.size * plan.per_element,
                        plan.code,
                        plan.op,
                        root,
                        stream.ptr,
                    )
        self._decode(call, plan, into, out)

    def _encoded(self, call: ReductionCall, data: DeviceArray) -> tuple[Reduction, DeviceArray]:
        """Return how `data` is reduced, and what travels: itself, or other memory."""
        plan, rule = self._reduction(call), call.rule
        assert plan is not None
        if plan.encoded and rule.encode is not None:
            data = rule.encode(data)
        if data.dtype.itemsize != plan.wire.itemsize:
            data = data.astype(plan.wire)
        return plan, data

    def _decode(
        self, call: ReductionCall, plan: Reduction, wire: DeviceArray, out: DeviceArray
    ) -> None:
        """Write what has been reduced to `out`, unless it is there already."""
        rule = call.rule
        if plan.encoded and plan.wire.itemsize != rule.wire.itemsize:
            wire = wire.astype(rule.wire)
        if plan.decoded and rule.decode is not None:
            rule.decode(wire, out, self._size)
        elif wire is not out:
            out[...] = wire

    def broadcast(self, call: Distribution, _: Any, stream: Stream) -> None:
        at = self.runtime.address(call.recv)
        self._comm.broadcast(at, at, call.recv.nbytes, BYTES, call.root, stream.ptr)

    def all_gather(self, call: Gathering, detail: tuple[int, int], stream: Stream) -> list[Block]:
        send, recv = _flat(call.send), call.recv
        if not is_even(detail):
            shapes = exchange_shapes(self._context, call)
            filled = with_room(call, counts_of(call, shapes))
            if recv is not None and self._overlap(send, _flat(recv)):
                send = send.copy()
            with self._together():
                self._send_to_all(send, stream)
                self._receive_from_all(from_each(filled, self._size), stream)
            return new_blocks(call, filled, shapes)
        if recv is None:
            recv = np.empty_like(send, shape=(self._size * send.size,))
        flat = _flat(recv)
        if self._overlap(send, flat) and not self._is_in_place(send, flat):
            send = send.copy()
        from_, into = self.runtime.address(send), self.runtime.address(flat)
        self._comm.all_gather(from_, into, send.nbytes, BYTES, stream.ptr)
        return even_blocks(recv, call, self._size)

    def _apart(self, call: AnyArrays) -> tuple[DeviceArray, DeviceArray]:
        """Return what is sent and what is received, flat and in different memory."""
        send, recv = _flat(call.send), _flat(call.recv)
        return (send.copy() if self._overlap(send, recv) else send), recv

    def _overlap(self, one: DeviceArray, other: DeviceArray) -> bool:
        """Return whether two contiguous arrays have memory in common."""
        first, second = self.runtime.address(one), self.runtime.address(other)
        return bool(first < second + other.nbytes and second < first + one.nbytes)

    def _is_in_place(self, send: DeviceArray, recv: DeviceArray) -> bool:
        """Return whether this rank's part of a gather is where the gather would put it."""
        own = self.runtime.address(recv) + self._rank * send.nbytes
        return bool(self.runtime.address(send) == own)

    def gather(
        self, call: Gathering, detail: tuple[int, int], stream: Stream
    ) -> list[Block] | None:
        send, recv, at_root = _flat(call.send), call.recv, self._rank == call.root
        even = is_even(detail)
        shapes = [call.shape] * self._size if even else exchange_shapes(self._context, call)
        filled = call
        if at_root:
            if recv is not None and self._overlap(send, _flat(recv)):
                send = send.copy()
            counts = [send.size] * self._size if even else counts_of(call, shapes)
            filled = with_room(call, counts)
        with self._together():
            self._send(send, call.root, stream)
            if at_root:
                self._receive_from_all(from_each(filled, self._size), stream)
        return new_blocks(call, filled, shapes) if at_root else None

    def scatter(self, call: Distribution, detail: tuple[int, int], stream: Stream) -> None:
        out = _flat(call.recv)
        if not is_even(detail):
            exchange_shapes(self._context, call)
        with self._together():
            if self._rank == call.root:
                given, _ = self._apart(call)
                for rank, part in enumerate(to_each(call._replace(send=given), self._size)):
                    self._send(part, rank, stream)
            self._receive(out, call.root, stream)

    def alltoall(self, call: Gathering, detail: tuple[int, int], stream: Stream) -> list[Block]:
        if call.recv is not None:
            call = call._replace(send=self._apart(call)[0])
        shapes = [call.shape] * self._size
        if is_even(detail):
            filled = call
            if call.recv is None:
                filled = with_room(call, [run.size for run in to_each(call, self._size)])
        else:
            agreed = agree_on_counts(self._context, call)
            filled, shapes = with_room(call, agreed.received), agreed.shapes
        with self._together():
            for rank, part in enumerate(to_each(call, self._size)):
                self._send(part, rank, stream)
            self._receive_from_all(from_each(filled, self._size), stream)
        return new_blocks(call, filled, shapes)

    # ---- messages inside a collective

    def _send_to_all(self, part: DeviceArray, stream: Stream) -> None:
        for rank in range(self._size):
            self._send(part, rank, stream)

    def _receive_from_all(self, parts: Sequence[DeviceArray], stream: Stream) -> None:
        for rank, part in enumerate(parts):
            self._receive(part, rank, stream)

    def _send(self, part: DeviceArray, rank: int, stream: Stream) -> None:
        if part.size:
            self._comm.send(self.runtime.address(part), part.nbytes, BYTES, rank, stream.ptr)

    def _receive(self, part: DeviceArray, rank: int, stream: Stream) -> None:
        if part.size:
            self._comm.recv(self.runtime.address(part), part.nbytes, BYTES, rank, stream.ptr)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Issue messages as one operation: none waits for another."""
        self._nccl.group_start()
        try:
            yield
        finally:
            self._nccl.group_end()


def _flat(array: Any) -> DeviceArray:
    return array if array.ndim == 1 else array.reshape(-1)


_REDUCED = frozenset({Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER})
_ROWS: dict[Kind, Callable[[Nccl, Any, tuple[int, int], Stream], Any]] = {
    Kind.ALL_REDUCE: Nccl.all_reduce,
    Kind.REDUCE: Nccl.reduce,
    Kind.REDUCE_SCATTER: Nccl.reduce_scatter,
    Kind.BROADCAST: Nccl.broadcast,
    Kind.ALL_GATHER: Nccl.all_gather,
    Kind.GATHER: Nccl.gather,
    Kind.SCATTER: Nccl.scatter,
    Kind.ALLTOALL: Nccl.alltoall,
}
_VERBS = table_for("NCCL's operations", ARRAYS, _ROWS, without=(Kind.SCAN, Kind.EXSCAN))
