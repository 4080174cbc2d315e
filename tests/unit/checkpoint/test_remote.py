"""Checkpoints by URL: in an object store and in HDFS, both real servers of this process."""

import uuid

import numpy as np
import pytest
from webhdfs import webhdfs

import hpcdist as dist
from hpcdist import checkpoint
from hpcdist.fs import file_system

pytest.importorskip("fsspec")


@pytest.fixture(params=["memory", "webhdfs", pytest.param("s3", marks=pytest.mark.thorough)])
def url(request, tmp_path):
    """A folder that does not exist yet."""
    if request.param == "memory":
        yield f"memory://{uuid.uuid4()}/run"
    elif request.param == "webhdfs":
        with webhdfs(tmp_path) as server:
            yield f"webhdfs://127.0.0.1:{server.port}/deep/run"
    else:
        request.getfixturevalue("object_store")
        bucket = f"s3://bucket-{uuid.uuid4()}"
        fs, inside = file_system(bucket)
        fs.mkdirs(inside)
        yield f"{bucket}/deep/run"


def names(url):
    fs, inside = file_system(url)
    return fs.ls_dir(inside)


def state(seed=0):
    return {"w": np.random.default_rng(seed).random((700, 300)), "step": seed, "none": None}


def test_what_is_saved_is_loaded(url):
    work = checkpoint.save(state(), url)
    assert work.result() == url
    loaded = checkpoint.load(None, url)
    np.testing.assert_array_equal(loaded["w"], state()["w"])
    assert (loaded["step"], loaded["none"]) == (0, None)
    assert checkpoint.verify(url).nbytes == state()["w"].nbytes


def test_a_new_checkpoint_takes_the_place_of_the_old_one_and_its_files(url):
    for seed in (1, 2):
        checkpoint.save(state(seed), url)
    assert checkpoint.load(None, url)["step"] == 2
    folders, files = names(url)
    assert folders == []
    assert len(files) == 2  # one of data, and the manifest


def test_a_series_keeps_its_last_ones(url):
    for step in (1, 2, 30):
        checkpoint.save(state(step), url, step=step, keep=2)
    assert names(url)[0] == ["step-000002", "step-000030"]
    assert checkpoint.latest(url) == f"{url}/step-000030"
    assert checkpoint.load(None, url)["step"] == 30
    assert checkpoint.load(None, url, step=2)["step"] == 2
    with pytest.raises(dist.CheckpointError, match="steps there: 2, 30"):
        checkpoint.load(None, url, step=1)


def test_it_may_be_written_beside_what_comes_next(url):
    held = state()
    work = checkpoint.save(held, url, async_save=True)
    held["w"][...] = -1
    work.wait()
    np.testing.assert_array_equal(checkpoint.load(None, url)["w"], state()["w"])


def test_other_numbers_of_ranks_load_it(url):
    whole = state()["w"]

    def save():
        first = 350 * dist.get_rank()
        part = dist.checkpoint.LocalSlice(whole[first : first + 350], whole.shape, (first, 0))
        checkpoint.save({"w": part}, url)

    def load():
        first = (0, 100, 500, 700)[dist.get_rank()]
        end = (0, 100, 500, 700)[dist.get_rank() + 1]
        part = np.zeros((end - first, 300))
        checkpoint.load({"w": dist.checkpoint.LocalSlice(part, whole.shape, (first, 0))}, url)
        np.testing.assert_array_equal(part, whole[first:end])

    dist.simulate(2, save)
    dist.simulate(3, load)


def test_what_is_not_there_or_not_ours_is_told(url):
    with pytest.raises(dist.CheckpointError, match="no checkpoint"):
        checkpoint.load(None, url)
    fs, inside = file_system(url)
    fs.mkdirs(inside)
    with fs.open(f"{inside}/checkpoint.json", "wb") as file:
        file.write(b"{}")
    with pytest.raises(dist.CheckpointError, match="does not belong"):
        checkpoint.save(state(), url)


def test_a_file_that_is_cut_short_or_changed_is_damage(url):
    checkpoint.save(state(), url)
    fs, inside = file_system(url)
    [data] = [name for name in names(url)[1] if name.endswith(".safetensors")]
    with fs.open(f"{inside}/{data}", "rb") as file:
        content = file.read()
    for damaged in (content[:-8], content[:-8] + b"8 bytes."):
        with fs.open(f"{inside}/{data}", "wb") as file:
            file.write(damaged)
        with pytest.raises(dist.CheckpointError, match="damaged"):
            checkpoint.load(None, url)


def test_a_save_that_fails_leaves_what_was_there(url, monkeypatch):
    checkpoint.save(state(1), url)

    def fail(*_):
        raise OSError("the disk is on fire")

    with monkeypatch.context() as patch:
        patch.setattr("hpcdist.checkpoint.remote.commit", fail)
        with pytest.raises(dist.CheckpointError, match="on fire"):
            checkpoint.save(state(2), url)
    assert checkpoint.load(None, url)["step"] == 1
    assert len(names(url)[1]) == 2


def test_a_kill_between_the_old_manifest_and_the_new_one_leaves_the_new_one(tmp_path):
    """A file system that cannot replace a file removes the old one first."""
    with webhdfs(tmp_path) as server:
        url = f"webhdfs://127.0.0.1:{server.port}/run"
        checkpoint.save(state(1), url)
        manifest = tmp_path / "run/checkpoint.json"
        manifest.rename(tmp_path / "run/checkpoint.json.0123456789ab.new")
        assert checkpoint.load(None, url)["step"] == 1
        checkpoint.save(state(2), url)
        assert checkpoint.load(None, url)["step"] == 2
        assert [each for each in names(url)[1] if each.endswith(".new")] == []


def test_a_server_that_goes_away_is_a_checkpoint_error(tmp_path, monkeypatch):
    monkeypatch.setattr("hpcdist.fs.urls.TIME_OUT_MS", 100)
    with webhdfs(tmp_path) as server:
        url = f"webhdfs://127.0.0.1:{server.port}/run"
        checkpoint.save(state(1), url)
    for use in (lambda: checkpoint.load(None, url), lambda: checkpoint.save(state(2), url)):
        with pytest.raises(dist.CheckpointError, match=r"within 0\.1 s"):
            use()
