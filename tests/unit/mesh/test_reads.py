"""What ranks read, done in memory: any layout becomes any other one."""

import itertools

import numpy as np
import pytest
from arrays_in_memory import (
    AVG,
    MAX,
    MESHES,
    SHAPES,
    SUM,
    array_of,
    every_layout,
    layouts_of,
    pieced,
    scattered,
    whole_of,
)
from hypothesis import given, settings, strategies as st

from hpcdist.boxes import meet, volume
from hpcdist.mesh.layout import layout_of, make_layout
from hpcdist.mesh.placements import Partial, ReduceType, Replicate, Shard
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.mesh.reads import gives_of, reads_of

GRID = MESHES["(2, 2)"]


def check(src, dst):
    array = array_of(src.shape)
    parts = pieced(scattered(array, src), src, dst)
    assert np.allclose(whole_of(parts, dst), array)


def received(src, dst):
    """Return how many elements all ranks together take from others."""
    return sum(
        volume(piece.box)
        for place in dst.mesh.coordinates()
        for piece in reads_of(src, dst, place)
        if src.mesh.rank_at(piece.coordinate) != dst.mesh.rank_at(place)
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh", [*MESHES])
def test_each_placement_becomes_each_other_one(mesh, shape):
    layouts = every_layout(MESHES[mesh], shape)
    pairs = [*itertools.product(layouts, layouts)]
    for src, dst in pairs[:: 1 + len(pairs) // 250]:
        check(src, dst)


@pytest.mark.thorough
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh", [*MESHES])
def test_every_placement_becomes_every_other_one(mesh, shape):
    """All pairs on one and two axes; every so many on three."""
    layouts = every_layout(MESHES[mesh], shape, (SUM, MAX, AVG))
    pairs = [*itertools.product(layouts, layouts)]
    for src, dst in pairs[:: 1 + len(pairs) // 2500]:
        check(src, dst)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_cuts_become_any_others_on_any_mesh(data):
    shape = data.draw(st.sampled_from(SHAPES))
    src, dst = data.draw(layouts_of(shape)), data.draw(layouts_of(shape))
    check(src, dst)


@pytest.mark.parametrize("kind", ReduceType)
@pytest.mark.parametrize("then", [Replicate(), Shard(1), Partial()])
def test_every_kind_of_contributions_is_reduced(kind, then):
    src = layout_of(GRID, (5, 7), [Partial(kind), Shard(0)])
    dst = layout_of(GRID, (5, 7), [then, Replicate()])
    array = array_of((5, 7), kind)
    parts = pieced(scattered(array, src), src, dst)
    assert np.allclose(whole_of(parts, dst), array)


def test_a_rank_reads_what_it_has_from_itself():
    src = layout_of(GRID, (8, 8), [Shard(0)])
    dst = layout_of(GRID, (8, 8), [Shard(0), Shard(1)])
    assert received(src, dst) == 0


def test_ranks_that_hold_the_same_share_what_is_read():
    src = layout_of(GRID, (8, 8), [Shard(0)])
    dst = layout_of(GRID, (8, 8), [])
    gifts = [len(gives_of(src, dst, place)) for place in GRID.coordinates()]
    assert gifts == [2, 2, 2, 2]


def test_other_ranks_than_those_of_the_source_share_it_too():
    dst = layout_of(ProcessMesh(range(4, 8)), (8,), [])
    src = layout_of(GRID, (8,), [])
    owners = {reads_of(src, dst, place)[0].coordinate for place in dst.mesh.coordinates()}
    assert len(owners) == 4


def test_contributions_are_combined_in_ascending_order_by_all():
    src = layout_of(MESHES["permuted"], (4,), [Partial(), Partial()])
    dst = layout_of(MESHES["permuted"], (4,), [])
    for place in dst.mesh.coordinates():
        pieces = reads_of(src, dst, place)
        assert [piece.coordinate for piece in pieces] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert [piece.first for piece in pieces] == [True, False, False, False]


def test_a_cut_becomes_contributions_without_moving_data():
    src = layout_of(GRID, (8, 8), [Shard(0), Shard(1)])
    assert received(src, layout_of(GRID, (8, 8), [Partial(), Shard(1)])) == 0


def test_ranks_that_contribute_nothing_read_nothing():
    src = layout_of(GRID, (8, 8), [])
    dst = layout_of(GRID, (8, 8), [Partial(MAX)])
    assert [len(reads_of(src, dst, place)) for place in GRID.coordinates()] == [1, 1, 0, 0]


def test_nothing_is_read_for_an_empty_part():
    src = layout_of(MESHES["(4,)"], (5,), [])
    dst = layout_of(MESHES["(4,)"], (5,), [Shard(0)])
    assert reads_of(src, dst, (3,)) == ()


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_owners_give_what_others_read_in_the_same_order(data):
    src, dst = data.draw(layouts_of((5, 7))), data.draw(layouts_of((5, 7)))
    for owner in src.mesh.coordinates():
        given = gives_of(src, dst, owner)
        for reader in dst.mesh.coordinates():
            read = [p.box for p in reads_of(src, dst, reader) if p.coordinate == owner]
            assert [gift.box for gift in given if gift.coordinate == reader] == read


def test_pieces_of_one_contribution_do_not_overlap():
    src = make_layout(GRID, (9, 6), [(0, 1), ()], [(0, 1, 1, 8, 9), None])
    dst = layout_of(GRID, (9, 6), [Shard(1), Shard(0)])
    for place in GRID.coordinates():
        boxes = [piece.box for piece in reads_of(src, dst, place)]
        assert all(meet(a, b) is None for a, b in itertools.combinations(boxes, 2))
        assert sum(map(volume, boxes)) == volume(dst.box(place))
