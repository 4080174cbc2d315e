"""Pictures of layouts."""

import numpy as np
import pytest

import hpcdist as dist
from hpcdist import Partial, ProcessMesh, Replicate, Shard

GRID = ProcessMesh([[0, 1], [2, 3]], ["x", "y"])


def picture_of(x, placements, capsys, mesh=GRID):
    def draw():
        array = dist.shard_tensor(x, mesh, placements)
        if dist.get_rank() == 0:  # the others are not there
            dist.visualize_sharding(array)

    dist.simulate(mesh.size, draw)
    return capsys.readouterr().out.splitlines()


def cells(line):
    return [each.strip() for each in line.strip("│").split("│")]


def test_parts_are_fields_with_their_ranks(capsys):
    title, _, head, _, upper, _, lower, _ = picture_of(
        np.ones((5, 7)), [Shard(0), Shard(1)], capsys
    )
    assert title == "(5, 7), [Shard(0), Shard(1)] on ProcessMesh(x=2, y=2)"
    assert cells(head) == ["", "0:4", "4:7"]
    assert cells(upper) == ["0:3", "0", "1"]
    assert cells(lower) == ["3:5", "2", "3"]


@pytest.mark.parametrize(
    ("shape", "placements", "row"),
    [
        ((4, 2), [Replicate(), Replicate()], ["0:4", "0, 1, 2, 3"]),
        ((4, 2), [Partial(), Partial()], ["0:4", "0 + 1 + 2 + 3"]),
        ((4, 2), [Replicate(), Partial()], ["0:4", "(0, 2) + (1, 3)"]),
        ((4, 2, 6), [Shard(2), Partial()], ["0:4", "0 + 1", "2 + 3"]),
        ((3,), [Shard(0), Shard(0)], ["", "0", "1", "2"]),
        ((), [], ["", "0, 1, 2, 3"]),
    ],
)
def test_ranks_that_have_the_same_or_contribute_are_in_one_field(shape, placements, row, capsys):
    assert cells(picture_of(np.ones(shape), placements, capsys)[4]) == row


def test_parts_of_many_cuts_are_listed(capsys):
    mesh = ProcessMesh(np.arange(8).reshape(2, 2, 2))
    told = picture_of(np.ones((2, 2, 2)), [Shard(0), Shard(1), Shard(2)], capsys, mesh)
    assert cells(told[-2]) == ["[1:2, 1:2, 1:2]", "7"]


def test_other_things_have_no_picture():
    with pytest.raises(dist.UsageError, match="a picture is of a DistArray"):
        dist.visualize_sharding(np.ones(3))


def test_axes_of_matplotlib_are_drawn_into():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    ax = figure.subplots()

    def draw():
        array = dist.shard_tensor(np.ones((5, 7)), GRID, [Shard(0), Shard(1)])
        if dist.get_rank() == 0:
            dist.visualize_sharding(array, ax)

    dist.simulate(4, draw)
    assert sorted(text.get_text() for text in ax.texts) == ["0", "1", "2", "3"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]
