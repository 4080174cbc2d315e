"""Boxes of arrays: what NumPy says of their elements, `boxes`, `cover` and `copies` say, too."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hpcdist.checkpoint import cover
from hpcdist.checkpoint.boxes import (
    EMPTY,
    Box,
    between,
    boxes_of_run,
    contains,
    intersection,
    lies_in,
    row_size,
    run,
    simplest,
    split,
    unfolded,
    whole,
)
from hpcdist.checkpoint.copies import copies_between, in_blocks, in_bytes
from hpcdist.checkpoint.cover import Flaw, flaw_of, grid_of

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes(draw, shape):
    """A run of elements, or a box of all dimensions; maybe empty."""
    if draw(st.booleans()) or not shape:
        shape = (math.prod(shape),)
    pairs = [sorted(draw(st.tuples(*[st.integers(0, length)] * 2))) for length in shape]
    return Box(tuple(a for a, _ in pairs), tuple(b - a for a, b in pairs))


def elements(box, shape):
    """Return the numbers of the elements of a box in the flattened array."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    if box.is_run:
        return numbers.reshape(-1)[box.offsets[0] : box.ends[0]]
    return numbers[tuple(map(slice, box.offsets, box.ends))].reshape(-1)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), shape=shapes)
def test_the_simplest_box_has_the_same_elements_and_is_a_run_if_they_are_one(data, shape):
    box = data.draw(boxes(shape))
    found, numbers = simplest(box, shape), elements(box, shape)
    assert lies_in(box, shape)
    assert lies_in(found, shape)
    assert elements(found, shape).tolist() == numbers.tolist()
    if len(numbers):
        assert found.is_run == (len(shape) == 1 or np.ptp(numbers) + 1 == len(numbers))
    else:
        assert found == EMPTY


@settings(max_examples=150, deadline=None)
@given(data=st.data(), shape=shapes)
def test_a_run_is_unfolded_into_few_boxes_in_its_order(data, shape):
    box = data.draw(boxes(shape))
    parts = unfolded(box, shape)
    found = [elements(part, shape) for part, _ in parts]
    assert np.concatenate([[], *found]).tolist() == elements(box, shape).tolist()
    assert [before for _, before in parts] == [sum(map(len, found[:n])) for n in range(len(found))]
    assert all(len(part.offsets) == len(shape) for part, _ in parts)
    assert len(parts) < max(2, 2 * len(shape))


@settings(max_examples=200, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 5), min_size=2, max_size=4).map(tuple))
def test_intersections_have_what_both_have(data, shape):
    every = boxes(shape).filter(lambda box: not box.is_run)
    one, other = data.draw(every), data.draw(every)
    common = sorted({*elements(one, shape)} & {*elements(other, shape)})
    found = intersection(one, other)
    assert (elements(found, shape).tolist() if found else []) == common
    if one.size:
        assert contains(other, one) == (len(common) == one.size)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), shape=shapes)
def test_a_box_is_split_into_its_first_rows_and_the_others(data, shape):
    box = simplest(data.draw(boxes(shape)), shape)
    if not box.size:
        return
    rows = data.draw(st.integers(0, box.size // row_size(box)))
    first, others = split(box, rows)
    assert first.size == rows * row_size(box)
    both = [*elements(first, shape), *elements(others, shape)]
    assert both == elements(box, shape).tolist()


def test_a_box_is_shown_as_numpy_indexes_it():
    assert str(Box((0, 3), (2, 4))) == "[0:2, 3:7]"
    assert str(run(5, 8)) == "[5:8]"


@pytest.mark.parametrize(
    ("box", "shape"),
    [
        (Box((0, 3), (2, 2)), (2, 4)),
        (Box((-1, 0), (1, 1)), (2, 4)),
        (Box((0, 0), (2, -1)), (2, 4)),
        (Box((0, 0), (1,)), (2, 4)),
        (Box((0, 0), (1, 1)), (2, 4, 1)),
        (run(7, 9), (2, 4)),
        (Box((), ()), (2,)),
        (run(0, 2), ()),
    ],
)
def test_a_box_outside_of_an_array_is_none_of_it(box, shape):
    assert not lies_in(box, shape)


# ---- whether boxes are all of an array


@st.composite
def divisions(draw, shape):
    """An array cut at random, again and again: grids, and what is none."""
    parts = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 7))):
        number = draw(st.integers(0, len(parts) - 1))
        box = parts[number]
        long = [axis for axis, length in enumerate(box.lengths) if length > 1]
        if long:
            axis = draw(st.sampled_from(long))
            start, stop = box.offsets[axis], box.ends[axis]
            cut = draw(st.integers(start + 1, stop - 1))
            parts[number : number + 1] = [
                between(box, axis, start, cut),
                between(box, axis, cut, stop),
            ]
    return [simplest(box, shape) for box in draw(st.permutations(parts))]


def times_told(parts, shape):
    """Return for each element in how many boxes it is."""
    told = np.zeros(math.prod(shape), int)
    for box in parts:
        told[elements(box, shape)] += 1
    return told


@settings(max_examples=200, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(0, 6), max_size=4).map(tuple))
def test_a_flaw_is_found_exactly_if_an_element_is_in_no_box_or_in_two(data, shape):
    parts = data.draw(divisions(shape))
    change = data.draw(st.sampled_from(["none", "drop", "add", "replace"]))
    if change in ("drop", "replace"):
        parts.pop()
    if change in ("add", "replace"):
        parts.append(simplest(data.draw(boxes(shape)), shape))
    told, flaw = times_told(parts, shape), flaw_of(parts, shape)
    if (told == 1).all():
        assert flaw is None
    else:
        found = told[elements(flaw.box, shape)]
        assert len(found)
        assert (found > 1).all() if flaw.is_double else (found == 0).all()


def pinwheel(size):
    """Return boxes that no cut separates: four around a fifth one."""
    return [
        Box((0, 0), (1, size - 1)),
        Box((0, size - 1), (size - 1, 1)),
        Box((size - 1, 1), (1, size - 1)),
        Box((1, 0), (size - 1, 1)),
        Box((1, 1), (size - 2, size - 2)),
    ]


def test_boxes_that_no_cut_separates_are_compared():
    parts = pinwheel(5)
    assert flaw_of(parts, (5, 5)) is None
    assert flaw_of(parts[:-1], (5, 5)) == Flaw(Box((1, 1), (3, 3)), False)
    moved = [*parts[:-1], Box((1, 1), (3, 4))]
    assert flaw_of(moved, (5, 5)) == Flaw(Box((1, 4), (3, 1)), True)


def test_runs_and_boxes_of_one_array_are_compared():
    shape = (4, 6)
    assert flaw_of([run(0, 12), Box((2, 0), (2, 3)), Box((2, 3), (2, 3))], shape) is None
    assert flaw_of([run(0, 13), Box((2, 0), (2, 3)), Box((2, 3), (2, 3))], shape).is_double
    assert flaw_of([run(0, 11), Box((2, 0), (2, 3)), Box((2, 3), (2, 3))], shape) == Flaw(
        Box((1, 5), (1, 1)), False
    )


def test_flaws_of_runs_are_runs():
    assert flaw_of([run(0, 5), run(7, 24)], (4, 6)) == Flaw(run(5, 7), False)
    assert flaw_of([run(0, 8), run(7, 24)], (4, 6)) == Flaw(run(7, 8), True)
    assert flaw_of([], (4, 6)) == Flaw(run(0, 24), False)
    assert flaw_of([], (4, 0)) is None


def test_a_grid_is_known_by_its_counts():
    grid = [Box((row, column), (2, 3)) for row in (0, 2, 4) for column in (0, 3)]
    assert grid_of(grid, Box((0, 0), (6, 6))) == (3, 2)
    assert grid_of(grid, Box((0, 0), (6, 7))) is None
    assert grid_of([*grid[:-1], grid[0]], Box((0, 0), (6, 6))) is None
    assert grid_of(pinwheel(4), Box((0, 0), (4, 4))) is None


def test_boxes_that_cuts_separate_are_not_compared_in_pairs(monkeypatch):
    """Of 10 000 boxes that would be fifty million comparisons."""
    monkeypatch.setattr(cover, "intersection", None)
    side = 100
    grid = [Box((3 * row, 2 * col), (3, 2)) for row in range(side) for col in range(side)]
    assert flaw_of(grid, (3 * side, 2 * side)) is None
    grid[50:51] = split(grid[50], 1)
    assert flaw_of(grid, (3 * side, 2 * side)) is None
    assert flaw_of(grid[1:], (3 * side, 2 * side)) == Flaw(Box((0, 0), (3, 2)), False)


# ---- copies


def carry_out(copy, source, target):
    """Copy as NumPy does it with strides."""

    def view(memory, start, strides):
        steps = [each * memory.itemsize for each in strides]
        return np.lib.stride_tricks.as_strided(memory[start:], copy.lengths, steps)

    view(target, copy.target, copy.target_strides)[...] = view(
        source, copy.source, copy.source_strides
    )


@settings(max_examples=200, deadline=None)
@given(data=st.data(), shape=shapes, block=st.integers(1, 9), itemsize=st.integers(1, 3))
def test_copies_bring_what_both_boxes_have_block_by_block(data, shape, block, itemsize):
    stored, wanted = data.draw(boxes(shape)), data.draw(boxes(shape))
    source, expected = (np.repeat(elements(box, shape), itemsize) for box in (stored, wanted))
    target = np.full(wanted.size * itemsize, -1)
    for copy in copies_between(stored, wanted, shape):
        copy = in_bytes(copy, itemsize)
        numbers = []
        for number, parts in in_blocks(copy, block):
            numbers.append(number)
            visible = np.full_like(source, -2)
            inside = slice(number * block, number * block + block)
            visible[inside] = source[inside]
            for part in parts:
                assert (part.source, part.target) >= (0, 0)
                carry_out(part, visible, target)
        assert numbers == sorted(set(numbers))
    expected[~np.isin(expected, source)] = -1
    assert target.tolist() == expected.tolist()


def test_what_lies_alike_in_both_is_one_run():
    box = Box((2, 1, 0), (3, 2, 4))
    (copy,) = copies_between(box, box, (9, 5, 4))
    assert copy.is_run
    assert copy.size == box.size
    (copy,) = copies_between(whole((9, 5, 4)), Box((2, 1, 0), (1, 2, 4)), (9, 5, 4))
    assert copy.is_run
    assert copy.source == 2 * 20 + 4


def test_blocks_without_wanted_elements_are_left_out():
    (copy,) = copies_between(whole((4, 1000)), Box((1, 10), (3, 5)), (4, 1000))
    assert [number for number, _ in in_blocks(copy, 100)] == [10, 20, 30]


def test_a_run_is_cut_into_a_rest_whole_rows_and_a_beginning():
    assert boxes_of_run(5, 17, (5, 4)) == [
        Box((1, 1), (1, 3)),
        Box((2, 0), (2, 4)),
        Box((4, 0), (1, 1)),
    ]
    assert boxes_of_run(5, 7, (5, 4)) == [Box((1, 1), (1, 2))]
