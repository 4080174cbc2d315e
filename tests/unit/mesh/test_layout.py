"""Layouts: which boxes there are, that each layout exists once, and what is refused."""

import copy
import gc
import itertools
import pickle
import threading
import weakref

import numpy as np
import pytest
from arrays_in_memory import MESHES, layouts_of, partial_axes
from hypothesis import given, settings, strategies as st

import hpcdist as dist
from hpcdist.boxes import lengths, meet, volume, whole, within
from hpcdist.mesh import layout as module
from hpcdist.mesh.layout import default_cuts, layout_of, make_layout
from hpcdist.mesh.placements import Partial, ReduceType, Replicate, Shard
from hpcdist.mesh.process_mesh import ProcessMesh

LINE, GRID = MESHES["(4,)"], MESHES["(2, 2)"]


def boxes_along(layout, dim):
    return [layout.box(place)[dim] for place in layout.mesh.coordinates()]


# ---- boxes


def test_boxes_meet_where_both_are():
    assert meet(((0, 4), (2, 6)), ((3, 9), (0, 3))) == ((3, 4), (2, 3))
    assert meet(((0, 4),), ((4, 9),)) is None
    assert meet((), ()) == ()


def test_a_box_is_a_part_of_an_array():
    array = np.arange(40).reshape(5, 8)
    box, outer = ((2, 4), (3, 5)), ((1, 5), (2, 8))
    part = array[within(outer, whole(array.shape))]
    assert np.array_equal(part[within(box, outer)], array[2:4, 3:5])
    assert (lengths(box), volume(box), volume(())) == ((2, 2), 4, 1)


# ---- which boxes there are


@settings(max_examples=60, deadline=None)
@given(st.data(), st.lists(st.integers(0, 9), max_size=3))
def test_the_boxes_of_different_parts_fill_the_array_once(data, shape):
    layout = data.draw(layouts_of(tuple(shape)))
    cutting = {axis for axes in layout.axes for axis in axes}
    times = np.zeros(shape, int)
    for place in layout.mesh.coordinates():
        if not any(place[axis] for axis in range(layout.mesh.ndim) if axis not in cutting):
            times[within(layout.box(place), whole(tuple(shape)))] += 1
    assert (times == 1).all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ranks_differ_only_along_axes_that_cut(data):
    layout = data.draw(layouts_of((5, 7)))
    cutting = {axis for axes in layout.axes for axis in axes}
    for a, b in itertools.combinations(layout.mesh.coordinates(), 2):
        if all(a[axis] == b[axis] for axis in cutting):
            assert layout.box(a) == layout.box(b)


@pytest.mark.parametrize(
    ("length", "sizes", "cuts"),
    [
        (8, (4,), (0, 2, 4, 6, 8)),
        (7, (4,), (0, 2, 4, 6, 7)),
        (5, (4,), (0, 2, 4, 5, 5)),
        (0, (2,), (0, 0, 0)),
        (6, (), (0, 6)),
        (5, (2, 2), (0, 2, 3, 4, 5)),
    ],
)
def test_parts_are_of_equal_length_and_the_last_ones_shorter(length, sizes, cuts):
    assert default_cuts(length, sizes) == cuts


def test_the_first_axis_of_the_mesh_cuts_first():
    layout = layout_of(GRID, (8,), [Shard(0), Shard(0)])
    assert boxes_along(layout, 0) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert layout.axes == ((0, 1),)


@pytest.mark.parametrize(
    "placements",
    [
        [Shard(0, co_shard_order=1), Shard(0, co_shard_order=0)],
        [Shard(0, co_shard_order=1), Shard(0)],
        [Shard(0, split_factor=2), Shard(0)],
    ],
)
def test_the_order_of_axes_on_one_dimension_can_be_told(placements):
    layout = layout_of(GRID, (8,), placements)
    assert boxes_along(layout, 0) == [(0, 2), (4, 6), (2, 4), (6, 8)]
    assert layout.axes == ((1, 0),)
    assert layout is layout_of(GRID, (8,), layout.placements)


def test_of_three_axes_each_says_what_has_been_cut_before():
    mesh = ProcessMesh(shape=[2, 3, 4])
    assert layout_of(mesh, (24,), [Shard(0, split_factor=12), Shard(0), Shard(0)]).axes == (
        (1, 2, 0),
    )
    assert layout_of(mesh, (24,), [Shard(0), Shard(0, split_factor=4), Shard(0)]).axes == (
        (0, 2, 1),
    )


def test_dimensions_count_from_the_end_too():
    for dim in range(3):
        last = layout_of(LINE, (5, 7, 9), [Shard(dim - 3)])
        assert last is layout_of(LINE, (5, 7, 9), [Shard(dim)])


def test_placements_left_out_are_replicate():
    assert layout_of(GRID, (5, 7), [Shard(0)]) is layout_of(GRID, (5, 7), [Shard(0), Replicate()])
    assert layout_of(GRID, (5, 7), None).is_replicated


def test_a_layout_tells_its_shape_and_bytes():
    layout = layout_of(LINE, (5, 7), [Shard(0)])
    assert [layout.local_shape((i,)) for i in range(4)] == [(2, 7), (2, 7), (1, 7), (0, 7)]
    assert layout.nbytes_local(8) == 2 * 7 * 8
    assert layout_of(LINE, (), []).nbytes_local(8) == 8


def test_a_layout_tells_whether_it_is_partial_or_replicated():
    partial = layout_of(GRID, (4,), [Partial()])
    assert partial.is_partial
    assert not partial.is_replicated
    assert partial_axes(partial) == [0]
    cut = layout_of(GRID, (4,), [Shard(0)])
    assert not cut.is_partial
    assert not cut.is_replicated


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_placements_tell_what_a_layout_is_but_for_its_boundaries(data):
    drawn = data.draw(layouts_of((5, 7)))
    layout = make_layout(drawn.mesh, drawn.shape, drawn.axes, None, drawn.partial)
    assert layout_of(layout.mesh, layout.shape, layout.placements) is layout


def test_a_layout_can_be_read():
    mesh = ProcessMesh([[0, 1], [2, 3]], ["x", "y"])
    assert repr(layout_of(mesh, (5, 7), [Shard(0)])) == (
        "Layout((5, 7), [Shard(0), Replicate()] on ProcessMesh(x=2, y=2))"
    )
    assert repr(make_layout(mesh, (5, 7), [(0,), ()], [(0, 1, 5), None])) == (
        "Layout((5, 7), [Shard(0), Replicate()], cut at 1 along 0 on ProcessMesh(x=2, y=2))"
    )


# ---- each layout exists once


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equal_layouts_are_the_same_object(data):
    layout = data.draw(layouts_of((5, 7)))
    mesh = ProcessMesh(layout.mesh.mesh, layout.mesh.dim_names)
    again = make_layout(
        mesh,
        [*layout.shape],
        [[*axes] for axes in layout.axes],
        [[*cuts] for cuts in layout.cuts],
        [*layout.partial],
    )
    assert again is layout
    assert pickle.loads(pickle.dumps(layout)) is layout
    assert copy.copy(layout) is layout
    assert copy.deepcopy(layout) is layout


def test_even_boundaries_are_the_same_layout_however_they_are_told():
    even = layout_of(LINE, (5, 7), [Shard(0)])
    assert even is make_layout(LINE, (5, 7), [(0,), ()], [None, None])
    assert even is make_layout(LINE, (5, 7), [(0,), ()], [(0, 2, 4, 5, 5), (0, 7)])


@pytest.mark.parametrize(
    "other",
    [
        layout_of(LINE, (5, 7), [Shard(1)]),
        layout_of(LINE, (5, 8), [Shard(0)]),
        layout_of(LINE, (5, 7), [Partial()]),
        layout_of(ProcessMesh([0, 1, 3, 2]), (5, 7), [Shard(0)]),
        layout_of(ProcessMesh([0, 1, 2, 3], ["x"]), (5, 7), [Shard(0)]),
        make_layout(LINE, (5, 7), [(0,), ()], [(0, 1, 2, 3, 5), None]),
    ],
    ids=str,
)
def test_different_layouts_are_different_objects(other):
    assert layout_of(LINE, (5, 7), [Shard(0)]) is not other


def test_a_layout_that_nobody_holds_goes():
    layout = layout_of(LINE, (123, 7), [Shard(0)])
    layout.remember("itself", layout)
    gone = weakref.ref(layout)
    del layout
    gc.collect()
    assert gone() is None


def test_threads_get_the_same_object():
    ready, found = threading.Barrier(8), []

    def ask():
        for length in range(1000, 1100):
            ready.wait(60)
            found.append((length, layout_of(LINE, (length,), [Shard(0)])))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 800
    assert len({id(layout) for _, layout in found}) == 100


def test_what_layouts_remember_is_bounded(monkeypatch):
    monkeypatch.setattr(module._Remembered, "LIMIT", 10)
    first = layout_of(LINE, (1,), [])
    at = first
    for length in range(2, 200):  # each remembers the next: all would live as long as the first
        at = at.remember("next", layout_of(LINE, (length,), []))
    alive = 0
    while first is not None:
        first, alive = first.memo.get("next"), alive + 1
    assert alive <= 12


# ---- what is refused


@pytest.mark.parametrize(
    ("mesh", "shape", "placements", "words"),
    [
        (LINE, (5, 7), [Shard(2)], "its dimensions are 0 to 1"),
        (LINE, (5, 7), [Shard(-3)], "its dimensions are 0 to 1"),
        (LINE, (), [Shard(0)], "it has no dimensions"),
        (LINE, (5, 7), [Shard(0), Shard(1)], "2 placements for a mesh of 1 axes"),
        (GRID, (5, 7), [Partial(), Partial(ReduceType.kRedMax)], "the same ReduceType"),
        (GRID, (5, 7), [Shard(0, split_factor=3), Shard(0)], "into 3 parts"),
        (GRID, (5, 7), [Shard(0), Shard(0, split_factor=2)], "into 2 parts"),
        (GRID, (5, 7), [Shard, Replicate()], "placements must be a list"),
        (GRID, (5, 7), [0, 1], "placements must be a list"),
        (GRID, (5, 7), "ab", "placements must be a list"),
        ([0, 1], (5, 7), [Shard(0)], "must be a ProcessMesh"),
    ],
)
def test_placements_that_do_not_fit_are_refused(mesh, shape, placements, words):
    with pytest.raises(dist.UsageError, match=words):
        layout_of(mesh, shape, placements)


def test_contributions_of_one_kind_along_two_axes_are_fine():
    assert layout_of(GRID, (5,), [Partial(), Partial()]).partial == (ReduceType.kRedSum,) * 2
