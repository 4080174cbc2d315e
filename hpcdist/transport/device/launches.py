"""`Launches`: a group's operations on their way to the device, and on it until they have ended.

[Note: streams] The operation waits, through events, for work already queued on the caller's current
streams; later work on those streams waits for the operation. The host never blocks. With
``use_calc_stream`` the operation runs on the current stream itself.

[Note: lent memory] Arrays that an operation made come from the memory pool of a stream of ours, and
go back there when the caller drops them, perhaps while his streams still read them. The pool would
then give their memory to the next operation that asks on our stream. So from the first such array
on, an operation that was queued waits also for what was put on the caller's streams after its
issue. One that runs at once on the caller's thread has nothing after its issue to wait for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

from hpcdist.arrays.device import DeviceRuntime, Event
from hpcdist.errors import HpcdistError, TransportError, UsageError
from hpcdist.transport.call.call import Call, Gathering, label
from hpcdist.transport.call.kinds import Family
from hpcdist.transport.device.backend import DeviceBackend, Launch
from hpcdist.transport.device.host_waits import wait_on_host
from hpcdist.transport.device.launch_order import LAUNCH_ORDER
from hpcdist.transport.waiting.queue import Job, QueuedWork
from hpcdist.transport.waiting.work import Work

if TYPE_CHECKING:
    from hpcdist.transport.mpi.context import MpiContext

GOODBYE_S = 1.0
"""How long the device may take to end what is under way where nobody waits for it."""


@final
class Launches:
    """The operations of one group; `backend` is the group's own, once it is open."""

    def __init__(self, context: MpiContext) -> None:
        self._context = context
        self.backend: DeviceBackend | None = None
        self._running: deque[tuple[Call, Event]] = deque()
        """Keeps the arrays of operations that nobody waits for alive until they have ended."""
        self._forgetting = threading.Lock()
        self._lends = False
        """Whether callers have got arrays that were made on a stream of ours."""

    # ---- on the way to the device

    def record(self, call: Call, runtime: DeviceRuntime) -> Launch:
        """Record how far the current streams are, and take the operation's turn on the device."""
        streams = runtime.current_streams()
        capturing = tuple(filter(runtime.is_capturing, streams))
        if capturing and not self._can_capture(call):
            raise self._not_capturable(call)
        if not capturing:  # which forbids to ask for the state of events
            self._forget_ended()
        if call.begin is not None:  # on the current stream, ahead of the operation
            call.begin()
            call = call._replace(begin=None)
        streams = capturing or streams
        elsewhere = streams[:-1] if call.on_current else streams
        ready = [runtime.record(stream) for stream in elsewhere]
        nested = self._context.queue.is_current()  # a callback: it goes before what is queued
        return Launch(call, runtime, streams, ready, None if nested else LAUNCH_ORDER.take())

    def _can_capture(self, call: Call) -> bool:
        return call.on_current and self.backend is not None and self.backend.can_capture(call)

    def refuse_capture(self, call: Call, runtime: DeviceRuntime) -> None:
        """Raise `UsageError` where a current stream records a graph."""
        if any(map(runtime.is_capturing, runtime.current_streams())):
            raise self._not_capturable(call)

    def _not_capturable(self, call: Call) -> UsageError:
        return UsageError(
            f"{label(call, self._context.ranks)} cannot be part of a CUDA graph: capture needs "
            "NCCL, use_calc_stream=True, the same operation once before the capture, and arrays "
            "that travel as they are: contiguous, apart from each other, and no sums of 16-bit "
            "floats over more than two ranks without HPCDIST_NCCL_SUMS=native"
        )

    def queue(self, call: Call, launch: Job) -> Work:
        """Queue `call`, which `launch` puts on the device when its turn has come."""
        context = self._context
        start = context.queue.start if context.threads else _at_once
        work = start(lambda: context.guarded(call, launch), label(call, context.ranks))
        LAUNCH_ORDER.hand_over()
        return work

    def covering_lent_memory(self, launch: Launch) -> Launch:
        """Make the operation wait for what was put on the streams since its issue, if it must.

        See [Note: lent memory].
        """
        call, runtime = launch.call, launch.runtime
        if isinstance(call, Gathering) and call.recv is None:
            self._lends = True
        if not self._lends or not self._context.queue.is_current():
            return launch
        later = [
            runtime.record(stream) for stream in launch.streams if not runtime.is_capturing(stream)
        ]
        return launch._replace(ready=[*launch.ready, *later])

    def why_not_at_home(self, runtime: DeviceRuntime) -> UsageError | None:
        """Return what is wrong with an array on `runtime`; None where the backend takes it."""
        home = None if self.backend is None else self.backend.home()
        if home is None or home is runtime:
            return None
        context = self._context
        return UsageError(
            f"rank {context.ranks[context.rank]}: the array is on {runtime.name}, but the group "
            f"works on {home.name} of this rank; move it there, or make a group for it"
        )

    # ---- on the device

    def keep(self, call: Call, done: Event) -> None:
        """Keep the arrays of `call` alive until `done`."""
        self._running.append((call, done))

    def _forget_ended(self) -> None:
        if not self._forgetting.acquire(blocking=False):
            return  # another thread is at it, or this one, which a signal handler interrupts
        try:
            while self._running:
                call, event = self._running[0]
                assert call.device is not None
                if not call.device.is_done(event):
                    return
                self._running.popleft()
        finally:
            self._forgetting.release()

    def join(self, launch: Launch, done: Event | None) -> None:
        """Make the streams that the operation was issued from wait for its end: [Note: streams].

        They are the current ones still, for the caller has been blocked since.
        """
        if done is not None:
            with self.translated_failures(launch.runtime):
                for stream in launch.streams:
                    launch.runtime.wait_event(stream, done)

    def await_on_device(self, runtime: DeviceRuntime, event: Event) -> None:
        """Make the current streams wait for `event`."""
        with self.translated_failures(runtime):
            for stream in runtime.current_streams():
                runtime.wait_event(stream, event)

    def await_on_host(self, call: Call, event: Event) -> None:
        """Block the host until `event`; raise what goes wrong on the device meanwhile."""
        runtime, backend, limit_s = call.device, self.backend, self._context.timeout_s
        assert runtime is not None
        assert backend is not None  # it has put the operation there
        if (
            call.kind.family is Family.MESSAGE
        ):  # a peer may wait for another of its peers before it begins
            limit_s = 2 * limit_s + GOODBYE_S
        with self.translated_failures(runtime):
            backend.await_on_host(event, call, limit_s)

    def synchronize(self, *, on_device: bool) -> None:
        """Make the current streams (or the host) wait for everything that is on the device."""
        for call, event in tuple(self._running):
            if not on_device:
                self.await_on_host(call, event)
                continue
            assert call.device is not None
            for stream in call.device.current_streams():
                call.device.wait_event(stream, event)

    def settle(self, timeout_s: float) -> bool:
        """Wait for what is under way; return whether all of it has ended."""
        for call, event in tuple(self._running):
            runtime = call.device
            assert runtime is not None
            try:
                if not wait_on_host(runtime, event, timeout_s):
                    return False
            except runtime.failures:
                return False
        self._running.clear()
        return True

    # ---- failures

    def check(self) -> None:
        """Raise what the backend reports about the operations under way."""
        if self.backend is not None:
            self.backend.check()

    @contextmanager
    def translated_failures(self, runtime: DeviceRuntime) -> Iterator[None]:
        """Make a `TransportError` of a device's failure, after which the backend cannot go on."""
        try:
            yield
        except runtime.failures as error:
            if isinstance(error, HpcdistError):
                raise
            if self.backend is not None:
                self.backend.abort()
            raise device_failure(runtime, error) from error


def device_failure(runtime: DeviceRuntime, error: Exception) -> TransportError:
    """Return the error of a device that fails with `error`."""
    return TransportError(f"{runtime.name} failed: {error}; end the job")


def _at_once(job: Job, label: str) -> QueuedWork:
    """Run `job` on this thread, where MPI may be used by one only."""
    work = QueuedWork(job, label)
    work.execute()
    work.end()
    return work
