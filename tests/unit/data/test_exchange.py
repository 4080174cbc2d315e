"""Plans of exchanges: every row is counted where it goes, in numbers beyond 2^31, too."""

import numpy as np
import pytest

from hpcdist.data.columns import Columns, Fixed, Ragged, offsets_of
from hpcdist.data.exchange import Arrangement, Homes, Incoming, partitioned, sizes_of
from hpcdist.data.layout import Extent, cut, laid, nbytes_of, pour
from hpcdist.data.order import Natural, Shuffled
from hpcdist.data.shares import plan_shares
from hpcdist.data.spill import private_memory

LARGE = 3 << 30


@pytest.mark.parametrize("ranks", [1, 2, 5, 70_000])
def test_what_goes_to_each_rank_is_counted_and_sorted_alike(ranks):
    random = np.random.default_rng(ranks)
    lengths = random.integers(0, 9, 500)
    rows = Columns(
        {
            "id": Fixed(np.arange(500)),
            "x": Ragged(np.arange(lengths.sum()), offsets_of(lengths)),
        }
    )
    taken = random.integers(0, 500, 700)  # some twice, as those that are repeated
    homes = Homes(taken, np.arange(700), random.integers(0, ranks, 700))
    sizes, order = sizes_of(rows, homes, ranks), partitioned(homes, ranks)
    assert sizes.shape == (ranks, 2)
    first = 0
    for rank in np.unique(homes.ranks).tolist():
        count, values = sizes[rank].tolist()
        assert {*order.ranks[first : first + count].tolist()} == {rank}
        assert (np.diff(order.places[first : first + count]) > 0).all(), "their order is kept"
        assert lengths[order.rows[first : first + count]].sum() == values
        first += count
    assert first == len(order.rows) == sizes[:, 0].sum()


@pytest.mark.parametrize("tail", ["pad", "drop", "keep"])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_rank_finds_its_rows_among_those_of_its_node(tail, size):
    total = 61
    where = Arrangement(Shuffled(total, 1, 0), Natural(total), plan_shares(total, 5, size, tail))
    homes = where.homes(np.arange(total))
    places = np.random.default_rng(0).permutation(homes.places)  # of all ranks, as they came
    for rank in range(size):
        found = places[where.indices(places, rank)]
        assert found.tolist() == list(where.shares.positions(rank))


def test_more_than_2_to_the_31_bytes_go_from_a_rank_to_another():
    rows = Columns({"raw": Ragged(private_memory(2 * LARGE), [0, LARGE, 2 * LARGE], "bytes")})
    homes = Homes(np.arange(2), np.arange(2), np.array([1, 1]))
    sizes = sizes_of(rows, homes, 2)
    assert sizes.tolist() == [[0, 0], [2, 2 * LARGE]]
    assert cut(rows, 8 << 20) == [(0, 1), (1, 2)]
    incoming = Incoming(np.stack([sizes, sizes]))
    assert incoming.extent == Extent(4, (4 * LARGE,))
    assert [incoming.run(1, which) for which in (0, 1)] == [(2, 4), (2 * LARGE, 4 * LARGE)]


def test_rows_are_laid_beyond_2_to_the_31_bytes():
    row = Columns({"raw": Ragged.of([b"behind"])})
    schema, extent = row.schema(), Extent(2, (LARGE + 6,))
    rows = laid(private_memory(nbytes_of(schema, extent)), schema, extent)
    assert pour(row, rows, Extent(1, (LARGE,))) == extent
    assert rows["raw"].offsets.tolist()[2] == LARGE + 6
    assert rows["raw"].values[LARGE:].tobytes() == b"behind"
