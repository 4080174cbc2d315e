"""`MpiTransport`: host memory over MPI, and what is in the memory of devices.

Each group has three communicators: the user's (`mpi_comm`, never used by hpcdist), one for
collectives, one for messages. Operations agree first (`agreement`), then run the MPI verb
of their row (`collectives`, `objects`). Here the parts of a group are put together; what they need
of each other is in its `MpiContext`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, final

from mpi4py import MPI

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.errors import HpcdistError, UsageError
from hpcdist.runtime.survival import can_recover
from hpcdist.transport.base import Plan, Recovered, Transport, watched
from hpcdist.transport.call.call import (
    MESSAGES,
    AnyArrays,
    AnyMessage,
    Barrier,
    Call,
    Collective,
    Exchange,
    Message,
    ObjectMessage,
    Reduction,
    apart,
    is_apart,
    is_even,
    label,
)
from hpcdist.transport.call.kinds import LOOSE
from hpcdist.transport.flight import recorder
from hpcdist.transport.mpi import along
from hpcdist.transport.mpi.early import discard_unread
from hpcdist.transport.mpi.intranode import end_left, end_posted, perform
from hpcdist.transport.mpi.opening import open_context
from hpcdist.transport.mpi.ordered import keeps_order
from hpcdist.transport.mpi.patience import POLLED_UP_TO, check_going
from hpcdist.transport.mpi.site import Site
from hpcdist.transport.mpi.survival import translate
from hpcdist.transport.mpi.verbs import verb_of
from hpcdist.transport.shm.collectives import SHARED, fits
from hpcdist.transport.shm.hot import HotTransport, learn_ways, open_hot
from hpcdist.transport.shm.node import SharedNode
from hpcdist.transport.tuning import Algorithm, TuningTable
from hpcdist.transport.waiting.polling import (
    held,
    is_at_errands,
    poll,
    raise_held,
)
from hpcdist.transport.waiting.queue import ending, refusal
from hpcdist.transport.waiting.unheard import tell_at_end, tell_unfinished
from hpcdist.transport.waiting.work import Ended, Work

if TYPE_CHECKING:
    from hpcdist.transport.device.calls import DeviceCalls
    from hpcdist.transport.mpi.crew import Crew
    from hpcdist.transport.mpi.hierarchical.nodes import Hierarchy
    from hpcdist.transport.mpi.plans import Plans
    from hpcdist.transport.mpi.rendezvous import Rendezvous
    from hpcdist.transport.presence.roles import GroupTable

_SHORT = 256 << 10
"""Up to so many bytes an operation is one call of MPI, before which no interrupt is held."""

_ABANDON_S = 5.0
_GOODBYE_S = 1.0


@final
class MpiTransport(Transport, HotTransport):
    """The ranks of one MPI communicator; collective to create."""

    backend = "MPI"
    takes_exchanges = True

    def __init__(
        self,
        user_comm: MPI.Intracomm,
        ranks: Sequence[int],
        timeout_s: float,
        site: Site,
        parent: SharedNode | None = None,
    ) -> None:
        self.user_comm = user_comm
        self.context = context = open_context(
            user_comm, ranks, timeout_s, site, self._perform, parent
        )
        self.rank, self.size, self.ranks = context.rank, context.size, context.ranks
        self.one_node, self.queue = context.one_node, context.queue
        self.membership = context.membership
        self._hierarchical: Hierarchy | Literal["unknown"] | None = "unknown"
        self.nodes = [site.nodes[rank] for rank in context.ranks]
        self._shares_nodes = not self.one_node and len({*self.nodes}) < len(self.nodes)
        self._on_devices: DeviceCalls | None = None
        self._plans: Plans | None = None
        self._to_free: list[MPI.Intracomm] | None = None  # once all ranks have ended the group
        self.crew: Crew | None = None
        """Of the world of a job that goes on when a rank dies."""
        if context.agreement is not None and context.node is not None and context.node.can_pipeline:
            self.hot = open_hot(context.node, context.tuning_table, context.queue)
        if self.hot is not None and context.agreement is not None:
            context.agreement.count_in(self.hot)
            self.mail = context.messages.matching.mail
        if context.agreement is not None and context.slots is not None:
            parts = context.slots, context.ranks, context.agreement, context.queue
            self.hot = along.open_hot(*parts)
        # last: a group that cannot be made leaves no errand behind
        context.messages.matching.start_taking_in()

    @property
    def timeout_s(self) -> float:
        """The time limit of operations."""
        return self.context.timeout_s

    def set_timeout(self, timeout_s: float) -> None:
        """Change the time limit of operations from now on; local."""
        self.context.set_timeout(timeout_s)

    def run(self, call: Call) -> Any:
        """Finish `call` before returning."""
        try:
            if call.device is not None:
                return self.on_devices.run(call)
            if type(call) is Message or type(call) is ObjectMessage:  # faster than isinstance
                return self._run_message(call)
            if call.ended is not None:  # told when the group is free again: it may use it
                return watched(self.run, call)
            return self.queue.run(self._perform, call)
        except MPI.Exception as error:
            raise self.context.failure(call, error) from error

    def start(self, call: Call) -> Work:
        """Begin `call`; collectives make progress on the group's own thread."""
        try:
            if call.device is not None:
                return self.on_devices.start(call)
            if isinstance(call, MESSAGES):
                self.context.messages.refuse_nested()
                return self.context.messages.start(call)
        except MPI.Exception as error:
            raise self.context.failure(call, error) from error
        if not self.context.threads:  # MPI may be used by one thread only: finish it here
            return Ended(self.run(call))
        # `ended` hears of its errors
        perform = partial(self.context.guarded, call, self.queue.turn.call, self._perform)
        job = lambda: watched(perform, call)  # noqa: E731
        return self.queue.start(job, label(call, self.ranks))

    def _run_message(self, call: AnyMessage) -> Work:
        messages = self.context.messages
        messages.refuse_nested()
        work = messages.run(call)
        if held:
            raise_held()
        return work

    def await_copied(self, call: Message) -> None:
        """Wait while the other rank copies a large message that the hot path has begun."""
        self.context.messages.await_copied(call)

    def start_batch(self, calls: Sequence[AnyMessage]) -> list[Work]:
        """Begin messages; those on device memory together, if the group has it so."""
        on_device = [
            call for call in calls if isinstance(call, Message) and call.device is not None
        ]
        if not on_device:
            return super().start_batch(calls)
        batches = self.context.guarded(on_device[0], self.on_devices.find_batches, on_device[0])
        if batches is None:
            return super().start_batch(calls)
        works = iter(batches.start(on_device))
        return [self.start(call) if call.device is None else next(works) for call in calls]

    def use_rules(self, table: TuningTable) -> None:
        """Have the operations on arrays take other ways from now on; the same on all ranks."""
        self.context.tuning_table = table
        if self.hot is not None and self.context.node is not None:
            learn_ways(self.hot, self.context.node, table)

    @property
    def on_devices(self) -> DeviceCalls:
        """The operations on device memory; local."""
        if self._on_devices is None:
            from hpcdist.transport.device.calls import DeviceCalls

            self._on_devices = DeviceCalls(self.context)
        return self._on_devices

    @cached_property
    def _rendezvous(self) -> Rendezvous:
        """Where the members of new groups meet; local."""
        from hpcdist.transport.mpi.rendezvous import Rendezvous

        return Rendezvous(self.context.comm, self.context.ranks, self.context.news)

    @property
    def hierarchical(self) -> Hierarchy | None:
        """The nodes of this group, and its lanes; collective when first used."""
        if self._hierarchical == "unknown":
            from hpcdist.transport.mpi.hierarchical.nodes import open_hierarchy

            def meet() -> None:  # which an interrupt comes after
                self._hierarchical = open_hierarchy(self.context)

            self.context.making(lambda: "the first meeting of the ranks of each node", meet)
        return self._met

    @property
    def _met(self) -> Hierarchy | None:
        """The nodes of this group, if they have met."""
        return None if self._hierarchical == "unknown" else self._hierarchical

    def _perform(self, call: Collective) -> Any:
        context = self.context
        if context.stopped:
            check_going(context, call)
        if call.begin is not None:
            call.begin()
        if context.node is not None:
            before = context.node.control.sequence
            try:
                result = perform(context, context.node, call)
            except BaseException as error:
                self._leave(context.node, call, error, before)
                raise
        else:
            data = None if context.slots is None else along.offered(context.slots, call)
            result = self._agree_and_go_on(call, partial(context.agree, data=data))
        if call.finish is not None:
            result = call.finish(result)
        return result

    def _agree_and_go_on(
        self, call: Collective, agree: Callable[[Collective], tuple[int, int]]
    ) -> Any:
        """Run `call`, on which the ranks agree by `agree`, where they share no memory."""
        context, agreement = self.context, self.context.agreement
        before = 0 if agreement is None else agreement.sequence
        context.under_way.clear()
        try:
            return self._go_on(call, agree(call))
        except BaseException as error:
            self._leave_to_another(call, before, error)
            raise

    def _leave_to_another(
        self, call: Collective, before: int, error: BaseException | None = None
    ) -> None:
        """Let another thread take part in `call`, in which this one is interrupted."""
        context, agreement = self.context, self.context.agreement
        if context.stopped:
            self.hot = None
        if isinstance(error, (HpcdistError, MPI.Exception)):
            context.under_way[:] = (None,)
        elif agreement is not None:
            hand_over = lambda: partial(self._end_left, apart(call))  # noqa: E731
            context.hand_over(call, agreement, before, hand_over)

    def _end_left(self, call: Collective, agreed: Callable[[], tuple[int, int]]) -> None:
        self._go_on(call, agreed())

    def _go_on(self, call: Collective, detail: tuple[int, int]) -> Any:
        """Run what all ranks have agreed on by MPI, or by the nodes; or what came along."""
        context = self.context
        if context.slots is not None and along.came_along(context.slots, call, detail):
            return along.take(context.slots, call)
        nodes = self._nodes_for(call, detail)
        if nodes is None:
            return self._run_verb(call, detail)
        if isinstance(call, Exchange):
            from hpcdist.transport.mpi.hierarchical.boxes import exchange_between

            return context.to_its_end(call, partial(exchange_between, context, nodes.node, call))
        from hpcdist.transport.mpi.hierarchical.verbs import perform_by_nodes

        return context.to_its_end(call, partial(perform_by_nodes, context, nodes, call))

    def _run_verb(self, call: Collective, detail: tuple[int, int]) -> Any:
        """Run an operation by MPI; no rank waits inside it for ever, see `patience`."""
        context, verb = self.context, verb_of(call.kind)
        if context.agreement is None:
            return verb(context, call, detail)  # nobody waits
        is_short = self._is_short(call, detail)
        if is_short and self.one_node:
            context.under_way[:] = (None,)
            return verb(context, call, detail)  # nor here, for more than a moment
        is_polled = is_short and self.size <= POLLED_UP_TO.get(call.kind, 0)
        if is_polled or not (self.one_node or context.threads):
            return verb(context.polled(context.named(call)), call, detail)
        return context.to_its_end(call, partial(verb, context, call, detail))

    def _is_short(self, call: Collective, detail: tuple[int, int]) -> bool:
        """Return, the same on all ranks, whether an operation is one call of MPI, or none."""
        if not isinstance(call, AnyArrays):
            return isinstance(call, Barrier)
        return fits(call, detail) and SHARED[call.kind].total(call, self.size) <= _SHORT

    @ending
    def end_posted(self, call: Call, state: int = 0) -> None:
        """End `call`, which the hot path has posted."""
        context = self.context
        assert not isinstance(call, MESSAGES)
        if context.node is None:
            result = context.guarded(call, self._end_in_slots, call, state)
            if call.finish is not None:
                call.finish(result)
            return
        try:
            result = context.guarded(call, end_posted, context, context.node, call, state)
            if call.finish is not None and not state:  # else what has come is in its place
                call.finish(result)
        except BaseException as error:
            self._leave(context.node, call, error)
            raise

    def _end_in_slots(self, call: Collective, state: int) -> Any:
        """End what the hot path has posted in slots, and may have agreed on."""
        agreement = self.context.agreement
        assert agreement is not None
        try:
            if self.context.stopped:
                check_going(self.context, call)
            if state == along.AGREED:
                return self._go_on(call, (call.detail, call.detail))
            failure = agreement.take_failure()
            if failure is not None:
                raise failure
            return self._go_on(call, agreement.end_posted(call))
        except BaseException as error:
            self._leave_to_another(call, agreement.sequence - 1, error)
            raise

    def _leave(
        self, node: SharedNode, call: Collective, error: BaseException, before: int = -1
    ) -> None:
        """Leave a collective by `error`; by an interrupt, not before MPI has ended it."""
        try:
            if not isinstance(error, (HpcdistError, MPI.Exception)):
                end_left(self.context, node, call, before)
        finally:
            self.context.leave(call, error, before)

    def take_back(self, call: Call) -> None:
        """Take back what the hot path has lent to `call`, which has failed."""
        assert not isinstance(call, MESSAGES)
        if self.context.node is None:
            agreement = self.context.agreement
            assert agreement is not None
            if agreement.take_failure() is None:
                self._leave_to_another(call, agreement.sequence - 1)
            return
        self._leave(self.context.node, call, KeyboardInterrupt())

    def start_posted(self, call: Call, state: int, kept: tuple[Any, ...]) -> Work:
        """Let the queue's thread end `call`, which the hot path has begun; what is `kept` stays."""
        if not self.context.threads:  # MPI may be used by one thread only: end it here
            return Ended(self.end_posted(call, state))

        def end(_: tuple[Any, ...] = kept) -> Any:
            return self.queue.turn.call(self.end_posted, call, state)

        return self.queue.start(end, label(call, self.ranks))

    def _nodes_for(self, call: Collective, detail: tuple[int, int]) -> Hierarchy | None:
        """Return the nodes of the group if `call`, agreed on by all ranks, is to use them."""
        if self.one_node or not isinstance(call, (AnyArrays, Exchange)):
            return None
        from hpcdist.transport.mpi.hierarchical.boxes import WORTH_IT
        from hpcdist.transport.mpi.hierarchical.verbs import goes_by_nodes

        if isinstance(call, Exchange):
            pays = self._shares_nodes and detail[1] >= WORTH_IT
            return self.hierarchical if pays else None
        if call.kind in LOOSE and (not is_even(detail) or is_apart(detail)):
            return None
        total = SHARED[call.kind].total(call, self.size)
        way = self.context.tuning_table.algorithm(call.kind, total, short=False, shared=False)
        nodes = self.hierarchical if way is Algorithm.HIERARCHICAL else None
        if nodes is None:
            return None
        config = self.context.site.config
        ordered = isinstance(call, Reduction) and keeps_order(config, call.rule)
        return nodes if goes_by_nodes(nodes, call, ordered=ordered) else None

    def plan(self, call: Collective) -> Plan | None:
        """Prepare `call` as a persistent MPI collective, where there is one for it."""
        if self._plans is None:
            from hpcdist.transport.mpi.plans import Plans

            in_slots = self.hot is not None and self.context.node is not None
            self._plans = Plans(self.context, in_slots=in_slots)
        plan: Plan | None = self.context.guarded(call, self._plans.make, call)
        return plan

    def empty(self, nbytes: int) -> NumpyArray | None:
        """Return memory of the heap that the ranks of the node share, if they have met."""
        meets = self.context.node or self._met
        return self.context.heap.empty(nbytes) if meets else None

    def place_of(self, array: NumpyArray) -> int | None:
        """Return where in the heap an array lies; None for other memory, and between nodes."""
        return None if self.context.node is None else self.context.heap.offset_of(array)

    def seen(self, rank: int, place: int, nbytes: int) -> NumpyArray:
        """Return what lies at a place of the heap of a rank of the node."""
        assert self.context.node is not None
        return self.context.node.heap_of(rank)[place : place + nbytes]

    def subgroup(
        self, ranks: Sequence[int], next_id: int, timeout: float, error: Exception | None = None
    ) -> tuple[MpiTransport, int]:
        """Create the communicators of the group of `ranks`; only its members call this."""
        context = self.context
        if error is not None:
            self.groups_begun += 1
            if context.threads:  # else another thread is in MPI
                self._rendezvous.call_off(tuple(ranks), str(error))
            raise error
        interrupts: list[BaseException] = []

        def meet_and_make() -> tuple[MpiTransport, int]:
            self.groups_begun += 1
            group_id = self._rendezvous.meet(tuple(ranks), next_id, self.timeout_s, interrupts)
            return context.making(what, make), group_id

        def make() -> MpiTransport:
            world_ranks = [self.ranks[rank] for rank in ranks]
            communicators = context.site.communicators
            with communicators.making(context.comm, world_ranks):
                comm = communicators.of_ranks(context.comm, ranks)
                return MpiTransport(comm, world_ranks, timeout, context.site, context.node)

        def what() -> str:
            return f"new_group({[self.ranks[rank] for rank in ranks]})"

        with self._translated(what()):
            made: tuple[MpiTransport, int]
            made = context.on_helper(what, meet_and_make, interrupts=interrupts)
            return made

    def synchronize(self, *, on_device: bool = False) -> None:
        """Wait for the queue, and on the device for what was put there."""
        self.queue.run(lambda: None)
        if self._on_devices is not None:
            self._on_devices.synchronize(on_device=on_device)

    def who_died(self, patience_s: float) -> tuple[int, ...]:
        """See `Transport.who_died`."""
        if not (can_recover() and self.context.threads):
            return ()
        with suppress(MPI.Exception):
            return self.context.site.deaths.awaited(patience_s)
        return ()

    def abandon(self) -> None:
        """Leave everything under way to MPI, since a rank has died; local."""
        self.hot = self.mail = None
        self.context.site.communicators.revoke()
        self.queue.close(_ABANDON_S)
        self.context.messages.close()
        self.context.messages.matching.abandon()
        if self._plans is not None:
            self._plans.abandon()
        if self._on_devices is not None:
            self._on_devices.leave()

    def recover(
        self,
        generation: int,
        groups: GroupTable,
        timeout_s: float,
        give_up: Callable[[], None],
    ) -> Recovered:
        """Go on with the ranks that are left; collective over them. See `Transport.recover`."""
        from hpcdist.transport.mpi.recovering import CANNOT, Own, Settled, recover

        if self.crew is None:
            raise UsageError(CANNOT)
        give_up()
        told = self.crew.told(self.rank, self.size, generation)
        settled = Settled(self.timeout_s, self.costs, self.job, recorder.worlds())
        own = Own(told, self.context.site.config, groups, self.context.heap, settled)
        return recover(self.crew, MpiTransport, own, timeout_s)

    def reopen(self) -> MpiTransport:
        """Duplicate the user's communicator again."""
        what, site = "restart_process_group", self.context.site

        def make() -> MpiTransport:
            with site.communicators.making(self.user_comm, self.ranks):
                return MpiTransport(self.user_comm, self.ranks, self.timeout_s, site)

        with self._translated(what):
            again = self.context.making(lambda: what, make)
        again.costs = self.costs
        return again

    def together_at_end(self) -> bool:
        """Meet all ranks that have nothing left to do."""
        if self._to_free is not None:
            return False
        if self.context.stopped or not self.queue.close() or not self._is_settled():
            return False
        self._end_eager()
        return poll(self.context.comm.Ibarrier().Test, _GOODBYE_S)

    def _is_settled(self) -> bool:
        agreement = self.context.agreement
        return agreement is None or agreement.is_settled()

    def _end_eager(self) -> None:
        """Say so if ranks disagree in what this one has given before its last operation."""
        context = self.context
        try:
            if context.agreement is not None and not context.stopped:
                context.agreement.end_eager()
        except HpcdistError as error:
            tell_at_end(error)

    def leave(self, why: str) -> None:
        """Report to the other ranks that this one no longer takes part."""
        if self._to_free is not None:  # they know
            return
        with self._translated("shutdown_process_group"):
            self._end_eager()
            if self.context.news is not None:
                self.context.news.leave(why)
            left = self.context.messages.close()
            tell_unfinished(self.ranks, self._unfinished(left))
            self._linger()
            if self._on_devices is not None:
                self._on_devices.leave()

    def _linger(self) -> None:
        """Stay, when the program ends, in what others may still come to."""
        if not self.context.stopped:
            self.queue.linger(self.context.timeout_s)

    def _unfinished(self, messages: Sequence[Work]) -> list[str]:
        """Return in words what has not ended: collectives, and of `messages` those."""
        under_way = [each.left_over() for each in messages if not each.is_completed()]
        return [*self.queue.under_way(), *under_way]

    def close(self) -> None:
        """End what is queued and free the communicators; collective."""
        with self._translated("destroy_process_group"):
            self._close()

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        """Raise what `translate` makes of what MPI raises."""
        try:
            yield
        except MPI.Exception as error:
            what = f"{what}, of ranks {[*self.ranks]}"
            raise translate(error, what, self.context.site.deaths) from error

    def _close(self) -> None:
        if self._to_free is None and not self._end_everything():
            return  # MPI keeps what it uses
        while self._to_free:  # from the last, also after an interrupt
            discard_unread(self._to_free[-1], _GOODBYE_S)
            self._to_free.pop().Free()

    def _end_everything(self) -> bool:
        """End what is queued with all ranks; return whether all have, so that nothing is used."""
        context, messages = self.context, self.context.messages
        self.queue.refuse_nested()
        messages.refuse_nested()
        if is_at_errands():  # maybe of this group, whose communicators are to be freed
            raise refusal()
        self.hot = self.mail = None
        ended = self.queue.close()
        if ended and self._on_devices is not None:
            self._on_devices.close()
        left = messages.close()
        if self._plans is not None:
            self._plans.free()
        if ended:
            self._end_eager()
        is_free = (
            ended
            and not context.stopped
            and (context.agreement is None or context.agreement.close())
        )
        if is_free and self._met is not None:
            self._met.close()
        is_free = is_free and poll(context.comm.Ibarrier().Test, _GOODBYE_S)
        tell_unfinished(self.ranks, self._unfinished(left))
        messages.tell_unreceived()
        messages.matching.stop_taking_in(_GOODBYE_S)
        if not is_free:  # a rank does not come, or an operation is under way
            self._linger()
            if context.news is not None:
                context.news.leave("has ended the group")
            return False
        of_plans = None if self._plans is None else self._plans.comm
        comms = context.comm, messages.comm, of_plans
        self._to_free = [comm for comm in comms if comm is not None]
        return True
