"""The interfaces of this layer; every other class here is final."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.config import Config
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime.place import Place
from hpcdist.transport.call.call import AnyMessage, Call, Collective
from hpcdist.transport.presence.membership import Membership
from hpcdist.transport.waiting.work import Work

if TYPE_CHECKING:
    from hpcdist.transport.presence.roles import GroupTable, Kept, Roles


def watched(run: Callable[[Any], Any], call: Call) -> Any:
    """Run `call`, then tell its `ended` how it ended."""
    ended = call.ended
    try:
        result = run(call._replace(ended=None))
    except BaseException as error:
        if ended is not None:
            ended(error)
        raise
    if ended is not None:
        ended(None)
    return result


class Counter(Protocol):
    """What counts the collectives of a group."""

    issued: int
    flight: int


class Plan(ABC):
    """An operation bound to its buffers, to be started again and again.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> x = np.ones(3)
        >>> plan = dist.plan_all_reduce(x)
        >>> for step in range(10):
        ...     x[:] = step
        ...     _ = plan.start().wait()
        >>> plan.free()

    """

    @abstractmethod
    def start(self) -> Work:
        """Begin the operation on what the buffers contain now; the last start must have ended."""

    def watch(self, counter: Counter, tell: Callable[[Callable[[], Work]], Work]) -> None:  # noqa: B027
        """Count each start in `counter`, and have `tell` do it while there are `listeners`.

        A plan of a transport that leaves this out is started without anyone hearing of it.

        Args:
            counter: what is added to.
            tell: gets a function that starts the plan, calls it and returns its work.

        """

    @abstractmethod
    def free(self) -> None:
        """Free the resources of MPI for the plan; it cannot be started again."""

    def __repr__(self) -> str:
        return f"<Plan: {self.in_words()}>"

    def in_words(self) -> str:
        """Describe the plan and its state, without asking MPI."""
        return "operation"


REFUSE_START = (
    "this plan is under way or has been freed; wait() for its last start before the next one, "
    "and make a new plan after free()"
)


class WorldRequest(NamedTuple):
    """The arguments with which `init_parallel_env` starts a transport.

    `timeout_s` is the time limit of the world's operations, `comm` the communicator that the user
    gave (None: all ranks). `before_end` is to be called when the library that a transport uses is
    about to end before the program does, while it can still communicate.
    """

    config: Config
    timeout_s: float
    comm: Any
    before_end: Callable[[], None]


class StartedWorld(NamedTuple):
    """The world that a transport has started, for `init_parallel_env`.

    `place` is where this rank stands. `hosts` and `local_ranks` tell of every rank the name of its
    node and its rank there. `connect` makes the transport of the world; it is called once, when
    this rank's GPU has become the current one.

    Of a process that is a spare these are all processes, and `join` is called in place of
    `connect`: it waits until the process gets a place in the world, and returns this; None if the
    job ends before.
    """

    place: Place
    hosts: Sequence[str]
    local_ranks: Sequence[int]
    connect: Callable[[], Transport]
    join: Callable[[], Recovered | None] | None = None


class Recovered(NamedTuple):
    """A world after a recovery.

    `transport` joins its ranks; `roles` says who they were, `world` where they are (`hosts`,
    `local_ranks` and this rank's `place`); `groups` are the others that go on and that this rank is
    in, each with its transport; `seconds` is how long it took here.
    """

    transport: Transport
    roles: Roles
    world: Any
    groups: Sequence[tuple[Kept, Transport]]
    seconds: float = 0.0


class LinkCost(NamedTuple):
    """What it takes to move data inside a node, or between nodes.

    Attributes:
        alpha: seconds a message.
        beta: seconds a byte received.

    """

    alpha: float
    beta: float


class Transport(ABC):
    """Moves the bytes of a `Call` between the ranks of one group.

    `backend` is its name, that of its entry point in any case of letters. `ranks` are the world
    ranks of the group, in group order; `one_node` says whether they all run on one node, and
    `membership` which of them are still there.
    """

    backend: str
    rank: int
    size: int
    ranks: Sequence[int]
    one_node: bool
    membership: Membership
    nodes: Sequence[int] = ()
    """For each rank a number of its node, alike for ranks that can share memory; () if unknown."""
    job: str = ""
    """The name of the job, of all ranks the same; of the world's transport only."""
    takes_exchanges: bool = False
    """Whether `run` and `start` take an `Exchange`; else they get the alltoall that does it."""
    hot: Any = None
    """What the hot path needs of it, where that can be used: it is a `shm.hot.HotTransport`."""
    mail: Any = None
    """What the hot path of messages needs of it, where that can be used."""
    user_comm: Any = None
    """The communicator of mpi4py that the group was made of, if it was."""
    without_mpi: str | None = None
    """Why a rank is alone, if it is so because there is no MPI."""
    groups_begun: int = 0
    """How often `subgroup` has let other members hear of this rank."""
    costs: Mapping[str, LinkCost] = MappingProxyType({})
    """What was measured of moving data on "one" node and on "several"; of all ranks the same."""

    def __repr__(self) -> str:
        place = f", rank {self.rank} of {self.size}" if hasattr(self, "rank") else ""
        return f"<Transport {self.backend}{place}>"

    @abstractmethod
    def run(self, call: Call) -> Any:
        """Finish `call` before returning.

        Args:
            call: what is to be done.

        """

    @abstractmethod
    def start(self, call: Call) -> Work:
        """Begin `call` and return at once.

        Args:
            call: what is to be done.

        """

    def start_batch(self, calls: Sequence[AnyMessage]) -> list[Work]:
        """Begin messages that were issued together; return a work for each.

        Args:
            calls: sends and receives.

        """
        return [self.start(call) for call in calls]

    @abstractmethod
    def plan(self, call: Collective) -> Plan | None:
        """Prepare `call` to be started many times on the same buffers; collective.

        None (on every rank) where the transport has nothing faster than starting it anew.

        Args:
            call: what is to be done.

        """

    def empty(self, nbytes: int) -> NumpyArray | None:
        """Return memory (uint8) for arrays that collectives do not copy; None for ordinary.

        Args:
            nbytes: how many bytes.

        """
        return None

    def place_of(self, array: NumpyArray) -> int | None:
        """Return the place of a contiguous array, for `seen` on other ranks; local.

        None where other ranks cannot see it.

        Args:
            array: of any dtype.

        """
        return None

    def seen(self, rank: int, place: int, nbytes: int) -> NumpyArray:
        """Return the memory (uint8) of a rank of the group that lies at its `place`; local.

        Args:
            rank: of the group.
            place: what `place_of` returned there.
            nbytes: how many bytes.

        """
        raise NotImplementedError(f"{self!r} has no memory that other ranks see")

    @abstractmethod
    def subgroup(
        self, ranks: Sequence[int], next_id: int, timeout: float, error: Exception | None = None
    ) -> tuple[Transport, int]:
        """Join the members of a new group (ranks of this one) and agree on its id.

        Collective over the members only. Returns the group's transport and the largest
        `next_id` of its members.

        Args:
            ranks: of this group, in the order of the new one.
            next_id: the smallest id that is free on this rank.
            timeout: of the new group, in seconds.
            error: says that this rank cannot take part: it is raised here, and the others raise
                `RemoteError`.

        """

    @abstractmethod
    def synchronize(self, *, on_device: bool = False) -> None:
        """Block until every collective this rank issued before has ended; local.

        Args:
            on_device: make the current streams wait for what runs on a device, not this rank.

        """

    def who_died(self, patience_s: float) -> tuple[int, ...]:
        """Return which ranks of the world have died, where the job goes on after a death; local.

        Args:
            patience_s: how long to wait for the first that is known of.

        """
        return ()

    def abandon(self) -> None:  # noqa: B027 # most have nothing to leave
        """Abandon everything under way, because a rank has died; local."""

    def recover(
        self,
        generation: int,
        groups: GroupTable,
        timeout_s: float,
        give_up: Callable[[], None],
    ) -> Recovered:
        """Go on with the ranks that are left when some have died. Collective over them.

        Whatever is under way in this and in all other groups of the job is given up.

        Args:
            generation: how many recoveries there have been.
            groups: this rank's other groups, by id and ranks, and their time limits in seconds.
            timeout_s: how long to wait for the others to come here.
            give_up: is called first, and abandons all groups.

        Raises:
            UsageError: this transport ends with the first rank that dies.

        """
        raise UsageError("recover() is for worlds whose ranks are processes of MPI")

    @abstractmethod
    def reopen(self) -> Transport:
        """Return a new transport between the same ranks, after `close`; collective."""

    @abstractmethod
    def leave(self, why: str) -> None:
        """Report to the other ranks that this one no longer takes part.

        Args:
            why: the reason, for their messages.

        """

    @abstractmethod
    def together_at_end(self) -> bool:
        """Return whether all ranks arrive here within about a second; once, before the end."""

    @abstractmethod
    def close(self) -> None:
        """End what is under way and give the communicators back."""
