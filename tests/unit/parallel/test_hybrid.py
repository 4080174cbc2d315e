"""The grid of hybrid training on simulated ranks: coordinates, groups, what it looks like."""

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.comm.session import Whereabouts, require_session
from hpcdist.parallel.grid_picture import picture_of
from hpcdist.parallel.hybrid import HybridCommunicateGroup, current_grid, set_current_grid
from hpcdist.parallel.topology import AXES, CommunicateTopology, ParallelMode

NAMES = [axis.long for axis in AXES]
MODEL = ["data", "pipe", "model"], [2, 2, 2]


def grid_of(names=MODEL[0], dims=MODEL[1], **given):
    return HybridCommunicateGroup(CommunicateTopology(names, dims), **given)


def on_nodes(nodes):
    """Let this job believe that its ranks run on these nodes."""
    session = require_session()
    endpoints = tuple(f"{node}:{6170 + rank}" for rank, node in enumerate(nodes))
    session.whereabouts = Whereabouts(0, 1, 0, len(set(nodes)), endpoints)


def test_each_rank_knows_its_place():
    def check():
        grid, rank = grid_of(), dist.get_rank()
        assert (grid.nranks, grid.global_rank, grid.degree("mp")) == (8, rank, 2)
        place = [grid.rank(axis) for axis in ("dp", "pp", "mp")]
        assert place == [rank // 4, rank // 2 % 2, rank % 2]
        assert [grid.rank(axis) for axis in MODEL[0]] == place
        assert (grid.degree("sharding"), grid.rank("sep")) == (1, 0)
        assert (grid.stage_id, grid.get_stage_id()) == (rank // 2 % 2,) * 2
        assert (grid.is_first_stage, grid.is_last_stage) == (grid.stage_id == 0, grid.stage_id == 1)
        assert grid.get_rank_from_stage(1) == grid.ranks("pp")[1]
        assert {grid.next_rank, grid.prev_rank} == {grid.get_rank_from_stage(1 - grid.stage_id)}
        assert grid.get_parallel_mode() is ParallelMode.PIPELINE_PARALLEL
        assert grid.mesh == dist.ProcessMesh(np.arange(8).reshape(2, 2, 2), ["dp", "pp", "mp"])
        return grid.ranks("dp", "mp")

    assert dist.simulate(8, check)[2] == (2, 3, 6, 7)


def test_the_sum_along_an_axis_is_that_of_its_ranks():
    def check():
        grid = grid_of()
        for axis in ("mp", "dp", "pp", "sharding", "sep"):
            x = np.array([float(dist.get_rank())])
            dist.all_reduce(x, group=grid[axis])
            assert x[0] == sum(grid.ranks(axis))
            assert grid[axis].nranks == grid.degree(axis)
            assert grid[axis].rank == grid.rank(axis)

    dist.simulate(8, check)


def test_odd_and_even_ranks_use_the_axes_in_opposite_order():
    def check():
        grid, found = grid_of(), {}
        axes = ["dp", "pp", "mp"]
        for axis in axes:
            grid[axis]  # groups are made by all of their ranks
        for axis in axes if dist.get_rank() % 2 else reversed(axes):
            found[axis] = np.array([1.0])
            works = dist.all_reduce(found[axis], group=grid[axis], sync_op=False)
            found[axis, "work"] = works
        for axis in axes:
            found[axis, "work"].wait()
            assert found[axis][0] == 2

    dist.simulate(8, check)


def test_paddles_getters_are_the_axes():
    def check():
        grid = grid_of(NAMES, [2, 1, 2, 2, 1, 1])
        for axis in AXES:
            name = {"dp": "data", "mp": "model", "pp": "pipe", "cp": "context"}.get(
                axis.short, axis.short
            )
            prefix = f"get_{name}_parallel_"
            assert getattr(grid, f"{prefix}world_size")() == grid.degree(axis.short)
            assert getattr(grid, f"{prefix}rank")() == grid.rank(axis.short)
            assert getattr(grid, f"{prefix}group")() is grid[axis.long]
            if name != "pipe":
                assert getattr(grid, f"{prefix}group_src_rank")() == grid.ranks(axis.short)[0]
        assert grid.get_check_parallel_group().ranks == sorted(grid.ranks("sharding", "sep"))
        assert grid.get_check_parallel_group(sharding=True).ranks == [*grid.ranks("dp", "sep")]
        assert grid.get_dp_sep_parallel_group() is grid.fused("sep", "dp")
        assert grid.get_pp_mp_parallel_group().ranks == [dist.get_rank()]
        assert grid.get_dp_cp_parallel_group() is grid["dp"]
        assert grid.get_cp_mp_parallel_group().nranks == 1
        assert grid.get_cp_sharding_parallel_group() is grid["sharding"]
        assert grid.get_moe_sharding_parallel_world_size() == 0
        assert {*grid.get_p2p_groups()} == {grid["pp"]}
        ranks, group = grid.create_fuse_group(["data", "sharding"])
        assert ranks == group.ranks == [*grid.ranks("dp", "sharding")]
        assert grid.topology().get_coord(grid.get_global_rank()).data == grid.rank("dp")

    dist.simulate(8, check)


def test_a_group_is_made_by_its_own_ranks_alone():
    def check():
        grid = grid_of()
        if grid.rank("pp") == 0:  # the other stage has nothing to do with it
            x = np.array([1.0])
            dist.all_reduce(x, group=grid["mp"])
            assert x[0] == 2
        return len(require_session().groups)

    assert dist.simulate(8, check) == [2, 2, 1, 1] * 2


def test_all_ranks_along_one_axis_are_the_world():
    def check():
        world = dist.init_parallel_env()
        grid = grid_of(["data", "model"], [4, 1])
        assert grid["dp"] is world
        assert grid.fused("dp", "mp") is world

    dist.simulate(4, check)


def test_ranks_along_an_axis_are_in_the_order_of_their_coordinates():
    def check():
        topology = CommunicateTopology(["pipe", "model"], [2, 2], ranks=[3, 1, 0, 2])
        grid = HybridCommunicateGroup(topology)
        assert (grid["mp"].rank, grid["pp"].rank) == (grid.rank("mp"), grid.rank("pp"))
        return grid["mp"].ranks, grid["pp"].ranks

    found = dist.simulate(4, check)
    assert found == [([0, 2], [3, 0]), ([3, 1], [1, 2]), ([0, 2], [1, 2]), ([3, 1], [3, 0])]


def test_a_grid_of_a_part_of_the_ranks():
    def check():
        rank = dist.init_parallel_env().rank
        part = dist.new_group([1, 3, 4, 5])
        if rank not in part.ranks:
            with pytest.raises(dist.UsageError, match=f"rank {rank} is not in group"):
                grid_of(["data", "model"], [2, 2], group=part)
            return None
        grid = grid_of(["data", "model"], [2, 2], group=part)
        return grid["mp"].ranks, grid["dp"].ranks

    found = dist.simulate(6, check)
    assert found == [None, ([1, 3], [1, 4]), None, ([1, 3], [3, 5]), ([4, 5], [1, 4]),
                     ([4, 5], [3, 5])]  # fmt: skip


def test_a_grid_that_does_not_fit_is_refused_on_every_rank():
    def check():
        with pytest.raises(dist.UsageError, match=r"data=2 x pipe=2 x model=2 make 8 places, .* 4"):
            grid_of()
        with pytest.raises(dist.UsageError, match="no axis 'expert'"):
            grid_of(["expert"], [4])
        with pytest.raises(dist.UsageError, match="needs a CommunicateTopology"):
            HybridCommunicateGroup([4])
        with pytest.raises(dist.UsageError, match=r"the ranks \[4, 5, 6, 7\], but"):
            HybridCommunicateGroup(CommunicateTopology(["data"], [4], ranks=range(4, 8)))
        with pytest.raises(dist.UsageError, match="no axis 'tp'"):
            grid_of(["data"], [4])["tp"]
        with pytest.raises(dist.UsageError, match="needs an axis"):
            grid_of(["data"], [4]).fused()

    dist.simulate(4, check)


def test_the_current_grid_ends_with_the_session():
    def check():
        dist.init_parallel_env()
        assert current_grid() is None
        set_current_grid(grid := grid_of(["data"], [2]))
        assert current_grid() is grid
        dist.destroy_process_group()
        assert current_grid() is None
        dist.init_parallel_env()
        assert current_grid() is None

    dist.simulate(2, check)


def test_sixty_four_ranks_on_five_axes():
    dims = [2, 4, 2, 2, 1, 2]

    def check():
        grid = grid_of(NAMES, dims)
        for axis, size in zip(NAMES, dims, strict=True):
            x = np.array([1.0])
            dist.all_reduce(x, group=grid[axis])
            assert x[0] == size
        return grid.get_check_parallel_group().nranks

    assert dist.simulate(64, check, timeout=300) == [32] * 64


# ---- what it looks like

PICTURE = """\
pp=2 x mp=2: 4 ranks on 2 nodes
┌────┬──────┬──────┬───────┐
│ pp │ mp 0 │ mp 1 │ nodes │
├────┼──────┼──────┼───────┤
│ 0  │ 0    │ 1    │ n1    │
│ 1  │ 2    │ 3    │ n2    │
└────┴──────┴──────┴───────┘"""


def test_a_grid_is_drawn_with_its_nodes():
    def check():
        on_nodes(["n1", "n1", "n2", "n2"])
        assert grid_of(["pipe", "model"], [2, 2]).describe() == PICTURE
        assert grid_of(["pipe", "model"], [4, 1]).describe().count("\n") == 5

    dist.simulate(4, check)


def test_a_large_grid_is_drawn_in_part():
    hosts = [f"n{rank // 8}" for rank in range(80)]
    told = picture_of({"dp": 80, "mp": 1}, range(80), hosts).splitlines()
    assert told[0] == "dp=80: 80 ranks on 10 nodes"
    assert told[-1] == "... and 16 rows more"
    assert len(told) == 1 + 3 + 64 + 1 + 1


def test_ranks_are_drawn_where_they_are():
    told = picture_of({"dp": 2, "mp": 2}, [5, 1, 7, 3], ["a", "b", "c", "[c]"]).splitlines()
    assert [line.split("│")[1:-1] for line in told if "│" in line] == [
        [" dp ", " mp 0 ", " mp 1 ", " nodes  "],
        [" 0  ", " 5    ", " 1    ", " a, b   "],
        [" 1  ", " 7    ", " 3    ", " c, [c] "],
    ]


def test_one_rank_is_drawn_in_a_line():
    def check():
        assert grid_of(["data"], [1]).describe() == "dp=1: 1 rank on localhost"

    dist.simulate(1, check)


@pytest.mark.parametrize(
    ("nodes", "crosses"), [("aabb", False), ("abab", True), ("aaab", True), ("aaaa", False)]
)
def test_ranks_of_mp_on_different_nodes_are_a_warning_on_the_first_rank(nodes, crosses, recwarn):
    def check():
        dist.init_parallel_env()
        on_nodes(nodes)
        grid_of(["data", "model"], [2, 2])

    dist.simulate(4, check)
    told = [str(each.message) for each in recwarn if "different nodes" in str(each.message)]
    assert len(told) == crosses
