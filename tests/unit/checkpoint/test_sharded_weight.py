"""`ShardedWeight`s in checkpoints, on any number of ranks, and what a model keeps."""

import numpy as np
import pytest

import hpcdist as dist
from hpcdist import checkpoint

WHOLE = np.arange(24.0).reshape(4, 6)


def columns(whole, key="w"):
    """Return this rank's columns; they are equally many."""
    own = np.split(whole, dist.get_world_size(), axis=1)[dist.get_rank()].copy()
    return dist.shard_weight(key, own, 1, dist.get_group(0))


def flattened(whole, key="w"):
    """Return this rank's run of the flattened last four columns."""
    block, size, rank = whole[:, 2:], dist.get_world_size(), dist.get_rank()
    bounds = slice(16 * rank // size, 16 * (rank + 1) // size)
    own = block.reshape(-1)[bounds].copy()
    return dist.ShardedWeight(key, own, (4, 4), (4, 6), (0, 2), True, bounds)


@pytest.mark.parametrize(("savers", "loaders"), [(2, 3), (3, 1), (1, 2)])
def test_what_any_number_of_ranks_has_saved_any_other_loads(savers, loaders, tmp_path):
    def save():
        dist.save_state_dict({"w": columns(WHOLE), "rest": WHOLE[:, :2].copy()}, tmp_path)

    def load():
        state = {"w": columns(np.zeros_like(WHOLE)), "rest": np.zeros((4, 2))}
        dist.load_state_dict(state, tmp_path)
        assert (state["w"].local_tensor == columns(WHOLE).local_tensor).all()
        assert (state["rest"] == WHOLE[:, :2]).all()
        whole = checkpoint.load(None, tmp_path)["w"]
        assert (whole == WHOLE).all()

    dist.simulate(savers, save)
    dist.simulate(loaders, load)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_run_of_a_flattened_part_is_filled_from_the_whole(ranks, tmp_path):
    def check():
        checkpoint.save({"w": WHOLE}, tmp_path)
        state = {"w": flattened(np.zeros_like(WHOLE))}
        assert dist.load_state_dict(state, tmp_path) is None
        assert (state["w"].local_tensor == flattened(WHOLE).local_tensor).all()

    dist.simulate(ranks, check)


def test_runs_of_flattened_parts_are_saved(tmp_path):
    def check():
        rank = dist.get_rank()
        block, bounds = WHOLE[2 * rank : 2 * rank + 2], [slice(0, 5), slice(5, 12)]
        parts = [
            dist.ShardedWeight(
                "w", block.reshape(-1)[each].copy(), (2, 6), (4, 6), (2 * rank, 0), True, each
            )
            for each in bounds
        ]
        whole = dist.ShardedWeight(
            "w", block.reshape(-1).copy(), (2, 6), (4, 6), (2 * rank, 0), True
        )
        dist.save_state_dict({"w": whole}, tmp_path / "kept")
        for part in parts:
            expected = part.local_tensor.copy()
            part.local_tensor[:] = 0
            dist.load_state_dict({"w": part}, tmp_path / "kept")
            assert (part.local_tensor == expected).all()

    dist.simulate(2, check)


def test_rules_say_which_weights_are_parts(tmp_path):
    def save():
        state = {"w": columns(WHOLE).local_tensor, "b": np.arange(3.0)}
        built = dist.build_sharded_state_dict(state, {"w": 1}, "model.")
        assert [*built] == ["model.w", "model.b"]
        assert built["model.w"].global_shape == (4, 6)
        assert built["model.b"].global_offset == (0,)
        dist.save_state_dict(built, tmp_path)

    dist.simulate(2, save)
    found = dist.load_merged_state_dict(tmp_path)
    assert (found["model.w"] == WHOLE).all()
    assert (found["model.b"] == np.arange(3.0)).all()


def test_rules_mean_the_ranks_along_the_axis_mp_of_the_mesh(tmp_path):
    def save():
        with dist.ProcessMesh([[0, 1], [2, 3]], ["dp", "mp"]) as mesh:
            own = WHOLE[:, 3 * mesh.coordinate[1] :][:, :3].copy()
            spread = dist.shard_tensor(WHOLE, mesh, [dist.Shard(0)])
            built = dist.build_sharded_state_dict({"w": own, "a": spread}, {"w": 1})
            assert built["a"] is spread
            dist.save_state_dict(built, tmp_path)

    dist.simulate(4, save)
    found = dist.load_merged_state_dict(tmp_path)
    assert (found["w"] == WHOLE).all()
    assert (found["a"] == WHOLE).all()


def test_what_does_not_fit_is_refused():
    with pytest.raises(dist.UsageError, match="a length and an offset for each dimension"):
        dist.ShardedWeight("w", WHOLE, (4, 6), (4, 6), (0,))

    def check():
        group = dist.get_group(0)
        for axis in (2, -1, True):
            with pytest.raises(dist.UsageError, match="Shard axis"):
                dist.shard_weight("w", WHOLE, axis, group)
        with pytest.raises(dist.UsageError, match="shard_rules has 'v'"):
            dist.build_sharded_state_dict({"w": WHOLE}, {"v": 0})
        wrong = dist.ShardedWeight("w", WHOLE, (4, 5), (4, 6), (0, 0))
        with pytest.raises(dist.UsageError, match=r"has the shape \(4, 6\), but by its"):
            dist.save_state_dict({"w": wrong}, "nowhere")

    dist.simulate(2, check)


# ---- persistables


class Model:
    def __init__(self, value):
        self.w, self.is_training = np.full(3, value), True

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = state["w"]

    def eval(self):
        self.is_training = False

    def forward(self, x, mask):
        return self.w * x * mask


def test_what_a_model_keeps_is_saved_and_loaded(tmp_path):
    def check():
        dist.io.save_persistables(None, tmp_path, {"w": np.arange(3), "b": [np.ones(2)]}, "tree")
        found = {"w": np.zeros(3, int), "b": [np.zeros(2)]}
        dist.io.load_persistables(None, tmp_path, found, "tree")
        assert (found["w"].tolist(), found["b"][0].tolist()) == ([0, 1, 2], [1, 1])
        dist.io.save_persistables(Model(2.0), tmp_path / "model")
        model, inputs, outputs = dist.io.load_inference_model_distributed(
            tmp_path / "model", Model(0.0)
        )
        assert model.w.tolist() == [2, 2, 2]
        assert (model.is_training, inputs, outputs) == (False, ["x", "mask"], [])
        for wrong in ({"model_filename": "model"}, {"pserver_endpoints": ["a:1"]}):
            with pytest.raises(dist.UsageError, match="has no structure of a model"):
                dist.io.load_inference_model_distributed(tmp_path / "model", model, **wrong)
        with pytest.raises(dist.UsageError, match="there are no programs here"):
            dist.io.save_persistables("executor", tmp_path)

    dist.simulate(2, check)


def test_parameters_and_arrays_persist():
    assert dist.io.is_persistable(np.ones(3))
    assert dist.io.is_persistable(dist.Parameter(np.ones(3)))
    assert not dist.io.is_persistable(3)


def test_of_torch_parameters_persist_and_what_says_so():
    torch = pytest.importorskip("torch")
    tensor = torch.ones(3)
    assert not dist.io.is_persistable(tensor)
    assert dist.io.is_persistable(torch.nn.Parameter(tensor))
    tensor.persistable = True
    assert dist.io.is_persistable(tensor)
