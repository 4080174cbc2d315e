"""`DeviceWork`: an operation on device memory under way, from its issue to its end."""

from __future__ import annotations

from typing import Any, final

from hpcdist.arrays.device import Event
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.device.backend import Launch
from hpcdist.transport.device.launches import Launches
from hpcdist.transport.waiting.work import Known, Work


class Launched(NamedTuple):
    """An operation that is on its stream: what it returned, and the event of its end.

    There is no event where it became a part of a graph.
    """

    result: Any
    done: Event | None


@final
class DeviceWork(Work):
    """An operation on device memory.

    `wait` blocks the host until the operation is on its stream, and then lets the current streams
    wait for its end; `synchronize` blocks the host until it has ended.
    """

    def __init__(self, launches: Launches, launch: Launch, queued: Work) -> None:
        self._launches, self._launch, self._queued = launches, launch, queued

    def wait(self, timeout: Any = None) -> bool:
        """Make the current streams wait; raise what went wrong."""
        self._queued.wait(timeout)
        self._launches.check()
        done = self._queued.result().done
        if done is not None:
            self._launches.await_on_device(self._launch.runtime, done)
        return True

    def is_completed(self) -> bool:
        """Return whether the operation has ended on the device."""
        if not self._queued.is_completed():
            return False
        if self._queued.known().error is not None:  # which only wait() takes for heard of
            return True
        try:
            done = self._queued.result().done
            return done is None or self._launch.runtime.is_done(done)
        except Exception:
            return True  # wait() raises what went wrong

    def synchronize(self) -> None:
        """Block the host until the operation has ended."""
        self.wait()
        done = self._queued.result().done
        if done is not None:
            self._launches.await_on_host(self._launch.call, done)

    def result(self) -> Any:
        """Wait, and return what the operation returned."""
        self.wait()
        return self._queued.result().result

    def refuse_nested(self) -> None:
        """See `Work.refuse_nested`."""
        self._queued.refuse_nested()

    def detach(self) -> None:
        """See `Work.detach`."""
        self._queued.detach()

    def known(self) -> Known:
        """See `Work.known`."""
        what, begun, error = self._queued.known()
        return Known(what, None if begun else False, error)
