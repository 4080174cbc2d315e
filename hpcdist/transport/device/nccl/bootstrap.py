"""A group gets its NCCL communicator, or all of its ranks get an error.

NCCL waits for all ranks while it makes a communicator, and has no time limit for that. It could
make one that never waits (``blocking = 0`` in ncclConfig_t), but then every later operation is put
on its stream by a new thread of NCCL, and has to be polled for before an event may follow it
(NCCL 2.30, group.cc). So the communicator is made on a thread of its own, and the group's time
limit holds for the one that waits for that thread. Afterwards the ranks agree that all have one.

It is made from an id of its own and not by ncclCommSplit, which all ranks of the parent would have
to call: a group is made by its members alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from hpcdist.arrays.device import DeviceRuntime, Stream
from hpcdist.errors import CollectiveTimeout, HpcdistError, TransportError
from hpcdist.runtime.mpi import told_by_all
from hpcdist.transport.call.call import Barrier, Refusal
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.device.nccl.binding import Binding, Communicator, failure
from hpcdist.transport.waiting.polling import poll

if TYPE_CHECKING:
    from hpcdist.transport.mpi.context import MpiContext


def connect(
    context: MpiContext, runtime: DeviceRuntime, binding: Binding
) -> tuple[Stream, Communicator]:
    """Make a stream of this rank and a communicator of the ranks of a group. Collective.

    Raises:
        TransportError: CUDA or NCCL has failed on this rank; `RemoteError` on the others.
        CollectiveTimeout: NCCL has not found all ranks within the time limit of the group.

    """
    stream, key = _prepared(context, runtime, binding)
    making = _Making(runtime, lambda: binding.communicator(context.size, key, context.rank))
    reason: HpcdistError | None = None
    if not poll(making.ended.is_set, context.timeout_s, lambda _: context.progress()):
        reason = CollectiveTimeout(
            f"NCCL has not connected the ranks {', '.join(map(str, context.ranks))} within "
            f"{context.timeout_s:g} s; look for a rank that has died, and run with NCCL_DEBUG=INFO "
            "to see what it waits for"
        )
    elif making.error is not None:
        reason = failure("creating a communicator", making.error)
        reason.__cause__ = making.error
    try:
        context.agree(
            Barrier() if reason is None else Refusal(Kind.BARRIER, 0, reason), enters=True
        )
    except BaseException:
        making.release()
        raise
    assert making.made is not None
    return stream, making.made


def _prepared(context: MpiContext, runtime: DeviceRuntime, binding: Binding) -> tuple[Stream, Any]:
    """Make stream and id, and make sure that all ranks can go on."""
    stream, key, trouble = None, None, ""
    try:
        stream = runtime.new_stream()
        key = binding.unique_id() if context.rank == 0 else None
    except (*runtime.failures, *binding.failures) as error:
        trouble = f"rank {context.ranks[context.rank]}: {error or type(error).__name__}"
    told = told_by_all(context.comm, (trouble, key))
    troubles = [each for each, _ in told if each]
    if troubles:
        raise TransportError(f"NCCL's communicator cannot be made: {'; '.join(troubles)}")
    return stream, told[0][1]


@final
class _Making:
    """A communicator that is being made; `made` or `error` are there when it has `ended`."""

    def __init__(self, runtime: DeviceRuntime, make: Callable[[], Communicator]) -> None:
        self.ended = threading.Event()
        self.made: Communicator | None = None
        self.error: Exception | None = None
        self._runtime, self._make = runtime, make
        self._released = False
        self._ending = threading.Lock()
        threading.Thread(target=self._run, name="hpcdist-nccl-start", daemon=True).start()

    def _run(self) -> None:
        try:
            self._runtime.use()
            self.made = self._make()
        except Exception as error:
            self.error = error
        with self._ending:
            self.ended.set()
            if self._released:
                self._free()

    def release(self) -> None:
        """Free the communicator, now or, where NCCL still waits, when it is made."""
        with self._ending:
            self._released = True
            if self.ended.is_set():
                self._free()

    def _free(self) -> None:
        if self.made is not None:
            self.made.abort()
