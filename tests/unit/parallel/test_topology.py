"""Degrees, their order and the ranks along each axis: pure."""

import math

import pytest

import hpcdist as dist
from hpcdist.parallel.topology import (
    AXES,
    CommunicateTopology,
    ParallelMode,
    by_node,
    infer_degrees,
    mode_of,
    plan_axes,
)

GRID = CommunicateTopology(["data", "pipe", "model"], [2, 2, 2])


def degrees(**given):
    """Return the degrees of all axes, 1 where none is given."""
    return {axis.short: given.get(axis.short, 1) for axis in AXES}


# ---- degrees


@pytest.mark.parametrize(
    ("size", "given", "wanted"),
    [
        (8, {}, degrees(dp=8)),
        (1, {"dp": -1}, degrees()),
        (8, {"mp": 2, "pp": 2}, degrees(dp=2, mp=2, pp=2)),
        (8, {"dp": -1, "mp": 2, "sharding": 2}, degrees(dp=2, mp=2, sharding=2)),
        (16, {"dp": -1, "sep": 2, "cp": 2, "mp": 2}, degrees(dp=2, sep=2, cp=2, mp=2)),
        (8, {"mp": -1, "pp": 2}, degrees(mp=4, pp=2)),
        (8, {"sharding": -1}, degrees(sharding=8)),
        (8, {"data": 4, "model": 2}, degrees(dp=4, mp=2)),
        (6, {"dp": 2, "mp": 3, "pp": None}, degrees(dp=2, mp=3)),
    ],
)
def test_a_degree_that_is_left_open_takes_what_all_other_axes_leave(size, given, wanted):
    assert infer_degrees(size, given) == wanted


@pytest.mark.parametrize(
    ("size", "given", "told"),
    [
        (8, {"dp": 2, "mp": 3}, "dp=2 x mp=3 take 6 ranks, but there are 8 .*dp=4 x mp=2 would"),
        (8, {"dp": 2, "mp": 2}, "take 4 ranks, but there are 8 ranks; dp=4 x mp=2 would fit"),
        (8, {"dp": -1, "mp": 3, "sharding": 2}, "dp=-1 is 8 / 6, .*dp=2 x sharding=2 x mp=2"),
        (8, {"mp": 3}, "mp=3 takes 3 ranks, so dp=-1 is 8 / 3, .*; dp=4 x mp=2 would fit"),
        (2, {"mp": 4, "pp": 4}, "take 16 ranks, .* but there are 2 ranks; dp=1 x pp=1 x mp=2"),
        (4, {"dp": -1, "mp": -1}, "the degrees of dp and mp are both -1"),
        (4, {"mp": 0}, "the degree of mp must be an integer of at least 1, or -1 .*, got 0"),
        (4, {"mp": True}, "the degree of mp must be an integer"),
        (4, {"mp": 2.0}, "the degree of mp must be an integer .*, got 2.0"),
        (4, {"mq": 2}, "no axis 'mq'; there are dp, data, pp"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_some_that_do(size, given, told):
    with pytest.raises(dist.UsageError, match=told):
        infer_degrees(size, given)


def test_the_proposed_degrees_fit():
    for size in range(1, 40):
        for wrong in ({"dp": 7, "mp": 3}, {"mp": 5, "pp": 4, "sharding": 2}, {"sep": 11, "cp": 3}):
            try:
                infer_degrees(size, wrong)
            except dist.UsageError as error:
                proposal = str(error).partition("; ")[2].partition(" would fit")[0]
                told = dict(part.split("=") for part in proposal.split(" x "))
                assert math.prod(map(int, told.values())) == size
                assert infer_degrees(size, {axis: int(told[axis]) for axis in told})


def test_the_order_puts_the_last_axis_on_neighbours():
    assert list(plan_axes(degrees(mp=2))) == ["dp", "pp", "sharding", "sep", "cp", "mp"]
    turned = plan_axes(degrees(mp=4, dp=2), ["mp", "pp", "sharding", "sep", "cp", "dp"])
    assert next(iter(turned.items())) == ("mp", 4)
    assert list(turned.items())[-1] == ("dp", 2)
    older = plan_axes(degrees(dp=2), ["dp", "pp", "sharding", "mp"])
    assert set(older) == {"dp", "pp", "sharding", "sep", "cp", "mp"}
    assert list(plan_axes(degrees(), ["data", "pipe", "sharding", "model"]))[-1] == "mp"


@pytest.mark.parametrize(
    ("order", "told"),
    [
        (["dp", "pp", "sharding", "sep", "cp", "mp", "mp"], "has mp twice"),
        (["dp", "pp", "sharding", "sep", "cp", "dp"], "has dp twice"),
        (["dp", "pp", "sharding", "sep", "cp"], "lacks mp"),
        (["dp", "pp", "sharding", "cp", "mp"], "lacks sep"),
        (["dp", "pp", "sharding", "sep", "cp", "tp"], "no axis 'tp'"),
        ("dp", "must be a list of axes"),
        (3, "must be a list of axes"),
    ],
)
def test_an_order_that_is_none_is_refused(order, told):
    with pytest.raises(dist.UsageError, match=told):
        plan_axes(degrees(sep=2), order)


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({}, ParallelMode.DATA_PARALLEL),
        ({"dp": 4}, ParallelMode.DATA_PARALLEL),
        ({"dp": 2, "sharding": 2}, ParallelMode.SHARDING_PARALLEL),
        ({"sharding": 2, "sep": 2}, ParallelMode.SEGMENT_PARALLEL),
        ({"sep": 2, "mp": 2}, ParallelMode.TENSOR_PARALLEL),
        ({"dp": 2, "mp": 2, "pp": 2}, ParallelMode.PIPELINE_PARALLEL),
    ],
)
def test_the_mode_is_that_of_the_axis_that_decides(given, mode):
    assert mode_of(given) is mode


def test_the_modes_have_paddles_numbers():
    assert dist.ParallelMode is ParallelMode
    assert [*ParallelMode] == [0, 1, 2, 3, 4]


def test_ranks_of_a_node_are_laid_out_next_to_each_other():
    assert by_node(range(6), ["a", "b", "a", "b", "a", "c"]) == (0, 2, 4, 1, 3, 5)
    assert by_node(range(4), ["a", "a", "b", "b"]) == (0, 1, 2, 3)
    assert by_node([3, 1], ["a"] * 4) == (3, 1)


# ---- topologies


def test_a_topology_tells_ranks_and_coordinates():
    assert GRID.get_hybrid_group_names() == ["data", "pipe", "model"]
    assert (GRID.get_dim("pipe"), GRID.get_dim_size("pipe"), GRID.world_size()) == (2, 2, 8)
    assert GRID.get_coord(5) == GRID.coordinate(data=1, pipe=0, model=1)
    assert GRID.get_rank(data=1, pipe=0, model=1) == 5
    assert GRID.get_rank_from_stage(5, pipe=1) == 7
    assert [GRID.get_rank(**GRID.get_coord(rank)._asdict()) for rank in range(8)] == [*range(8)]


def test_a_topology_tells_the_ranks_along_its_axes():
    assert GRID.get_axis_list("pipe", 1) == [2, 3, 6, 7]
    assert GRID.get_comm_list("data") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert GRID.get_comm_list("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert GRID.get_fused_ranks(["data", "model"]) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert GRID.get_fused_ranks(["model", "data"]) == [[0, 4, 1, 5], [2, 6, 3, 7]]


def test_every_rank_is_in_one_group_along_each_axis():
    grid = CommunicateTopology([axis.long for axis in AXES], [2, 3, 1, 2, 1, 4])
    for axis in grid.get_hybrid_group_names():
        ranks = [rank for group in grid.get_comm_list(axis) for rank in group]
        assert sorted(ranks) == [*range(48)]
        assert {len(group) for group in grid.get_comm_list(axis)} == {grid.get_dim(axis)}


def test_places_can_be_given_other_ranks():
    grid = CommunicateTopology(["data", "model"], [2, 2], ranks=[5, 1, 7, 3])
    assert grid.get_comm_list("model") == [[5, 1], [7, 3]]
    assert grid.get_coord(7) == (1, 0)
    assert grid.get_axis_list("model", 0) == [5, 7]


def test_a_topology_without_arguments_has_one_place():
    assert CommunicateTopology().get_hybrid_group_names() == [axis.long for axis in AXES]
    assert CommunicateTopology().world_size() == 1


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: CommunicateTopology(["data"], [2, 2]), "1 axes .* and 2 sizes"),
        (lambda: CommunicateTopology(["data", "data"], [2, 2]), "different names"),
        (lambda: CommunicateTopology("data", [2]), "a list of names"),
        (lambda: CommunicateTopology(["a b"], [2]), "a list of names"),
        (lambda: CommunicateTopology(["data"], [0]), "at least 1"),
        (lambda: CommunicateTopology(["data"], [2.0]), "must be integers"),
        (lambda: CommunicateTopology(["data"], [2], ranks=[0]), "2 places, which 1 ranks do not"),
        (lambda: CommunicateTopology(["data"], [2], ranks=[1, 1]), "each once"),
        (lambda: GRID.get_coord(8), "rank 8 is not part of the grid data=2 x pipe=2 x model=2"),
        (lambda: GRID.get_coord("x"), "rank 'x' is not part"),
        (lambda: GRID.get_rank(data=1, pipe=0), "needs model too"),
        (lambda: GRID.get_rank(data=1, pipe=0, model=2), "model=2 is not a coordinate"),
        (lambda: GRID.get_rank(data=1, pipe=0, modle=0), "did you mean 'model'"),
        (lambda: GRID.get_dim("mp"), "no axis 'mp'"),
        (lambda: GRID.get_axis_list("pipe", -1), "pipe=-1 is not a coordinate"),
        (lambda: GRID.get_fused_ranks("data"), "a list of names"),
        (lambda: GRID.get_fused_ranks(["data", "data"]), "once each"),
    ],
)
def test_what_a_grid_cannot_be_asked_is_an_error(make, told):
    with pytest.raises(dist.UsageError, match=told):
        make()
