"""The tree of virtual ranks adds in one order, wherever they live."""

import pytest

from hpcdist.data.shares import virtual_ranks_of
from hpcdist.parallel.virtual.tree import Span, TreeSum, pieces_of


def _sum(count, size):
    """Return, as a text, the sum of `count` virtual ranks on `size` real ones."""

    def added(one, other):
        return f"({one}+{other})"

    whole = TreeSum(count, 0, added)
    for rank in range(size):
        own = virtual_ranks_of(rank, size, count)
        here = TreeSum(count, own.start, added)
        for each in own:
            here.push(Span(each, each + 1), f"{each}")
        assert [span for span, _ in here.pieces] == pieces_of(count, own)
        for span, value in here.pieces:
            whole.push(span, value)
    ((span, value),) = whole.pieces
    assert span == (0, count)
    return value


@pytest.mark.parametrize("count", [*range(1, 20), 64, 100])
def test_the_order_of_the_sum_does_not_depend_on_the_ranks(count):
    assert len({_sum(count, size) for size in range(1, min(count, 20) + 1)}) == 1


def test_halves_are_cut_at_a_power_of_two():
    assert _sum(7, 3) == "(((0+1)+(2+3))+((4+5)+6))"


def test_a_rank_has_one_piece_where_it_can_and_a_few_elsewhere():
    assert all(len(pieces_of(64, virtual_ranks_of(rank, 8, 64))) == 1 for rank in range(8))
    most = max(
        len(pieces_of(1000, virtual_ranks_of(rank, size, 1000)))
        for size in range(1, 200)
        for rank in range(size)
    )
    assert most <= 2 * 10


@pytest.mark.parametrize("count", [5, 8])
def test_every_virtual_rank_lives_on_one_rank(count):
    for size in range(1, count + 1):
        owned = [virtual_ranks_of(rank, size, count) for rank in range(size)]
        assert [each for own in owned for each in own] == [*range(count)]
        assert max(map(len, owned)) - min(map(len, owned)) <= 1
