"""`Group`: some ranks of the world and the transport that joins them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast, final

import numpy as np

from hpcdist.comm.closed import Closed, Dormant
from hpcdist.comm.making import split
from hpcdist.comm.members import Members
from hpcdist.comm.session import Session
from hpcdist.errors import UsageError
from hpcdist.transport.base import Transport
from hpcdist.transport.shm.hot import GroupState

if TYPE_CHECKING:
    from hpcdist.comm.grid import Grid

_ALONE = "this program runs alone: `hpcdist run -n 2` starts it on two ranks"


@final
class Group(GroupState, Members):
    """A set of ranks that communicate with each other.

    Made by `init_parallel_env` (the world), `new_group` and `split`. The ranks are in ascending
    order of world rank, unless the keys of a `split` have ordered them.

    Attributes:
        rank: this process's rank in the group, -1 if it is not a member.
        ranks: the world ranks of the members.
        nranks: how many members there are.
        id: a number that all members agree on; 0 is the world.
        name: the name given to `new_group`, or one made of the id.

    Example:
        >>> import hpcdist as dist
        >>> def halves():
        ...     half = dist.init_parallel_env().split(dist.get_rank() % 2)
        ...     return half.rank, half.ranks
        >>> dist.simulate(4, halves)
        [(0, [0, 2]), (0, [1, 3]), (1, [0, 2]), (1, [1, 3])]

    """

    def __init__(
        self,
        ranks: Sequence[int],
        world_rank: int,
        id: int,
        transport: Transport | None,
        name: str | None = None,
    ) -> None:
        self.id = id
        self.name = name or ("_default_pg" if id == 0 else f"_default_pg{id}")
        self.go_on(ranks, world_rank, transport)

    generation = 0
    """Of the world: how often it has recovered from deaths; see `recover`."""
    lost: tuple[int, ...] = ()
    """Of the world: the ranks that died before the last recovery, as they were numbered then."""
    replaced: tuple[int, ...] = ()
    """Of the world: those of them whose place another process has taken."""

    def go_on(self, ranks: Sequence[int], world_rank: int, transport: Transport | None) -> None:
        """Replace the members; for `recover`.

        Args:
            ranks: world ranks.
            world_rank: of this process.
            transport: joins the members; None if this process is not one of them.

        """
        self.ranks = list(ranks)
        self.nranks = len(self.ranks)
        self.world_rank = world_rank
        self.transport = transport
        self.open_blocks: list[weakref.ref[Any]] = []
        """Blocks of `together` that this rank is in, the outermost first; see `Together`."""
        self.issued = 0
        self.announced = {}
        self._rank_of = {world: rank for rank, world in enumerate(self.ranks)}
        self.rank = self._rank_of.get(world_rank, -1)

    @property
    def world_size(self) -> int:
        """Number of members; -1 if this process is not one of them."""
        return self.nranks if self.is_member() else -1

    @property
    def process_group(self) -> Transport | None:
        """The transport that joins the members; None if this process is not one of them."""
        return self.transport if self.is_member() else None

    @property
    def backend(self) -> str:
        """Name of the transport, for example ``"MPI"``."""
        if self.transport is None or not self.is_member():
            raise UsageError(
                f"Invalid group specified: rank {self.world_rank} is not a member of {self.name}"
            )
        return self.transport.backend

    @property
    def mpi_comm(self) -> Any:
        """The mpi4py communicator of the members, free for your own use.

        hpcdist never communicates on it. None in simulated worlds and for non-members.

        Raises:
            UsageError: this rank is alone because there is no MPI library.

        """
        if self.transport is None:
            return None
        if self.transport.without_mpi is not None:
            why = self.transport.without_mpi
            raise UsageError(f"group {self.name} has no communicator of MPI: {why}")
        return self.transport.user_comm

    @property
    def one_node(self) -> bool:
        """Whether all members run on one node; False if this process is not one of them."""
        return self.transport is not None and self.transport.one_node

    @property
    def is_closed(self) -> bool:
        """Whether the group cannot be used any more."""
        return isinstance(self.transport, Closed)

    def open_transport(self) -> Any:
        """Return the transport, restarted if it was shut down: collective then.

        Raises:
            UsageError: the group is closed.

        """
        transport = self.transport
        return transport.reopen() if isinstance(transport, (Closed, Dormant)) else transport

    def is_member(self) -> bool:
        """Return whether this process belongs to the group."""
        return self.rank >= 0

    def get_group_rank(self, rank: int) -> int:
        """Return the rank in this group of world rank `rank`; -1 if this process is no member.

        Args:
            rank: a world rank.

        Raises:
            UsageError: `rank` is not in the group.

        """
        return self.root_of(rank, "rank") if self.is_member() else -1

    def get_global_rank(self, rank: int) -> int:
        """Return the world rank of rank `rank` of this group; -1 if this process is no member.

        Args:
            rank: a rank of this group, from 0.

        Raises:
            UsageError: the group has no such rank.

        """
        if not self.is_member():
            return -1
        if not _is_int(rank) or not 0 <= rank < self.nranks:
            raise UsageError(f"group {self.name} has ranks 0 to {self.nranks - 1}, got {rank!r}")
        return self.ranks[rank]

    def split(
        self,
        color: int | None,
        key: int | None = None,
        *,
        timeout: Any = None,
        name: str | None = None,
    ) -> Group:
        """Make groups of the ranks with equal `color`; return this rank's (MPI_Comm_split).

        Collective over this group.

        Args:
            color: an integer of at least 0; None (or ``MPI.UNDEFINED``) for no group.
            key: an integer: the ranks of the new group are in ascending order of their keys, and
                of their ranks in this group where keys are equal. None is 0.
            timeout: as in `new_group`.
            name: as in `new_group`.

        Returns:
            This rank's group; if `color` is None, a group without members. `src` and `dst` stay
            world ranks.

        Example:
            >>> import hpcdist as dist
            >>> world = dist.init_parallel_env()
            >>> world.split(world.rank % 2).ranks
            [0]

        """
        return cast(Group, split(self, color, key, timeout, name))

    def grid(self, dims: int | Sequence[int], periodic: bool | Sequence[bool] = False) -> Grid:
        """Lay the ranks out on a Cartesian grid, in C order (MPI_Cart_create). Local.

        Args:
            dims: ranks along each axis, whose product is the number of ranks; those that are 0
                or -1 are chosen, as equal as can be (MPI_Dims_create).
            periodic: whether the last rank of an axis is next to its first; a bool per axis, or
                one for all.

        Example:
            >>> import hpcdist as dist
            >>> dist.init_parallel_env().grid((-1, -1), periodic=True).dims
            (1, 1)

        """
        from hpcdist.comm.grid import Grid

        return Grid(self, dims, periodic)

    def root_of(self, world_rank: Any, what: str) -> int:
        """Turn the argument `what`, a world rank, into a rank of this group.

        Args:
            world_rank: of a member of the group.
            what: the name of the argument, for the message.

        """
        rank = self._rank_of.get(world_rank) if _is_int(world_rank) else None
        if rank is None:
            raise UsageError(
                f"{what}={world_rank!r} can not be found inside the group {self.name}, whose "
                f"world ranks are {self.ranks}; {self._advice(world_rank, what)}"
            )
        return rank

    def _advice(self, given: Any, what: str) -> str:
        """Return what to do about an argument that is no world rank of this group."""
        if not _is_int(given):
            return f"give {what} as an integer, and other arguments by keyword (group=, sync_op=)"
        if self._is_alone():
            return _ALONE
        if self.id and 0 <= given < self.nranks:
            here = self.ranks[given]
            return f"{what} is a world rank: rank {given} of this group is world rank {here}"
        return f"let {what} be one of these world ranks"

    def _is_alone(self) -> bool:
        """Return whether this is the world of a program of one rank."""
        return self.id == 0 and self.nranks == 1

    def beside(
        self, ranks: Sequence[int], id: int, transport: Transport | None, name: str | None
    ) -> Group:
        """Return another group of ranks of the same world.

        Args:
            ranks: the world ranks of the members, in the group's order.
            id: the number that its members have agreed on.
            transport: what joins its members; None where this process is no member.
            name: for messages; None for one made of the id.

        """
        return Group(ranks, self.world_rank, id, transport, name)

    def __copy__(self) -> Group:
        return self

    def __deepcopy__(self, memo: Any) -> Group:
        return self  # the copy of a model communicates with the same ranks

    def __repr__(self) -> str:
        shown = [*map(str, self.ranks)]
        if self.nranks > _SHOWN:
            shown[_SHOWN - 2 : -1] = ["..."]
        state = _STATES.get(type(self.transport), "")
        return (
            f"rank: {self.rank}, nranks: {self.nranks}, id: {self.id}, ranks: {', '.join(shown)}; "
            f"name: {self.name}{state}"
        )


def world_group(transport: Transport) -> Group:
    """Return the group of all ranks that `transport` joins."""
    return Group(range(transport.size), transport.rank, 0, transport)


def world_of(session: Session) -> Group:
    """Return the world group of `session`, which was made by `world_group`."""
    return cast(Group, session.world)


_SHOWN = 16
"""Ranks that are written out; of more, the first ones and the last."""


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


_STATES: dict[type, str] = {Closed: "; closed", Dormant: "; shut down"}
"""What is said of a group besides, by the transport it has."""
