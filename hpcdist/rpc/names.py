"""`WorkerInfo`, `Directory`: who can be called, and by which names. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, final

import numpy as np

from hpcdist.errors import UsageAssertionError, UsageError
from hpcdist.named_tuple import NamedTuple


class WorkerInfo(NamedTuple):
    """A rank that can be called: its name, world rank, and where it listens.

    `port` is 0 where only ranks of its own node call it, which need none.
    """

    name: str
    rank: int
    ip: str
    port: int


@final
class Directory:
    """All ranks that can be called, in order of rank.

    Raises:
        UsageError: two ranks have the same name; the message names both.

    """

    def __init__(self, infos: Iterable[WorkerInfo]) -> None:
        self.infos = tuple(infos)
        self._ranks: dict[Any, int] = {}
        for info in self.infos:
            first = self._ranks.setdefault(info.name, info.rank)
            if first != info.rank:
                raise UsageAssertionError(
                    f"ranks {first} and {info.rank} both call themselves {info.name!r}; give "
                    "init_rpc another name on one of them, or none: it is 'worker' and the rank"
                )
        self._by_rank = {info.rank: info for info in self.infos}
        self._ranks.update((info, info.rank) for info in self.infos)
        self._ranks.update((rank, rank) for rank in self._by_rank)

    def __getitem__(self, rank: int) -> WorkerInfo:
        return self._by_rank[rank]

    def rank_of(self, to: Any) -> int:
        """Return the rank meant by a name, a rank or a `WorkerInfo`.

        Raises:
            UsageError: there is none; the message tells names like it.

        """
        if type(to) in (int, str, WorkerInfo):
            rank = self._ranks.get(to)
            if rank is not None:
                return rank
        elif isinstance(to, np.integer) and int(to) in self._by_rank:
            return int(to)
        raise UsageError(f"{self._nobody(to)}; {self._others(to)}")

    def find(self, to: Any) -> WorkerInfo:
        """Return who is meant by a name, a rank or a `WorkerInfo`."""
        return self._by_rank[self.rank_of(to)]

    def _nobody(self, to: Any) -> str:
        if isinstance(to, str):
            return f"no rank calls itself {to!r}"
        if isinstance(to, (int, np.integer)) and not isinstance(to, bool):
            return f"rank {to} takes no calls"
        return f"the callee must be a name, a rank or a WorkerInfo of this init_rpc, got {to!r}"

    def _others(self, to: Any) -> str:
        names = [info.name for info in self.infos]
        if isinstance(to, str) and (close := difflib.get_close_matches(to, names)):
            return f"do you mean {' or '.join(map(repr, close))}?"
        shown = ", ".join(map(repr, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
        return f"there are ranks {self.infos[0].rank} to {self.infos[-1].rank}: {shown}"


_SHOWN = 8
"""Names that are written out."""


def check_name(name: Any, rank: int) -> str:
    """Return the name of a rank: the one it was given, or one made of its rank."""
    if name is None:
        return f"worker{rank}"
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST:
        raise UsageError(f"the name of a rank is a str of 1 to {_LONGEST} characters, got {name!r}")
    return name


_LONGEST = 128
