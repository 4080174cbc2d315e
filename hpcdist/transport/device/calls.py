"""Calls on device memory: their order, their way and their streams.

An operation on device memory has its place in the group's queue like every other. When its turn
has come all ranks agree on it, on the host, with host operations of other ranks included; then it
is put on a stream by the way that the group has chosen (`device_way`): NCCL, CUDA-aware MPI, or
staging through host memory, which also takes what the others cannot do.

[Note: streams] What the caller has computed is waited for by events of his current streams, and
what he computes next waits for the operation's: the host waits for neither. With
``use_calc_stream`` the operation runs on the current stream itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, final

from hpcdist.arrays.device import DeviceRuntime, Event, Stream
from hpcdist.errors import (
    CollectiveTimeout,
    MismatchError,
    TransportError,
    UsageError,
)
from hpcdist.runtime import gpu
from hpcdist.transport.base import Ended, Work, watched
from hpcdist.transport.call import MAKERS, MESSAGES, Call, Kind, label
from hpcdist.transport.device import cuda_mpi
from hpcdist.transport.device.choose import Ability, BackendName, Choice, choose_backend
from hpcdist.transport.device.launch_order import LaunchOrder
from hpcdist.transport.device.nccl import binding
from hpcdist.transport.device.nccl.backend import Nccl
from hpcdist.transport.device.staged import backend
from hpcdist.transport.device.staged.buffers import StagingBuffers, wait_on_host
from hpcdist.transport.device.staged.pinned import Pinned
from hpcdist.transport.device.work import (
    DeviceWork,
    Failing,
    Launch,
    Launched,
    at_once,
    device_failure,
)

if TYPE_CHECKING:
    from hpcdist.transport.device.nccl.batch import Batches
    from hpcdist.transport.mpi.context import MpiContext

_MiB = 1 << 20
_GOODBYE_S = 1.0
_NOT_NCCL = ("mpi", "staged")
_FIRST_BATCH = (
    "With HPCDIST_DEVICE_BATCHES=nccl the first operation of a group on arrays of a GPU connects "
    "all its ranks: let all of them call it, or let a collective come first"
)
LAUNCH_ORDER = LaunchOrder()
"""Of this process: its device operations, whatever their groups."""


@final
class DeviceCalls:
    """The operations of one group on device memory; made when the first one comes."""

    def __init__(self, host: MpiContext) -> None:
        self._host = host
        self._choice: Choice | None = None
        self._nccl: Nccl | None = None
        self._batches: Batches | None = None
        self._stages: dict[DeviceRuntime, StagingBuffers] = {}
        self._flying: deque[tuple[Call, Event]] = deque()
        """Keeps the arrays of operations that nobody waits for alive until they have ended."""
        self._forgetting = threading.Lock()
        self._lends = False
        """Whether callers have got arrays that were made on a stream of ours."""

    @property
    def way(self) -> BackendName | None:
        """How the group's device memory travels; None before its first operation."""
        return None if self._choice is None else self._choice.way

    def run(self, call: Call) -> Work:
        """Put `call` on its stream, let the current streams wait for its end; return its work."""
        if call.kind >= MESSAGES:
            work = self._start_message(call)
            work.wait()
            return work
        queue = self._host.queue
        if queue.running.locked():
            queue.refuse_nested()  # before it takes a turn
        if call.on_current and queue.queued:
            queue.run(lambda: None)  # this thread's own stream means nothing on another thread
        flight = self._take_off(call)
        landed: Launched = queue.run(self._land, flight)
        self._join(flight, landed)
        return DeviceWork(self, flight, Ended(landed))

    def start(self, call: Call) -> Work:
        """Begin `call` and return at once."""
        if call.kind >= MESSAGES:
            return self._start_message(call)
        flight = self._take_off(call)
        return DeviceWork(self, flight, self.queue(call, lambda: self._land(flight)))

    def queue(self, call: Call, land: Callable[[], Launched]) -> Work:
        """Let `land` bring `call` on its way in the group's queue."""
        host = self._host
        start = host.queue.start if host.threads else at_once
        return start(lambda: host.guarded(call, land), label(call, host.ranks))

    def synchronize(self, *, on_device: bool) -> None:
        """Let the current streams (or the host) wait for everything that was issued."""
        self._host.queue.run(lambda: None)
        for call, event in tuple(self._flying):
            if not on_device:
                self.await_on_host(call, event)
                continue
            assert call.device is not None
            for stream in call.device.current_streams():
                call.device.wait_event(stream, event)

    def close(self) -> None:
        """End what is under way and give back communicators and memory. Collective."""
        ended = self._settle(self._host.timeout_s)
        self._free_nccl(ended)
        if not ended:
            return  # the device may still use the memory
        for staging in self._stages.values():
            staging.pinned.close()
        self._stages.clear()

    def leave(self) -> None:
        """End NCCL before MPI and Python end, if nothing else is possible by force; local."""
        self._free_nccl(self._settle(_GOODBYE_S))

    def _settle(self, timeout_s: float) -> bool:
        """Wait for what is under way; say whether all of it has ended."""
        for call, event in tuple(self._flying):
            assert call.device is not None
            try:
                if not wait_on_host(call.device, event, timeout_s):
                    return False
            except call.device.failures:
                return False
        self._flying.clear()
        return True

    def _free_nccl(self, ended: bool) -> None:
        if self._nccl is not None:
            (self._nccl.close if ended else self._nccl.abort)()

    # ---- the way of an operation

    def _take_off(self, call: Call) -> Launch:
        """Note where the current streams are; if the device fails, on all ranks."""
        engine = call.device
        assert engine is not None
        try:
            return self.noted(call, engine)
        except engine.failures as error:
            reason = device_failure(engine, error)
            self._host.run(Call(call.kind, root=call.root, error=reason))  # raises
            raise

    def noted(self, call: Call, engine: DeviceRuntime) -> Launch:
        """Note where the current streams are, and take the operation's turn on the device."""
        streams = engine.current_streams()
        capturing = tuple(filter(engine.is_capturing, streams))
        if capturing and not self._can_be_captured(call):
            raise _not_capturable(call, self._host)
        if not capturing:
            self._forget_landed()
        if call.begin is not None:  # on the current stream, ahead of the operation
            call.begin()
            call = call._replace(begin=None)
        streams = capturing or streams
        elsewhere = streams[:-1] if call.on_current else streams
        ready = [engine.record(stream) for stream in elsewhere]
        nested = self._host.queue.is_current()  # a callback: it goes before what is queued
        return Launch(call, engine, streams, ready, None if nested else LAUNCH_ORDER.take())

    def _can_be_captured(self, call: Call) -> bool:
        return call.on_current and self._nccl is not None and self._nccl.is_plain(call)

    def _land(self, flight: Launch) -> Launched:
        """Agree on the operation and put it on its stream; on the queue of the group."""
        call = flight.call
        if self._host.queue.is_current():
            flight.engine.use()
        try:
            if call.ended is None:
                return self._issue(flight, call)
            done: list[Event | None] = []

            def issue(bare: Call) -> Any:
                landed = self._issue(flight, bare)
                done.append(landed.done)
                if landed.done is not None:  # who is told of the end reads the arrays
                    self.await_on_host(call, landed.done)
                return landed.result

            return Launched(watched(issue, call), done[0])
        finally:
            if flight.turn is not None:
                LAUNCH_ORDER.give_up(flight.turn)

    def _issue(self, flight: Launch, call: Call) -> Launched:
        host, engine = self._host, flight.engine
        detail = host.agree(self.at_home(call, engine))
        with self.failing(engine):
            return self._put_or_stage(flight, call, detail)

    def _put_or_stage(self, flight: Launch, call: Call, detail: tuple[int, int]) -> Launched:
        host, engine = self._host, flight.engine
        flight = self.covering_lent_memory(flight, call)
        way = self._way(engine)
        if way is BackendName.NCCL and self.communicator(engine).can(call):
            return self._by_nccl(flight, call, detail)
        if flight.turn is not None and way is BackendName.STAGED:
            LAUNCH_ORDER.give_up(
                flight.turn
            )  # nothing is put on the device that waits for another rank
        staging, ready = self._stage(engine), flight.ready
        if call.on_current:
            ready = [*ready, engine.record(flight.streams[-1])]
        if way is BackendName.MPI and call.kind in cuda_mpi.ALLOWED:
            for event in ready:
                engine.wait_event(staging.inward, event)
            result, done = cuda_mpi.perform(host, engine, staging.inward, call, detail)
        else:
            result, done = backend.perform(host, staging, call, detail, ready)
        return self._finished(flight, call, staging.inward, result, done)

    def at_home(self, call: Call, engine: DeviceRuntime) -> Call:
        """Make of a call on a device that is not that of NCCL's communicator an error."""
        reason = self.why_not_at_home(engine)
        return call if reason is None else call._replace(error=reason)

    def why_not_at_home(self, engine: DeviceRuntime) -> UsageError | None:
        """Say what is wrong with an array on `engine`."""
        home = engine if self._nccl is None else self._nccl.engine
        if home is engine:
            return None
        return UsageError(
            f"rank {self._host.ranks[self._host.rank]}: the array is on {engine.name}, but the "
            f"group works on {home.name} of this rank; move it there, or make a group for it"
        )

    def covering_lent_memory(self, flight: Launch, call: Call) -> Launch:
        """Let the operation also wait for what was computed since it was issued, if it must.

        Arrays that an operation made come from the memory pool of our stream, and go back there
        when the caller drops them, perhaps while his streams still read them.
        """
        if call.recv is None and call.kind in MAKERS:
            self._lends = True
        if not self._lends or not self._host.queue.is_current():
            return flight
        engine = flight.engine
        later = [
            engine.record(stream) for stream in flight.streams if not engine.is_capturing(stream)
        ]
        return flight._replace(ready=[*flight.ready, *later])

    def failing(self, engine: DeviceRuntime) -> Failing:
        """Return a block in which the device's failures become a `TransportError`."""
        return Failing(self, engine)

    def give_nccl_up(self) -> None:
        """End what NCCL has under way on this rank, if there is any."""
        if self._nccl is not None:
            self._nccl.abort()

    def _by_nccl(self, flight: Launch, call: Call, detail: tuple[int, int]) -> Launched:
        engine, communicator = flight.engine, self.communicator(flight.engine)
        stream = flight.streams[-1] if call.on_current else communicator.stream
        result = self.put(
            communicator, flight, stream, lambda: communicator.perform(call, detail, stream)
        )
        if engine.is_capturing(stream):
            return Launched(result, None)
        return self._finished(flight, call, stream, result, None)

    def put(
        self, communicator: Nccl, flight: Launch, stream: Stream, act: Callable[[], Any]
    ) -> Any:
        """Do `act`, which puts something on `stream`, when its turn on the device has come."""
        with nullcontext() if flight.turn is None else LAUNCH_ORDER.turn(flight.turn):
            communicator.check()
            for event in flight.ready:
                flight.engine.wait_event(stream, event)
            return act()

    def _finished(
        self, flight: Launch, call: Call, stream: Stream, result: Any, done: Event | None
    ) -> Launched:
        engine = flight.engine
        if call.finish is not None:
            with engine.on(stream):
                result, done = call.finish(result), None
        done = engine.record(stream) if done is None else done
        self.keep(flight.call, done)
        return Launched(result, done)

    def keep(self, call: Call, done: Event) -> None:
        """Keep the arrays of `call` alive until `done`."""
        self._flying.append((call, done))

    def _join(self, flight: Launch, landed: Launched) -> None:
        """Let the streams of the caller wait for the end; see [Note: streams]."""
        if landed.done is not None:
            with self.failing(flight.engine):
                for stream in flight.streams:  # his current ones, for he has waited
                    flight.engine.wait_event(stream, landed.done)

    def await_on_device(self, engine: DeviceRuntime, event: Event) -> None:
        """Let the current streams wait for `event`."""
        with self.failing(engine):
            for stream in engine.current_streams():
                engine.wait_event(stream, event)

    def await_on_host(self, call: Call, event: Event) -> None:
        """Block the host until `event`; raise what goes wrong on the device meanwhile."""
        engine, host = call.device, self._host
        assert engine is not None
        limit_s = host.timeout_s
        if call.kind >= MESSAGES:  # a peer may wait for another of its peers before it begins
            limit_s = 2 * limit_s + _GOODBYE_S
        with self.failing(engine):
            if self._nccl is not None:
                self._nccl.await_on_host(event, call, limit_s)
            elif not wait_on_host(engine, event, limit_s):
                raise CollectiveTimeout(
                    f"{label(call, host.ranks)} has not ended on {engine.name} within "
                    f"{limit_s:g} s; look for what holds up its streams"
                )

    def check(self) -> None:
        """Raise what NCCL has reported about the operations under way."""
        if self._nccl is not None:
            self._nccl.check()

    def nccl_trouble(self) -> TransportError | None:
        """Return what `check` would raise."""
        try:
            self.check()
        except TransportError as error:
            return error
        return None

    def _forget_landed(self) -> None:
        with self._forgetting:
            while self._flying:
                call, event = self._flying[0]
                assert call.device is not None
                if not call.device.is_done(event):
                    return
                self._flying.popleft()

    # ---- the way of the group

    def _way(self, engine: DeviceRuntime) -> BackendName:
        """Return the way of the group; collective when first asked for."""
        if self._choice is None:
            self._choice = self._choose(engine)
        return self._choice.way

    def _choose(self, engine: DeviceRuntime) -> Choice:
        host, config = self._host, self._host.site.config
        own = self._ability(engine)
        wanted, may_share = config.device_way, config.share_gpu
        return choose_backend(host.comm.allgather(own), wanted=wanted, may_share=may_share)

    def _ability(self, engine: DeviceRuntime) -> Ability:
        """Look what this rank can do; whatever goes wrong is a reason and no exception."""
        host, config = self._host, self._host.site.config
        rank = host.ranks[host.rank]
        node, wanted, provider = host.site.nodes[rank], config.device_way, config.nccl_binding
        try:
            uuid = gpu.uuid_of(engine.name)
        except (RuntimeError, OSError) as error:
            reason = f"{engine.name} cannot be asked for its UUID ({error})"
            return Ability(rank, node, str(rank), reason, reason)
        no_nccl = "" if uuid else f"{engine.name} is no CUDA device"
        if not no_nccl:
            without = wanted in _NOT_NCCL
            no_nccl = f"HPCDIST_DEVICE_WAY={wanted}" if without else binding.why_not(provider)
        no_mpi = cuda_mpi.why_not(config.cuda_selftest) if uuid else no_nccl
        version = 0 if no_nccl else binding.version(provider)
        return Ability(rank, node, uuid or str(rank), no_nccl, no_mpi, version)

    def communicator(self, engine: DeviceRuntime) -> Nccl:
        """Return NCCL's communicator; collective when first asked for."""
        if self._nccl is None:
            self._nccl = Nccl(self._host, engine)
        return self._nccl

    def _stage(self, engine: DeviceRuntime) -> StagingBuffers:
        staging = self._stages.get(engine)
        if staging is None:
            chunk = int(self._host.site.config.device_chunk_mb * _MiB)
            pinned = Pinned(engine, self._host.heap)
            staging = StagingBuffers(
                engine, pinned, engine.new_stream(), engine.new_stream(), chunk
            )
            staging = self._stages.setdefault(engine, staging)  # messages have threads of their own
        return staging

    # ---- messages

    def _start_message(self, call: Call) -> Work:
        """Send or receive through locked host memory."""
        engine = call.device
        assert engine is not None
        with self.failing(engine):
            self._refuse_capture(call, engine)
            ready = [engine.record(stream) for stream in engine.current_streams()]
            return backend.start_message(self._host, self._stage(engine), call, ready)

    def _refuse_capture(self, call: Call, engine: DeviceRuntime) -> None:
        if any(map(engine.is_capturing, engine.current_streams())):
            raise _not_capturable(call, self._host)

    # ---- batches of messages

    def find_batches(self, call: Call) -> Batches | None:
        """Return what sends the batches of the group over NCCL; None where they are staged.

        Collective when first asked for, as all ranks of a group choose its way and join in NCCL's
        communicator; but not where the settings alone say that messages are staged.
        """
        config, engine = self._host.site.config, call.device
        if config.device_batches == "staged" or config.device_way in _NOT_NCCL:
            return None
        assert engine is not None
        with self.failing(engine):
            if not self._is_open():
                self._refuse_capture(call, engine)
                self._host.queue.run(self._open, engine)
        if self.way is BackendName.NCCL and self._batches is None:
            from hpcdist.transport.device.nccl.batch import Batches

            self._batches = Batches(self._host, self)
        return self._batches

    def _is_open(self) -> bool:
        return self.way not in (None, BackendName.NCCL) or self._nccl is not None

    def _open(self, engine: DeviceRuntime) -> None:
        """Choose the way of the group with all its ranks, and connect them; on the queue."""
        if self._is_open():
            return
        if self._host.queue.is_current():
            engine.use()
        try:
            self._host.agree(Call(Kind.BATCH_ISEND_IRECV, device=engine))
        except (CollectiveTimeout, MismatchError) as error:
            error.args = (f"{error}. {_FIRST_BATCH}",)
            raise
        if self._way(engine) is BackendName.NCCL:
            self.communicator(engine)


def _not_capturable(call: Call, host: MpiContext) -> UsageError:
    return UsageError(
        f"{label(call, host.ranks)} cannot be part of a CUDA graph: capture needs NCCL, "
        "use_calc_stream=True, the same operation once before the capture, and arrays that travel "
        "as they are: contiguous, apart from each other, and no sums of 16-bit floats over more "
        "than two ranks without HPCDIST_NCCL_SUMS=native"
    )
