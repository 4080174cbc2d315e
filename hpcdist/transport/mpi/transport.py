"""`MpiTransport`: host memory over MPI.

Each group has three communicators: the user's (`mpi_comm`, never used by hpcdist), one for
collectives, one for messages. Operations agree first (`mpi_agreement`), then run the MPI verb
of their row (`mpi_collectives`, `mpi_objects`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final
from weakref import WeakSet

from mpi4py import MPI

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.config import Config
from hpcdist.errors import TransportError
from hpcdist.transport.base import Ended, Plan, Transport, Work, watched
from hpcdist.transport.call import MESSAGES, Call, Kind, label
from hpcdist.transport.call_site import call_site
from hpcdist.transport.mpi.agreement import Agreement
from hpcdist.transport.mpi.control_messages import discard_unread
from hpcdist.transport.mpi.early import Allowance
from hpcdist.transport.mpi.exchange import mpi_exchange, shared_exchange
from hpcdist.transport.mpi.hierarchical import HierarchicalAllReduce, open_hierarchical
from hpcdist.transport.mpi.intranode import perform
from hpcdist.transport.mpi.messages import Messages
from hpcdist.transport.mpi.news import Circles, Count, News
from hpcdist.transport.mpi.objects import OBJECT_VERBS
from hpcdist.transport.mpi.persistent import PERSISTENT, MpiPlan
from hpcdist.transport.mpi.rendezvous import Rendezvous
from hpcdist.transport.mpi.share_node import open_node
from hpcdist.transport.polling import drop_held, held, is_at_errands, poll, raise_held
from hpcdist.transport.queue import CollectiveQueue, inside, refusal
from hpcdist.transport.shm.control import PAYLOAD
from hpcdist.transport.shm.heap import Heap
from hpcdist.transport.shm.node import SharedNode
from hpcdist.transport.tuning import Algorithm, TuningRule, TuningTable, read_rules

if TYPE_CHECKING:
    from hpcdist.transport.device.calls import DeviceCalls

_MiB = 1 << 20
_GOODBYE_S = 1.0


class Site(NamedTuple):
    """What the groups of a job have in common.

    `nodes` tells for each world rank the first rank of its node.
    """

    config: Config
    heap: Heap
    nodes: Sequence[int]
    rules: Sequence[TuningRule]
    allowance: Allowance
    circles: Circles


def make_site(config: Config, nodes: Sequence[int]) -> Site:
    """Read the tuning file and prepare shared memory; local.

    Raises:
        UsageError: the tuning file is unusable.

    """
    pretended = config.ranks_per_node
    if pretended is not None:
        nodes = [rank // pretended for rank in range(len(nodes))]
    heap = Heap(int(config.shared_heap_mb * _MiB))
    allowance = Allowance(int(config.early_mb * _MiB))
    return Site(config, heap, nodes, read_rules(config.tuning), allowance, Circles())


@final
class MpiTransport(Transport):
    """The ranks of one MPI communicator; collective to create."""

    backend = "MPI"

    def __init__(
        self,
        user_comm: MPI.Intracomm,
        ranks: Sequence[int],
        timeout_s: float,
        site: Site,
    ) -> None:
        self.user_comm = user_comm
        self.ranks = tuple(ranks)
        self.timeout_s = timeout_s
        self.site, self.heap = site, site.heap
        self.comm = user_comm.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.one_node = len({site.nodes[rank] for rank in self.ranks}) == 1
        self.piece_bytes = int(site.config.piece_mb * _MiB) if self.one_node else 1 << 30
        comm, allowance, circles = user_comm.Dup(), site.allowance, site.circles
        self.messages = Messages(comm, self.ranks, timeout_s, allowance, circles)
        shares = self.one_node and self.size > 1
        self.node = self.open_node(self.comm, self.ranks) if shares else None
        self.tuning_table = TuningTable(site.rules, self.size, several_nodes=not self.one_node)
        self.agreement = self._make_agreement() if self.size > 1 else None
        self.queue = CollectiveQueue(f"hpcdist-group-{self.ranks[0]}-{self.size}")
        self.news = self._make_news() if self.agreement is not None else None
        self._rendezvous = Rendezvous(self.comm, self.ranks, self.news)
        self.threads: bool = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        self._hierarchical: HierarchicalAllReduce | Literal["unknown"] | None = "unknown"
        self._on_devices: DeviceCalls | None = None
        self._plan_comm: MPI.Intracomm | None = None
        self._plans: WeakSet[MpiPlan] = WeakSet()
        self.messages.start_taking_in()  # last: a group that cannot be made leaves no errand behind

    @inside(lambda local: local.get("queue"))
    def run(self, call: Call) -> Any:
        """Finish `call` before returning."""
        try:
            if call.device is not None:
                return self.on_devices.run(call)
            if call.kind >= MESSAGES:
                return self._run_message(call)
            if call.ended is not None:  # told when the group is free again: it may use it
                return watched(self.run, call)
            queue = self.queue
            if queue.queued or not queue.running.acquire(False):
                del queue  # what marks this as being inside: it may only wait there
                return self.queue.run(self._perform, call)
            try:  # nothing is ahead: Lane.run, without the calls
                result = self._perform(call)
            except BaseException:
                drop_held()
                raise
            finally:
                queue.running.release()
            if held:
                raise_held()
            return result
        except MPI.Exception as error:
            raise self._failure(call, error) from error

    def start(self, call: Call) -> Work:
        """Begin `call`; collectives make progress on the group's own thread."""
        try:
            if call.device is not None:
                return self.on_devices.start(call)
            if call.kind >= MESSAGES:
                self.messages.refuse_nested()
                return self.messages.start(call)
        except MPI.Exception as error:
            raise self._failure(call, error) from error
        if not self.threads:  # MPI may be used by one thread only: finish it here
            return Ended(self.run(call))
        perform = self._perform if call.ended is None else partial(watched, self._perform)
        job = lambda: self.guarded(call, perform, call)  # noqa: E731
        return self.queue.start(job, label(call, self.ranks))

    def _run_message(self, call: Call) -> Work:
        self.messages.refuse_nested()
        work = self.messages.run(call)
        if held:
            raise_held()
        return work

    def start_batch(self, calls: Sequence[Call]) -> list[Work]:
        """Begin messages; those on device memory together, if the group has it so."""
        on_device = [call for call in calls if call.device is not None]
        if not on_device:
            return super().start_batch(calls)
        batches = self.guarded(on_device[0], self.on_devices.find_batches, on_device[0])
        if batches is None:
            return super().start_batch(calls)
        works = iter(batches.start(on_device))
        return [self.start(call) if call.device is None else next(works) for call in calls]

    def open_node(self, comm: MPI.Intracomm, ranks: Sequence[int]) -> SharedNode | None:
        """Map the memory of the world ranks `ranks`, those of `comm`. Collective over them."""
        return open_node(
            comm,
            self.heap,
            ranks,
            self.timeout_s,
            self.progress,
            use_compiled=self.site.config.kernel == "auto",
        )

    @property
    def on_devices(self) -> DeviceCalls:
        """The operations on device memory; local."""
        if self._on_devices is None:
            from hpcdist.transport.device.calls import DeviceCalls

            self._on_devices = DeviceCalls(self)
        return self._on_devices

    @property
    def hierarchical(self) -> HierarchicalAllReduce | None:
        """The lanes between the nodes of this group; collective when first used."""
        if self._hierarchical == "unknown":
            self._hierarchical = open_hierarchical(self, self.site.nodes[self.ranks[self.rank]])
        return self._hierarchical

    def _make_agreement(self) -> Agreement:
        if self.node is None:
            exchange, check = mpi_exchange(self.comm), None
        else:
            probe = partial(self.comm.Iprobe, MPI.ANY_SOURCE, MPI.ANY_TAG)
            exchange = shared_exchange(self.node.control, probe)
            check = self.node.check_alive
        return Agreement(self.comm, self.ranks, self.timeout_s, exchange, check)

    def _make_news(self) -> News:
        """Let the group's agreement and its messages tell each other's news."""
        agreement, messages, queue = self.agreement, self.messages, self.queue
        assert agreement is not None
        count = Count(
            lambda: agreement.sequence,
            lambda: agreement.sequence + len(queue.queued),
            lambda rank: messages.sent[rank],
        )
        site = self.site
        news = News(self.comm, self.ranks, site.allowance, site.circles, count)
        agreement.news = messages.news = news
        return news

    def set_timeout(self, timeout_s: float) -> None:
        """Change the time limit of operations from now on; local."""
        self.timeout_s = self.messages.timeout_s = timeout_s
        if self.agreement is not None:
            self.agreement.set_timeout(timeout_s)

    def progress(self) -> None:
        """Let MPI proceed with messages under way."""
        self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)

    def departed(self) -> Mapping[int, str]:
        """Return the ranks of this group that take part no longer, and why."""
        return {} if self.news is None else self.news.departed()

    def agree(self, call: Call, address: int = 0, data: Any = None) -> tuple[int, int]:
        """Make sure all ranks issued an equal `call`; return the range of `detail`."""
        if self.agreement is not None:
            return self.agreement(call, address, data)
        if call.error is not None:
            raise call.error
        return call.detail, call.detail

    @inside(lambda local: local["self"].queue)
    def _perform(self, call: Call) -> Any:
        if call.begin is not None:
            call.begin()
        if self.node is not None:
            result = perform(self, self.node, call)
        else:
            detail = self.agree(call)
            hierarchical = self._hierarchical_for(call)
            if hierarchical is None:
                result = OBJECT_VERBS[call.kind](self, call, detail)
            else:
                hierarchical.all_reduce(self, call)
                result = None
        if call.finish is not None:
            result = call.finish(result)
        return result

    def _hierarchical_for(self, call: Call) -> HierarchicalAllReduce | None:
        """Return the lanes if `call`, on which all ranks have agreed, is to use them."""
        if call.kind is not Kind.ALL_REDUCE or self.one_node:
            return None
        assert call.recv is not None
        algorithm = self.tuning_table.algorithm(
            call.kind, call.recv.nbytes, short=False, shared=False
        )
        return self.hierarchical if algorithm is Algorithm.HIERARCHICAL else None

    def run_inside(self, call: Call) -> Any:
        """Run `call` as a part of the operation whose turn it is."""
        return self._perform(call)

    def guarded(self, call: Call, perform: Callable[..., Any], *args: Any) -> Any:
        """Return ``perform(*args)``, which is done for `call`; `TransportError` where MPI fails."""
        try:
            return perform(*args)
        except MPI.Exception as error:
            raise self._failure(call, error) from error

    def _failure(self, call: Call, error: MPI.Exception) -> TransportError:
        return TransportError(
            f"MPI failed in {label(call, self.ranks)} on rank {self.ranks[self.rank]}: {error}; "
            f"called at {call_site()}. The group may be in an unknown state: end the job"
        )

    def plan(self, call: Call) -> Plan | None:
        """Prepare `call` as a persistent MPI collective, where there is one for it."""
        make = PERSISTENT.get(call.kind)
        direct = call.rule is None or (call.rule.encode is None and call.rule.decode is None)
        if make is None:
            return None
        possible = call.device is None and direct and call.finish is None and not _is_large(call)
        data = call.recv if call.recv is not None else call.send
        if self.node is not None and data is not None and data.nbytes > PAYLOAD:
            possible = False  # shared memory is faster than a persistent collective
        everywhere, _ = self.queue.run(self.agree, call._replace(detail=int(possible)))
        if not everywhere:
            return None
        if self._plan_comm is None:
            self._plan_comm = self.queue.run(self.comm.Dup)
        assert self._plan_comm is not None
        try:
            plan = MpiPlan(make(self._plan_comm, call), call, self)
        except NotImplementedError:  # an MPI library older than MPI-4
            return None
        self._plans.add(plan)
        return plan

    def empty(self, nbytes: int) -> NumpyArray | None:
        """Return memory of the heap that the ranks of the node share."""
        return None if self.node is None else self.heap.empty(nbytes)

    def subgroup(
        self, ranks: Sequence[int], next_id: int, timeout: float, error: Exception | None = None
    ) -> tuple[MpiTransport, int]:
        """Create the communicators of the group of `ranks`; only its members call this."""
        if error is not None:
            if self.threads:  # else another thread is in MPI
                self._rendezvous.call_off(tuple(ranks), error, self.timeout_s)
            raise error
        group_id = self._rendezvous.meet(tuple(ranks), next_id, self.timeout_s)
        mine = self.comm.Get_group()
        theirs = mine.Incl(ranks)
        comm = self.comm.Create_group(theirs, hash(tuple(ranks)) % 32000)
        theirs.Free()
        mine.Free()
        world_ranks = [self.ranks[rank] for rank in ranks]
        return MpiTransport(comm, world_ranks, timeout, self.site), group_id

    def synchronize(self, *, on_device: bool = False) -> None:
        """Wait for the queue, and on the device for what was put there."""
        self.queue.run(lambda: None)
        if self._on_devices is not None:
            self._on_devices.synchronize(on_device=on_device)

    def reopen(self) -> MpiTransport:
        """Duplicate the user's communicator again."""
        return MpiTransport(self.user_comm, self.ranks, self.timeout_s, self.site)

    def together_at_end(self) -> bool:
        """Meet all ranks that have nothing left to do."""
        if not self.queue.close() or not self._is_settled():
            return False
        return poll(self.comm.Ibarrier().Test, _GOODBYE_S)

    def _is_settled(self) -> bool:
        return self.agreement is None or self.agreement.is_settled()

    def leave(self, why: str) -> None:
        """Tell the other ranks that this one takes part no longer."""
        if self.news is not None:
            self.news.leave(why)
        self.messages.close()
        if self._on_devices is not None:
            self._on_devices.leave()

    def close(self) -> None:
        """End what is queued and free the communicators; collective."""
        self.queue.refuse_nested()
        self.messages.refuse_nested()
        if is_at_errands():  # maybe of this group, whose communicators are to be freed
            raise refusal()
        ended = self.queue.close()
        if ended and self._on_devices is not None:
            self._on_devices.close()
        self.messages.close()
        for plan in list(self._plans):
            plan.free()
        is_free = ended and (self.agreement is None or self.agreement.close())
        if is_free and isinstance(self._hierarchical, HierarchicalAllReduce):
            self._hierarchical.close()
        is_free = is_free and poll(self.comm.Ibarrier().Test, _GOODBYE_S)
        self.messages.stop_taking_in(_GOODBYE_S)
        if not is_free:
            return  # a rank does not come, or an operation is under way: MPI keeps what it uses
        for comm in (self._plan_comm, self.messages.comm, self.comm):
            if comm is not None:
                discard_unread(comm, _GOODBYE_S)
                comm.Free()


def _is_large(call: Call) -> bool:
    return any(array is not None and array.nbytes > (1 << 30) for array in (call.send, call.recv))
