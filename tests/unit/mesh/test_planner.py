"""Plans, carried out in memory: they lead where they should, and move little."""

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
    scattered,
    stepped,
    whole_of,
)
from hypothesis import given, settings, strategies as st

import hpcdist as dist
from hpcdist.boxes import volume
from hpcdist.mesh.layout import layout_of, make_layout
from hpcdist.mesh.placements import Partial, ReduceType, Replicate, Shard
from hpcdist.mesh.planner import NETWORK, NODE, WHOLE, Costs, costs_of, plan_reshard
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.mesh.reads import reads_of
from hpcdist.transport.base import LinkCost

BYTES_ALONE = Costs(alpha=0.0, beta=1e-10, gamma=1e-10)
"""As for large arrays: the test arrays are small."""


def plan(src, dst, costs=BYTES_ALONE):
    return plan_reshard(src, dst, 8, (costs,) * src.mesh.ndim)


def check(src, dst, costs=BYTES_ALONE):
    array = array_of(src.shape)
    parts, at = scattered(array, src), src
    for step in plan(src, dst, costs):
        parts, at = stepped(parts, at, step), step.to
    assert at is dst
    assert np.allclose(whole_of(parts, dst), array)


def verbs(src, dst, costs=BYTES_ALONE):
    return [step.verb for step in plan(src, dst, costs)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh", [*MESHES])
def test_each_placement_becomes_each_other_one(mesh, shape):
    layouts = every_layout(MESHES[mesh], shape)
    pairs = [*itertools.product(layouts, layouts)]
    for number, (src, dst) in enumerate(pairs[:: 1 + len(pairs) // 200]):
        check(src, dst, NODE if number % 4 == 0 else BYTES_ALONE)


@pytest.mark.thorough
@pytest.mark.parametrize("costs", [NODE, BYTES_ALONE])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh", [*MESHES])
def test_every_placement_becomes_every_other_one(mesh, shape, costs):
    """All pairs on one and two axes; every so many on three."""
    layouts = every_layout(MESHES[mesh], shape, (SUM, MAX, AVG))
    pairs = [*itertools.product(layouts, layouts)]
    for src, dst in pairs[:: 1 + len(pairs) // 2500]:
        check(src, dst, costs)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_cuts_become_any_others(data):
    shape = data.draw(st.sampled_from(SHAPES))
    src = data.draw(layouts_of(shape))
    dst = data.draw(layouts_of(shape, (src.mesh,)))
    check(src, dst, data.draw(st.sampled_from([NODE, BYTES_ALONE])))


def test_nothing_is_to_do_where_the_layouts_are_the_same():
    layout = layout_of(MESHES["(2, 2)"], (8, 8), [Shard(0), Partial()])
    assert plan(layout, layout) == ()


@pytest.mark.parametrize(
    "other",
    [
        layout_of(MESHES["(4,)"], (8, 9), [Shard(0)]),
        layout_of(MESHES["(2, 2)"], (8, 8), [Shard(0)]),
    ],
)
def test_steps_lead_to_no_other_shape_or_mesh(other):
    src = layout_of(MESHES["(4,)"], (8, 8), [Shard(0)])
    with pytest.raises(dist.UsageError, match="the same shape on the same mesh"):
        plan(src, other)


def test_a_plan_is_made_once():
    src = layout_of(MESHES["(4,)"], (8, 8), [Shard(0)])
    dst = layout_of(MESHES["(4,)"], (8, 8), [Shard(1)])
    assert plan(src, dst) is plan(src, dst)
    assert plan(src, dst) is not plan(src, dst, NODE)


# (mesh, before, after, verbs)
KNOWN = [
    ("(4,)", [Replicate()], [Shard(1)], ["slice"]),
    ("(4,)", [Shard(1)], [Replicate()], ["all_gather"]),
    ("(4,)", [Shard(1)], [Shard(0)], ["all_to_all"]),
    ("(4,)", [Partial()], [Replicate()], ["all_reduce"]),
    ("(4,)", [Partial()], [Shard(1)], ["reduce_scatter"]),
    ("(4,)", [Replicate()], [Partial()], ["to_partial"]),
    ("(4,)", [Shard(0)], [Partial()], ["to_partial"]),
    ("(4,)", [Partial()], [Partial(MAX)], ["reduce_scatter", "to_partial"]),
    ("(2, 2)", [Partial(), Replicate()], [Replicate(), Shard(0)], ["slice", "all_reduce"]),
    ("(2, 2)", [Shard(0), Shard(1)], [Shard(1), Shard(0)], ["exchange"]),
    ("(2, 2)", [Shard(0), Replicate()], [Replicate(), Shard(0)], ["exchange"]),
    (
        "(2, 2)",
        [Shard(0), Shard(0)],
        [Shard(0, co_shard_order=1), Shard(0, co_shard_order=0)],
        ["exchange"],
    ),
    (
        "(2, 2)",
        [Partial(), Replicate()],
        [Replicate(), Partial()],
        ["slice", "all_reduce", "to_partial"],
    ),
]


@pytest.mark.parametrize(("mesh", "before", "after", "expected"), KNOWN)
def test_what_everybody_would_do_is_done(mesh, before, after, expected):
    mesh, shape = MESHES[mesh], (1024, 1024)
    assert verbs(layout_of(mesh, shape, before), layout_of(mesh, shape, after)) == expected


def test_other_boundaries_are_between_the_ranks_along_their_axis():
    before = make_layout(MESHES["(2, 2)"], (8, 8), [(0,), (1,)], [(0, 1, 8), None])
    after = layout_of(MESHES["(2, 2)"], (8, 8), [Shard(0), Shard(1)])
    assert [(step.verb, step.axis) for step in plan(before, after)] == [("all_to_all", 0)]


def test_an_exchange_is_among_all_ranks():
    before = layout_of(MESHES["(2, 2)"], (8, 8), [Shard(0), Shard(1)])
    after = layout_of(MESHES["(2, 2)"], (8, 8), [Shard(1), Shard(0)])
    assert [(step.verb, step.axis) for step in plan(before, after)] == [("exchange", WHOLE)]


def test_ranks_of_a_node_divide_what_they_reduce_between_nodes():
    """Each node holds the same contribution on all its ranks: each takes a part to the network."""
    mesh = ProcessMesh(shape=[4, 8], dim_names=["nodes", "local"])
    src = layout_of(mesh, (4096, 1024), [Partial()])
    dst = layout_of(mesh, (4096, 1024), [])
    steps = plan_reshard(src, dst, 8, costs_of([True, False]))
    assert [(step.verb, step.axis) for step in steps] == [
        ("slice", 1),
        ("all_reduce", 0),
        ("all_gather", 1),
    ]


def test_small_arrays_take_few_messages_and_large_ones_few_bytes():
    mesh = ProcessMesh(shape=[4, 4])

    def steps(length):
        src, dst = layout_of(mesh, (length,), [Partial()] * 2), layout_of(mesh, (length,), [])
        return [step.verb for step in plan_reshard(src, dst, 8, (NETWORK, NETWORK))]

    assert steps(16) == ["all_reduce", "all_reduce"]
    assert steps(1 << 22)[0] == "reduce_scatter"


def test_axes_between_nodes_are_dearer():
    assert costs_of([True, False]) == (NETWORK, NODE)


def test_costs_are_those_that_were_measured_where_they_were():
    measured = {"several": LinkCost(3e-5, 4e-9)}
    assert costs_of([True, False], measured) == (Costs(3e-5, 4e-9, NETWORK.gamma), NODE)
    measured = {"one": LinkCost(3e-7, 4e-11)}
    assert costs_of([True, False], measured) == (NETWORK, Costs(3e-7, 4e-11, NODE.gamma))


# ---- bytes


def received(src, steps):
    """Return how many elements all ranks together receive."""
    total, at = 0.0, src
    for step in steps:
        share = (at.mesh.shape[step.axis] - 1) / at.mesh.shape[step.axis]
        for place in at.mesh.coordinates():
            before, after = volume(at.box(place)), volume(step.to.box(place))
            total += {
                "slice": 0,
                "to_partial": 0,
                "all_reduce": 2 * before * share,
                "reduce_scatter": before * share,
                "all_gather": after - before,
            }.get(step.verb) or taken(at, step, place)
        at = step.to
    return total


def taken(at, step, place):
    """Return what a rank takes from others in an exchange."""
    if step.verb not in ("all_to_all", "exchange"):
        return 0
    pieces = reads_of(at, step.to, place)
    return sum(volume(piece.box) for piece in pieces if piece.coordinate != place)


def through_replicate(src):
    """Return what ranks receive where everything is reduced and gathered first, axis by axis."""
    total, at = 0.0, [*src.placements]
    for axis in [
        *(axis for axis, each in enumerate(src.placements) if each.is_partial()),
        *(axis for axis, each in reversed([*enumerate(src.placements)]) if each.is_shard()),
    ]:
        before = layout_of(src.mesh, src.shape, at)
        at[axis] = Replicate()
        total += received(before, plan(before, layout_of(src.mesh, src.shape, at)))
    return total


@pytest.mark.parametrize(
    ("sizes", "bound"), [([4], 0.55), ([2, 2], 0.38), ([4, 4], 0.27), ([2, 2, 2], 0.3)], ids=str
)
def test_plans_move_less_than_half_of_what_goes_through_replicate(sizes, bound):
    layouts = every_layout(ProcessMesh(shape=sizes), (1024, 1024), (SUM,))
    pairs = [(src, dst) for src in layouts for dst in layouts if src is not dst]
    pairs = pairs[:: 1 + len(pairs) // 400]
    usual = {src: through_replicate(src) for src in layouts}
    moved = sum(received(src, plan(src, dst)) for src, dst in pairs)
    assert moved <= bound * sum(usual[src] for src, _ in pairs)


@pytest.mark.parametrize("kind", ReduceType)
def test_every_kind_of_contributions_can_be_planned(kind):
    mesh = MESHES["(2, 2)"]
    src = layout_of(mesh, (8, 8), [Partial(kind), Shard(0)])
    dst = layout_of(mesh, (8, 8), [Shard(0), Partial(kind)])
    array = array_of((8, 8), kind)
    parts, at = scattered(array, src), src
    for step in plan(src, dst):
        parts, at = stepped(parts, at, step), step.to
    assert np.allclose(whole_of(parts, dst), array)
