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
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, final

from hpcdist.arrays.device import Engine, Event, Stream
from hpcdist.errors import CollectiveTimeout, HpcdistError, TransportError, UsageError
from hpcdist.runtime import gpu
from hpcdist.transport import mpi_cuda, nccl, staged
from hpcdist.transport.base import Ended, Work, watched
from hpcdist.transport.call import MESSAGES, Call, Kind, label
from hpcdist.transport.device_turns import Turns
from hpcdist.transport.device_way import Ability, Choice, DeviceWay, choose_way
from hpcdist.transport.lane import Job, QueuedWork
from hpcdist.transport.nccl import Nccl
from hpcdist.transport.pinned import Pinned
from hpcdist.transport.stage import Stage, wait_on_host

if TYPE_CHECKING:
    from hpcdist.transport.mpi_host import MpiHost

_MiB = 1 << 20
_GOODBYE_S = 1.0
_NOT_NCCL = ("mpi", "staged")
TURNS = Turns()
"""Of this process: its device operations, whatever their groups."""


class _Flight(NamedTuple):
    """An issued operation: the streams it was issued from, and when their work is complete.

    With `on_current` it runs on the last of `streams`, and `ready` are those of the others.
    """

    call: Call
    engine: Engine
    streams: tuple[Stream, ...]
    ready: list[Event]
    turn: int | None


class _Landed(NamedTuple):
    """An operation that is on its stream: what it returned, and the event of its end."""

    result: Any
    done: Event | None


@final
class DeviceCalls:
    """The operations of one group on device memory; made when the first one comes."""

    def __init__(self, host: MpiHost) -> None:
        self._host = host
        self._choice: Choice | None = None
        self._nccl: Nccl | None = None
        self._stages: dict[Engine, Stage] = {}
        self._flying: deque[tuple[Call, Event]] = deque()
        """Keeps the arrays of operations that nobody waits for alive until they have ended."""
        self._forgetting = threading.Lock()
        self._lends = False
        """Whether callers have got arrays that were made on a stream of ours."""

    @property
    def way(self) -> DeviceWay | None:
        """How the group's device memory travels; None before its first operation."""
        return None if self._choice is None else self._choice.way

    def run(self, call: Call) -> Work:
        """Put `call` on its stream, let the current streams wait for its end; return its work."""
        if call.kind >= MESSAGES:
            work = self._start_message(call)
            work.wait()
            return work
        flight = self._take_off(call)
        landed: _Landed = self._host.lane.run(self._land, flight)
        self._join(flight, landed)
        return DeviceWork(self, flight, Ended(landed))

    def start(self, call: Call) -> Work:
        """Begin `call` and return at once."""
        if call.kind >= MESSAGES:
            return self._start_message(call)
        flight = self._take_off(call)
        host = self._host
        start = host.lane.start if host.threads else _at_once
        queued = start(lambda: host.guarded(call, self._land, flight), label(call, host.ranks))
        return DeviceWork(self, flight, queued)

    def synchronize(self, *, on_device: bool) -> None:
        """Let the current streams (or the host) wait for everything that was issued."""
        self._host.lane.run(lambda: None)
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
        for stage in self._stages.values():
            stage.pinned.close()
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

    def _take_off(self, call: Call) -> _Flight:
        """Note where the current streams are; if the device fails, on all ranks."""
        engine = call.device
        assert engine is not None
        try:
            return self._noted(call, engine)
        except engine.failures as error:
            reason = _failure(engine, error)
            self._host.run(Call(call.kind, root=call.root, error=reason))  # raises
            raise

    def _noted(self, call: Call, engine: Engine) -> _Flight:
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
        nested = self._host.lane.is_current()  # a callback: it goes before what is queued
        return _Flight(call, engine, streams, ready, None if nested else TURNS.take())

    def _can_be_captured(self, call: Call) -> bool:
        return call.on_current and self._nccl is not None and self._nccl.is_plain(call)

    def _land(self, flight: _Flight) -> _Landed:
        """Agree on the operation and put it on its stream; on the queue of the group."""
        call = flight.call
        if self._host.lane.is_current():
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

            return _Landed(watched(issue, call), done[0])
        finally:
            if flight.turn is not None:
                TURNS.give_up(flight.turn)

    def _issue(self, flight: _Flight, call: Call) -> _Landed:
        host, engine = self._host, flight.engine
        detail = host.agree(self._at_home(call, engine))
        with self._failing(engine):
            return self._put_or_stage(flight, call, detail)

    def _put_or_stage(self, flight: _Flight, call: Call, detail: tuple[int, int]) -> _Landed:
        host, engine = self._host, flight.engine
        flight = self._covering_lent_memory(flight, call)
        way = self._way(engine)
        if way is DeviceWay.NCCL and self._communicator(engine).can(call):
            return self._by_nccl(flight, call, detail)
        if flight.turn is not None and way is DeviceWay.STAGED:
            TURNS.give_up(flight.turn)  # nothing is put on the device that waits for another rank
        stage, ready = self._stage(engine), flight.ready
        if call.on_current:
            ready = [*ready, engine.record(flight.streams[-1])]
        if way is DeviceWay.MPI and call.kind in mpi_cuda.ALLOWED:
            for event in ready:
                engine.wait_event(stage.inward, event)
            result, done = mpi_cuda.perform(host, engine, stage.inward, call, detail)
        else:
            result, done = staged.perform(host, stage, call, detail, ready)
        return self._finished(flight, call, stage.inward, result, done)

    def _at_home(self, call: Call, engine: Engine) -> Call:
        """Make of a call on a device that is not that of NCCL's communicator an error."""
        home = engine if self._nccl is None else self._nccl.engine
        if home is engine:
            return call
        reason = UsageError(
            f"rank {self._host.ranks[self._host.rank]}: the array is on {engine.name}, but the "
            f"group works on {home.name} of this rank; move it there, or make a group for it"
        )
        return call._replace(error=reason)

    def _covering_lent_memory(self, flight: _Flight, call: Call) -> _Flight:
        """Let the operation also wait for what was computed since it was issued, if it must.

        Arrays that an operation made come from the memory pool of our stream, and go back there
        when the caller drops them, perhaps while his streams still read them.
        """
        if call.recv is None and call.kind in (Kind.ALL_GATHER, Kind.GATHER):
            self._lends = True
        if not self._lends or not self._host.lane.is_current():
            return flight
        engine = flight.engine
        later = [
            engine.record(stream) for stream in flight.streams if not engine.is_capturing(stream)
        ]
        return flight._replace(ready=[*flight.ready, *later])

    @contextmanager
    def _failing(self, engine: Engine) -> Iterator[None]:
        """Turn what the device fails with into `TransportError`."""
        try:
            yield
        except engine.failures as error:
            if isinstance(error, HpcdistError):
                raise
            if self._nccl is not None:
                self._nccl.abort()
            raise _failure(engine, error) from error

    def _by_nccl(self, flight: _Flight, call: Call, detail: tuple[int, int]) -> _Landed:
        engine, communicator = flight.engine, self._communicator(flight.engine)
        stream = flight.streams[-1] if call.on_current else communicator.stream
        with nullcontext() if flight.turn is None else TURNS.turn(flight.turn):
            result = self._put(communicator, flight, call, detail, stream)
        if engine.is_capturing(stream):
            return _Landed(result, None)
        return self._finished(flight, call, stream, result, None)

    def _put(
        self,
        communicator: Nccl,
        flight: _Flight,
        call: Call,
        detail: tuple[int, int],
        stream: Stream,
    ) -> Any:
        communicator.check()
        for event in flight.ready:
            flight.engine.wait_event(stream, event)
        return communicator.perform(call, detail, stream)

    def _finished(
        self, flight: _Flight, call: Call, stream: Stream, result: Any, done: Event | None
    ) -> _Landed:
        engine = flight.engine
        if call.finish is not None:
            with engine.on(stream):
                result, done = call.finish(result), None
        done = engine.record(stream) if done is None else done
        self._flying.append((flight.call, done))
        return _Landed(result, done)

    def _join(self, flight: _Flight, landed: _Landed) -> None:
        """Let the current streams wait for the end; see [Note: streams]."""
        if landed.done is not None:
            self.await_on_device(flight.engine, landed.done)

    def await_on_device(self, engine: Engine, event: Event) -> None:
        """Let the current streams wait for `event`."""
        with self._failing(engine):
            for stream in engine.current_streams():
                engine.wait_event(stream, event)

    def await_on_host(self, call: Call, event: Event) -> None:
        """Block the host until `event`; raise what goes wrong on the device meanwhile."""
        engine, host = call.device, self._host
        assert engine is not None
        with self._failing(engine):
            if self._nccl is not None:
                self._nccl.await_on_host(event, call)
            elif not wait_on_host(engine, event, host.timeout_s):
                raise CollectiveTimeout(
                    f"{label(call, host.ranks)} has not ended on {engine.name} within "
                    f"{host.timeout_s:g} s; look for what holds up its streams"
                )

    def check(self) -> None:
        """Raise what NCCL has reported about the operations under way."""
        if self._nccl is not None:
            self._nccl.check()

    def _forget_landed(self) -> None:
        with self._forgetting:
            while self._flying:
                call, event = self._flying[0]
                assert call.device is not None
                if not call.device.is_done(event):
                    return
                self._flying.popleft()

    # ---- the way of the group

    def _way(self, engine: Engine) -> DeviceWay:
        """Return the way of the group; collective when first asked for."""
        if self._choice is None:
            self._choice = self._choose(engine)
        return self._choice.way

    def _choose(self, engine: Engine) -> Choice:
        host, config = self._host, self._host.site.config
        own = self._ability(engine)
        wanted, may_share = config.device_way, config.share_gpu
        return choose_way(host.comm.allgather(own), wanted=wanted, may_share=may_share)

    def _ability(self, engine: Engine) -> Ability:
        """Look what this rank can do; whatever goes wrong is a reason and no exception."""
        host, config = self._host, self._host.site.config
        rank = host.ranks[host.rank]
        node, wanted = host.site.nodes[rank], config.device_way
        try:
            uuid = gpu.uuid_of(engine.name)
        except (RuntimeError, OSError) as error:
            reason = f"{engine.name} cannot be asked for its UUID ({error})"
            return Ability(rank, node, str(rank), reason, reason)
        no_nccl = "" if uuid else f"{engine.name} is no CUDA device"
        if not no_nccl:
            no_nccl = f"HPCDIST_DEVICE_WAY={wanted}" if wanted in _NOT_NCCL else nccl.why_not()
        no_mpi = mpi_cuda.why_not(config.cuda_selftest) if uuid else no_nccl
        return Ability(rank, node, uuid or str(rank), no_nccl, no_mpi)

    def _communicator(self, engine: Engine) -> Nccl:
        """Return NCCL's communicator; collective when first asked for."""
        if self._nccl is None:
            self._nccl = Nccl(self._host, engine)
        return self._nccl

    def _stage(self, engine: Engine) -> Stage:
        stage = self._stages.get(engine)
        if stage is None:
            chunk = int(self._host.site.config.device_chunk_mb * _MiB)
            pinned = Pinned(engine, self._host.heap)
            stage = Stage(engine, pinned, engine.new_stream(), engine.new_stream(), chunk)
            stage = self._stages.setdefault(engine, stage)  # messages have threads of their own
        return stage

    # ---- messages

    def _start_message(self, call: Call) -> Work:
        """Send or receive through locked host memory."""
        engine = call.device
        assert engine is not None
        with self._failing(engine):
            streams = engine.current_streams()
            if any(map(engine.is_capturing, streams)):
                raise _not_capturable(call, self._host)
            ready = [engine.record(stream) for stream in streams]
            return staged.start_message(self._host, self._stage(engine), call, ready)


def _not_capturable(call: Call, host: MpiHost) -> UsageError:
    return UsageError(
        f"{label(call, host.ranks)} cannot be part of a CUDA graph: capture needs NCCL, "
        "use_calc_stream=True, the same operation once before the capture, and arrays that travel "
        "as they are: contiguous, apart from each other, and no sums of 16-bit floats over more "
        "than two ranks without HPCDIST_NCCL_SUMS=native"
    )


def _failure(engine: Engine, error: Exception) -> TransportError:
    return TransportError(f"{engine.name} failed: {error}; end the job")


def _at_once(job: Job, label: str) -> QueuedWork:
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

    def __init__(self, calls: DeviceCalls, flight: _Flight, queued: Work) -> None:
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
