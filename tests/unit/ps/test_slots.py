"""The hash table from ids to slots, against a dict."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from hpcdist.compiled import load
from hpcdist.ps import slots as slots_module
from hpcdist.ps.ids import mixed
from hpcdist.ps.slots import Slots

compiled = load("hpcdist.ps._native")


def some_ids(count, seed=0):
    return np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count)


@pytest.mark.usefixtures("loops")
def test_new_ids_get_slots_in_the_order_they_appear():
    slots = Slots()
    ids = np.array([5, -7, 5, 2**63 - 1, -(2**63), -7, 0])
    np.testing.assert_array_equal(slots.insert(ids), [0, 1, 0, 2, 3, 1, 4])
    np.testing.assert_array_equal(slots.ids(), [5, -7, 2**63 - 1, -(2**63), 0])
    np.testing.assert_array_equal(slots.find(np.array([0, 1, -1, 5])), [4, -1, -1, 0])


@pytest.mark.usefixtures("loops")
def test_nothing_is_found_where_nothing_is():
    slots = Slots()
    assert len(slots) == 0
    assert slots.find(np.empty(0, np.int64)).size == 0
    np.testing.assert_array_equal(slots.find(np.array([-1, 0, -2])), [-1, -1, -1])


@pytest.mark.usefixtures("loops")
def test_a_table_that_grows_keeps_every_id():
    slots, ids = Slots(), some_ids(30_000)
    for start in range(0, ids.size, 700):
        slots.insert(ids[start : start + 700])
    np.testing.assert_array_equal(slots.find(ids), np.arange(ids.size))
    assert (slots.find(some_ids(1000, seed=1)) == -1).all()


@pytest.mark.usefixtures("loops")
def test_removed_ids_are_absent_and_their_slots_taken_again():
    slots, ids = Slots(), np.arange(1000)
    slots.insert(ids)
    slots.remove(np.concatenate([ids[::2], ids[:10:2], [12345]]))
    assert len(slots) == 500
    np.testing.assert_array_equal(slots.find(ids[::2].copy()), np.full(500, -1))
    np.testing.assert_array_equal(slots.find(ids[1::2].copy()), ids[1::2])
    slots.insert(np.arange(2000, 2500))
    assert slots.used == 1000
    np.testing.assert_array_equal(np.sort(slots.ids()), [*ids[1::2], *range(2000, 2500)])


@pytest.mark.usefixtures("loops")
def test_many_removals_do_not_fill_the_table():
    slots = Slots()
    for turn in range(200):
        ids = np.arange(turn * 50, turn * 50 + 50)
        slots.insert(ids)
        np.testing.assert_array_equal(slots.ids_at(slots.find(ids)), ids)
        slots.remove(ids[:-1])
    assert len(slots) == 200
    assert slots._index.size <= 1024
    assert (slots.find(np.arange(49, 10_000, 50)) >= 0).all()


@pytest.mark.usefixtures("loops")
def test_a_compact_table_has_all_ids_in_the_first_slots_and_grows_again():
    slots, ids = Slots(), np.arange(500)
    slots.insert(ids)
    slots.remove(ids[ids % 5 > 0])
    before = slots.find(ids[::5].copy())
    old, new = slots.moves()
    np.testing.assert_array_equal(old, before[before >= 100])
    slots.compact(old, new)
    after = slots.find(ids[::5].copy())
    np.testing.assert_array_equal(np.sort(after), np.arange(100))
    np.testing.assert_array_equal(after[before >= 100], new)
    assert slots.used == len(slots) == 100
    assert slots.nbytes < 3000
    slots.insert(np.arange(1000, 5000))
    assert sorted(slots.ids()) == [*range(0, 500, 5), *range(1000, 5000)]


@pytest.mark.usefixtures("loops")
def test_ids_that_collide_in_one_table_do_not_in_the_next():
    # whoever knows the hash but not the key of the table
    ids = np.arange(1 << 18)
    unlucky = ids[mixed(ids) >> np.uint64(54) == 0][:200]
    slots = Slots()
    slots.insert(unlucky)
    homes, _ = slots._home(unlucky)
    assert np.unique(homes).size > unlucky.size / 3


@pytest.mark.skipif(compiled is None, reason="the kernel was not compiled here")
def test_both_loops_make_the_same_table(monkeypatch):
    tables, numbers = [], []
    for index_type in (np.int32, np.int64):
        for python in (False, True):
            with monkeypatch.context() as patch:
                if python:
                    for name in ("_find", "_place"):
                        patch.setattr(slots_module, name, None)
                slots = Slots()
                slots._key = np.uint64(99)
                slots._index = slots._index.astype(index_type)
                slots.insert(some_ids(30))
                tables.append((slots._ids[:30].tolist(), slots.find(some_ids(40)).tolist()))
                numbers.append(sorted(slots._index.tolist()))  # tags and slots
    assert numbers[:2] == [numbers[0]] * 2
    assert numbers[2:] == [numbers[2]] * 2
    assert tables.count(tables[0]) == 4


def twins():
    """Return pairs of ids that a table of key 1 finds at the same place, with the same tag."""
    ids = np.arange(300_000)
    upper = mixed(ids) >> np.uint64(33)
    order = np.argsort(upper)
    same = np.flatnonzero(np.diff(upper[order].view(np.int64)) == 0)
    return ids[order[same]], ids[order[same + 1]]


@pytest.mark.usefixtures("loops")
def test_an_id_is_not_taken_for_another_of_the_same_place_and_tag():
    first, second = twins()
    assert first.size > 5
    slots = Slots()
    slots._key = np.uint64(1)
    slots.insert(first)
    assert (slots.find(second) == -1).all()
    slots.insert(second)
    for each in (first, second):
        np.testing.assert_array_equal(slots.ids_at(slots.find(each)), each)


@pytest.mark.usefixtures("loops")
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(-40, 40), max_size=30)), max_size=12))
def test_a_table_is_like_a_dict(steps):
    slots, model = Slots(), set()
    for insert, chosen in steps:
        ids = np.array(chosen, np.int64)
        if insert:
            slots.insert(ids)
            model.update(chosen)
        else:
            slots.remove(ids)
            model.difference_update(chosen)
        assert sorted(slots.ids()) == sorted(model)
        everyone = np.arange(-40, 41)
        found = slots.find(everyone)
        np.testing.assert_array_equal(found >= 0, [each in model for each in everyone.tolist()])
        there = found[found >= 0]
        assert np.unique(there).size == there.size
        np.testing.assert_array_equal(slots.ids_at(there), everyone[found >= 0])


@pytest.mark.slow
def test_a_million_ids_are_found():
    slots, ids = Slots(), some_ids(10**6)
    slots.insert(ids)
    np.testing.assert_array_equal(slots.ids_at(slots.find(ids)), ids)


@pytest.mark.skipif(compiled is None, reason="the kernel was not compiled here")
def test_the_compiled_loops_refuse_what_does_not_fit():
    index, ids = np.full(64, -1, np.int32), np.arange(10)
    found = np.empty(3, np.int64)
    with pytest.raises(ValueError, match="do not fit"):
        compiled.find_slots(4, index[:63], ids, ids[:3], found, 0)
    with pytest.raises(ValueError, match="do not fit"):
        compiled.find_slots(4, index, ids, ids[:4], found, 0)
    with pytest.raises(ValueError, match="do not fit"):
        compiled.find_slots(2, index, ids, ids[:3], found, 0)
    with pytest.raises(ValueError, match="do not fit"):
        compiled.place_slots(4, index, ids, np.array([10]), 0)
    with pytest.raises(ValueError, match="full"):
        compiled.place_slots(4, np.zeros(64, np.int32), ids, np.array([1]), 0)
    with pytest.raises(ValueError, match="contiguous"):
        compiled.find_slots(4, index, ids, ids[:6:2], found, 0)
    rows, slabs = np.empty((3, 2), np.float32), np.array([ids.ctypes.data], np.uintp)
    with pytest.raises(ValueError, match="do not fit"):
        compiled.pull_rows(index[:63], ids, slabs, ids[:3], rows, 4, 0, 3)
    with pytest.raises(ValueError, match="do not fit"):
        compiled.pull_rows(index, ids, slabs, ids[:3], rows, 2, 0, 3)
    with pytest.raises(ValueError, match="do not fit"):
        compiled.pull_rows(index, ids, slabs, ids[:5], rows, 4, 0, 3)
    index[:] = 1000  # a damaged table ends the search, and nothing outside is read
    compiled.find_slots(4, index, ids, ids[:3], found, 0)
    assert compiled.pull_rows(index, ids, slabs, ids[:3], rows, 4, 0, 3) == 3
