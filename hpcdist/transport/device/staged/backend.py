"""Device memory through host memory: for every operation, right with every MPI library.

An operation is cut into steps (`staged_plan`). While the host runs one step, the copies of the
steps before and after it are under way: device to host, host operation and host to device overlap.
Each step is an ordinary operation on host memory, so its ways, checks and errors are the host's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from hpcdist.arrays.device import DeviceArray, Event
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.errors import CollectiveTimeout, TransportError
from hpcdist.transport.base import Known, Work
from hpcdist.transport.call import MAKERS, Block, Call, Kind, shape_detail
from hpcdist.transport.device.staged import on_node
from hpcdist.transport.device.staged.buffers import StagingBuffers, arrive, wait_on_host
from hpcdist.transport.device.staged.plan import Piece, Shape, Step, is_whole, plan_steps
from hpcdist.transport.parts import new_blocks, with_room

if TYPE_CHECKING:
    from hpcdist.transport.mpi.context import MpiContext

_GOODBYE_S = 1.0
AHEAD = 2
"""Steps whose copies to the host are begun before their turn."""


class _Copied(NamedTuple):
    """A step whose copies to the host are under way."""

    step: Step
    send: NumpyArray | None
    recv: NumpyArray | None
    blocks: list[NumpyArray]
    arrived: Event


def perform(
    host: MpiContext,
    staging: StagingBuffers,
    call: Call,
    detail: tuple[int, int],
    ready: list[Event],
) -> tuple[Any, Event]:
    """Run `call`, on which all ranks have agreed; return its result and the event of its end.

    The device's arrays are read once `ready` is complete. Blocks the host until the last host
    operation has ended.
    """
    engine = staging.engine
    for event in ready:
        engine.wait_event(staging.outward, event)
        engine.wait_event(staging.inward, event)
    if is_whole(call, detail):
        result = _perform_whole(host, staging, call)
    elif on_node.applies(host, call):
        result = None
        on_node.reduce(host, staging, call)
    else:
        result = _perform_steps(host, staging, call)
    return result, engine.record(staging.inward)


# ---- in steps


def _perform_steps(host: MpiContext, staging: StagingBuffers, call: Call) -> Any:
    with staging.engine.on(staging.inward):
        call, result = _with_room(host, call)
    source, target = _flat(call.send), _flat(call.recv)
    unit = next(each.dtype for each in (target, source) if each is not None)
    if source is not None and target is not None and _partly_shared(source, target):
        with staging.engine.on(staging.outward):
            source = source.copy()
    given = target if source is None else source
    waiting: deque[_Copied] = deque()
    returning: deque[tuple[list[NumpyArray], Event]] = deque()
    steps = _steps(host, call, staging.chunk_bytes // unit.itemsize)
    try:
        for step in steps:
            with _told_to_all(host, staging, call):
                waiting.append(_copy_out(staging, step, given, unit))
            if len(waiting) > AHEAD:
                _finish(host, staging, call, waiting, returning, target)
        while waiting:
            _finish(host, staging, call, waiting, returning, target)
    except BaseException:
        _give_back(staging, waiting, returning, _GOODBYE_S)
        raise
    _give_back(staging, waiting, returning, host.timeout_s)
    return result


def _steps(host: MpiContext, call: Call, chunk: int) -> Iterator[Step]:
    send, recv = (0 if each is None else each.size for each in (call.send, call.recv))
    shape = Shape(send, recv, host.size, host.rank, host.rank == call.root)
    return plan_steps(call.kind, shape, chunk)


def _copy_out(staging: StagingBuffers, step: Step, given: DeviceArray, unit: np.dtype) -> _Copied:
    """Begin the copies to the host of one step."""
    blocks = []

    def room(items: int | None) -> NumpyArray | None:
        if items is None:
            return None
        blocks.append(staging.pinned.take(items * unit.itemsize))
        return blocks[-1][: items * unit.itemsize].view(unit)

    send, recv = room(step.send), room(step.recv)
    memory = recv if send is None else send
    for device, at_host in _pairs(step.out, given, memory):
        staging.engine.copy_to_host(device, at_host, staging.outward)
    return _Copied(step, send, recv, blocks, staging.engine.record(staging.outward))


def _finish(
    host: MpiContext,
    staging: StagingBuffers,
    call: Call,
    waiting: deque[_Copied],
    returning: deque[tuple[list[NumpyArray], Event]],
    target: DeviceArray | None,
) -> None:
    """Run the host's part of the next step, and begin the copies to the device."""
    engine = staging.engine
    while returning and engine.is_done(returning[0][1]):
        _release(staging, returning.popleft()[0])
    copied = waiting[0]
    with _told_to_all(host, staging, call):
        arrive(engine, copied.arrived, host.timeout_s)
    host.run_inside(_host_call(call, copied))
    waiting.popleft()
    for device, at_host in _pairs(copied.step.into, target, copied.recv):
        engine.copy_to_device(at_host, device, staging.inward)
    returning.append((copied.blocks, engine.record(staging.inward)))


@contextmanager
def _told_to_all(host: MpiContext, staging: StagingBuffers, call: Call) -> Iterator[None]:
    """Raise on all ranks what goes wrong on the device before they agree on the next step."""
    engine = staging.engine
    try:
        yield
    except Exception as error:
        if not isinstance(error, (CollectiveTimeout, *engine.failures)):
            raise
        reason: Exception = error
        if not isinstance(error, CollectiveTimeout):
            reason = TransportError(f"{engine.name} failed: {error}; end the job")
        host.run_inside(Call(call.kind, root=call.root, error=reason))
        raise


def _host_call(call: Call, copied: _Copied) -> Call:
    """Describe the host's part of a step."""
    shape = (copied.step.items,)
    return Call(
        call.kind,
        copied.send,
        copied.recv,
        call.dtype,
        shape,
        call.root,
        call.op,
        call.rule,
        shape_detail(shape),
    )


def _pairs(
    pieces: tuple[Piece, ...], device: DeviceArray, memory: NumpyArray | None
) -> Iterator[tuple[DeviceArray, NumpyArray]]:
    for piece in pieces:
        assert memory is not None
        yield (
            device[piece.device : piece.device + piece.items],
            memory[piece.host : piece.host + piece.items],
        )


def _give_back(
    staging: StagingBuffers,
    waiting: deque[_Copied],
    returning: deque[tuple[list[NumpyArray], Event]],
    timeout_s: float,
) -> None:
    """Take the blocks back once no copy uses them; those that are not free in time are lost."""
    copies = [(each.blocks, each.arrived) for each in waiting]
    for blocks, event in (*returning, *copies):
        try:
            free = wait_on_host(staging.engine, event, timeout_s)
        except staging.engine.failures:
            free = False
        if free:
            _release(staging, blocks)
        else:
            staging.pinned.lose(blocks)


def _release(staging: StagingBuffers, blocks: list[NumpyArray]) -> None:
    for block in blocks:
        staging.pinned.give_back(block)


def _with_room(host: MpiContext, call: Call) -> tuple[Call, Any]:
    """Give an operation that makes its own result the memory for it, and its blocks."""
    if call.kind not in MAKERS or (call.kind is Kind.GATHER and host.rank != call.root):
        return call, None
    assert call.send is not None
    block = call.send.size // (host.size if call.kind is Kind.ALLTOALL else 1)
    filled = call if call.recv is not None else with_room(call, [block] * host.size)
    return filled, new_blocks(call, filled, [call.shape] * host.size)


def _flat(array: DeviceArray | None) -> DeviceArray | None:
    return None if array is None else array.reshape(-1)


def _partly_shared(source: DeviceArray, target: DeviceArray) -> bool:
    return bool(np.may_share_memory(source, target))


# ---- as a whole, where the ranks' blocks differ


def _perform_whole(host: MpiContext, staging: StagingBuffers, call: Call) -> Any:
    engine, source, target = staging.engine, _flat(call.send), _flat(call.recv)
    send = None if source is None else np.empty(source.size, source.dtype)
    recv = None if target is None else np.empty(target.size, target.dtype)
    with _told_to_all(host, staging, call):
        if send is not None:
            engine.copy_to_host(source, send, staging.outward)
        arrive(engine, engine.record(staging.outward), host.timeout_s)
    result = host.run_inside(call._replace(send=send, recv=recv, device=None, finish=None))
    if recv is not None:
        engine.copy_to_device(recv, target, staging.inward)
    if result:
        result = [Block(_to_device(staging, call, each.data), each.shape) for each in result]
    arrive(engine, engine.record(staging.inward), host.timeout_s)  # `recv` is ours alone
    return result


def _to_device(staging: StagingBuffers, call: Call, data: NumpyArray) -> DeviceArray:
    assert call.send is not None
    with staging.engine.on(staging.inward):
        made = np.empty_like(call.send, shape=(data.size,))
    staging.engine.copy_to_device(data, made, staging.inward)
    return made


# ---- messages


def start_message(
    host: MpiContext, staging: StagingBuffers, call: Call, ready: list[Event]
) -> Work:
    """Begin to send or receive a device array as one message of host memory."""
    return (_send if call.kind is Kind.SEND else _receive)(host, staging, call, ready)


def _send(host: MpiContext, staging: StagingBuffers, call: Call, ready: list[Event]) -> Work:
    """Copy to the host, which is waited for: messages keep their order; then send from there."""
    assert call.send is not None
    block = staging.pinned.take(call.send.nbytes)
    memory = block[: call.send.nbytes].view(call.send.dtype)
    for event in ready:
        staging.engine.wait_event(staging.outward, event)
    staging.engine.copy_to_host(call.send.reshape(-1), memory, staging.outward)
    arrive(staging.engine, staging.engine.record(staging.outward), host.timeout_s)
    work = host.messages.start(call._replace(send=memory, device=None))
    return _StagedMessage(staging, work, block, None)


def _receive(host: MpiContext, staging: StagingBuffers, call: Call, ready: list[Event]) -> Work:
    recv, finish = call.recv, call.finish
    assert recv is not None
    block = staging.pinned.take(recv.nbytes)
    memory = block[: recv.nbytes].view(recv.dtype)
    arrived: list[Event] = []

    def copy_in(_: Any) -> None:
        engine, stream = staging.engine, staging.inward
        with engine.on(stream):  # on whatever thread the message is taken
            for event in ready:
                engine.wait_event(stream, event)
            engine.copy_to_device(memory, recv.reshape(-1), stream)
            if finish is not None:
                finish(None)
            arrived.append(engine.record(stream))

    inner = call._replace(recv=memory, finish=copy_in, device=None)
    return _StagedMessage(staging, host.messages.start(inner), block, arrived)


@final
class _StagedMessage(Work):
    """A message in locked host memory, and for a receive the copy to the device."""

    def __init__(
        self, staging: StagingBuffers, work: Work, block: NumpyArray, arrived: list[Event] | None
    ) -> None:
        self._stage, self._work, self._block, self._arrived = staging, work, block, arrived
        self._ended = False

    @property
    def limit_s(self) -> float:
        return self._work.limit_s

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait(timeout)
        self.source = self._work.source
        engine = self._stage.engine
        for event in self._arrived or ():
            for stream in engine.current_streams():
                engine.wait_event(stream, event)
            wait_on_host(engine, event, float("inf"))  # the block is used again
        if not self._ended:
            self._ended = True
            self._stage.pinned.give_back(self._block)
        return True

    def is_completed(self) -> bool:
        engine = self._stage.engine
        return self._work.is_completed() and all(map(engine.is_done, self._arrived or ()))

    def attend(self, waited: float) -> None:
        self._work.attend(waited)

    def known(self) -> Known:
        return self._work.known()

    def result(self) -> Any:
        self.wait()
        return self
