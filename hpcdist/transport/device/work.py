"""`DeviceWork`: an operation on device memory under way, from its issue to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, final

from hpcdist.arrays.device import DeviceRuntime, Event, Stream
from hpcdist.errors import HpcdistError, TransportError
from hpcdist.transport.base import Known, Work
from hpcdist.transport.call import Call
from hpcdist.transport.queue import Job, QueuedWork

if TYPE_CHECKING:
    from hpcdist.transport.device.calls import DeviceCalls


class Launch(NamedTuple):
    """An issued operation: the streams it was issued from, and when their work is complete.

    With `on_current` it runs on the last of `streams`, and `ready` are those of the others.
    """

    call: Call
    engine: DeviceRuntime
    streams: tuple[Stream, ...]
    ready: list[Event]
    turn: int | None


class Launched(NamedTuple):
    """An operation that is on its stream: what it returned, and the event of its end."""

    result: Any
    done: Event | None


def at_once(job: Job, label: str) -> QueuedWork:
    """Run `job` on this thread, where MPI may be used by one only."""
    work = QueuedWork(job, label)
    work.execute()
    work.ended.set()
    return work


@final
class DeviceWork(Work):
    """An operation on device memory.

    `wait` blocks the host until the operation is on its stream, and then lets the current streams
    wait for its end; `synchronize` blocks the host until it has ended.
    """

    def __init__(self, calls: DeviceCalls, flight: Launch, queued: Work) -> None:
        self._calls, self._flight, self._queued = calls, flight, queued

    def wait(self, timeout: Any = None) -> bool:
        """Let the current streams wait; raise what went wrong."""
        self._queued.wait(timeout)
        self._calls.check()
        done = self._queued.result().done
        if done is not None:
            self._calls.await_on_device(self._flight.engine, done)
        return True

    def is_completed(self) -> bool:
        """Say whether the operation has ended on the device."""
        if not self._queued.is_completed():
            return False
        try:
            done = self._queued.result().done
            return done is None or self._flight.engine.is_done(done)
        except Exception:
            return True  # wait() raises what went wrong

    def synchronize(self) -> None:
        """Block the host until the operation has ended."""
        self.wait()
        done = self._queued.result().done
        if done is not None:
            self._calls.await_on_host(self._flight.call, done)

    def result(self) -> Any:
        """Do `wait`, and return what the operation returned."""
        self.wait()
        return self._queued.result().result

    def known(self) -> Known:
        """See `Work.known`."""
        what, begun, error = self._queued.known()
        return Known(what, None if begun else False, error)


@final
class Failing:
    """Makes a `TransportError` of a device's failure, after which NCCL cannot go on either."""

    __slots__ = ("_calls", "_engine")

    def __init__(self, calls: DeviceCalls, engine: DeviceRuntime) -> None:
        self._calls, self._engine = calls, engine

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if isinstance(error, self._engine.failures) and not isinstance(error, HpcdistError):
            self._calls.give_nccl_up()
            raise device_failure(self._engine, error) from error


def device_failure(engine: DeviceRuntime, error: Exception) -> TransportError:
    """Return the error of a device that fails with `error`."""
    return TransportError(f"{engine.name} failed: {error}; end the job")
