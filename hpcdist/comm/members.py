"""`Members`: what describing, telling and issuing an operation need to know of a `Group`.

The modules below `group` know only this, so that a group may split itself and lay out a grid, which
are operations, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from hpcdist.transport.base import Transport


class Members(ABC):
    """The ranks of a group; see `Group`, which is the only one."""

    rank: int
    ranks: list[int]
    nranks: int
    id: int
    name: str
    world_rank: int
    transport: Transport | None
    issued: int
    """Collectives that this rank has issued; see `Event.sequence`."""
    flight: int = 0
    """Where the flight recorder has the group; 0 where it records nothing of it."""
    announced: dict[int, Callable[[BaseException | None], None]]
    """What tells the end of operations under way whose begin was told, by `Event.id`."""

    @abstractmethod
    def is_member(self) -> bool:
        """Return whether this process belongs to the group."""

    @abstractmethod
    def get_global_rank(self, rank: int) -> int:
        """Return the world rank of rank `rank` of this group; -1 if this process is no member."""

    @abstractmethod
    def root_of(self, world_rank: Any, what: str) -> int:
        """Turn the argument `what`, a world rank, into a rank of this group."""

    @abstractmethod
    def beside(
        self, ranks: Sequence[int], id: int, transport: Transport | None, name: str | None
    ) -> Members:
        """Return another group of ranks of the same world."""
