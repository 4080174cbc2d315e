"""`Membership`: which ranks of a group are still there, and why the others are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import final

Listener = Callable[[int, str], None]


@final
class Membership:
    """The members of one group, as this rank knows them; ranks are world ranks.

    A rank learns that another one has left when it waits for something for a while, or asks:
    `look`.

    Args:
        ranks: the members.
        listen: takes in what has been said meanwhile, and notes it here.

    """

    def __init__(self, ranks: Sequence[int], listen: Callable[[], None] = lambda: None) -> None:
        self._ranks = tuple(ranks)
        self._listen = listen
        self._departed: dict[int, str] = {}
        self._listeners: list[Listener] = []

    def __repr__(self) -> str:
        gone = "".join(f", rank {rank} {why}" for rank, why in self._departed.items())
        return f"<Membership: ranks {list(self.members)}{gone}>"

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that have not left."""
        return tuple(rank for rank in self._ranks if rank not in self._departed)

    @property
    def departed(self) -> Mapping[int, str]:
        """The ranks that have left, in order, each with the reason."""
        return MappingProxyType(self._departed)

    def look(self) -> Mapping[int, str]:
        """Read the news of other ranks, and return `departed`; local, does not wait."""
        self._listen()
        return self.departed

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener(rank, why)`` when a rank leaves; return a function that ends this. Local.

        It is called in the middle of whatever waits, on any thread: it must be quick, and may
        neither communicate nor wait. What it raises becomes a warning.

        Args:
            listener: takes a rank and the reason, a text.

        """
        self._listeners.append(listener)

        def unsubscribe() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return unsubscribe

    def note(self, rank: int, why: str) -> None:
        """Note that a rank has left; an earlier reason stays.

        Args:
            rank: the one that has left.
            why: the reason.

        """
        if rank in self._departed:
            return
        self._departed[rank] = why
        for listener in tuple(self._listeners):
            try:
                listener(rank, why)
            except Exception as error:
                warnings.warn(
                    f"a listener failed when rank {rank} left: {type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
