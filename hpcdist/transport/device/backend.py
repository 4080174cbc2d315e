"""`DeviceBackend`: how the device memory of one group travels between its ranks.

What surrounds it is the same for all: the group's order and agreement (`calls`), streams, events
and the lifetime of arrays (`launches`). The table of the backends is `table`; what the chosen one
cannot do is staged through host memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hpcdist.arrays.device import DeviceRuntime, Event, Stream
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.call import AnyArrays, Call
from hpcdist.transport.device.launch_order import LAUNCH_ORDER


class Launch(NamedTuple):
    """An issued operation: the streams it was issued from, and when their work is complete.

    `call` is one on arrays, or the agreement on a batch. With `on_current` it belongs on the last
    of `streams`, and `ready` are the events of the others. `turn` is its place in `LAUNCH_ORDER`;
    None for what goes before all others.
    """

    call: Any
    runtime: DeviceRuntime
    streams: tuple[Stream, ...]
    ready: list[Event]
    turn: int | None

    def on_own_stream(self) -> Launch:
        """Return the same for a backend that does not work on the caller's stream itself."""
        if not self.call.on_current:
            return self
        return self._replace(ready=[*self.ready, self.runtime.record(self.streams[-1])])

    def make_wait(self, stream: Stream) -> None:
        """Make `stream` wait for the work that was queued before the operation was issued."""
        for event in self.ready:
            self.runtime.wait_event(stream, event)

    def in_turn(self) -> AbstractContextManager[Any]:
        """Return a block that begins when all earlier launches of the process are over."""
        return nullcontext() if self.turn is None else LAUNCH_ORDER.turn(self.turn)

    def put(self, stream: Stream, check: Callable[[], None], act: Callable[[], Any]) -> Any:
        """Run `act`, which puts something on `stream`, in its turn and when `check` passes."""
        with self.in_turn():
            check()  # in the turn: an earlier operation may have failed in its own
            self.make_wait(stream)
            return act()


class DeviceBackend(ABC):
    """What moves device memory between the ranks of one group.

    All ranks have agreed, on the host, on every operation that it is given, and issue it in the
    same order. It runs on the thread whose turn it is in the group's queue.
    """

    @abstractmethod
    def can(self, call: AnyArrays) -> bool:
        """Return whether it has what `call` needs; equal on all ranks."""

    @abstractmethod
    def run(self, launch: Launch, detail: tuple[int, int]) -> tuple[Any, Stream]:
        """Put the operation on a stream; return its result and the stream.

        The stream must wait for `launch.ready`, and the result is complete when the stream has
        come to this point. The host may be blocked meanwhile.
        """

    @abstractmethod
    def await_on_host(self, event: Event, call: Call, timeout_s: float) -> None:
        """Block the host until `event`, the end of `call`; raise what goes wrong meanwhile."""

    def can_capture(self, call: Call) -> bool:
        """Return whether `call` can become part of a CUDA graph."""
        return False

    def waits_on_device(self) -> bool:
        """Return whether what it puts on the device waits there for other ranks.

        If so, the operations of all groups are put on the device in the order of their issue.
        """
        return True

    def home(self) -> DeviceRuntime | None:
        """Return the one device of this rank that it works on; None where it works on any."""
        return None

    def check(self) -> None:  # noqa: B027 (few backends can tell)
        """Raise what is known to be wrong with the operations under way."""

    def abort(self) -> None:  # noqa: B027 (the host's operations end by themselves)
        """End what is under way on this rank; the backend cannot be used any more. Local."""

    def close(self) -> None:  # noqa: B027 (some have nothing to give back)
        """Give back what it holds, after all operations have ended. Collective."""
