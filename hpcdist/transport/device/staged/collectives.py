"""Collectives on device memory through host memory: all of them, right with every MPI library.

An operation is cut into steps (`plan`). While the host runs one step, the copies of the
steps before and after it are under way: device to host, host operation and host to device overlap.
Each step is an ordinary operation on host memory, so its ways, checks and errors are the host's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcdist.arrays.device import DeviceArray, Event
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.errors import CollectiveTimeout, TransportError
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.call import (
    AnyArrays,
    Block,
    Gathering,
    Reduction,
    Refusal,
    shape_detail,
)
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.runs import new_blocks, with_room
from hpcdist.transport.device.host_waits import arrive, wait_on_host
from hpcdist.transport.device.staged import on_node
from hpcdist.transport.device.staged.buffers import StagingBuffers
from hpcdist.transport.device.staged.plan import Piece, Shape, Step, is_whole, plan_steps

if TYPE_CHECKING:
    from hpcdist.transport.mpi.context import MpiContext

_GOODBYE_S = 1.0
AHEAD = 2
"""Steps whose copies to the host are begun before their turn."""


class _Copied(NamedTuple):
    """A step whose copies to the host are under way."""

    step: Step
    send: Any
    recv: Any
    blocks: list[NumpyArray]
    arrived: Event


def perform(
    context: MpiContext, staging: StagingBuffers, call: AnyArrays, detail: tuple[int, int]
) -> Any:
    """Run `call`, on which all ranks have agreed, on `staging.inward`; return its result.

    Both streams of `staging` wait already for what the arrays are read after. Blocks the host until
    the last host operation has ended.
    """
    if is_whole(call, detail):
        return _perform_whole(context, staging, call)
    if isinstance(call, Reduction) and on_node.applies(context, call):
        return on_node.reduce(context, staging, call)
    return _perform_steps(context, staging, call)


# ---- in steps


def _perform_steps(context: MpiContext, staging: StagingBuffers, call: AnyArrays) -> Any:
    with staging.runtime.on(staging.inward):
        call, result = _with_room(context, call)
    source, target = _flat(call.send), _flat(call.recv)
    unit = next(each.dtype for each in (target, source) if each is not None)
    if source is not None and target is not None and _partly_shared(source, target):
        with staging.runtime.on(staging.outward):
            source = source.copy()
    given = target if source is None else source
    waiting: deque[_Copied] = deque()
    returning: deque[tuple[list[NumpyArray], Event]] = deque()
    steps = _steps(context, call, staging.chunk_bytes // unit.itemsize)
    try:
        for step in steps:
            with _told_to_all(context, staging, call):
                waiting.append(_copy_out(staging, step, given, unit))
            if len(waiting) > AHEAD:
                _finish(context, staging, call, waiting, returning, target)
        while waiting:
            _finish(context, staging, call, waiting, returning, target)
    except BaseException:
        _give_back(staging, waiting, returning, _GOODBYE_S)
        raise
    _give_back(staging, waiting, returning, context.timeout_s)
    return result


def _steps(context: MpiContext, call: AnyArrays, chunk: int) -> Iterator[Step]:
    send, recv = (0 if each is None else each.size for each in (call.send, call.recv))
    shape = Shape(send, recv, context.size, context.rank, context.rank == call.root)
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
        staging.runtime.copy_to_host(device, at_host, staging.outward)
    return _Copied(step, send, recv, blocks, staging.runtime.record(staging.outward))


def _finish(
    context: MpiContext,
    staging: StagingBuffers,
    call: AnyArrays,
    waiting: deque[_Copied],
    returning: deque[tuple[list[NumpyArray], Event]],
    target: DeviceArray | None,
) -> None:
    """Run the host's part of the next step, and begin the copies to the device."""
    runtime = staging.runtime
    while returning and runtime.is_done(returning[0][1]):
        _release(staging, returning.popleft()[0])
    copied = waiting[0]
    with _told_to_all(context, staging, call):
        arrive(runtime, copied.arrived, context.timeout_s)
    context.run_inside(_host_call(call, copied))
    waiting.popleft()
    for device, at_host in _pairs(copied.step.into, target, copied.recv):
        runtime.copy_to_device(at_host, device, staging.inward)
    returning.append((copied.blocks, runtime.record(staging.inward)))


@contextmanager
def _told_to_all(context: MpiContext, staging: StagingBuffers, call: AnyArrays) -> Iterator[None]:
    """Raise on all ranks what goes wrong on the device before they agree on the next step."""
    runtime = staging.runtime
    try:
        yield
    except Exception as error:
        if not isinstance(error, (CollectiveTimeout, *runtime.failures)):
            raise
        reason: Exception = error
        if not isinstance(error, CollectiveTimeout):
            reason = TransportError(f"{runtime.name} failed: {error}; end the job")
        context.run_inside(Refusal(call.kind, call.root, reason))
        raise


def _host_call(call: AnyArrays, copied: _Copied) -> AnyArrays:
    """Describe the host's part of a step."""
    shape = (copied.step.items,)
    return call._replace(
        send=copied.send,
        recv=copied.recv,
        shape=shape,
        detail=shape_detail(shape),
        counts=None,
        finish=None,
        ended=None,
        begin=None,
        device=None,
        on_current=False,
    )


def _pairs(
    pieces: tuple[Piece, ...], device: DeviceArray, memory: Any
) -> Iterator[tuple[DeviceArray, NumpyArray]]:
    for piece in pieces:
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
            free = wait_on_host(staging.runtime, event, timeout_s)
        except staging.runtime.failures:
            free = False
        if free:
            _release(staging, blocks)
        else:
            staging.pinned.lose(blocks)


def _release(staging: StagingBuffers, blocks: list[NumpyArray]) -> None:
    for block in blocks:
        staging.pinned.give_back(block)


def _with_room(context: MpiContext, call: AnyArrays) -> tuple[AnyArrays, Any]:
    """Give an operation that makes its own result the memory for it, and its blocks."""
    if not isinstance(call, Gathering) or (call.kind is Kind.GATHER and context.rank != call.root):
        return call, None
    block = call.send.size // (context.size if call.kind is Kind.ALLTOALL else 1)
    filled = call if call.recv is not None else with_room(call, [block] * context.size)
    return filled, new_blocks(call, filled, [call.shape] * context.size)


def _flat(array: DeviceArray | None) -> DeviceArray:
    return None if array is None else array.reshape(-1)


def _partly_shared(source: DeviceArray, target: DeviceArray) -> bool:
    return bool(np.may_share_memory(source, target))


# ---- as a whole, where the ranks' blocks differ


def _perform_whole(context: MpiContext, staging: StagingBuffers, call: AnyArrays) -> Any:
    runtime, source, target = staging.runtime, _flat(call.send), _flat(call.recv)
    send: Any = None if source is None else np.empty(source.size, source.dtype)
    recv: Any = None if target is None else np.empty(target.size, target.dtype)
    with _told_to_all(context, staging, call):
        if send is not None:
            runtime.copy_to_host(source, send, staging.outward)
        arrive(runtime, runtime.record(staging.outward), context.timeout_s)
    result = context.run_inside(call._replace(send=send, recv=recv, device=None, finish=None))
    if recv is not None:
        runtime.copy_to_device(recv, target, staging.inward)
    if result:
        result = [Block(_to_device(staging, source, each.data), each.shape) for each in result]
    arrive(runtime, runtime.record(staging.inward), context.timeout_s)  # `recv` is ours alone
    return result


def _to_device(staging: StagingBuffers, like: DeviceArray, data: NumpyArray) -> DeviceArray:
    with staging.runtime.on(staging.inward):
        made = np.empty_like(like, shape=(data.size,))
    staging.runtime.copy_to_device(data, made, staging.inward)
    return made
