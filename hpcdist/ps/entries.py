"""Entries: which ids of a table get a row, and which rows leave when there is no room.

The names and arguments are Paddle's. All decisions are functions of an id, the seed of its table
and its own counters, so they are the same for any number of servers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.named_tuple import NamedTuple
from hpcdist.ps.ids import coins


class Terms(NamedTuple):
    """What an entry asks for before an id gets a row.

    `probability` is the part of the ids that ever get one. `appearances` is how often one has to be
    in pushes; with 0 it gets its row at its first pull. `scored` rows have counters: shows, clicks,
    and the number of the period in which they were last pushed.
    """

    probability: float = 1.0
    appearances: int = 0
    scored: bool = False

    @property
    def counters(self) -> int:
        """Counters of a row."""
        return 3 * self.scored

    def admit(self, ids: NumpyArray, seed: int) -> NumpyArray:
        """Return whether each id may ever have a row."""
        if self.probability == 1:
            return np.ones(ids.size, bool)
        below: NumpyArray = coins(ids, seed) < self.probability
        return below


class Entry(ABC):
    """Which ids get a row."""

    @property
    @abstractmethod
    def terms(self) -> Terms:
        """The conditions for a row."""


@final
class ProbabilityEntry(Entry):
    """A row for some of the ids; the others keep their initial value, whatever is pushed.

    Which ids have a row is a function of the id and the seed of the table: a coin that falls the
    same way in every run and on any number of servers.

    Args:
        probability: the fraction of the ids that get a row, a float between 0 and 1.

    Raises:
        ValueError: `probability` is not such a number.

    Example:
        >>> import hpcdist as dist
        >>> dist.ProbabilityEntry(0.25)
        ProbabilityEntry(0.25)

    """

    def __init__(self, probability: float) -> None:
        if not isinstance(probability, float) or not 0 < probability < 1:
            raise ValueError("probability must be a float in (0,1)")
        self.probability = probability

    def __repr__(self) -> str:
        return f"ProbabilityEntry({self.probability!r})"

    @property
    def terms(self) -> Terms:
        """The conditions for a row."""
        return Terms(probability=self.probability)


@final
class CountFilterEntry(Entry):
    """A row for ids that have appeared `count_filter` times in pushes.

    An id that is three times in a push appears three times, as in Paddle. Until then pulls give the
    id's initial value and gradients are dropped; the id costs only a counter. The gradients of the
    push that reaches the count are applied.

    Args:
        count_filter: at least 0; with 0 an id has a row from its first pull on.

    Raises:
        ValueError: `count_filter` is not such a number.

    Example:
        >>> import hpcdist as dist
        >>> dist.CountFilterEntry(10)
        CountFilterEntry(10)

    """

    def __init__(self, count_filter: int) -> None:
        if not isinstance(count_filter, int) or isinstance(count_filter, bool):
            raise ValueError("count_filter must be a valid integer greater than 0")
        if count_filter < 0:
            raise ValueError("count_filter must be a valid integer greater or equal than 0")
        self.count_filter = count_filter

    def __repr__(self) -> str:
        return f"CountFilterEntry({self.count_filter!r})"

    @property
    def terms(self) -> Terms:
        """The conditions for a row."""
        return Terms(appearances=self.count_filter)


@final
class ShowClickEntry(Entry):
    """A row for every id, with counters: how often it was shown and clicked, and when last.

    The score of a row is ``0.1 (shows - clicks) + clicks``, as in Paddle. `shrink` removes rows of
    a low score, and a table that is full makes room by removing those of the lowest. `shrink` can
    let shows and clicks decay, too, and remove rows that have not been pushed for some time.

    Args:
        show_name: what the counts of shows are called where they are fed.
        click_name: the same for clicks.

    Raises:
        ValueError: a name is not a str.

    Example:
        >>> import hpcdist as dist
        >>> dist.ShowClickEntry("show", "click")
        ShowClickEntry('show', 'click')

    """

    def __init__(self, show_name: str, click_name: str) -> None:
        if not isinstance(show_name, str) or not isinstance(click_name, str):
            raise ValueError("show_name click_name must be a str")
        self.show_name = show_name
        self.click_name = click_name

    def __repr__(self) -> str:
        return f"ShowClickEntry({self.show_name!r}, {self.click_name!r})"

    @property
    def terms(self) -> Terms:
        """The conditions for a row."""
        return Terms(scored=True)


def scores(counters: NumpyArray) -> NumpyArray:
    """Return the score of rows by their shows and clicks."""
    shows, clicks = counters[:, 0], counters[:, 1]
    weighed: NumpyArray = np.float32(0.1) * (shows - clicks) + clicks
    return weighed
