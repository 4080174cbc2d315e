"""Columns hold rows of any length, and give them back by slice, by index, joined and as buffers."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as some

from hpcdist.data import columns as module
from hpcdist.data.columns import Columns, Fixed, Ragged, difference, offsets_of
from hpcdist.errors import UsageError

TEXTS = some.lists(some.text(max_size=6), max_size=12)
LISTS = some.lists(some.lists(some.integers(-9, 9), max_size=5), max_size=12)


@pytest.fixture(params=["compiled", "numpy"])
def _each_way(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(module, "_compiled_runs", None)
    elif module._compiled_runs is None:
        pytest.skip("the kernel was not compiled here")


def table(rows):
    """Return a column of each kind; row i of all of them is about number ``rows[i]``."""
    return Columns(
        {
            "number": Fixed(np.array(rows, np.int32)),
            "square": Fixed(np.array([[row, row * row] for row in rows], float).reshape(-1, 2)),
            "ones": Ragged.of([[1.0] * (row % 4) for row in rows], np.float32),
            "text": Ragged.of([f"né {row}" for row in rows] or [""]).slice(0, len(rows)),
            "raw": Ragged.of([bytes(range(row % 5)) for row in rows] or [b""]).slice(0, len(rows)),
        }
    )


def numbers(columns):
    """Return the numbers that the rows are about, and see that every column agrees."""
    rows = columns["number"].values.tolist()
    for got, want in zip(columns, table(rows), strict=True):
        assert got.keys() == want.keys()
        for name in got:
            assert np.array_equal(got[name], want[name]), name
            assert type(got[name]) is type(want[name])
    return rows


@pytest.mark.usefixtures("_each_way")
@pytest.mark.parametrize("indices", [[], [0], [4, 4, 0, -1], list(range(9, -1, -1))])
def test_take_gives_the_rows_at_the_indices_in_their_order(indices):
    assert numbers(table(range(10)).take(indices)) == [range(10)[index] for index in indices]


@pytest.mark.usefixtures("_each_way")
def test_rows_are_taken_from_the_middle_of_a_slice():
    assert numbers(table(range(20)).slice(5, 15).take([0, 9, 3])) == [5, 14, 8]


@pytest.mark.usefixtures("_each_way")
def test_take_is_right_where_numpy_gathers_piece_by_piece(monkeypatch):
    monkeypatch.setattr(module, "_PIECE", 7)
    rows = np.random.default_rng(0).integers(0, 50, 300)
    assert numbers(table(range(50)).take(rows)) == rows.tolist()


@pytest.mark.usefixtures("_each_way")
def test_elements_of_a_list_may_be_arrays():
    pairs = np.arange(12).reshape(6, 2)
    taken = Ragged(pairs, [0, 1, 3, 3, 6]).take([3, 2, 0])
    assert [taken.row(i).tolist() for i in range(3)] == [pairs[3:].tolist(), [], [[0, 1]]]


@pytest.mark.usefixtures("_each_way")
@given(lists=LISTS, texts=TEXTS, seed=some.integers(0, 99))
def test_taking_a_permutation_and_its_inverse_gives_the_rows_back(lists, texts, seed):
    for rows in (lists, texts):
        column = Ragged.of(rows, np.int64)
        order = np.random.default_rng(seed).permutation(len(rows))
        back = column.take(order).take(np.argsort(order))
        assert [list(back.row(i)) for i in range(len(rows))] == list(map(list, rows))


def test_a_mask_takes_the_rows_where_it_is_true():
    assert numbers(table(range(5)).take(np.array([True, False, False, True, False]))) == [0, 3]


@pytest.mark.parametrize("wrong", [[3], [-4], [0, 99]])
def test_rows_that_are_not_there_are_refused_by_name(wrong):
    with pytest.raises(IndexError, match=f"there is no row {wrong[-1]}: there are 3"):
        table(range(3)).take(wrong)


@pytest.mark.parametrize("wrong", [[0.5], [[0]], ["a"]])
def test_indices_are_whole_numbers(wrong):
    with pytest.raises(UsageError, match="indices must be whole numbers"):
        table(range(3)).take(wrong)


def test_slices_are_views_of_the_same_memory():
    whole = table(range(10))
    part = whole.slice(3, 7)
    assert numbers(part) == [3, 4, 5, 6]
    assert all(np.shares_memory(part[name].values, whole[name].values) for name in whole.names)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (3, 3), (5, 2), (8, 99), (-3, 10)])
def test_slices_are_cut_like_those_of_lists(start, stop):
    assert numbers(table(range(10)).slice(start, stop)) == list(range(10))[start:stop]


@pytest.mark.parametrize("cuts", [[0, 10], [0, 0, 4, 4, 10], list(range(11))])
def test_parts_are_joined_in_order(cuts):
    whole = table(range(10))
    parts = [whole.slice(start, stop) for start, stop in pairwise(cuts)]
    assert numbers(Columns.concat(parts)) == list(range(10))


def test_parts_of_other_columns_are_not_joined():
    one, other = table(range(3)), table(range(2))
    wider = Columns({**dict(other.items()), "number": Fixed(np.zeros(2))})
    with pytest.raises(UsageError, match="'number' is fixed of int32 here and fixed of float64"):
        Columns.concat([one, wider])
    with pytest.raises(UsageError, match="nothing to join"):
        Columns.concat([])


@pytest.mark.parametrize("start", [0, 4])
def test_buffers_and_schema_make_the_rows_again(start):
    rows = table(range(9)).slice(start, 9)
    buffers = rows.buffers()
    assert all(buffer.ndim == 1 and buffer.flags.c_contiguous for buffer in buffers)
    again = Columns.from_buffers(rows.schema(), len(rows), buffers)
    assert numbers(again) == list(range(start, 9))
    assert again.schema() == rows.schema()


def test_buffers_may_come_as_bytes():
    rows = table(range(6))
    raw = [buffer.view(np.uint8) for buffer in rows.buffers()]
    assert numbers(Columns.from_buffers(rows.schema(), 6, raw)) == list(range(6))


def test_buffers_that_do_not_fit_are_refused():
    rows = table(range(6))
    with pytest.raises(UsageError, match="are not 7 rows"):
        Columns.from_buffers(rows.schema(), 7, rows.buffers())
    with pytest.raises(UsageError, match="are not 6 rows"):
        Columns.from_buffers(rows.schema(), 6, rows.buffers()[:-1])


def test_no_rows_of_a_schema_join_with_its_rows():
    rows = table(range(4))
    empty = Columns.empty_like(rows.schema())
    assert len(empty) == 0
    assert empty.schema() == rows.schema()
    assert numbers(Columns.concat([empty, rows, empty])) == [0, 1, 2, 3]


def test_nbytes_counts_what_the_rows_have_and_no_more():
    column = Ragged(np.zeros(100, np.int16), [0, 40, 60, 100])
    assert column.nbytes == 200 + 4 * 8
    assert column.slice(1, 2).nbytes == 40 + 2 * 8
    assert Columns({"a": Fixed(np.zeros((3, 2))), "b": column}).nbytes == 48 + column.nbytes


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(UsageError, match=r"equally many rows, got \{'a': 2, 'b': 3\}"):
        Columns({"a": Fixed([1, 2]), "b": Fixed([1, 2, 3])})


@pytest.mark.parametrize("offsets", [[], [0, 4], [-1, 2]])
def test_offsets_outside_of_the_values_are_refused(offsets):
    with pytest.raises(UsageError, match="offsets"):
        Ragged([1, 2, 3], offsets)


@pytest.mark.usefixtures("_each_way")
def test_offsets_that_descend_reach_no_foreign_memory():
    column = Ragged(np.arange(4), [0, 1_000_000, 4])
    with pytest.raises((ValueError, IndexError)):
        column.take([0])


def test_rows_of_columns_are_counted_and_told():
    rows = table([7])
    assert (len(rows), rows.names[0], "text" in rows, "x" in rows) == (1, "number", True, False)
    assert rows.select(["text"]).names == ("text",)
    assert next(iter(rows))["text"] == "né 7"
    assert difference(rows.schema(), rows.select(["raw"]).schema()).startswith("the columns are")
    assert repr(rows["text"]) == "Ragged(1 rows of string, 5 in all)"


def test_columns_without_names_have_rows():
    assert len(Columns({}, 5).take([0, 1])) == 2
    assert len(Columns({}, 5).slice(0, 5)) == 5


@pytest.mark.usefixtures("_each_way")
def test_rows_beyond_2_to_the_31_bytes_are_found():
    long = (1 << 31) + 5
    values = np.zeros(long + 3, np.uint8)  # pages that nobody touches take no memory
    values[-3:] = [1, 2, 3]
    column = Ragged(values, offsets_of([long, 3]), "bytes")
    assert column.take(np.array([1])).row(0) == b"\1\2\3"
    assert column.nbytes == long + 3 + 24


@pytest.mark.usefixtures("_each_way")
def test_a_row_longer_than_what_numpy_gathers_at_a_time_is_copied(monkeypatch):
    monkeypatch.setattr(module, "_PIECE", 4)
    column = Ragged.of(["ab", "0123456789", "c", "xyz"])
    taken = column.take(np.array([3, 1, 0, 1, 2]))
    assert [taken.row(i) for i in range(5)] == ["xyz", "0123456789", "ab", "0123456789", "c"]
