"""Meshes are values; groups and the current mesh belong to a rank and its session."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest

import hpcdist as dist
from hpcdist import ProcessMesh

GRID = ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])
TURNED = ProcessMesh([[3, 0], [1, 2]], dim_names=["x", "y"])


def on_ranks(count, check):
    """Run a check on simulated ranks and return what each returns."""
    return dist.simulate(count, check, timeout=120)


# ---- a value


@pytest.mark.parametrize(
    "mesh",
    [
        ProcessMesh(np.arange(4).reshape(2, 2), ["x", "y"]),
        ProcessMesh(shape=[2, 2], process_ids=[0, 1, 2, 3], dim_names=["x", "y"]),
        ProcessMesh(shape=(2, 2), process_ids=range(4), dim_names=("x", "y")),
        pickle.loads(pickle.dumps(GRID)),
        copy.deepcopy(GRID),
    ],
)
def test_meshes_of_equal_ranks_shape_and_names_are_equal(mesh):
    assert mesh == GRID
    assert hash(mesh) == hash(GRID)
    assert mesh.unique_id == GRID.unique_id
    assert {mesh: 1}[GRID] == 1


@pytest.mark.parametrize(
    "other",
    [
        ProcessMesh([[0, 1], [2, 3]]),
        ProcessMesh([[1, 0], [2, 3]], ["x", "y"]),
        ProcessMesh([0, 1, 2, 3], ["x"]),
        ProcessMesh([[0, 1, 2, 3]], ["x", "y"]),
        "ProcessMesh(x=2, y=2)",
    ],
)
def test_other_meshes_are_different(other):
    assert other != GRID
    assert getattr(other, "unique_id", 0) != GRID.unique_id


def test_its_number_is_the_same_in_every_process():
    script = "import hpcdist as d; print(d.ProcessMesh([[0, 1], [2, 3]], ['x', 'y']).unique_id)"
    told = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(told.stdout) == GRID.unique_id


def test_a_mesh_tells_what_it_is():
    assert (GRID.shape, GRID.ndim, GRID.size) == ([2, 2], 2, 4)
    assert GRID.process_ids == [0, 1, 2, 3]
    assert GRID.dim_names == ["x", "y"]
    assert ProcessMesh([[0, 1]]).dim_names == ["d0", "d1"]
    assert np.array_equal(TURNED.mesh, [[3, 0], [1, 2]])
    assert repr(GRID) == "ProcessMesh(x=2, y=2)"
    assert repr(TURNED) == "ProcessMesh(x=2, y=2, ranks [3, 0, 1, 2])"
    assert len(repr(ProcessMesh(range(1, 5000)))) < 200


def test_what_is_taken_from_a_mesh_does_not_change_it():
    GRID.mesh[:] = 7
    assert GRID.process_ids == [0, 1, 2, 3]


def test_ranks_have_coordinates():
    assert [TURNED.coordinate_of(rank) for rank in range(5)] == [
        (0, 1),
        (1, 0),
        (1, 1),
        (0, 0),
        None,
    ]
    assert [TURNED.rank_at(place) for place in TURNED.coordinates()] == [3, 0, 1, 2]
    assert TURNED.get_dim_size("y") == TURNED.get_dim_size(1) == 2
    assert TURNED.get_rank_by_dim_and_process_id("x", 1) == 1
    assert TURNED.get_rank_by_dim_and_process_id(1, 9) == -1


def test_a_mesh_has_parts():
    assert GRID[0] == ProcessMesh([0, 1], ["y"])
    assert GRID[:, 1] == ProcessMesh([1, 3], ["x"])
    assert GRID[0:1] == ProcessMesh([[0, 1]], ["x", "y"])
    assert GRID[1, 1] == ProcessMesh([3], ["y"])
    assert GRID[-1] == ProcessMesh([2, 3], ["y"])


def test_an_axis_can_be_moved_to_the_front():
    assert GRID.get_mesh_with_dim("y") == ProcessMesh([[0, 2], [1, 3]], ["y", "x"])
    assert GRID.get_mesh_with_dim("y", 1) == ProcessMesh([1, 3], ["x"])
    assert ProcessMesh([4, 5], ["x"]).get_mesh_with_dim("x", 1) == ProcessMesh([5], ["x"])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ProcessMesh(), "a mesh needs its ranks"),
        (lambda: ProcessMesh([]), "The mesh must be an instance of list or np.ndarray"),
        (lambda: ProcessMesh("ab"), "The mesh must be an instance of list or np.ndarray"),
        (lambda: ProcessMesh([0.5]), "The mesh must be an instance of list or np.ndarray"),
        (lambda: ProcessMesh([[0], [1, 2]]), "rows of equal length"),
        (lambda: ProcessMesh(3), "The mesh must be an instance of list or np.ndarray"),
        (lambda: ProcessMesh([0, -1]), "at least 0, got -1"),
        (lambda: ProcessMesh([0, 1, 1]), r"more of \[1\]"),
        (lambda: ProcessMesh(shape=[2, 2], process_ids=[0, 1]), "do not fill"),
        (lambda: ProcessMesh(shape=[2, 0]), "positive"),
        (lambda: ProcessMesh(shape=2), "shape must be integers"),
        (lambda: ProcessMesh(shape=[2], process_ids=[0, 1.5]), "process_ids must be integers"),
        (lambda: ProcessMesh([0, 1], ["x", "y"]), "1 strings"),
        (lambda: ProcessMesh([0, 1], "x"), "list of strings"),
        (lambda: ProcessMesh([0, 1], [3]), "1 strings"),
        (lambda: ProcessMesh([[0], [1]], ["x", "x"]), "different"),
        (lambda: GRID.get_dim_size("z"), "no axis 'z'; its axes are x, y"),
        (lambda: GRID.get_dim_size(2), "no axis 2"),
        (lambda: GRID[0, 0, 0], "at most 2"),
        (lambda: GRID["x"], "integers and slices"),
        (lambda: GRID[5], "no part 5"),
        (lambda: GRID[5:], "at least one rank"),
    ],
)
def test_meshes_that_make_no_sense_are_refused(make, words):
    with pytest.raises(dist.UsageError, match=words):
        make()


# ---- ranks


def test_a_rank_knows_where_it_is():
    assert on_ranks(5, lambda: TURNED.coordinate) == [(0, 1), (1, 0), (1, 1), (0, 0), None]


def test_each_axis_has_a_group_through_each_rank():
    def check():
        x, y = TURNED.get_group("x"), TURNED.get_group("y")
        total = np.array([dist.get_rank()])
        dist.all_reduce(total, group=x)
        return x.ranks, y.ranks, int(total[0])

    assert on_ranks(4, check) == [
        ([0, 2], [0, 3], 2),
        ([1, 3], [1, 2], 4),
        ([0, 2], [1, 2], 2),
        ([1, 3], [0, 3], 4),
    ]


def test_groups_are_made_once_and_shared_by_equal_ranks():
    def check():
        other = ProcessMesh([[3, 0], [1, 2]])
        assert TURNED.get_group("x") is TURNED.get_group(0) is other.get_group("d0")
        assert ProcessMesh([[0, 1, 2, 3]]).get_group("d1") is dist.get_group(0)
        assert TURNED.group is dist.get_group(0)
        return True

    assert all(on_ranks(4, check))


def test_a_mesh_of_one_axis_needs_no_name():
    assert on_ranks(2, lambda: ProcessMesh([1, 0]).get_group().ranks) == [[0, 1], [0, 1]]


def test_a_group_that_was_destroyed_is_made_again():
    def check():
        group = GRID.get_group("x")
        dist.destroy_process_group(group)
        again = GRID.get_group("x")
        return again is not group and not again.is_closed

    assert all(on_ranks(4, check))


def test_groups_die_with_the_session():
    def check():
        group = GRID.get_group("x")
        dist.destroy_process_group()
        dist.init_parallel_env()
        again = GRID.get_group("x")
        return group.is_closed and again.ranks == group.ranks and not again.is_closed

    assert all(on_ranks(4, check))


def test_only_the_ranks_along_an_axis_make_its_group():
    def check():
        pair = ProcessMesh([2, 1])
        if dist.get_rank() in pair.process_ids:
            return pair.group.ranks
        with pytest.raises(dist.UsageError, match="not part of"):
            _ = pair.group
        with pytest.raises(dist.UsageError, match="not part of"):
            pair.get_submesh_with_dim("d0")
        return None

    assert on_ranks(4, check) == [None, [1, 2], [1, 2], None]


def test_a_group_of_ranks_that_there_are_not_is_refused():
    def check():
        with pytest.raises(dist.UsageError, match="has rank 3, but the world has ranks 0 to 1"):
            GRID.get_group("x")
        return True

    assert all(on_ranks(2, check))


def test_which_axis_is_asked_for_must_be_said():
    with pytest.raises(dist.UsageError, match="You should specify the dim_name"):
        GRID.get_group()


def test_the_mesh_along_an_axis_goes_through_this_rank():
    meshes = on_ranks(4, lambda: TURNED.get_submesh_with_dim("x"))
    assert [mesh.process_ids for mesh in meshes] == [[0, 2], [3, 1], [0, 2], [3, 1]]
    assert {mesh.names for mesh in meshes} == {("x",)}


def test_ranks_of_one_machine_cross_no_nodes():
    assert on_ranks(4, lambda: GRID.crosses_nodes) == [(False, False)] * 4


def test_an_axis_crosses_nodes_if_any_of_its_lines_does():
    def check():
        where = dist.comm.session.require_session()
        where.whereabouts = where.whereabouts._replace(endpoints=("a:0", "a:1", "b:0", "b:1"))
        mixed = ProcessMesh([[0, 2], [1, 3]])
        return GRID.crosses_nodes, mixed.crosses_nodes, ProcessMesh(range(4)).crosses_nodes

    assert set(on_ranks(4, check)) == {((True, False), (False, True), (True,))}


# ---- the current mesh


def test_the_current_mesh_is_that_of_the_innermost_block():
    def check():
        assert dist.get_mesh() is None
        with GRID as mesh:
            assert dist.get_mesh() is mesh is GRID
            with TURNED:
                assert dist.get_mesh() is TURNED
            assert dist.get_mesh() is GRID
        dist.set_mesh(TURNED)
        with GRID:
            assert dist.get_mesh() is GRID
        return dist.get_mesh() is TURNED

    assert all(on_ranks(2, check))


def test_each_rank_has_its_own_current_mesh():
    def check():
        mine = ProcessMesh([dist.get_rank()])
        dist.set_mesh(mine)
        dist.barrier()
        return dist.get_mesh() is mine

    assert all(on_ranks(3, check))


def test_a_block_may_be_left_by_an_error_and_after_the_end_of_the_session():
    def check():
        with pytest.raises(KeyError), GRID:
            raise KeyError
        assert dist.get_mesh() is None
        with GRID:
            dist.destroy_process_group()
        dist.init_parallel_env()
        return dist.get_mesh()

    assert on_ranks(2, check) == [None, None]


def test_a_mesh_is_made_of_names_and_sizes():
    def check():
        mesh = dist.create_mesh([("dp", 1), ("mp", 2)])
        assert dist.get_mesh() is mesh
        return mesh

    assert on_ranks(2, check) == [ProcessMesh([[0, 1]], ["dp", "mp"])] * 2


@pytest.mark.parametrize("dims", [[2, 2], [("x", 2), ("x", 2)], [("x", "y")], [], None])
def test_a_mesh_of_other_things_is_refused(dims):
    with pytest.raises(dist.UsageError):
        dist.create_mesh(dims)


def test_only_a_mesh_can_be_the_current_one():
    with pytest.raises(dist.UsageError, match="ProcessMesh"):
        dist.set_mesh([[0, 1]])
