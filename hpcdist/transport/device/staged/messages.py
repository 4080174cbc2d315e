"""Messages on device memory through locked host memory, each as one message of the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, final

from hpcdist.arrays.device import Event
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.transport.call.call import Message
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.device.host_waits import arrive, wait_on_host
from hpcdist.transport.device.staged.buffers import StagingBuffers
from hpcdist.transport.waiting.polling import to_the_end
from hpcdist.transport.waiting.work import Known, Work

if TYPE_CHECKING:
    from hpcdist.transport.mpi.context import MpiContext


def start(context: MpiContext, staging: StagingBuffers, call: Message, ready: list[Event]) -> Work:
    """Begin to send or receive a device array as one message of host memory."""
    return (_send if call.kind is Kind.SEND else _receive)(context, staging, call, ready)


def _send(context: MpiContext, staging: StagingBuffers, call: Message, ready: list[Event]) -> Work:
    """Copy to the host, which is waited for: messages keep their order; then send from there."""
    block = staging.pinned.take(call.data.nbytes)
    memory = block[: call.data.nbytes].view(call.data.dtype)
    for event in ready:
        staging.runtime.wait_event(staging.outward, event)
    staging.runtime.copy_to_host(call.data.reshape(-1), memory, staging.outward)
    arrive(staging.runtime, staging.runtime.record(staging.outward), context.timeout_s)
    work = context.messages.start(call._replace(data=memory, device=None))
    return _StagedMessage(staging, work, block, None)


def receive_now(
    context: MpiContext, staging: StagingBuffers, call: Message, ready: list[Event]
) -> Work:
    """Receive a device array before returning, as `Messages.run` does."""
    work = _received(staging, call, ready, context.messages.run)
    work.wait()
    return work


def _receive(
    context: MpiContext, staging: StagingBuffers, call: Message, ready: list[Event]
) -> Work:
    return _received(staging, call, ready, context.messages.start)


def _received(
    staging: StagingBuffers, call: Message, ready: list[Event], begin: Callable[[Message], Work]
) -> Work:
    _forget_landed(staging)
    recv, finish = call.data, call.finish
    block = staging.pinned.take(recv.nbytes)
    memory = block[: recv.nbytes].view(recv.dtype)
    arrived: list[Event] = []

    def copy_in(_: Any) -> None:
        runtime, stream = staging.runtime, staging.inward
        with runtime.on(stream):  # on whatever thread the message is taken
            for event in ready:
                runtime.wait_event(stream, event)
            runtime.copy_to_device(memory, recv.reshape(-1), stream)
            if finish is not None:
                finish(None)
            arrived.append(runtime.record(stream))
            staging.landing.append((call, arrived[0]))

    inner = call._replace(data=memory, finish=copy_in, device=None)
    return _StagedMessage(staging, begin(inner), block, arrived)


def _forget_landed(staging: StagingBuffers) -> None:
    with suppress(IndexError):  # another thread does the same
        while staging.runtime.is_done(staging.landing[0][1]):
            staging.landing.popleft()


@final
class _StagedMessage(Work):
    """A message in locked host memory, and for a receive the copy to the device."""

    def __init__(
        self, staging: StagingBuffers, work: Work, block: NumpyArray, arrived: list[Event] | None
    ) -> None:
        self._staging, self._work, self._block, self._arrived = staging, work, block, arrived
        self._ended = False

    @property
    def limit_s(self) -> float:
        return self._work.limit_s

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait(timeout)
        self.source = self._work.source
        to_the_end(self._await_copy)
        if not self._ended:
            self._ended = True
            self._staging.pinned.give_back(self._block)
        return True

    def _await_copy(self) -> None:
        runtime = self._staging.runtime
        for event in self._arrived or ():
            for stream in runtime.current_streams():
                runtime.wait_event(stream, event)
            wait_on_host(runtime, event, float("inf"))  # the block is used again

    def is_completed(self) -> bool:
        runtime = self._staging.runtime
        return self._work.is_completed() and all(map(runtime.is_done, self._arrived or ()))

    def attend(self, waited: float) -> None:
        self._work.attend(waited)

    def refuse_nested(self) -> None:
        self._work.refuse_nested()

    def detach(self) -> None:
        self._work.detach()

    def known(self) -> Known:
        return self._work.known()

    def result(self) -> Any:
        self.wait()
        return self
