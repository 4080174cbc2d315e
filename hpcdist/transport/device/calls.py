"""`DeviceCalls`: a group's operations on device memory, their order and their agreement.

An operation on device memory has its place in the group's queue like every other. When its turn
has come all ranks agree on it, on the host, with host operations of other ranks included; then the
group's `DeviceBackend` puts it on a stream. The backend is chosen at the group's first operation,
from what all ranks can do (`table`); what it cannot do is staged through host memory.

Read `launches` for the streams and events around an operation, and for how long its arrays live.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, final

from hpcdist.arrays.device import DeviceRuntime, Event
from hpcdist.transport.base import watched
from hpcdist.transport.call.call import AnyArrays, Barrier, Message, Refusal, apart, refused
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.device import table
from hpcdist.transport.device.backend import DeviceBackend, Launch
from hpcdist.transport.device.batches import MessageBatches, meet
from hpcdist.transport.device.choose import Choice
from hpcdist.transport.device.launch_order import LAUNCH_ORDER
from hpcdist.transport.device.launches import GOODBYE_S, Launches, device_failure
from hpcdist.transport.device.staged.backend import Staged
from hpcdist.transport.device.work import DeviceWork, Launched
from hpcdist.transport.waiting.polling import held, raise_held, to_the_end
from hpcdist.transport.waiting.work import Ended, Work

if TYPE_CHECKING:
    from hpcdist.transport.mpi.context import MpiContext


@final
class DeviceCalls:
    """The operations of one group on device memory; made when the first one comes."""

    def __init__(self, context: MpiContext) -> None:
        self._context = context
        self._launches = Launches(context)
        self._staged = Staged(context)
        self._choice: Choice | None = None
        self._batches: MessageBatches | None = None

    @property
    def backend(self) -> str | None:
        """The name of the group's backend; None before its first operation."""
        return None if self._choice is None else self._choice.backend

    def run(self, call: AnyArrays | Barrier | Message) -> Work:
        """Put `call` on its stream, let the current streams wait for its end; return its work."""
        if isinstance(call, Message):
            return self._run_message(call)
        queue = self._context.queue
        queue.refuse_nested()  # before it takes a turn
        if call.on_current and queue.queued:
            queue.run(lambda: None)  # this thread's own stream means nothing on another thread
        launch = self._record_streams(call)
        launched: list[Launched] = []
        try:
            queue.run(lambda: launched.append(self._launch(launch)))
        finally:  # also where an interrupt comes out of it
            for each in launched:
                to_the_end(partial(self._launches.join, launch, each.done))
        return DeviceWork(self._launches, launch, Ended(launched[0]))

    def start(self, call: AnyArrays | Barrier | Message) -> Work:
        """Begin `call` and return at once."""
        if isinstance(call, Message):
            return self._start_message(call)
        launch = self._record_streams(call)
        queued = self._launches.queue(call, lambda: self._launch(launch))
        return DeviceWork(self._launches, launch, queued)

    def synchronize(self, *, on_device: bool) -> None:
        """Make the current streams (or the host) wait for everything that was issued."""
        self._context.queue.run(lambda: None)
        self._launches.synchronize(on_device=on_device)

    def close(self) -> None:
        """End what is under way and give back communicators and memory. Collective."""
        if self._end_backend(self._context.timeout_s):  # else the device may still use the memory
            self._staged.close()

    def leave(self) -> None:
        """End what other ranks may wait for before MPI and Python end, by force if need be; local.

        Memory that is locked for staging stays so: messages may still use it.
        """
        self._end_backend(GOODBYE_S)

    def _end_backend(self, timeout_s: float) -> bool:
        """End the group's backend; return whether all operations had ended."""
        ended, backend = self._launches.settle(timeout_s), self._launches.backend
        if backend is not None and backend is not self._staged:
            (backend.close if ended else backend.abort)()
        return ended

    # ---- one operation

    def _record_streams(self, call: AnyArrays | Barrier) -> Launch:
        """Like `Launches.record`; if the device fails, raise on all ranks."""
        runtime = call.device
        assert runtime is not None
        try:
            return self._launches.record(call, runtime)
        except runtime.failures as error:
            context, reason = self._context, device_failure(runtime, error)
            context.queue.run(context.agree, Refusal(call.kind, call.root, reason))
            raise  # not reached: to agree on an error is to raise it

    def _launch(self, launch: Launch) -> Launched:
        """Agree on the operation and put it on its stream; on the queue of the group."""
        call = launch.call
        if self._context.queue.is_current():
            launch.runtime.use()
        try:
            if call.ended is None:
                return self._put(launch)
            launched: list[Launched] = []

            def put(bare: AnyArrays) -> Any:
                launched.append(self._put(launch._replace(call=bare)))
                done = launched[0].done
                if done is not None:  # who is told of the end reads the arrays
                    self._launches.await_on_host(call, done)
                return launched[0].result

            return Launched(watched(put, call), launched[0].done)
        finally:
            if launch.turn is not None:
                LAUNCH_ORDER.release(launch.turn)

    def _put(self, launch: Launch) -> Launched:
        """Put an operation on its stream as soon as all ranks have agreed on it.

        Then they wait for this one: an interrupt is raised when it has done its part. What belongs
        on the caller's own stream, which may mean nothing on another thread, is done at once.
        """
        call = launch.call
        reason = self._launches.why_not_at_home(launch.runtime)
        call = call if reason is None else refused(call, reason)
        hand_over = partial(self._hand_over, launch)
        detail = self._context.agree_or_hand_over(call, hand_over, enters=True)
        put = partial(self._put_agreed, launch, detail, threading.get_ident())
        if call.on_current or self._context.size == 1:
            return put()
        launched: Launched = self._context.to_its_end(call, put)
        return launched

    def _hand_over(self, launch: Launch) -> Callable[[Callable[[], tuple[int, int]]], Any]:
        """See `HandOver`; later work on the caller's streams waits for the copies."""
        runtime = launch.runtime
        stream = runtime.new_stream()
        launch.on_own_stream().make_wait(stream)
        with runtime.on(stream):
            call: Any = apart(launch.call)
        copied = runtime.record(stream)
        for each in launch.streams:
            runtime.wait_event(each, copied)
        turn = LAUNCH_ORDER.take()
        LAUNCH_ORDER.hand_over()
        copies = Launch(call._replace(on_current=False), runtime, (stream,), [copied], turn)

        def go_on(agreed: Callable[[], tuple[int, int]]) -> None:
            try:
                self._put_agreed(copies, agreed(), 0)
            finally:
                LAUNCH_ORDER.release(turn)

        return go_on

    def _put_agreed(self, launch: Launch, detail: tuple[int, int], caller: int) -> Launched:
        """Put on its stream what all ranks have agreed on; `caller` is whose thread it is."""
        call, runtime = launch.call, launch.runtime
        if threading.get_ident() != caller:
            runtime.use()
        with self._launches.translated_failures(runtime):
            launch = self._launches.covering_lent_memory(launch)
            backend = self._opened(runtime)
            if launch.turn is not None and not backend.waits_on_device():
                LAUNCH_ORDER.release(launch.turn)  # it cannot hold up what other ranks wait for
            if not backend.can(call):
                backend = self._staged
            result, stream = backend.run(launch, detail)
            if runtime.is_capturing(stream):  # it is a part of a graph, and ends with that
                return Launched(result, None)
            if call.finish is not None:
                with runtime.on(stream):
                    result = call.finish(result)
            done = runtime.record(stream)
            self._launches.keep(call, done)
            return Launched(result, done)

    # ---- the backend of the group

    def _opened(self, runtime: DeviceRuntime) -> DeviceBackend:
        """Return the group's backend; collective when first asked for."""
        context, launches = self._context, self._launches
        if launches.backend is None:
            self._choice = self._choice or table.choose(context, runtime)
            row = table.BACKENDS.get(self._choice.backend)
            launches.backend = self._staged if row is None else row.open(context, runtime)
        return launches.backend

    # ---- messages

    def _start_message(self, call: Message) -> Work:
        """Send or receive through locked host memory."""
        with self._recorded(call) as ready:
            return self._staged.start_message(call, ready)

    def _run_message(self, call: Message) -> Work:
        """Like `_start_message`, to its end; an interrupted send has left, a receive takes none."""
        with self._recorded(call) as ready:
            if call.kind is Kind.RECV:
                return self._staged.receive(call, ready)
            start = partial(self._staged.start_message, call, ready)
            work: Work = self._context.to_its_end(call, start)
        if held:
            raise_held()
        work.wait()
        return work

    @contextmanager
    def _recorded(self, call: Message) -> Iterator[list[Event]]:
        """Yield when the current streams have come this far."""
        runtime = call.device
        assert runtime is not None
        with self._launches.translated_failures(runtime):
            self._launches.refuse_capture(call, runtime)
            yield [runtime.record(stream) for stream in runtime.current_streams()]

    def find_batches(self, call: Message) -> MessageBatches | None:
        """Return what sends batches of messages together; None where they are staged one by one.

        Collective when first asked for, as all ranks of a group choose its backend and open it;
        but not where the settings alone say that messages are staged.
        """
        config, launches, runtime = self._context.site.config, self._launches, call.device
        row = table.BACKENDS.get(config.device_batches)
        if row is None or row.batches is None or not table.may_choose(config, row.candidate.name):
            return None
        assert runtime is not None
        with launches.translated_failures(runtime):
            if launches.backend is None:
                launches.refuse_capture(call, runtime)
                self._context.queue.run(self._open_for_batches, runtime)
        if self._batches is None and self.backend == row.candidate.name:
            self._batches = row.batches(self._context, launches, launches.backend)
        return self._batches

    def _open_for_batches(self, runtime: DeviceRuntime) -> None:
        """Open the backend of the group with all its ranks; on the queue."""
        if self._launches.backend is not None:
            return
        if self._context.queue.is_current():
            runtime.use()
        meet(self._context, runtime)
        self._opened(runtime)
