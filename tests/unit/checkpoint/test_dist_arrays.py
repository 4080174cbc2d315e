"""Arrays across simulated ranks, in checkpoints and files."""

import os
import sys

import array_file_checks
import ml_dtypes
import numpy as np
import pytest
from tiers import first_of

import hpcdist as dist
from hpcdist import ProcessMesh, Shard, checkpoint


@pytest.mark.parametrize("check", array_file_checks.check)
@pytest.mark.parametrize("size", first_of([3, 1]))
def test_on_simulated_ranks(size, check, tmp_path):
    dist.simulate(size, check, str(tmp_path / "made"), timeout=20)


@pytest.mark.parametrize(("savers", "loaders"), [(2, 3), (3, 1)])
def test_what_any_number_of_ranks_has_saved_any_other_loads(savers, loaders, tmp_path):
    whole = array_file_checks.numbers((5, 7))
    kept, file = str(tmp_path / "kept"), str(tmp_path / "a.npy")

    def save():
        array = dist.shard_tensor(whole, ProcessMesh(range(savers)), [Shard(1)])
        checkpoint.save({"a": array}, kept)
        dist.save_array(file, array)

    def load():
        mesh = ProcessMesh(range(loaders))
        array = dist.shard_tensor(np.zeros_like(whole), mesh, [Shard(0)])
        checkpoint.load({"a": array}, kept)
        assert (dist.unshard_dtensor(array) == whole).all()
        assert (dist.unshard_dtensor(dist.open_array(file, mesh, [Shard(1)])) == whole).all()

    dist.simulate(savers, save)
    dist.simulate(loaders, load)


@pytest.mark.parametrize(
    ("source", "library", "extra"), [("a.h5::x", "h5py", "hdf5"), ("a.zarr", "zarr", "zarr")]
)
def test_without_its_library_a_file_names_the_extra(source, library, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)

    def refused():
        with pytest.raises(dist.UsageError, match=rf"pip install 'hpcdist\[{extra}\]'"):
            dist.open_array(source)

    dist.simulate(2, refused)


def test_a_dtype_that_npy_lacks_is_refused(tmp_path):
    def refused():
        array = dist.shard_tensor(np.ones(3, ml_dtypes.bfloat16), ProcessMesh(range(2)), [Shard(0)])
        with pytest.raises(dist.UsageError, match="no dtype bfloat16"):
            dist.save_array(tmp_path / "a.npy", array)

    dist.simulate(2, refused)
    assert not list(tmp_path.iterdir())


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path):
    path = tmp_path / "pipe.npy"
    os.mkfifo(path)

    def refused():
        with pytest.raises(dist.CheckpointError, match="regular files"):
            dist.open_array(path)

    dist.simulate(2, refused)


def test_a_folder_may_have_colons_in_its_name(tmp_path):
    (tmp_path / "a::b").mkdir()
    path = tmp_path / "a::b" / "x.npy"

    def saved_and_opened():
        dist.save_array(path, dist.shard_tensor(np.ones(3), ProcessMesh(range(2)), [Shard(0)]))
        assert dist.open_array(path).shape == (3,)

    dist.simulate(2, saved_and_opened)
