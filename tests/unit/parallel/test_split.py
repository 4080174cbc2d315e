"""`split` of arrays: the layer is that of one process, whatever the number of ranks."""

import numpy as np
import pytest
from tiers import first_of

import hpcdist as dist

RANKS = pytest.mark.parametrize("ranks", first_of([3, 1, 2, 4]))
X, WEIGHT = np.random.default_rng(0).random((2, 5, 7)), np.random.default_rng(1).random((7, 5))
BIAS = np.arange(5.0)
WHOLE = X @ WEIGHT + BIAS


def simulated(ranks, check):
    return dist.simulate(ranks, check, timeout=20)


def own(length, axis=0):
    """Return where this rank's part of a length is."""
    cut = dist.shard_tensor(
        np.arange(length), dist.ProcessMesh(dist.get_group(0).ranks), [dist.Shard(0)]
    )
    return slice(int(cut.local[0]), int(cut.local[-1]) + 1) if cut.local.size else slice(0, 0)


def linear(x, axis, **options):
    size = dist.get_world_size()
    given = {"weight_attr": WEIGHT, "bias_attr": BIAS, **options}
    return dist.split(x, (7, 5), "linear", axis, size, **given)


@RANKS
@pytest.mark.parametrize("axis", [0, 1])
def test_a_linear_layer_is_that_of_one_process(ranks, axis):
    def check():
        np.testing.assert_allclose(linear(X, axis), WHOLE)
        np.testing.assert_allclose(linear(X, axis, bias_attr=False), X @ WEIGHT)
        np.testing.assert_allclose(linear(X, axis, bias_attr=None), X @ WEIGHT)
        made = linear(X, axis, weight_attr=lambda shape: np.full(shape, 2.0))
        np.testing.assert_allclose(made, X @ np.full((7, 5), 2.0) + BIAS)

    simulated(ranks, check)


@RANKS
def test_what_is_not_gathered_is_cut_by_outputs_or_a_contribution(ranks):
    def check():
        np.testing.assert_allclose(linear(X, 1, gather_out=False), WHOLE[..., own(5)])
        total = linear(X, 0, gather_out=False).copy()
        dist.all_reduce(total)
        np.testing.assert_allclose(total, WHOLE)

    simulated(ranks, check)


@RANKS
def test_inputs_and_weights_may_come_in_parts(ranks):
    def check():
        rows, columns = own(7), own(5)
        np.testing.assert_allclose(linear(X[..., rows], 0), WHOLE)
        np.testing.assert_allclose(linear(X[..., rows], 0, weight_attr=WEIGHT[rows]), WHOLE)
        found = linear(X, 1, weight_attr=WEIGHT[:, columns], bias_attr=BIAS[columns])
        np.testing.assert_allclose(found, WHOLE)

    simulated(ranks, check)


@RANKS
def test_an_embedding_looks_up_the_rows_of_all_ranks(ranks):
    def check():
        numbers, size = np.array([[0, 6, 3], [2, 2, 5]]), dist.get_world_size()
        found = dist.split(numbers, [7, 5], "embedding", 0, size, weight_attr=WEIGHT)
        np.testing.assert_array_equal(found, WEIGHT[numbers])

    simulated(ranks, check)


@RANKS
@pytest.mark.parametrize("placements", [[dist.Replicate()], [dist.Shard(0)], [dist.Shard(2)]])
def test_arrays_across_ranks_are_spread_as_the_layer_cuts(ranks, placements):
    def check():
        mesh = dist.ProcessMesh(dist.get_group(0).ranks)
        x = dist.shard_tensor(X, mesh, placements)
        for axis, weight in ((0, [dist.Shard(0)]), (1, [dist.Shard(1)])):
            cut = dist.shard_tensor(WEIGHT, mesh, weight)
            whole = linear(x, axis, weight_attr=cut)
            assert whole.placements == [dist.Replicate()] or ranks == 1
            np.testing.assert_allclose(whole.local, WHOLE)
            part = linear(x, axis, gather_out=False)
            kind = dist.Partial() if axis == 0 else dist.Shard(2)
            assert part.placements == [kind] or ranks == 1
            np.testing.assert_allclose(dist.unshard_dtensor(part), WHOLE)

    simulated(ranks, check)


def test_on_a_grid_the_batch_stays_cut_along_the_other_axis():
    def check():
        mesh = dist.ProcessMesh([[0, 1], [2, 3]], ["dp", "mp"])
        x = dist.shard_tensor(X, mesh, [dist.Shard(0), dist.Replicate()])
        found = dist.split(x, (7, 5), "linear", 1, 2, weight_attr=WEIGHT, bias_attr=BIAS)
        assert found.placements == [dist.Shard(0), dist.Replicate()]
        np.testing.assert_allclose(dist.unshard_dtensor(found), WHOLE)
        with mesh:
            row = mesh.coordinate[0]
            plain = dist.split(X[row], (7, 5), "linear", 0, 2, weight_attr=WEIGHT, bias_attr=BIAS)
        np.testing.assert_allclose(plain, WHOLE[row])

    simulated(4, check)


@RANKS
def test_a_weight_that_is_drawn_is_the_same_on_any_number_of_ranks_and_known_by_its_name(ranks):
    def check():
        size = dist.get_world_size()
        made = [
            dist.split(np.eye(4), (4, 6), "linear", axis, size, bias_attr=False, name=name)
            for axis in (0, 1)
            for name in ("first", "second")
        ]
        np.testing.assert_allclose(made[0], made[2])
        assert not np.allclose(made[0], made[1])
        assert np.abs(made[0]).max() <= (6 / 10) ** 0.5
        return made[0]

    alone = dist.simulate(1, lambda: dist.split(np.eye(4), (4, 6), "linear", 1, 1, name="first"))[0]
    for found in simulated(ranks, check):
        np.testing.assert_allclose(found, alone)


WRONG = [
    ({"operation": "conv"}, "operation must be 'linear' or 'embedding'"),
    ({"size": (7,)}, "size must be two positive integers"),
    ({"size": (7, 0)}, "size must be two positive integers"),
    ({"axis": 2}, "axis must be 0 or 1"),
    ({"axis": True}, "axis must be 0 or 1"),
    ({"num_partitions": 5}, "num_partitions is 5, but .* has 2 ranks"),
    ({"num_partitions": 0}, "num_partitions must be a positive integer"),
    ({"gather_out": "yes"}, "gather_out must be True or False"),
    ({"weight_attr": np.ones((2, 2))}, r"weight_attr must be an array of the shape \(7, 5\)"),
    ({"bias_attr": np.ones(3)}, r"bias_attr must be an array of the shape \(5,\)"),
    ({"x": np.ones((2, 6))}, r"the last dimension of x must be 7 or, as this rank's part of it"),
    ({"x": ["a"]}, "split takes arrays and tensors of numbers"),
    ({"name": 3}, "name must be a string"),
    ({"operation": "embedding"}, "takes integers"),
    ({"operation": "embedding", "x": np.array([7])}, "x must name entries 0 to 6"),
    ({"operation": "embedding", "axis": 1, "x": np.array([1])}, "axis must be 0, got 1"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG)
def test_what_one_rank_gets_wrong_all_ranks_hear_of(changed, message):
    right = {"x": X, "size": (7, 5), "operation": "linear", "axis": 0, "num_partitions": 2}

    def check():
        options = {**right, "bias_attr": None if "operation" in changed else BIAS}
        bad = dist.get_rank() == 1
        with pytest.raises(dist.UsageError if bad else dist.RemoteError, match=message):
            dist.split(**(options | changed if bad else options))
        np.testing.assert_allclose(linear(X, 0), WHOLE)

    simulated(2, check)


def test_ranks_that_split_other_layers_hear_of_both():
    def check():
        with pytest.raises(dist.MismatchError, match=r"(?s)7 x 5.*7 x 6"):
            dist.split(X, (7, 5 + dist.get_rank()), "linear", 1, 2)

    simulated(2, check)


def test_with_one_partition_every_rank_is_alone():
    def check():
        if dist.get_rank() == 0:
            found = dist.split(X, (7, 5), "linear", weight_attr=WEIGHT, bias_attr=BIAS)
            np.testing.assert_allclose(found, WHOLE)
            with pytest.raises(dist.UsageError, match="last dimension"):
                dist.split(X[..., :3], (7, 5), "linear")

    simulated(2, check)


def test_with_one_partition_a_batch_stays_cut():
    def check():
        mesh = dist.ProcessMesh([0, 1])
        x = dist.shard_tensor(X, mesh, [dist.Shard(0)])
        found = dist.split(x, (7, 5), "linear", weight_attr=WEIGHT, bias_attr=BIAS)
        assert found.placements == [dist.Shard(0)]
        np.testing.assert_allclose(dist.unshard_dtensor(found), WHOLE)

    simulated(2, check)
