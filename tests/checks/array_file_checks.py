"""What holds for arrays across ranks in checkpoints and files, on any number of ranks.

Each check takes a folder that all ranks see.
"""

import os
from importlib.util import find_spec

import numpy as np
import pytest
from array_programs import Spread, any_layout, mesh_of
from checks import Checks
from mesh_checks import meshes_of, numbers

import hpcdist as dist
from hpcdist import Partial, ProcessMesh, Replicate, Shard, checkpoint
from hpcdist.checkpoint import LocalSlice

check = Checks()

needs_h5py = pytest.mark.skipif(find_spec("h5py") is None, reason="h5py is not installed")
needs_zarr = pytest.mark.skipif(find_spec("zarr") is None, reason="zarr is not installed")

SHAPES = [(5, 7), (0, 4), (), (9, 2, 5)]


def world():
    return dist.get_group(0)


def line():
    return ProcessMesh(world().ranks)


def at(folder, name):
    """Return a path in the folder, which is made."""
    os.makedirs(folder, exist_ok=True)
    dist.barrier()
    return os.path.join(folder, name)


def on_first(do, *args):
    """Let the first rank do something that the others see afterwards."""
    dist.together().lead(do, *args)


def divisions(shape):
    """Return layouts of arrays of a shape: meshes, and placements of each of their axes."""
    dims = [Shard(dim) for dim in range(len(shape))]
    for mesh in meshes_of(world().nranks):
        yield mesh, [Replicate()] * mesh.ndim
        for placement in dims:
            yield mesh, [placement] * mesh.ndim
            yield mesh, [*[Replicate()] * (mesh.ndim - 1), placement]
        if len(dims) > 1 < mesh.ndim:
            yield mesh, [dims[-1], dims[0]]


def spread(whole, mesh, placements):
    return dist.shard_tensor(whole, mesh, placements)


def identity():
    return spread(np.eye(4), line(), [Shard(0)])


def has_its_part(array, whole):
    """Return whether this rank has what it is to have of a whole array."""
    box = array.layout.box(array.process_mesh.coordinate)
    part = whole[tuple(slice(*each) for each in box)]
    return array.local.shape == part.shape and bool((array.local == part).all())


# ---- checkpoints


@check
def an_array_is_loaded_in_any_other_division(folder):
    wholes = {str(shape): numbers(shape) for shape in SHAPES}
    found = {name: list(divisions(whole.shape)) for name, whole in wholes.items()}
    rounds = max(map(len, found.values()))
    for turn in range(rounds):
        saved = {
            name: spread(whole, *found[name][turn % len(found[name])])
            for name, whole in wholes.items()
        }
        wanted = {
            name: spread(np.zeros_like(whole), *found[name][(turn + 3) % len(found[name])])
            for name, whole in wholes.items()
        }
        checkpoint.save(saved, folder)
        assert checkpoint.load(wanted, folder) is wanted
        assert all(has_its_part(wanted[name], whole) for name, whole in wholes.items())


@check
def an_array_comes_back_as_a_whole_where_nothing_is_given(folder):
    whole = numbers((5, 7), "f4")
    checkpoint.save({"a": spread(whole, line(), [Shard(1)])}, folder)
    found = checkpoint.load(None, folder)["a"]
    assert type(found) is np.ndarray
    assert found.dtype == whole.dtype
    assert (found == whole).all()


@check
def arrays_slices_and_whole_arrays_take_each_others_place(folder):
    whole, rank, size = numbers((4, 6)), world().rank, world().nranks
    rows = [4 * each // size for each in (rank, rank + 1)]

    def forms(values):
        yield spread(values, line(), [Shard(1)])
        yield LocalSlice(values[slice(*rows)].copy(), values.shape, offsets=(rows[0], 0))
        yield values.copy()

    for number, saved in enumerate(forms(whole)):
        checkpoint.save({"a": saved}, f"{folder}-{number}")
        array, part, other = forms(np.zeros_like(whole))
        for wanted in (array, part, other):
            checkpoint.load({"a": wanted}, f"{folder}-{number}")
        assert has_its_part(array, whole)
        assert (part.data == whole[slice(*rows)]).all()
        assert (other == whole).all()


@check
def parts_of_any_lengths_are_saved(folder):
    rank, size = world().rank, world().nranks
    uneven = dist.dtensor_from_local(np.full((size - rank, 2), rank), line(), [Shard(0)])
    checkpoint.save({"a": uneven}, folder)
    expected = np.repeat(np.arange(size), np.arange(size, 0, -1))
    assert (checkpoint.load(None, folder)["a"] == expected[:, None]).all()


@check
def ranks_outside_of_a_mesh_save_and_load_with_the_others(folder):
    whole, first, last = numbers((3, 4)), ProcessMesh([0]), ProcessMesh([world().nranks - 1])
    checkpoint.save({"a": spread(whole, first, [Shard(0)])}, folder)
    wanted = spread(np.zeros_like(whole), last, [Shard(1)])
    checkpoint.load({"a": wanted}, folder)
    assert last.coordinate is None or has_its_part(wanted, whole)
    assert last.coordinate is not None or not wanted.local.size


@check
def memory_that_cannot_be_written_is_replaced(folder):
    whole = numbers((4, 4))
    checkpoint.save({"a": spread(whole, line(), [Shard(0)])}, folder)
    wanted = spread(np.zeros_like(whole), line(), [Shard(1)])
    wanted.local.flags.writeable = False
    checkpoint.load({"a": wanted}, folder)
    assert has_its_part(wanted, whole)


@check
def contributions_are_refused_with_what_to_do(folder):
    total = spread(np.ones(3), line(), [Partial()])
    with pytest.raises(dist.UsageError, match=r"'a' is a DistArray .*dist\.reshard it first"):
        checkpoint.save({"a": total}, folder)
    whole = dist.reshard(total, line(), [Shard(0)])
    checkpoint.save({"a": whole}, folder)
    with pytest.raises(dist.CheckpointError, match=r"dist\.reshard it first"):
        checkpoint.load({"a": total}, folder)


@check
def paddles_names_take_arrays(folder):
    whole = numbers((6, 3))
    dist.save_state_dict({"a": spread(whole, line(), [Shard(0)])}, folder)
    wanted = spread(np.zeros_like(whole), line(), [Shard(1)])
    dist.load_state_dict({"a": wanted}, folder)
    assert has_its_part(wanted, whole)


@check
def an_array_with_any_boundaries_is_loaded_with_any_others(folder):
    for seed in range(12):
        random = np.random.default_rng(seed)
        whole = numbers(random.integers(0, 7, random.integers(4)).tolist())
        saver, loader = (mesh_of(world().ranks, seed + each) for each in range(2))
        wanted = Spread(loader).spread(np.zeros_like(whole), seed)
        checkpoint.save({"a": Spread(saver).spread(whole, seed + 50)}, folder)
        checkpoint.load({"a": wanted}, folder)
        assert has_its_part(wanted, whole)


# ---- files


@check
def what_is_written_is_read_in_any_division_and_by_numpy(folder):
    path = at(folder, "a.npy")
    for shape in SHAPES:
        whole = numbers(shape)
        for mesh, placements in divisions(shape):
            dist.save_array(path, spread(whole, mesh, placements))
            stored = np.load(path)
            assert stored.shape == shape
            assert stored.dtype == whole.dtype
            assert (stored == whole).all()
            assert has_its_part(dist.open_array(path, mesh, placements), whole)
            dist.barrier()
    assert os.listdir(folder) == ["a.npy"]


@check.needing(needs_h5py, needs_zarr)
def an_array_with_any_boundaries_goes_through_files_of_every_kind(folder):
    import h5py
    import zarr

    path, ranks = at(folder, "a.npy"), world().ranks

    def convert(number):
        whole = np.load(path)
        zarr.save_array(at_once(number, "zarr"), whole)
        with h5py.File(at_once(number, "h5"), "w") as file:
            file["x"] = whole

    def at_once(number, ending):
        return os.path.join(folder, f"{number}.{ending}")

    for seed in range(8):
        random = np.random.default_rng(seed)
        whole = numbers(random.integers(1, 7, 1 + random.integers(3)).tolist())
        dist.save_array(path, Spread(mesh_of(ranks, seed)).spread(whole, seed))
        on_first(convert, seed)
        mesh = mesh_of(ranks, seed + 1)
        placements = any_layout(mesh, whole.shape, seed + 1).placements
        for name in (path, at_once(seed, "zarr"), f"{at_once(seed, 'h5')}::x"):
            assert has_its_part(dist.open_array(name, mesh, placements), whole)
        dist.barrier()


@check
def rows_are_cut_over_all_ranks_where_nothing_is_said(folder):
    path, whole = at(folder, "a.npy"), numbers((7, 2))
    on_first(np.save, path, whole)
    array = dist.open_array(path)
    assert array.placements == [Shard(0)]
    assert array.process_mesh == line()
    assert has_its_part(array, whole)
    for mesh in meshes_of(world().nranks):
        with mesh:
            array = dist.open_array(path)
        assert array.process_mesh == mesh
        assert array.placements == [Shard(0)] * mesh.ndim


@check
def files_of_any_order_and_dtype_are_read_as_asked(folder):
    path, whole = at(folder, "a.npy"), numbers((4, 5))
    on_first(np.save, path, np.asfortranarray(whole.astype(">i4")))
    array = dist.open_array(path, line(), [Shard(1)])
    assert array.dtype == np.dtype("=i4")
    assert has_its_part(array, whole)
    array = dist.open_array(path, line(), [Shard(0)], dtype="float32")
    assert array.dtype == np.float32
    assert has_its_part(array, whole)


@check
def contributions_are_written_reduced_and_read_once(folder):
    path = at(folder, "a.npy")
    dist.save_array(path, dist.dtensor_from_local(np.ones(4), line(), [Partial()], shape=(4,)))
    assert (np.load(path) == world().nranks).all()
    total = dist.open_array(path, line(), [Partial()])
    assert (dist.unshard_dtensor(total) == world().nranks).all()


@check
def ranks_outside_of_a_mesh_learn_shape_and_dtype(folder):
    path, whole, last = at(folder, "a.npy"), numbers((3, 4), "f4"), world().nranks - 1
    mesh = ProcessMesh([last])
    dist.save_array(path, spread(whole, mesh, [Shard(0)]))
    dist.barrier()
    array = dist.open_array(path, mesh, [Shard(0)])
    assert (array.shape, array.dtype) == ((3, 4), np.float32)
    assert array.local.size == (whole.size if world().rank == last else 0)


@check.needing(needs_h5py)
def datasets_of_hdf5_are_read(folder):
    import h5py

    path, whole = at(folder, "a.h5"), numbers((5, 6))

    def write():
        with h5py.File(path, "w") as file:
            file.create_dataset("in/x", data=whole, chunks=(2, 4), compression="gzip")
            file["one"] = 2.5

    on_first(write)
    for mesh, placements in divisions(whole.shape):
        assert has_its_part(dist.open_array(f"{path}::/in/x", mesh, placements), whole)
    assert dist.open_array(f"{path}::one").local == 2.5
    with pytest.raises(dist.UsageError, match=r"has no dataset 'y', but in, one; name one as"):
        dist.open_array(f"{path}::y")


@check.needing(needs_zarr)
def arrays_of_zarr_are_read(folder):
    import zarr

    path, whole = at(folder, "a.zarr"), numbers((5, 6))
    group = at(folder, "g.zarr")

    def write():
        zarr.save_array(path, whole)
        zarr.save_group(group, x=whole)
        inner = zarr.open_group(group, mode="a").create_group("in")
        make = getattr(inner, "create_array", None) or inner.array  # of zarr 3, of zarr 2
        make("y", data=whole[1:])

    on_first(write)
    for mesh, placements in divisions(whole.shape):
        assert has_its_part(dist.open_array(path, mesh, placements), whole)
    for name in ("::/x", "::x", "/x", "/x/"):
        assert has_its_part(dist.open_array(f"{group}{name}"), whole)
    for name in ("::in/y", "/in/y"):
        assert has_its_part(dist.open_array(f"{group}{name}"), whole[1:])
    for name in ("", "/", "::y", "/y", "/in"):
        with pytest.raises(
            dist.UsageError, match=r"has no array '.*', but in/y, x; name one as .*/n"
        ):
            dist.open_array(f"{group}{name}")
    with pytest.raises(dist.UsageError, match=r"a\.zarr has no array 'y', but none at all"):
        dist.open_array(f"{path}/y")


@check
def what_is_missing_or_damaged_is_one_error_on_all_ranks(folder):
    cut, words = at(folder, "cut.npy"), at(folder, "words.npy")

    def write():
        np.save(cut, np.arange(1000.0))
        os.truncate(cut, 4000)
        with open(words, "w") as file:
            file.write("these are no numbers, but they are many words " * 9)

    on_first(write)
    for path in (cut, words, at(folder, "none.npy")):
        with pytest.raises(dist.CheckpointError, match=os.path.basename(path)) as raised:
            dist.open_array(path)
        assert dist.together().lead(str, raised.value) == str(raised.value)


@check.needing(needs_h5py, needs_zarr)
def what_libraries_find_damaged_is_one_error_on_all_ranks(folder):
    import h5py
    import zarr

    def write():
        for name in ("words.h5", "words.zarr"):
            with open(os.path.join(folder, name), "w") as file:
                file.write("words")
        whole = np.random.default_rng(0).random(1000)
        with h5py.File(os.path.join(folder, "cut.h5"), "w") as file:
            file.create_dataset("x", data=whole, fletcher32=True, chunks=(500,))
            where = file["x"].id.get_chunk_info(0).byte_offset
        with open(os.path.join(folder, "cut.h5"), "r+b") as file:
            file.seek(where)
            file.write(b"damaged")
        zarr.save_array(os.path.join(folder, "cut.zarr"), whole)
        for base, _, names in os.walk(os.path.join(folder, "cut.zarr")):
            for name in names:
                if name != "zarr.json" and name[0] != ".":  # a chunk
                    os.truncate(os.path.join(base, name), 5)

    at(folder, "")
    on_first(write)
    for name in ("words.h5::x", "words.zarr", "cut.h5::x", "cut.zarr", "none.h5::x", "none.zarr"):
        with pytest.raises(dist.CheckpointError) as raised:
            dist.open_array(os.path.join(folder, name))
        assert name.split("::")[0] in str(raised.value)
        assert dist.together().lead(str, raised.value) == str(raised.value)


@check
def what_one_rank_cannot_read_no_rank_opens(folder):
    path = at(folder, "a.npy")
    on_first(np.save, path, numbers((4, 4)))
    mine = path if world().rank else at(folder, "gone.npy")
    if world().rank:
        dist.barrier()
    with pytest.raises(dist.CheckpointError, match=r"gone\.npy: No such file"):
        dist.open_array(mine)


@check
def ranks_that_mean_different_arrays_hear_of_both(folder):
    path = at(folder, "a.npy")
    on_first(np.save, path, numbers((4, 4)))
    rank = world().rank
    if world().nranks == 1:
        return
    with pytest.raises(dist.MismatchError, match=r"Shard\(0\).*Shard\(1\)"):
        dist.open_array(path, line(), [Shard(min(rank, 1))])
    array = spread(numbers((4, 4)), line(), [Shard(0)])
    with pytest.raises(dist.MismatchError, match=r"a\.npy as .*b\.npy as"):
        dist.save_array(at(folder, "ab"[min(rank, 1)] + ".npy"), array)
    assert os.listdir(folder) == ["a.npy"]


@check
def wrong_arguments_are_refused_on_all_ranks(folder):
    path, array = at(folder, "a.npy"), spread(numbers((4, 4)), line(), [Shard(0)])
    on_first(np.save, path, numbers((4, 4)))
    for source, message in {
        "a.txt": "does not end like a file of arrays",
        f"{path}::x": "holds one array without a name",
    }.items():
        with pytest.raises(dist.UsageError, match=message):
            dist.open_array(source)
    with pytest.raises(dist.UsageError):
        dist.open_array(path, line(), [Shard(2)])
    with pytest.raises(dist.UsageError, match="dtype 'floot'"):
        dist.open_array(path, dtype="floot")
    with pytest.raises(dist.UsageError, match=r"end it in \.npy"):
        dist.save_array(at(folder, "a.txt"), array)
    with pytest.raises(dist.UsageError, match="got an ndarray"):
        dist.save_array(path, np.zeros(3))


@check
def what_cannot_be_written_leaves_what_was_there(folder):
    path, array = at(folder, "a.npy"), spread(numbers((4, 4)), line(), [Shard(0)])
    on_first(os.mkdir, path)
    with pytest.raises(dist.CheckpointError, match=r"a\.npy"):
        dist.save_array(path, array)
    with pytest.raises(dist.CheckpointError, match="No such file"):
        dist.save_array(os.path.join(folder, "none", "a.npy"), array)
    assert os.listdir(folder) == ["a.npy"]
    assert os.path.isdir(path)


@check
def a_symbolic_link_stays_one_and_its_file_is_replaced(folder):
    path, link, array = at(folder, "a.npy"), at(folder, "b.npy"), identity()
    on_first(os.symlink, "a.npy", link)  # which leads nowhere yet
    for _ in range(2):
        dist.save_array(link, array)
        assert os.path.islink(link)
        assert (np.load(path) == np.eye(4)).all()
    on_first(os.symlink, "c.npy", at(folder, "c.npy"))
    with pytest.raises(dist.CheckpointError, match="leads only to other links"):
        dist.save_array(os.path.join(folder, "c.npy"), array)


@check
def a_dtype_that_loses_what_is_there_is_refused_unless_told(folder):
    path, whole = at(folder, "a.npy"), np.arange(4) + 0.5
    on_first(np.save, path, whole)
    with pytest.raises(dist.UsageError, match="float64, which is not converted to int32"):
        dist.open_array(path, dtype="int32")
    with pytest.raises(dist.UsageError, match="casting must be one of no, equiv, safe"):
        dist.open_array(path, dtype="int32", casting="any")
    assert has_its_part(dist.open_array(path, dtype="int32", casting="unsafe"), whole.astype("i4"))
    assert has_its_part(dist.open_array(path, dtype="float32"), whole.astype("f4"))
    with pytest.raises(dist.UsageError, match="with casting='safe'"):
        dist.open_array(path, dtype="float32", casting="safe")


@check
def what_one_rank_gets_wrong_all_ranks_hear_of(folder):
    path, array = at(folder, "a.npy"), identity()
    dist.save_array(path, array)
    wrong = [
        lambda bad: dist.open_array(path, "rows" if bad else line()),
        lambda bad: dist.open_array(path, line(), dtype="floot" if bad else "f8"),
        lambda bad: dist.save_array(path, np.eye(4) if bad else array),
    ]
    last = world().nranks - 1
    for call in wrong:
        with pytest.raises(dist.HpcdistError) as raised:
            call(world().rank == last)
        assert not isinstance(raised.value, dist.CollectiveTimeout)
        assert isinstance(raised.value, dist.UsageError) or world().rank != last
        assert has_its_part(dist.open_array(path), np.eye(4))
