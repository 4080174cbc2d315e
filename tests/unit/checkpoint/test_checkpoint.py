"""Checkpoints of one process: what goes in comes out, and what is wrong is said."""

import json
import os
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import hpcdist as dist
from hpcdist import checkpoint
from hpcdist.checkpoint import Shard, blocks

STRUCTURED = np.dtype([("place", "f4", (3,)), ("name", "S4")])
DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *(
        each
        for each in vars(ml_dtypes).values()
        if isinstance(each, type) and issubclass(each, np.generic)
    ),
    STRUCTURED,
    "datetime64[s]",
    "U7",
]


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "saved")


def data_files(folder):
    return sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))


def data_file(folder):
    (name,) = data_files(folder)
    return os.path.join(folder, name)


# ---- what goes in comes out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_by_bit(folder, dtype):
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(1).integers(0, 2, 5 * dtype.itemsize, dtype=np.uint8)
    array = raw.view(dtype)
    checkpoint.save({"x": array}, folder)
    loaded = checkpoint.load(None, folder)["x"]
    assert loaded.dtype == dtype
    assert loaded.tobytes() == array.tobytes()
    given = np.zeros(5, dtype)
    checkpoint.load({"x": given}, folder)
    assert given.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "dtype",
    [
        {"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [4, 0]},
        [("a", ml_dtypes.bfloat16)],
    ],
    ids=["fields out of order", "a field of another package"],
)
def test_a_dtype_that_no_manifest_describes_is_refused(folder, dtype):
    with pytest.raises(dist.UsageError, match=r"cannot describe the dtype .* one by one"):
        checkpoint.save({"x": np.zeros(2, np.dtype(dtype))}, folder)


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": [1, -2.5, "text", None, True, b"\0\xff", 1 + 2j]}},
        {"ints as keys": {0: "zero", 1: "one"}, "empty": [{}, [], ()]},
        [float("inf"), (1, (2, 3)), 10**30],
        "only a string",
        None,
    ],
)
def test_values_and_containers_come_back_as_they_were(folder, state):
    checkpoint.save(state, folder)
    assert checkpoint.load(None, folder) == state


def test_nan_comes_back(folder):
    checkpoint.save({"loss": float("nan")}, folder)
    assert np.isnan(checkpoint.load(None, folder)["loss"])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4)])
def test_every_shape_comes_back(folder, shape):
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    checkpoint.save(array, folder)
    loaded = checkpoint.load(None, folder)
    assert loaded.shape == shape
    assert (loaded == array).all()


def test_a_numpy_scalar_stays_one(folder):
    checkpoint.save([np.float32(1.5)], folder)
    (loaded,) = checkpoint.load([np.float32(0)], folder)
    assert type(loaded) is np.float32
    assert loaded == 1.5


@pytest.mark.parametrize(
    "layout",
    [lambda x: x.T, lambda x: x[::2, ::-1], np.asfortranarray, lambda x: x.astype(">f8")],
    ids=["transposed", "strided", "Fortran", "big-endian"],
)
def test_arrays_of_any_layout_are_saved_and_filled(folder, layout):
    array = layout(np.arange(24.0).reshape(4, 6))
    checkpoint.save({"x": array}, folder)
    given = layout(np.zeros((4, 6)))
    checkpoint.load({"x": given}, folder)
    assert (given == array).all()


def test_torch_tensors_are_filled_where_they_are(folder):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 2).to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    checkpoint.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder)
    other = torch.nn.Linear(3, 2).to(torch.bfloat16)
    anew = torch.optim.Adam(other.parameters(), lr=1.0)
    weight = other.weight
    loaded = checkpoint.load({"model": other.state_dict(), "optimizer": None}, folder)
    assert weight is other.weight
    assert torch.equal(weight, model.weight)
    anew.load_state_dict(loaded["optimizer"])
    assert anew.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert anew.state[weight]["step"] == 1


def test_jax_arrays_are_replaced_by_new_ones(folder):
    jnp = pytest.importorskip("jax.numpy")
    checkpoint.save({"x": jnp.arange(3), "nested": [jnp.ones(2)]}, folder)
    state = {"x": jnp.zeros(3, int), "nested": [jnp.zeros(2)]}
    checkpoint.load(state, folder)
    assert type(state["x"]) is type(jnp.ones(1))
    assert (state["x"] == jnp.arange(3)).all()
    assert (state["nested"][0] == 1).all()


def test_what_is_loaded_fills_dicts_and_lists_in_place(folder):
    checkpoint.save({"epoch": 4, "losses": [1.0, 0.5], "pair": (1, 2)}, folder)
    losses = [0.0, 0.0]
    state = {"epoch": 0, "losses": losses, "pair": (0, 0)}
    assert checkpoint.load(state, folder) is state
    assert state == {"epoch": 4, "losses": [1.0, 0.5], "pair": (1, 2)}
    assert state["losses"] is losses


def test_a_part_of_a_checkpoint_can_be_loaded(folder):
    checkpoint.save({"model": {"w": np.ones(3), "b": np.zeros(2)}, "epoch": 3}, folder)
    state = {"model": {"w": np.zeros(3)}}
    rest = "'model.b' is in the checkpoint, but not in the state; 'epoch' is in the checkpoint"
    with pytest.raises(dist.CheckpointError, match=f"{rest}.*; strict=False loads what both have"):
        checkpoint.load(state, folder)
    assert (state["model"]["w"] == 0).all()
    with pytest.warns(dist.CheckpointWarning, match=rest):
        checkpoint.load(state, folder, strict=False)
    assert list(state) == ["model"]
    assert (state["model"]["w"] == 1).all()


def test_of_a_checkpoint_of_something_else_all_entries_are_named(folder):
    checkpoint.save({"a": np.ones(2), "c": np.ones(2)}, folder)
    told = r"'a' is in the checkpoint.*'c' is in the checkpoint"
    with pytest.raises(dist.CheckpointError, match=told):
        checkpoint.load({"b": np.ones(2)}, folder)


def test_a_shard_reads_its_elements_and_few_others(folder, monkeypatch):
    whole = np.arange(4 << 20, dtype=np.uint8)
    checkpoint.save({"x": whole}, folder)
    read = []
    preadv = os.preadv

    def counted(fd, buffers, offset):
        read.append(sum(map(len, buffers)))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    part = Shard(np.zeros(100, np.uint8), whole.shape, (1 << 20) - 50)
    checkpoint.load({"x": part}, folder)
    assert (part.data == whole[part.offset :][:100]).all()
    assert sum(read) == 2 * 2 * blocks.BLOCK  # two blocks, checked and then read


def test_a_folder_is_named_by_text_or_path(tmp_path):
    assert checkpoint.save({"x": 1}, tmp_path / "a").result() == str(tmp_path / "a")
    assert checkpoint.load(None, tmp_path / "a") == {"x": 1}


# ---- files


def test_safetensors_opens_the_data(folder):
    arrays = {
        "w": np.arange(6.0, dtype=np.float32).reshape(2, 3),
        "h": np.ones(3, np.float16),
        "i": np.arange(5),
        "flags": np.array([True, False, True]),
        "b": np.arange(3).astype(ml_dtypes.bfloat16),
        "c": np.full(2, 1 + 2j),
    }
    checkpoint.save(arrays, folder)
    with safe_open(data_file(folder), "numpy") as file:
        assert set(file.keys()) == set(arrays)
        assert file.get_slice("h").get_shape() == [3]
        assert file.get_slice("b").get_dtype() == "BF16"
        for name in ("w", "h", "i", "flags"):
            loaded = file.get_tensor(name)
            assert loaded.dtype == arrays[name].dtype
            assert (loaded == arrays[name]).all()
        assert (file.get_tensor("c").view(np.complex128) == 1 + 2j).all()


def test_elements_lie_at_multiples_of_their_size(folder):
    checkpoint.save({"a": np.ones(3, np.uint8), "b": np.ones(3), "c": np.ones(3, "f2")}, folder)
    with open(data_file(folder), "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    assert (8 + length) % 4096 == 0
    assert header["b"]["data_offsets"][0] % 8 == 0
    assert header["c"]["data_offsets"][0] % 2 == 0


def test_consolidate_writes_whole_arrays_into_one_file(folder, tmp_path):
    state = {"layers": [{"w": np.arange(6.0).reshape(2, 3)}], "epoch": 3}
    checkpoint.save(state, folder)
    output = tmp_path / "all.safetensors"
    summary = checkpoint.consolidate(folder, output)
    assert (summary.arrays, summary.nbytes) == (1, 48)
    assert (load_file(output)["layers.0.w"] == state["layers"][0]["w"]).all()
    with safe_open(output, "numpy") as file:
        structure = json.loads(file.metadata()["structure"])
    assert ["epoch", {"value": 3}] in structure["dict"]
    with pytest.raises(dist.UsageError, match="would be overwritten"):
        checkpoint.consolidate(folder, output)


def test_a_new_checkpoint_takes_the_place_of_the_old_one(folder):
    checkpoint.save({"x": np.zeros(3)}, folder)
    old = data_files(folder)
    with open(os.path.join(folder, "notes.txt"), "w") as notes:
        notes.write("mine")
    checkpoint.save({"y": np.ones(2)}, folder)
    assert list(checkpoint.load(None, folder)) == ["y"]
    assert not set(old) & set(os.listdir(folder))
    assert "notes.txt" in os.listdir(folder)


# ---- series


def test_a_series_keeps_the_last_checkpoints(folder):
    for step in (1, 5, 10, 20):
        checkpoint.save({"step": step}, folder, step=step, keep=2)
    assert sorted(os.listdir(folder)) == ["step-000010", "step-000020"]
    assert checkpoint.latest(folder) == os.path.join(folder, "step-000020")
    assert checkpoint.load(None, folder) == {"step": 20}
    assert checkpoint.load(None, folder, step=10) == {"step": 10}
    with pytest.raises(dist.CheckpointError, match=r"no checkpoint of step 5; steps there: 10, 20"):
        checkpoint.load(None, folder, step=5)


def test_a_step_that_was_not_finished_is_passed_over_and_removed_later(folder):
    checkpoint.save({"step": 1}, folder, step=1)
    checkpoint.save({"x": np.ones(3)}, folder, step=2)
    os.unlink(os.path.join(folder, "step-000002", "checkpoint.json"))
    assert checkpoint.load(None, folder) == {"step": 1}
    checkpoint.save({"step": 3}, folder, step=3, keep=5)
    assert sorted(os.listdir(folder)) == ["step-000001", "step-000003"]


def test_going_back_to_an_earlier_step_keeps_what_was_just_saved(folder):
    for step in (10, 20, 5):
        checkpoint.save({"step": step}, folder, step=step, keep=1)
    assert os.listdir(folder) == ["step-000005"]


def test_there_is_no_latest_where_nothing_is(folder):
    assert checkpoint.latest(folder) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step": -1}, "step must be a number"),
        ({"step": "last"}, "step must be a number"),
        ({"step": 1, "keep": 0}, "keep must be at least 1"),
        ({"keep": 2}, "give each a number"),
    ],
)
def test_nonsense_about_a_series_is_refused(folder, settings, message):
    with pytest.raises(dist.UsageError, match=message):
        checkpoint.save({"x": 1}, folder, **settings)
    assert not os.path.exists(folder)


# ---- what is wrong is said, and nothing is changed


def flip(path, position):
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 4]))


@pytest.fixture
def saved(folder):
    """A checkpoint of three blocks and a bit, and arrays to load it into."""
    state = {"x": np.arange(3 * blocks.BLOCK + 100, dtype=np.uint8), "y": np.ones(3)}
    checkpoint.save(state, folder)
    return state


def given():
    return {"x": np.full(3 * blocks.BLOCK + 100, 7, np.uint8), "y": np.full(3, 7.0)}


@pytest.mark.parametrize("back", [1, 50, blocks.BLOCK, 3 * blocks.BLOCK])
def test_a_flipped_bit_is_found_before_anything_is_filled(folder, saved, back):
    path = data_file(folder)
    flip(path, os.path.getsize(path) - back)
    target = given()
    with pytest.raises(dist.CheckpointError, match=r"is damaged: its bytes .* of 'x'"):
        checkpoint.load(target, folder)
    assert (target["x"] == 7).all()
    assert (target["y"] == 7).all()
    with pytest.raises(dist.CheckpointError, match="is damaged"):
        checkpoint.load(None, folder)
    with pytest.raises(dist.CheckpointError, match="is damaged"):
        checkpoint.verify(folder)


def test_what_is_sound_can_be_loaded_beside_what_is_damaged(folder, saved):
    path = data_file(folder)
    flip(path, os.path.getsize(path) - 1)
    target = {"y": np.zeros(3)}
    with pytest.warns(dist.CheckpointWarning, match="'x' is in the checkpoint"):
        checkpoint.load(target, folder, strict=False)
    assert (target["y"] == 1).all()


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_length_is_found(folder, saved, change):
    path = data_file(folder)
    os.truncate(path, os.path.getsize(path) + change)
    target = given()
    with pytest.raises(dist.CheckpointError, match=r"it has \d+ bytes, but \d+ were saved"):
        checkpoint.load(target, folder)
    assert (target["x"] == 7).all()


def test_a_missing_file_is_named(folder, saved):
    os.unlink(data_file(folder))
    target = given()
    with pytest.raises(dist.CheckpointError, match=r"safetensors is missing"):
        checkpoint.load(target, folder)
    assert (target["y"] == 7).all()


@pytest.mark.parametrize("position", [14, 60, -30])
def test_a_flipped_bit_in_the_manifest_is_found(folder, saved, position):
    path = os.path.join(folder, "checkpoint.json")
    flip(path, position % os.path.getsize(path))
    with pytest.raises(dist.CheckpointError, match=r"json is damaged|does not belong"):
        checkpoint.load(None, folder)


def test_a_manifest_of_another_program_is_neither_read_nor_overwritten(tmp_path):
    other = tmp_path / "checkpoint.json"
    other.write_text('{"mine": true}')
    with pytest.raises(dist.CheckpointError, match="does not belong to a checkpoint of hpcdist"):
        checkpoint.load(None, tmp_path)
    with pytest.raises(dist.CheckpointError, match="would be overwritten"):
        checkpoint.save({"x": np.ones(2)}, tmp_path)
    assert other.read_text() == '{"mine": true}'
    assert os.listdir(tmp_path) == ["checkpoint.json"]


def test_a_folder_without_a_checkpoint_says_what_it_holds(tmp_path):
    (tmp_path / "model.pt").write_text("")
    with pytest.raises(dist.CheckpointError, match=r"no checkpoint in .*: it holds model\.pt"):
        checkpoint.load(None, tmp_path)
    with pytest.raises(dist.CheckpointError, match="it does not exist"):
        checkpoint.load(None, tmp_path / "nothing")


def test_a_file_in_the_place_of_the_folder_stays(tmp_path):
    path = tmp_path / "results"
    path.write_text("mine")
    for where in (path, path / "deeper"):
        with pytest.raises(dist.CheckpointError, match="results exists and is not a folder"):
            checkpoint.save({"x": 1}, where)
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            {"x": np.ones((2, 2))},
            r"'x' is float64 of shape \(3,\) .* float64 of shape \(2, 2\) here",
        ),
        ({"x": np.ones(3, np.float32)}, "'x' is float64 .* but float32"),
        ({"y": np.ones(3)}, "'y' is not in the checkpoint"),
        ({"x": 1.0}, "'x' is an array in the checkpoint, a float here"),
        ({"n": {"deep": np.ones(2)}}, "'n.deep' is a value in the checkpoint, not an array"),
        ({"n": 3}, "'n' is a dict in the checkpoint, an int here"),
        ({"l": [1]}, "'l' has 2 entries in the checkpoint, 1 here"),
        ({"x": Shard(np.ones(2), (3,), 2)}, "do not lie inside"),
        ({"x": Shard(np.ones(2), (4,), 0)}, r"of shape \(3,\) .* of shape \(4,\) here"),
    ],
)
def test_the_checkpoint_of_another_model_is_refused(folder, wanted, message):
    checkpoint.save({"x": np.zeros(3), "n": {"deep": 1}, "l": [1, 2]}, folder)
    before = {key: np.copy(value) for key, value in wanted.items() if type(value) is np.ndarray}
    with pytest.raises(dist.CheckpointError, match=f"not one of this state; nothing .*{message}"):
        checkpoint.load(wanted, folder)
    assert all((wanted[key] == value).all() for key, value in before.items())


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"f": print}, "'f' is a builtin_function_or_method, which cannot be saved"),
        ({"a": {"b": {1, 2}}}, "'a.b' is a set, which cannot be saved"),
        ({"o": np.array([None])}, "'o' holds Python objects"),
        ({("a", 1): 2}, "a key of 'state' is"),
        ({"a.b": np.ones(1), "a": {"b": np.ones(1)}}, "two arrays of the state have the name"),
        ({"x": Shard(np.ones(3), (2,), 0)}, "do not lie inside the 2"),
        ({"x": Shard(np.ones(3), (5,), 0)}, "no rank has the elements 3 to 4 of 'x'"),
        ({"x": Shard(np.ones(3), (5,), 1.5)}, "must have integers"),
    ],
)
def test_what_cannot_be_saved_is_named(folder, state, message):
    with pytest.raises(dist.UsageError, match=message):
        checkpoint.save(state, folder)
    assert not os.path.exists(folder)


def test_a_full_disk_leaves_the_old_checkpoint(folder):
    """The limit of the size of files stands for the end of the disk."""
    checkpoint.save({"x": np.ones(3)}, folder)
    script = f"""
import resource, signal
import numpy as np
from hpcdist import checkpoint, CheckpointError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    checkpoint.save({{"x": np.zeros(100_000)}}, {folder!r})
except CheckpointError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "safetensors: File too large" in done.stdout, done.stderr
    assert (checkpoint.load(None, folder)["x"] == 1).all()
    assert len(os.listdir(folder)) == 2


# ---- beside other work


def test_an_async_save_has_the_state_of_the_moment(folder):
    x = np.zeros(1 << 20)
    saving = checkpoint.save({"x": x}, folder, async_save=True)
    x += 1
    assert saving.wait()
    assert saving.is_completed()
    assert saving.result() == folder
    assert (checkpoint.load(None, folder)["x"] == 0).all()


def test_what_goes_wrong_in_an_async_save_is_raised_by_wait(folder, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda *_: full_disk())
    saving = checkpoint.save({"x": np.ones(3)}, folder, async_save=True)
    for _ in range(2):
        with pytest.raises(dist.CheckpointError, match="No space left on device"):
            saving.wait()
    monkeypatch.undo()
    checkpoint.save({"x": np.ones(3)}, folder)
    assert len(data_files(folder)) == 1


def full_disk():
    raise OSError(28, "No space left on device")


def test_an_error_that_nobody_waited_for_is_a_warning(folder, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda *_: full_disk())
    checkpoint.save({"x": np.ones(3)}, folder, async_save=True)
    with (
        pytest.warns(RuntimeWarning, match=r"was not saved: .*No space left"),
        pytest.raises(dist.CheckpointError),
    ):
        checkpoint.save({"x": np.ones(3)}, folder)


def test_the_program_ends_when_its_save_has(folder):
    script = f"""
import numpy as np
from hpcdist import checkpoint

checkpoint.save({{"x": np.ones(3_000_000)}}, {folder!r}, async_save=True)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert checkpoint.load(None, folder)["x"].sum() == 3_000_000


# ---- without MPI, and on the command line


def test_a_process_without_mpi_loads(folder):
    checkpoint.save({"x": np.arange(3)}, folder)
    script = f"""
import sys
sys.modules["mpi4py"] = None
from hpcdist import checkpoint

print(checkpoint.load(None, {folder!r}), checkpoint.verify({folder!r}).arrays)
print(sorted({{"torch", "jax", "click", "rich"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "{'x': array([0, 1, 2])} 1\n[]\n", done.stderr


def test_one_of_several_ranks_does_not_save_before_it_knows_the_others(folder, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    if dist.is_initialized():
        pytest.skip("this process has a world")
    with pytest.raises(dist.UsageError, match=r"one of 4 ranks.*init_parallel_env"):
        checkpoint.save({"x": 1}, folder)


def hpcdist_checkpoint(*words):
    command = [sys.executable, "-m", "hpcdist", "checkpoint", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def test_the_command_shows_verifies_and_consolidates(folder, tmp_path):
    for step in (1, 2):
        checkpoint.save({"layer": {"w": np.full((2, 3), step)}}, folder, step=step)
    assert "step" in hpcdist_checkpoint("ls", folder).stdout
    shown = hpcdist_checkpoint("ls", folder, "--step", 1).stdout
    assert "layer.w" in shown
    assert "(2, 3)" in shown
    done = hpcdist_checkpoint("verify", folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 arrays, 48 bytes, as they were saved") == 2
    output = tmp_path / "all.safetensors"
    done = hpcdist_checkpoint("consolidate", folder, output)
    assert done.returncode == 0, done.stderr
    assert (load_file(output)["layer.w"] == 2).all()


def test_the_command_ends_with_1_if_something_is_damaged(folder):
    checkpoint.save({"x": np.ones(3)}, folder)
    flip(data_file(folder), os.path.getsize(data_file(folder)) - 1)
    done = hpcdist_checkpoint("verify", folder)
    assert done.returncode == 1
    assert "is damaged" in done.stderr
    shutil.rmtree(folder)
    done = hpcdist_checkpoint("ls", folder)
    assert done.returncode == 1
    assert "there is no checkpoint" in done.stderr


# ---- Paddle's names


def test_paddles_names_save_and_load(folder):
    state = {"model.w": np.arange(4.0), "model.b": np.ones(2), "epoch": 3}
    dist.save_state_dict(state, folder, unique_id=1)
    dist.save_state_dict({**state, "epoch": 4}, folder, unique_id=2, async_save=True).wait()
    target = {"model.w": np.zeros(4), "epoch": 0}
    assert dist.load_state_dict(target, folder) is None
    assert target["epoch"] == 4
    assert (target["model.w"] == state["model.w"]).all()
    dist.load_state_dict(target, folder, unique_id=1)
    assert target["epoch"] == 3
    merged = dist.load_merged_state_dict(folder, prefix="model.b")
    assert list(merged) == ["model.b"]
    assert (merged["model.b"] == 1).all()
    with pytest.raises(dist.UsageError, match="aoa_config is not supported"):
        dist.load_state_dict(target, folder, aoa_config={"aoa_statements": ["a -> b"]})
