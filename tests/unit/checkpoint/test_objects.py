"""Objects in the state, and values that come back as what they were."""

import math
import os
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tiers import first_of

import hpcdist as dist
from hpcdist import checkpoint
from hpcdist.checkpoint import Shard

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file

OLD = Path(__file__).parent / "data/checkpoints"


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "saved")


class Average:
    """A user's class: an array, a number, and a dict that grows."""

    def __init__(self, refuses=False):
        self.array, self.steps, self.seen = np.zeros(3), 0, {}
        self.refuses = refuses

    def add(self, value):
        self.array += value
        self.steps += 1
        self.seen[str(self.steps)] = [value]

    def state_dict(self):
        return {"array": self.array, "steps": self.steps, "seen": self.seen}

    def load_state_dict(self, state):
        if self.refuses:
            raise ValueError("no")
        self.array, self.steps, self.seen = state["array"], state["steps"], state["seen"]


def training(seed=0, kind=torch.optim.Adam, scheduled=True, **options):
    """Return all that a training with torch has."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU())
    optimizer = kind(model.parameters(), **{"lr": 0.1, **options})
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3], 0.5) if scheduled else None
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}


def train(state, steps):
    chance = torch.Generator().manual_seed(state["epoch"])
    for _ in range(steps):
        state["optimizer"].zero_grad()
        state["model"](torch.randn(5, 3, generator=chance)).square().sum().backward()
        state["optimizer"].step()
        if state["scheduler"] is not None:
            state["scheduler"].step()
        state["epoch"] += 1
    return [each.detach().clone() for each in state["model"].parameters()]


OPTIMIZERS = {
    "Adam": (torch.optim.Adam, {"amsgrad": True, "betas": (0.8, 0.9)}),
    "AdamW": (torch.optim.AdamW, {}),
    "SGD": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "a tensor as rate": (torch.optim.Adam, {"lr": torch.tensor(0.1), "foreach": False}),
}


# ---- the obvious thing


@pytest.mark.parametrize("name", first_of(OPTIMIZERS))
@pytest.mark.parametrize("way", ["objects", "state_dicts", "load(None)"])
def test_a_training_goes_on_as_if_it_had_not_stopped(folder, name, way):
    kind, options = OPTIMIZERS[name]
    first = training(kind=kind, **options)
    train(first, 2)
    checkpoint.save(first, folder)
    expected = train(first, 3)
    fresh = training(seed=1, kind=kind, **options)
    LOADING[way](fresh, folder)
    assert fresh["epoch"] == 2
    found = train(fresh, 3)
    assert all(map(torch.equal, expected, found))
    assert fresh["scheduler"].get_last_lr() == first["scheduler"].get_last_lr()


def load_objects(fresh, folder):
    assert checkpoint.load(fresh, folder) is fresh


def load_state_dicts(fresh, folder):
    objects = {key: fresh[key] for key in ("model", "optimizer", "scheduler")}
    state = {key: each.state_dict() for key, each in objects.items()}
    state["epoch"] = 0
    checkpoint.load(state, folder)
    for key, each in objects.items():
        each.load_state_dict(state[key])
    fresh["epoch"] = state["epoch"]


def load_all_anew(fresh, folder):
    state = checkpoint.load(None, folder)
    for key in ("model", "optimizer", "scheduler"):
        fresh[key].load_state_dict(state[key])
    fresh["epoch"] = state["epoch"]


LOADING = {
    "objects": load_objects,
    "state_dicts": load_state_dicts,
    "load(None)": load_all_anew,
}


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize(("savers", "loaders"), [(1, 3), (3, 1), (2, 2)])
def test_objects_are_saved_and_loaded_on_any_number_of_ranks(tmp_path, async_save, savers, loaders):
    def save():
        state = {"average": Average(), "deep": [{"again": Average()}]}
        state["average"].add(2.0)
        work = checkpoint.save(state, tmp_path, async_save=async_save)
        state["average"].array += 1  # what is saved is the state of that moment
        work.wait()

    def load():
        state = {"average": Average(), "deep": [{"again": Average()}]}
        kept = state["average"]
        checkpoint.load(state, tmp_path)
        assert state["average"] is kept
        assert state["deep"][0]["again"].steps == 0
        return kept.array.tolist(), kept.steps, kept.seen

    if async_save:
        dist.simulate(savers, save)
    else:
        dist.simulate(savers, lambda: checkpoint.save(with_one_step(), tmp_path))
    assert dist.simulate(loaders, load) == [([2.0] * 3, 1, {"1": [2.0]})] * loaders


def with_one_step():
    state = {"average": Average(), "deep": [{"again": Average()}]}
    state["average"].add(2.0)
    return state


def test_a_schedule_an_optimizer_and_a_sampler_of_ours_go_on(folder):
    def pieces():
        weights = dist.Parameter(np.ones(3))
        optimizer = dist.optim.Adam([("w", weights)], learning_rate=0.1)
        sampler = dist.DistributedSampler(10, num_replicas=1, rank=0, seed=3)
        return weights, {"optimizer": optimizer, "sampler": sampler}

    weights, state = pieces()
    weights.grad = np.arange(3.0)
    state["optimizer"].step()
    next(iter(state["sampler"]))
    checkpoint.save(state, folder)
    _, fresh = pieces()
    checkpoint.load(fresh, folder)
    assert fresh["sampler"].state_dict() == state["sampler"].state_dict()
    expected = state["optimizer"].state_dict()
    found = fresh["optimizer"].state_dict()
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[key], expected[key]) for key in found)


def test_a_grad_scaler_goes_on(folder):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    checkpoint.save({"scaler": scaler}, folder)
    fresh = torch.amp.GradScaler("cpu")
    checkpoint.load({"scaler": fresh}, folder)
    assert fresh.state_dict() == scaler.state_dict()


def test_going_back_forgets_the_steps_in_between(folder):
    """An optimizer without a state takes that of one with, and the other way round."""
    state = training(scheduled=False)
    checkpoint.save(state, folder)
    train(state, 2)
    checkpoint.load(state, folder)
    assert state["optimizer"].state_dict()["state"] == {}
    assert state["epoch"] == 0


def test_empty_dicts_and_lists_take_what_was_saved(folder):
    checkpoint.save({"losses": [0.5, 0.25], "more": {"a": {"x": np.ones(2)}}, "pair": (1,)}, folder)
    losses, more = [], {}
    state = {"losses": losses, "more": more, "pair": ()}
    checkpoint.load(state, folder)
    assert losses == [0.5, 0.25]
    assert (more["a"]["x"] == 1).all()
    assert state["losses"] is losses
    assert state["more"] is more
    assert state["pair"] == (1,)
    whole = {}
    assert checkpoint.load(whole, folder) is whole
    assert whole.keys() == state.keys()


# ---- what comes back is what it was

VALUES = [
    torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3),
    torch.tensor(3),
    torch.tensor([], dtype=torch.complex128),
    torch.zeros(2, dtype=torch.float8_e4m3fn),
    torch.ones(2, dtype=torch.bool),
    torch.nn.Parameter(torch.ones(2)).detach(),
    np.arange(3, dtype=np.int16),
    np.ones(2, ml_dtypes.bfloat16),
    np.array(2.5),
    np.float32(1.5),
    np.int64(-3),
    np.bool_(True),
    np.str_("text"),
    np.datetime64("2020-01-01"),
    *(1, 2.5, True, None, "text", b"\0", 1 + 2j, math.inf, 10**5000, -(2**63), 2**63),
    *((1, "two", (3.0, [None])), [], {}, ()),
]


@pytest.mark.parametrize("value", VALUES, ids=[type(value).__name__ for value in VALUES])
@pytest.mark.parametrize("template", [None, {"x": None}], ids=["None", "key"])
def test_a_value_comes_back_as_what_it_was(folder, value, template):
    checkpoint.save({"x": value}, folder)
    found = checkpoint.load(template and dict(template), folder)["x"]
    assert type(found) is type(value)
    if isinstance(value, torch.Tensor):
        assert found.dtype is value.dtype
        assert found.shape == value.shape
        bits = torch.uint8 if value.element_size() == 1 else value.dtype
        assert torch.equal(found.view(bits), value.view(bits))
    elif isinstance(value, np.ndarray):
        assert found.dtype == value.dtype
        assert found.tobytes() == value.tobytes()
    else:
        assert found == value


def test_arrays_of_jax_come_back_as_such(folder):
    jnp = pytest.importorskip("jax.numpy")
    checkpoint.save({"x": jnp.arange(3)}, folder)
    found = checkpoint.load(None, folder)["x"]
    assert type(found) is type(jnp.ones(1))
    assert (found == jnp.arange(3)).all()


def test_the_shards_of_a_tensor_come_back_as_one(tmp_path):
    def save():
        rank = dist.get_rank()
        part = Shard(torch.full((2,), rank), (4,), 2 * rank)
        checkpoint.save({"x": part}, tmp_path)

    dist.simulate(2, save)
    assert torch.equal(checkpoint.load(None, tmp_path)["x"], torch.tensor([0, 0, 1, 1]))


def test_without_torch_its_tensors_are_numpys_arrays(folder, monkeypatch):
    import sys

    checkpoint.save({"x": torch.ones(2, dtype=torch.bfloat16)}, folder)
    monkeypatch.setitem(sys.modules, "hpcdist.arrays.torch", None)
    found = checkpoint.load(None, folder)["x"]
    assert type(found) is np.ndarray
    assert found.dtype == ml_dtypes.bfloat16


# ---- what differs is named, and nothing is changed


def snapshot(state):
    return {
        key: repr(each.state_dict() if hasattr(each, "state_dict") else each)
        for key, each in state.items()
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("scheduler"), "'scheduler' is in the checkpoint, but not in the state"),
        (lambda s: s.pop("optimizer"), "'optimizer' is in the checkpoint, but not in the state"),
        (lambda s: s.update(extra=Average()), "'extra' is not in the checkpoint"),
        (
            lambda s: s.update(model=torch.nn.Sequential(torch.nn.Linear(3, 4))),
            "'model.1' is in|'model.1.weight' is in the checkpoint, but not in the state",
        ),
        (
            lambda s: s.update(model=torch.nn.Linear(3, 4)),
            "'model.weight' is not in the checkpoint",
        ),
        (
            lambda s: s["model"].__setitem__(0, torch.nn.Linear(3, 5)),
            r"'model\.0\.weight' is float32 of shape \(4, 3\) .* \(5, 3\) here",
        ),
        (
            lambda s: s["optimizer"].add_param_group(
                {"params": [torch.nn.Parameter(torch.ones(1))]}
            ),
            r"'optimizer\.param_groups' has 1 entries in the checkpoint, 2 here",
        ),
        (
            lambda s: s.update(
                optimizer=torch.optim.Adam(list(s["model"].parameters())[:2], lr=0.1)
            ),
            r"'optimizer\.param_groups\.0\.params' has 4 entries in the checkpoint, 2 here",
        ),
        (lambda s: s.update(optimizer=Average()), r"'optimizer\.array' is not in the checkpoint"),
        (
            lambda s: s.update(optimizer=Average()),
            r"'optimizer' was saved from an object of another kind: load it into one alike",
        ),
        (lambda s: s.update(epoch=Average()), "'epoch' is a value in the checkpoint, a dict here"),
    ],
)
def test_what_differs_is_named_before_anything_is_changed(folder, change, message):
    first = training()
    train(first, 2)
    checkpoint.save(first, folder)
    fresh = training(seed=1)
    change(fresh)
    before = snapshot(fresh)
    with pytest.raises(dist.CheckpointError, match=f"nothing was loaded.*({message})"):
        checkpoint.load(fresh, folder)
    assert snapshot(fresh) == before


def test_not_strict_loads_what_both_have_and_names_the_rest(folder):
    first = training()
    train(first, 2)
    checkpoint.save(first, folder)
    fresh = training(seed=1, scheduled=False)
    del fresh["scheduler"], fresh["optimizer"]
    fresh["later"] = 7
    told = (
        "'later' is not in the checkpoint; 'optimizer' is in the checkpoint, but not in the state"
    )
    with pytest.warns(dist.CheckpointWarning, match=told):
        checkpoint.load(fresh, folder, strict=False)
    assert torch.equal(fresh["model"][0].weight, first["model"][0].weight)
    assert (fresh["epoch"], fresh["later"]) == (2, 7)


def test_not_strict_fills_of_a_model_what_was_saved_of_it(folder):
    checkpoint.save({"model": torch.nn.Sequential(torch.nn.Linear(3, 4))}, folder)
    larger = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    kept = larger[1].weight.detach().clone()
    with pytest.warns(dist.CheckpointWarning, match=r"'model.1.weight' is not in the checkpoint"):
        checkpoint.load({"model": larger}, folder, strict=False)
    assert torch.equal(larger[1].weight, kept)
    assert torch.equal(larger[0].weight, checkpoint.load(None, folder)["model"]["0.weight"])


def test_one_rank_that_wants_more_is_an_error_on_all(tmp_path):
    checkpoint.save({"x": np.ones(2), "y": np.ones(2)}, tmp_path)

    def load():
        state = {"x": np.zeros(2), "y": np.zeros(2)}
        if dist.get_rank() == 1:
            state["z"] = np.zeros(2)
        with pytest.raises(dist.CheckpointError, match="'z' is not in the checkpoint"):
            checkpoint.load(state, tmp_path)
        return state["x"].sum() + state["y"].sum()

    assert dist.simulate(3, load) == [0, 0, 0]


def test_what_another_rank_loads_is_not_left(tmp_path):
    checkpoint.save({"own": {0: np.zeros(2), 1: np.ones(2)}, "left": 3}, tmp_path)

    def load(strict_state):
        rank = dist.get_rank()
        state = {"own": {rank: np.full(2, 9.0)}, **strict_state}
        try:
            checkpoint.load(state, tmp_path)
        except dist.CheckpointError as error:
            return str(error)
        return state["own"][rank][0]

    assert dist.simulate(2, load, {"left": 0}) == [0, 1]
    told = dist.simulate(2, load, {})
    assert all("'left' is in the checkpoint" in each and "own" not in each for each in told)


def test_an_object_that_refuses_its_state_leaves_the_others_as_they_were(folder):
    """A sampler of another dataset: found when the model is as it was."""
    first = training()
    first["sampler"] = dist.DistributedSampler(10, num_replicas=1, rank=0)
    train(first, 1)
    checkpoint.save(first, folder)
    fresh = training(seed=1)
    fresh["sampler"] = dist.DistributedSampler(11, num_replicas=1, rank=0)
    before = snapshot(fresh)
    with pytest.raises(dist.CheckpointError, match=r"'sampler', a DistributedSampler, refuses"):
        checkpoint.load(fresh, folder)
    assert snapshot(fresh) == before


def test_an_object_that_refuses_on_one_rank_is_an_error_on_all(tmp_path):
    checkpoint.save({"a": Average()}, tmp_path)

    def load():
        with pytest.raises(dist.CheckpointError, match=r"rank 1: 'a', an Average, refuses .*: no"):
            checkpoint.load({"a": Average(refuses=dist.get_rank() == 1)}, tmp_path)
        return True

    assert dist.simulate(2, load) == [True, True]


def test_an_object_whose_state_cannot_be_taken_is_named(folder):
    class Broken(Average):
        def state_dict(self):
            raise RuntimeError("not now")

    with pytest.raises(dist.UsageError, match=r"'b' is a Broken whose state cannot .*: not now"):
        checkpoint.save({"b": Broken()}, folder)
    assert not os.path.exists(folder)


def test_an_error_of_an_object_is_told_with_its_class(folder):
    class Forgetful(Average):
        def state_dict(self):
            return self.missing["taken"]

        def load_state_dict(self, state):
            state["loaded"]

    saved = Forgetful()
    saved.missing = {}
    with pytest.raises(dist.UsageError, match=r"cannot be taken: KeyError: 'taken'"):
        checkpoint.save({"a": saved}, folder)
    checkpoint.save({"a": Average()}, folder)
    with pytest.raises(dist.CheckpointError, match=r"cannot be taken: KeyError: 'taken'"):
        checkpoint.load({"a": saved}, folder)
    saved.missing = {"taken": Average().state_dict()}
    with pytest.raises(dist.CheckpointError, match=r"refuses .*: KeyError: 'loaded'"):
        checkpoint.load({"a": saved}, folder)


def test_a_damaged_checkpoint_changes_no_object(folder):
    first = training()
    train(first, 2)
    checkpoint.save(first, folder)
    (name,) = [name for name in os.listdir(folder) if name.endswith(".safetensors")]
    path = os.path.join(folder, name)
    with open(path, "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\x55")
    fresh = training(seed=1)
    before = snapshot(fresh)
    with pytest.raises(dist.CheckpointError, match="is damaged"):
        checkpoint.load(fresh, folder)
    assert snapshot(fresh) == before


def test_a_state_that_contains_itself_is_refused(folder):
    state = {}
    state["state"] = state
    with pytest.raises(dist.UsageError, match="must not contain itself"):
        checkpoint.save(state, folder)


def test_kinds_of_dicts_stay_what_they_are(folder):
    class Counting(Average):
        def __init__(self):
            super().__init__()
            self.seen = Counter()

    first = Counting()
    first.seen["a"] = 2
    checkpoint.save({"c": first}, folder)
    fresh = Counting()
    checkpoint.load({"c": fresh}, folder)
    assert fresh.seen == Counter(a=2)
    assert type(fresh.seen) is Counter


# ---- checkpoints of before


def test_a_checkpoint_of_arrays_made_before_objects_were_known_is_loaded():
    found = checkpoint.load(None, OLD / "numpy-1")
    assert (found["model"]["w"] == np.arange(6.0).reshape(2, 3)).all()
    assert found["model"]["b"].dtype == ml_dtypes.bfloat16
    assert found["model"]["table"]["name"][0] == b"ab"
    assert type(found["scalar"]) is np.float32
    assert found["losses"] == [1.0, math.inf, None]
    assert found["pair"] == (1, "two", b"\0\xff", 1 + 2j)
    assert found["by number"] == {0: "zero", 1: True}
    assert found["empty"] == [{}, [], ()]
    checkpoint.verify(OLD / "numpy-1")


@pytest.mark.parametrize("way", ["objects", "state_dicts"])
def test_a_checkpoint_of_torch_made_before_objects_were_known_is_loaded(way):
    """What the file holds is what comes back: another processor trains to other bits."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}
    LOADING[way](state, OLD / "torch-1")
    assert state["epoch"] == scheduler.last_epoch == 3
    assert optimizer.param_groups[0]["lr"] == 0.005
    found = {f"model.{name}": value for name, value in model.state_dict().items()}
    for number, moments in optimizer.state_dict()["state"].items():
        found |= {f"optimizer.state.{number}.{name}": value for name, value in moments.items()}
    (path,) = (OLD / "torch-1").glob("*.safetensors")
    saved = load_file(path)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)


def test_a_checkpoint_of_torch_made_before_objects_were_known_holds_arrays():
    loaded = checkpoint.load(None, OLD / "torch-1")
    (path,) = (OLD / "torch-1").glob("*.safetensors")
    saved = load_file(path)
    assert np.array_equal(loaded["model"]["weight"], saved["model.weight"])
    assert np.array_equal(
        loaded["optimizer"]["state"][0]["exp_avg"], saved["optimizer.state.0.exp_avg"]
    )


def test_a_checkpoint_of_shards_of_format_2_is_loaded():
    """Three ranks have saved it, one of which had nothing of ``w``."""
    found = checkpoint.load(None, OLD / "shards-2")
    assert (found["w"] == np.arange(42.0).reshape(6, 7)).all()
    assert torch.equal(found["moment"], torch.arange(10.0).view(2, 5))
    assert found["same"].dtype == ml_dtypes.bfloat16
    assert found["nothing"].shape == (0, 3)
    assert found["scalar"] == 1.5
    assert found["own"][1].tolist() == [1, 1]
    assert found["step"] == 7
    part = Shard(np.zeros(20), (6, 7), 5)
    with pytest.warns(dist.CheckpointWarning):
        checkpoint.load({"w": part}, OLD / "shards-2", strict=False)
    assert (part.data == np.arange(5.0, 25.0)).all()
    assert checkpoint.verify(OLD / "shards-2").ranks == 3
