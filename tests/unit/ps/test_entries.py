"""Which ids get a row."""

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.errors import UsageError
from hpcdist.ps import RowStore

ONE = np.ones((1, 2), np.float32)


def store_with(entry, **settings):
    settings = {"initializer": ("constant", 0.0), **settings}
    return RowStore(2, entry=entry, optimizer=("sgd", {"learning_rate": 1.0}), **settings)


@pytest.mark.parametrize("wrong", [0.0, 1.0, -0.5, 2.0, 1, "0.5", None, float("nan")])
def test_a_probability_is_a_float_between_0_and_1(wrong):
    with pytest.raises(ValueError, match=r"^probability must be a float in \(0,1\)$"):
        dist.ProbabilityEntry(wrong)


@pytest.mark.parametrize("wrong", [1.0, "1", None])
def test_a_count_is_an_integer(wrong):
    told = "^count_filter must be a valid integer greater than 0$"
    with pytest.raises(ValueError, match=told):
        dist.CountFilterEntry(wrong)


def test_a_count_is_not_negative():
    told = "^count_filter must be a valid integer greater or equal than 0$"
    with pytest.raises(ValueError, match=told):
        dist.CountFilterEntry(-1)


@pytest.mark.parametrize("names", [("show", 1), (None, "click"), (b"show", "click")])
def test_shows_and_clicks_have_names(names):
    with pytest.raises(ValueError, match=r"^show_name click_name must be a str$"):
        dist.ShowClickEntry(*names)


@pytest.mark.usefixtures("loops")
def test_a_part_of_the_ids_gets_rows_the_same_in_every_store():
    ids = np.arange(4000)
    one, other = (store_with(dist.ProbabilityEntry(0.25), seed=7) for _ in range(2))
    one.pull(ids)
    for part in np.array_split(np.random.default_rng(0).permutation(ids), 5):
        other.push(part, np.zeros((part.size, 2)))
    (mine,), (theirs,) = one.chunks(), other.chunks()
    np.testing.assert_array_equal(np.sort(mine.ids), np.sort(theirs.ids))
    assert 900 < len(one) < 1100
    assert len(store_with(dist.ProbabilityEntry(0.25), seed=7)) == 0


@pytest.mark.usefixtures("loops")
def test_what_is_pushed_to_an_id_without_a_row_is_dropped():
    store = store_with(dist.ProbabilityEntry(0.5))
    ids = np.arange(100)
    before = store.pull(ids)
    (chunk,) = store.chunks()
    store.push(ids, np.ones((100, 2)))
    has_row = np.isin(ids, chunk.ids)
    expected = np.where(has_row[:, None], before - 1, before)
    np.testing.assert_array_equal(store.pull(ids), expected)


@pytest.mark.usefixtures("loops")
def test_an_id_gets_its_row_when_it_appears_for_the_third_time():
    store = store_with(dist.CountFilterEntry(3))
    first = store.pull([8])
    for pushed in (1, 2):
        store.push([8], ONE)
        np.testing.assert_array_equal(store.pull([8]), first)
        assert len(store) == 0
        assert [each.tolist() for each in store.waiting()] == [[8], [pushed]]
    store.push([8], ONE)
    np.testing.assert_array_equal(store.pull([8]), first - 1)
    assert len(store) == 1
    assert store.stats()["waiting"] == 0


@pytest.mark.usefixtures("loops")
def test_gradients_that_were_merged_count_as_often_as_they_were():
    store = store_with(dist.CountFilterEntry(3))
    store.push([1, 2, 2, 2, 1], np.ones((5, 2)))
    store.push([5, 6], np.ones((2, 2)), counts=[3, 2])
    np.testing.assert_array_equal(np.sort(np.concatenate([c.ids for c in store.chunks()])), [2, 5])
    assert [each.tolist() for each in store.waiting()] == [[1, 6], [2, 2]]


@pytest.mark.parametrize(("count", "rows"), [(0, 1), (1, 0)])
def test_without_a_count_to_reach_the_first_pull_gives_a_row(count, rows):
    store = store_with(dist.CountFilterEntry(count))
    store.pull([4])
    assert len(store) == rows
    store.push([4], ONE)
    assert len(store) == 1


def test_ids_that_wait_can_be_forgotten_and_restored():
    store, other = (store_with(dist.CountFilterEntry(5)) for _ in range(2))
    store.push([1, 2, 3], np.ones((3, 2)), counts=[1, 2, 4])
    other.restore_waiting(*store.waiting())
    assert store.shrink(3) == 2
    assert [each.tolist() for each in store.waiting()] == [[3], [4]]
    assert store.shrink() == 1
    other.push([3], ONE)
    assert len(other) == 1
    assert other.stats()["waiting"] == 2


@pytest.mark.usefixtures("loops")
def test_rows_of_a_low_score_are_removed():
    store = store_with(dist.ShowClickEntry("show", "click"))
    ids = np.arange(6)
    store.push(ids, np.ones((6, 2)), counts=[1, 5, 20, 1, 2, 0], clicks=[0, 0, 0, 1, 2, 0])
    kept = store.pull(ids)
    (chunk,) = store.chunks()
    np.testing.assert_array_equal(
        chunk.counters, [[1, 0, 0], [5, 0, 0], [20, 0, 0], [1, 1, 0], [2, 2, 0], [0, 0, 0]]
    )
    assert store.shrink() == 3  # 0.1, 0.5, 2, 1, 2, 0
    (chunk,) = store.chunks()
    np.testing.assert_array_equal(chunk.ids, [2, 3, 4])
    np.testing.assert_array_equal(chunk.rows, kept[2:5])
    assert store.shrink(1.5) == 1
    assert store.shrink(1e9) == 2
    assert len(store) == 0
    assert store.stats()["row_bytes"] == 0
    np.testing.assert_array_equal(store.pull([2]), kept[2:3] + 1)


@pytest.mark.usefixtures("loops")
def test_shows_and_clicks_decay_and_rows_that_nobody_pushes_leave():
    store = store_with(dist.ShowClickEntry("show", "click"))
    store.push([1, 2], np.ones((2, 2)), counts=[8, 100], clicks=[8, 0])
    assert store.shrink(0.0, decay=0.5, unseen=1) == 0
    (chunk,) = store.chunks()
    np.testing.assert_array_equal(chunk.counters, [[4, 4, 0], [50, 0, 0]])
    store.push([2, 3], np.ones((2, 2)))
    store.pull([1, 4])  # only pushes count
    assert store.shrink(0.0, unseen=1) == 1
    assert sorted(store.content().ids) == [2, 3, 4]
    assert store.shrink(0.0, unseen=3) == store.shrink(0.0) == 0
    assert store.shrink(0.0, unseen=2) == 3
    store.push([5], ONE)
    assert store.shrink(0.0, unseen=0) == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"decay": 1.5}, "decay must be a number from 0 to 1"),
        ({"decay": None}, "decay must be a number from 0 to 1"),
        ({"unseen": -1}, "unseen must be an integer of at least 0"),
        ({"unseen": 0.5}, "unseen must be an integer of at least 0"),
        ({"threshold": "all"}, "threshold must be a number"),
    ],
)
def test_arguments_of_shrink_that_make_no_sense_are_refused(options, told):
    store = store_with(dist.ShowClickEntry("show", "click"))
    store.push([5], ONE)
    with pytest.raises(UsageError, match=told):
        store.shrink(**options)
    assert len(store) == 1
    with pytest.raises(UsageError, match="shows and clicks are counted"):
        store_with(None).shrink(decay=0.5)


@pytest.mark.usefixtures("loops")
def test_rows_are_removed_by_their_ids():
    store, gone = store_with(dist.CountFilterEntry(2)), []
    store.on_removal = lambda ids: gone.extend(ids.tolist())
    store.push([1, 2, 3, 4], np.ones((4, 2)), counts=[2, 2, 2, 1])
    store.remove([3, 1, 1, 9, 4])
    assert sorted(gone) == [1, 3]
    assert store.content().ids.tolist() == [2]
    assert store.content([7, 2, 1]).rows.tolist() == store.pull([2]).tolist()
    assert store.stats()["waiting"] == 0


@pytest.mark.usefixtures("loops")
def test_a_full_table_evicts_the_lowest_scores_but_nothing_in_use():
    store = store_with(dist.ShowClickEntry("show", "click"), max_rows=4)
    store.push([1, 2, 3, 4], np.ones((4, 2)), clicks=[0, 3, 1, 2])
    store.pull([1, 10])
    assert sorted(np.concatenate([chunk.ids for chunk in store.chunks()])) == [1, 2, 4, 10]
    store.push([20, 30], np.ones((2, 2)))
    assert sorted(np.concatenate([chunk.ids for chunk in store.chunks()])) == [2, 4, 20, 30]
    assert store.stats()["evicted"] == 3


@pytest.mark.usefixtures("loops")
def test_all_rows_may_make_room_at_once():
    store = store_with(dist.ShowClickEntry("show", "click"), max_rows=2)
    store.pull([1, 2])
    store.push([3, 4], np.ones((2, 2)))
    np.testing.assert_array_equal(store.pull([3, 4]), -np.ones((2, 2)))
    assert len(store) == 2


@pytest.mark.usefixtures("loops")
def test_more_rows_than_there_may_be_are_refused_before_anything_changes():
    scored = store_with(dist.ShowClickEntry("show", "click"), max_rows=4)
    for store in (store_with(None, max_rows=4), store_with(dist.CountFilterEntry(2), max_rows=4)):
        store.push([1, 2, 3], np.ones((3, 2)), counts=[2, 2, 2])
        before = store.pull([1, 2, 3])
        with pytest.raises(UsageError, match="max_rows=4"):
            store.push([1, 7, 8], np.ones((3, 2)), counts=[2, 2, 2])
        np.testing.assert_array_equal(store.pull([1, 2, 3]), before)
        assert store.stats()["waiting"] == 0
    with pytest.raises(UsageError, match="one call"):
        scored.pull(np.arange(5))
    assert len(scored) == 0
