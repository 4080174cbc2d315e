"""`Attendance`: which ranks still have batches, in the `join` of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import numpy as np

from hpcdist.comm.collectives import all_gather
from hpcdist.comm.dispatch import decline
from hpcdist.comm.group import Group
from hpcdist.errors import ENDS_ALL, MismatchError, RemoteError, UsageError
from hpcdist.transport.call.kinds import Kind


@contextmanager
def heard_of(group: Group, end_pass: Callable[[UsageError], bool]) -> Iterator[None]:
    """Let the others know of an error that ends a `join` on this rank.

    They hear of it in their next operation of the group, for which this rank does not wait, unless
    they have heard of it. `end_pass` calls off a backward pass that is under way, and returns
    whether one was.
    """
    try:
        yield
    except (RemoteError, MismatchError, *ENDS_ALL):
        raise
    except Exception as error:
        if isinstance(error, UsageError) and error.told:
            raise
        why = UsageError(f"left the join of its model with {type(error).__name__}: {error}")
        if not end_pass(why):
            decline(group, Kind.ALL_GATHER, why, sync_op=False).detach()
        raise


@final
class Attendance:
    """All ranks of `group` count as present, until a `join` begins.

    Attributes:
        wanted: a `join` is on: every backward pass asks who still has batches.
        active: the world ranks that had batches at the latest call.

    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.active: Sequence[int] = group.ranks
        self.wanted = self._scales = False
        self._turn, self._last_turn = 0, dict.fromkeys(group.ranks, 0)

    def enter(self, *, scales: bool) -> None:
        """Ask from now on; divide sums by the number of ranks that are left, if `scales`."""
        self.wanted, self._scales = True, scales
        self._turn, self._last_turn = 0, dict.fromkeys(self._group.ranks, 0)

    def leave(self) -> None:
        """Count on all ranks again."""
        self.wanted = self._scales = False
        self.active = self._group.ranks

    def call(self, *, active: bool) -> bool:
        """Find out which ranks still have batches; return whether any has. Collective."""
        flags = np.zeros(self._group.nranks, np.uint8)
        all_gather(flags, np.array([active], np.uint8), self._group)
        present = [self._group.ranks[rank] for rank in np.flatnonzero(flags)]
        self.active = present or self.active
        self._turn += 1
        self._last_turn.update(dict.fromkeys(present, self._turn))
        return bool(present)

    def factor(self, group: Group) -> float:
        """Return what a contribution to the mean over `group` must be multiplied with."""
        if not self._scales:
            return 1.0
        present = sum(rank in self.active for rank in group.ranks)
        return group.nranks / max(1, present)

    def last_of(self, group: Group) -> int:
        """Return the world rank of a group's member that was among the last with batches."""
        return max(group.ranks, key=self._last_turn.__getitem__)
