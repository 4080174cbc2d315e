"""`shard_layer` of trees of arrays."""

import numpy as np
import pytest

import hpcdist as dist


def tree():
    return {
        "layers": [dist.Parameter(np.arange(12.0).reshape(4, 3)), np.ones(5, "f4")],
        "rate": 0.1,
        "name": "small",
    }


def mesh():
    return dist.ProcessMesh(dist.get_group(0).ranks, ["mp"])


@pytest.mark.parametrize("size", [1, 3])
def test_arrays_of_a_tree_become_arrays_across_ranks(size):
    def check():
        seen = []

        def place(path, array, process_mesh):
            seen.append((path, type(array), process_mesh))
            return [dist.Shard(0)] if isinstance(array, dist.Parameter) else None

        given = tree()
        given["layers"][0].data += dist.get_rank()  # the first rank's counts
        found = dist.shard_layer(given, mesh(), place)
        weight, bias = found["layers"]
        assert [weight.placements, bias.placements] == [[dist.Shard(0)], [dist.Replicate()]]
        np.testing.assert_array_equal(dist.unshard_dtensor(weight), np.arange(12.0).reshape(4, 3))
        assert bias.dtype == np.float32
        assert (found["rate"], found["name"]) == (0.1, "small")
        assert seen == [
            ("tree['layers'][0]", dist.Parameter, mesh()),
            ("tree['layers'][1]", np.ndarray, mesh()),
        ]
        assert (given["layers"][0].data[0, 0], given["layers"][1].shape) == (dist.get_rank(), (5,))

    dist.simulate(size, check)


def test_without_a_function_all_is_replicated_and_what_is_spread_stays():
    def check():
        spread = dist.shard_tensor(np.arange(4), mesh(), [dist.Shard(0)])
        found = dist.shard_layer([np.ones(3), spread, None], mesh())
        assert found[0].placements == [dist.Replicate()]
        assert found[1] is spread
        assert found[2] is None

    dist.simulate(2, check)


def test_a_function_may_make_the_array_itself():
    def check():
        def place(path, array, process_mesh):
            return dist.shard_tensor(array * 2, process_mesh, [dist.Shard(0)])

        (found,) = dist.shard_layer((np.arange(4.0),), mesh(), place)
        np.testing.assert_array_equal(dist.unshard_dtensor(found), np.arange(4.0) * 2)

    dist.simulate(2, check)


def test_what_is_wrong_is_an_error_on_all_ranks():
    def check():
        rank = dist.get_rank()
        with pytest.raises(dist.MismatchError, match=r"\['a'\]"):
            dist.shard_layer({"a": np.ones(3 + rank)}, mesh())
        with pytest.raises(dist.HpcdistError):
            dist.shard_layer({"a": np.ones(3) if rank else {1, 2}}, mesh())
        place = lambda *_: [dist.Shard(0)] if rank else "rows"  # noqa: E731
        with pytest.raises(dist.RemoteError if rank else dist.UsageError, match="shard_fn must"):
            dist.shard_layer({"a": np.ones(3)}, mesh(), place)
        with pytest.raises(dist.UsageError, match="is not called"):
            dist.shard_layer({"a": np.ones(3)}, mesh(), input_fn=len)
        with pytest.raises(dist.UsageError, match="cannot be empty"):
            dist.shard_layer({"a": np.ones(3)}, None)

    dist.simulate(2, check)
