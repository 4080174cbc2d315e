"""Batches of messages on device memory that travel together, over NCCL.

The messages of one `batch_isend_irecv` in one group are one operation: it has its place in the
group's queue and its turn on the device, like a collective. When its turn has come, its peers tell
each other on the host what they mean to send and to receive (`mpi.handshake`), every pair makes one
order of it (`matching`), and what fits is put on the group's stream as one NCCL group.

[Note: pairs] Every pair of ranks stands for itself. What goes wrong between two of them is raised
by the works of their messages, on both; the messages with others travel all the same, because
those ranks cannot know of it and have begun them.

[Note: first contact] NCCL connects two ranks when they first exchange a message, and the host
waits until both do. That needs no care here, since both have told each other that they come: a rank
waits at most as long as its peer waits for a missing peer of its own, which is the time limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from hpcdist.arrays.device import Event
from hpcdist.errors import HpcdistError, RemoteError, TransportError, UsageError
from hpcdist.transport.call.call import ANY_SOURCE, Barrier, Message
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.device.backend import Launch
from hpcdist.transport.device.batches import MessageBatches
from hpcdist.transport.device.launch_order import LAUNCH_ORDER
from hpcdist.transport.device.launches import Launches, device_failure
from hpcdist.transport.device.nccl.matching import Entry, by_peer, entry_of, plan_pair, transfer_of
from hpcdist.transport.device.work import DeviceWork, Launched
from hpcdist.transport.mpi.handshake import Handshakes
from hpcdist.transport.waiting.work import Known, Work

if TYPE_CHECKING:
    from hpcdist.transport.device.nccl.backend import Nccl
    from hpcdist.transport.mpi.context import MpiContext

_WHAT = "batch_isend_irecv"


@final
class NcclBatches(MessageBatches):
    """The batches of one group; they share its streams and its order with its `launches`."""

    def __init__(self, context: MpiContext, launches: Launches, nccl: Nccl) -> None:
        self._context, self._launches, self._nccl = context, launches, nccl
        self._handshakes = Handshakes(
            context.comm, context.ranks, context.timeout_s, context.departed
        )

    def start(self, messages: Sequence[Message]) -> list[Work]:
        """Begin `messages`, all on device memory; return a work for each."""
        for each in messages:
            if each.root == ANY_SOURCE:
                raise UsageError(
                    f"rank {self._context.ranks[self._context.rank]}: a receive from any rank "
                    "cannot be in a batch that travels over NCCL; name its source (peer=...), or "
                    "set HPCDIST_DEVICE_BATCHES=staged on all ranks"
                )
        launch, trouble = self._record_streams(messages)
        queued = self._launches.queue(launch.call, lambda: self._launch(launch, messages, trouble))
        work = DeviceWork(self._launches, launch, queued)
        return [_BatchedMessage(work, each, self._context.ranks[each.root]) for each in messages]

    def _record_streams(self, messages: Sequence[Message]) -> tuple[Launch, HpcdistError | None]:
        """Like `Launches.record`; what is wrong on this rank is returned, for its peers, too."""
        runtime = messages[0].device
        assert runtime is not None
        batch = Barrier(Kind.BATCH_ISEND_IRECV, device=runtime)
        try:
            launch = self._launches.record(batch, runtime)
        except runtime.failures as error:
            if isinstance(error, HpcdistError):
                raise
            return Launch(batch, runtime, (), [], None), device_failure(runtime, error)
        return launch, next(filter(None, map(self._elsewhere, messages)), None)

    def _elsewhere(self, message: Message) -> HpcdistError | None:
        assert message.device is not None
        return self._launches.why_not_at_home(message.device)

    # ---- when its turn has come

    def _launch(
        self, launch: Launch, messages: Sequence[Message], trouble: HpcdistError | None
    ) -> Launched:
        """Put the messages on the device; return what went wrong with which peer."""
        try:
            if self._context.queue.is_current():
                launch.runtime.use()
            moved, troubles = self._agree(messages, trouble)
            done = self._put(
                launch, moved, [each for each in messages if each.root not in troubles]
            )
            for each in messages:
                self._launches.keep(each, done)
            if any(each.ended for each in messages):  # who is told of the end reads the arrays
                self._launches.await_on_host(launch.call, done)
        except BaseException as error:
            _tell_end(messages, dict.fromkeys((each.root for each in messages), error))
            raise
        finally:
            if launch.turn is not None:
                LAUNCH_ORDER.release(launch.turn)
        _tell_end(messages, troubles)
        return Launched(troubles, done)

    def _agree(
        self, messages: Sequence[Message], trouble: HpcdistError | None
    ) -> tuple[list[Message], dict[int, HpcdistError]]:
        """Return what is put on the device, in this order, and what went wrong with which peer."""
        peers, own = by_peer(messages), self._context.rank
        entries = {peer: list(map(entry_of, each)) for peer, each in peers.items()}
        trouble = trouble or self._reported()
        told, troubles = self._handshakes.exchange(
            {
                peer: each if trouble is None else str(trouble)
                for peer, each in entries.items()
                if peer != own
            },
            _WHAT,
        )
        if trouble is not None:
            raise trouble
        told[own] = entries.get(own)
        moved: list[Message] = []
        for peer in peers:
            if peer in troubles:
                continue
            try:
                order = self._plan(peer, entries[peer], told[peer])
                moved += [peers[peer][place] for place in order]
            except HpcdistError as error:
                troubles[peer] = error
        return moved, troubles

    def _reported(self) -> TransportError | None:
        """Return what NCCL reports about the operations under way."""
        try:
            self._nccl.check()
        except TransportError as error:
            return error
        return None

    def _plan(self, peer: int, mine: list[Entry], theirs: list[Entry] | str) -> list[int]:
        rank, own = self._context.ranks[peer], self._context.ranks[self._context.rank]
        if isinstance(theirs, str):
            raise RemoteError(
                f"{_WHAT} of ranks {own} and {rank} was called off because rank {rank} cannot "
                f"take part: {theirs}",
                rank,
            )
        return plan_pair(mine, theirs, (own, rank))

    def _put(self, launch: Launch, moved: Sequence[Message], whole: Sequence[Message]) -> Event:
        """Put `moved` on the group's stream, and then what completes the messages `whole`."""
        nccl, runtime = self._nccl, launch.runtime
        with self._launches.translated_failures(runtime):
            launch = self._launches.covering_lent_memory(launch)
            transfers, stream = list(map(transfer_of, moved)), nccl.stream
            launch.put(stream, nccl.check, lambda: nccl.exchange(transfers, stream))
            with runtime.on(stream):
                for each in whole:
                    if each.finish is not None:
                        each.finish(None)
            return runtime.record(stream)


def _tell_end(messages: Sequence[Message], errors: Mapping[int, BaseException]) -> None:
    """Report to each message how it ended; `errors` are per peer."""
    for each in messages:
        if each.ended is not None:
            each.ended(errors.get(each.root))


@final
class _BatchedMessage(Work):
    """One message of a batch; they share the work of the batch, but not what went wrong."""

    def __init__(self, batch: DeviceWork, message: Message, peer: int) -> None:
        self._batch, self._root = batch, message.root
        self._source = peer if message.kind is Kind.RECV else -1

    def wait(self, timeout: Any = None) -> bool:
        """Make the current streams wait for the batch; raise what went wrong with this peer."""
        if timeout is not None:
            self._batch.wait(timeout)
        trouble = self._batch.result().get(self._root)
        if trouble is not None:
            raise trouble
        self.source = self._source
        return True

    def is_completed(self) -> bool:
        """Return whether the batch has ended on the device."""
        return self._batch.is_completed()

    def synchronize(self) -> None:
        """Block the host until the batch has ended."""
        self.wait()
        self._batch.synchronize()

    def refuse_nested(self) -> None:
        """See `Work.refuse_nested`."""
        self._batch.refuse_nested()

    def detach(self) -> None:
        """See `Work.detach`."""
        self._batch.detach()

    def known(self) -> Known:
        """See `Work.known`."""
        return self._batch.known()
