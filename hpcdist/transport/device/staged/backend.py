"""`Staged`: the backend that every rank has; it also takes what others cannot do, and messages."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, final

from hpcdist.arrays.device import DeviceRuntime, Event, Stream
from hpcdist.transport.call.call import AnyArrays, Call, Message
from hpcdist.transport.device.backend import DeviceBackend, Launch
from hpcdist.transport.device.host_waits import await_end
from hpcdist.transport.device.staged import messages
from hpcdist.transport.device.staged.buffers import StagingBuffers
from hpcdist.transport.device.staged.collectives import perform
from hpcdist.transport.device.staged.pinned import Pinned
from hpcdist.transport.waiting.work import Work

if TYPE_CHECKING:
    from hpcdist.transport.mpi.context import MpiContext

_MiB = 1 << 20


@final
class Staged(DeviceBackend):
    """Copies to locked host memory, operations of the host there, and copies back. Local to make.

    No operation is on the device while it waits for another rank, so none can hold up another's.
    """

    def __init__(self, context: MpiContext) -> None:
        self._context = context
        self._staging: dict[DeviceRuntime, StagingBuffers] = {}

    def can(self, call: AnyArrays) -> bool:
        """Return True."""
        return True

    def run(self, launch: Launch, detail: tuple[int, int]) -> tuple[Any, Stream]:
        """Run the operation; blocks the host until its last host operation has ended."""
        staging = self._staging_of(launch.runtime)
        launch = launch.on_own_stream()
        launch.make_wait(staging.outward)
        launch.make_wait(staging.inward)
        return perform(self._context, staging, launch.call, detail), staging.inward

    def start_message(self, call: Message, ready: list[Event]) -> Work:
        """Begin to send or receive; the array is touched once `ready` is complete."""
        assert call.device is not None
        return messages.start(self._context, self._staging_of(call.device), call, ready)

    def receive(self, call: Message, ready: list[Event]) -> Work:
        """Receive before returning; an interrupt leaves the message where it is."""
        assert call.device is not None
        return messages.receive_now(self._context, self._staging_of(call.device), call, ready)

    def await_on_host(self, event: Event, call: Call, timeout_s: float) -> None:
        """See `DeviceBackend.await_on_host`."""
        await_end(event, call, self._context.ranks, timeout_s)

    def waits_on_device(self) -> bool:
        """Return False: it is the host that waits."""
        return False

    def close(self) -> None:
        """Unlock the host memory. Local."""
        for staging in self._staging.values():
            staging.pinned.close()
        self._staging.clear()

    def _staging_of(self, runtime: DeviceRuntime) -> StagingBuffers:
        staging = self._staging.get(runtime)
        if staging is None:
            chunk_bytes = int(self._context.site.config.device_chunk_mb * _MiB)
            pinned = Pinned(runtime, self._context.heap)
            staging = StagingBuffers(
                runtime, pinned, runtime.new_stream(), runtime.new_stream(), chunk_bytes, deque()
            )
            # Messages have threads of their own: one of two that come here first is kept.
            staging = self._staging.setdefault(runtime, staging)
        return staging
