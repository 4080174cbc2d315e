"""`Exchange`: of the sums that each rank has, the mean over all virtual ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm.collectives import all_gather, all_reduce, alltoall_single
from hpcdist.comm.group import Group
from hpcdist.data.shares import virtual_ranks_of
from hpcdist.parallel.virtual.tree import Span, TreeSum, pieces_of


@final
class Exchange:
    """Adds up pieces of all ranks in the order of the tree, see [Note: tree of virtual ranks].

    Each rank gets its share of every piece, adds these, and all get the results: the bytes of a
    reduction that keeps the order of the ranks. Of two numbers there is but one sum, so two ranks
    with one piece each reduce.

    Args:
        group: the real ranks.
        count: the virtual ranks.

    Attributes:
        own: the virtual ranks that live here.
        rank: of this process among the real ones.
        ranks: how many these are.

    """

    def __init__(self, group: Group, count: int) -> None:
        self._group, self._count = group, count
        self.rank, self.ranks = group.rank, group.nranks
        shares = [virtual_ranks_of(rank, group.nranks, count) for rank in range(group.nranks)]
        self.own = shares[group.rank]
        self._pieces = [pieces_of(count, share) for share in shares]
        self._reduces = group.nranks == 2 and count & (count - 1) == 0

    def padded(self, size: int) -> int:
        """Return the elements that arrays of at least `size` have to have here."""
        return -(-size // self._group.nranks) * self._group.nranks

    def mean(self, pieces: Sequence[NumpyArray], out: NumpyArray) -> None:
        """Write the mean over all virtual ranks into `out`. Collective; overwrites `pieces`.

        Args:
            pieces: the sums of this rank's pieces in order, flat, of `padded` elements.
            out: a flat array like them, or one of them.

        """
        if self._group.nranks == 1 or self._reduces:
            if self._reduces:
                all_reduce(pieces[0], group=self._group)
            self._divide(pieces[0], out)
        else:
            share = pieces[0].size // self._group.nranks
            total = self._sum_of_share(pieces, [share] * self._group.nranks)
            self._divide(total, total)
            all_gather(out, total, self._group)

    def mean_of_share(
        self, pieces: Sequence[NumpyArray], shares: Sequence[int], out: NumpyArray
    ) -> None:
        """Write this rank's share of the mean into `out`. Collective; may overwrite `pieces`.

        Args:
            pieces: the sums of this rank's pieces in order, flat: the shares of all ranks.
            shares: the elements of each rank.
            out: a flat array of as many elements as this rank has.

        """
        alone = self._group.nranks == 1
        self._divide(pieces[0] if alone else self._sum_of_share(pieces, shares), out)

    def _divide(self, total: NumpyArray, out: NumpyArray) -> None:
        with np.errstate(all="ignore"):
            np.divide(total, total.dtype.type(self._count), out=out)

    def _sum_of_share(self, pieces: Sequence[NumpyArray], shares: Sequence[int]) -> NumpyArray:
        sent = pieces[0] if len(pieces) == 1 else _by_rank(pieces, shares)
        given = [span for spans in self._pieces for span in spans]
        share = shares[self._group.rank]
        got = np.empty_like(pieces[0], shape=(len(given), share))
        alltoall_single(
            got.reshape(-1),
            sent,
            self._group,
            in_split_sizes=[len(pieces) * each for each in shares],
            out_split_sizes=[len(spans) * share for spans in self._pieces],
        )
        return _summed(given, got, self._count)


def _by_rank(pieces: Sequence[NumpyArray], shares: Sequence[int]) -> NumpyArray:
    """Return for one rank after the other its share of all pieces."""
    sent = np.empty_like(pieces[0], shape=len(pieces) * pieces[0].size)
    start = 0
    for share in shares:
        rows = sent[len(pieces) * start :][: len(pieces) * share].reshape(len(pieces), share)
        for row, piece in zip(rows, pieces, strict=True):
            row[...] = piece[start : start + share]
        start += share
    return sent


def _summed(spans: Sequence[Span], rows: Iterable[NumpyArray], count: int) -> NumpyArray:
    tree: TreeSum[NumpyArray] = TreeSum(count, 0, lambda one, other: np.add(one, other, out=one))
    with np.errstate(all="ignore"):  # gradients may overflow; between them is what was there before
        for span, row in zip(spans, rows, strict=True):
            tree.push(span, row)
    ((_, total),) = tree.pieces
    return total
