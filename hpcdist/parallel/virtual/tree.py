"""The order in which the gradients of virtual ranks are added; pure.

[Note: tree of virtual ranks] The sum over V virtual ranks is a binary tree that depends on V alone:
a span of several is cut at the largest power of two below its length, and the sums of both halves
are added. A real rank has consecutive virtual ranks. It adds up the spans that are all its own,
*pieces*, and the rest of the tree is computed of the pieces of all ranks. So the additions are the
same on any number of ranks, and a rank sends at most two pieces for each level of the tree, one
where V is as often the number of ranks as a power of two says. (ReproRed, 2025, separates the
tree of the additions from that of the messages in the same way.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Generic, TypeVar, final

from hpcdist.named_tuple import NamedTuple

T = TypeVar("T")


class Span(NamedTuple):
    """Virtual ranks from `start` up to `stop`, which is excluded."""

    start: int
    stop: int


@lru_cache(maxsize=16)
def spans_by_end(count: int) -> tuple[tuple[Span, ...], ...]:
    """Return the spans of the tree that have two halves, by where they stop; shortest first."""
    found: list[list[Span]] = [[] for _ in range(count + 1)]
    left = [Span(0, count)]
    while left:
        span = left.pop()
        length = span.stop - span.start
        if length > 1:
            middle = span.start + (1 << (length - 1).bit_length() - 1)
            found[span.stop].append(span)
            left += Span(span.start, middle), Span(middle, span.stop)
    return tuple(tuple(sorted(spans, reverse=True)) for spans in found)


@final
class TreeSum(Generic[T]):
    """Adds up what comes, span by span in order, as far as the tree allows.

    Args:
        count: the virtual ranks of all.
        start: the first of those that come here.
        add: returns the sum of two values; it may change the first of them.

    Attributes:
        pieces: the spans whose sums are known, and the sums.

    Example:
        >>> tree = TreeSum(4, 1, lambda a, b: f"({a}+{b})")
        >>> for rank in range(1, 4):
        ...     tree.push(Span(rank, rank + 1), rank)
        >>> tree.pieces
        [(Span(start=1, stop=2), 1), (Span(start=2, stop=4), '(2+3)')]

    """

    def __init__(self, count: int, start: int, add: Callable[[T, T], T]) -> None:
        self._ends, self._start, self._add = spans_by_end(count), start, add
        self.pieces: list[tuple[Span, T]] = []

    def push(self, span: Span, value: T) -> None:
        """Take the sum of the next span, and add what belongs together."""
        self.pieces.append((span, value))
        for whole in self._ends[span.stop]:
            if self._start <= whole.start < span.start:
                (_, right), (_, left) = self.pieces.pop(), self.pieces.pop()
                self.pieces.append((whole, self._add(left, right)))


def pieces_of(count: int, own: range) -> list[Span]:
    """Return the largest spans of the tree that consist of `own` virtual ranks, in order."""
    tree: TreeSum[None] = TreeSum(count, own.start, lambda _left, _right: None)
    for rank in own:
        tree.push(Span(rank, rank + 1), None)
    return [span for span, _ in tree.pieces]
