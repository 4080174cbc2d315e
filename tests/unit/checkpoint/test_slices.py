"""Slices of arrays in checkpoints: any division saves, any other loads, and nothing is lost."""

import copy
import os
import pickle
import re
import tempfile

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings, strategies as st
from safetensors import safe_open

import hpcdist as dist
from hpcdist import checkpoint
from hpcdist.checkpoint import LocalSlice, blocks
from hpcdist.checkpoint.command import checkpoint as command
from hpcdist.checkpoint.storage import open_checkpoint

ITEMS = {  # 12 bytes do not divide a block
    "f8": np.float64,
    "bf16": ml_dtypes.bfloat16,
    "12 bytes": np.dtype([("a", "f4"), ("b", "f8")]),
}


def numbered(shape, dtype=np.float64):
    """Return an array whose elements all differ, as far as the dtype can."""
    size = int(np.prod(shape))
    raw = np.zeros(size * np.dtype(dtype).itemsize, np.uint8)
    raw[...] = np.random.default_rng(0).integers(1, 127, raw.size)
    return raw.view(dtype).reshape(shape)


def box_slice(whole, box, empty=False):
    """Return a part of an array; `box` has the first index and the one after the last, by axis.

    An empty one has zeros.
    """
    data = np.array(whole[tuple(slice(*each) for each in box)])
    data = np.zeros_like(data) if empty else data
    return LocalSlice(data, whole.shape, [start for start, _ in box])


def flat_slice(whole, bounds, empty=False):
    data = whole.reshape(-1)[slice(*bounds)].copy()
    data = np.zeros_like(data) if empty else data
    return LocalSlice(data, whole.shape, offset=bounds[0])


@st.composite
def divisions(draw, shape, ranks):
    """For each rank the parts of an array that it has: each element is in one part.

    A part is a list of bounds by axis, or a tuple of the bounds in the flattened array.
    """
    if draw(st.booleans()):
        size = int(np.prod(shape))
        cuts = sorted(draw(st.lists(st.integers(0, size), min_size=ranks - 1, max_size=ranks - 1)))
        return list(zip([0, *cuts], [*cuts, size], strict=True))
    parts = [[(0, length) for length in shape]]
    for _ in range(ranks - 1):
        number = draw(st.integers(0, len(parts) - 1))
        if not shape:
            parts.append(None)
            continue
        axis = draw(st.integers(0, len(shape) - 1))
        start, stop = parts[number][axis]
        cut = draw(st.integers(start, stop))
        one, other = list(parts[number]), list(parts[number])
        one[axis], other[axis] = (start, cut), (cut, stop)
        parts[number] = one
        parts.append(other)
    return draw(st.permutations(parts))


def part_of(whole, part, empty=False):
    if part is None:  # a rank that has nothing of an array without dimensions
        return LocalSlice(whole.reshape(-1)[:0], whole.shape, offset=0)
    return (flat_slice if isinstance(part, tuple) else box_slice)(whole, part, empty)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 7), max_size=4).map(tuple),
    kind=st.sampled_from(list(ITEMS)),
    ranks=st.tuples(st.integers(1, 5), st.integers(1, 4)),
    data=st.data(),
)
def test_any_division_is_loaded_in_any_other(shape, kind, ranks, data):
    whole = numbered(shape, ITEMS[kind])
    saved, wanted = (data.draw(divisions(shape, each)) for each in ranks)

    def save(folder):
        state = {"w": part_of(whole, saved[dist.get_rank()]), "all": whole}
        checkpoint.save(state, folder)

    def load(folder):
        mine = wanted[dist.get_rank()]
        part, every = part_of(whole, mine, empty=True), np.zeros_like(whole)
        checkpoint.load({"w": part, "all": every}, folder)
        assert part.data.tobytes() == part_of(whole, mine).data.tobytes()
        assert every.tobytes() == whole.tobytes()

    with tempfile.TemporaryDirectory() as folder:
        dist.simulate(ranks[0], save, folder)
        dist.simulate(ranks[1], load, folder)
        assert checkpoint.load(None, folder)["w"].tobytes() == whole.tobytes()
        merged = dist.load_merged_state_dict(folder)
        assert merged["w"].tobytes() == whole.tobytes()
        assert checkpoint.verify(folder).nbytes == 2 * whole.nbytes


def columns(whole, rank, ranks, empty=False):
    cuts = [whole.shape[1] * each // ranks for each in (rank, rank + 1)]
    return box_slice(whole, [(0, whole.shape[0]), tuple(cuts)], empty)


def rows(whole, rank, ranks, empty=False):
    cuts = [whole.shape[0] * each // ranks for each in (rank, rank + 1)]
    return box_slice(whole, [tuple(cuts), (0, whole.shape[1])], empty)


LARGE = numbered((700, 1100), np.float32)
"""Some blocks of a file; a row is none, and no whole number of them is."""


@pytest.mark.parametrize("saver", [rows, columns])
@pytest.mark.parametrize("loader", [rows, columns])
def test_rows_and_columns_of_many_blocks_take_each_others_place(tmp_path, saver, loader):
    def save():
        checkpoint.save({"w": saver(LARGE, dist.get_rank(), 3)}, tmp_path)

    def load():
        part = loader(LARGE, dist.get_rank(), 2, empty=True)
        checkpoint.load({"w": part}, tmp_path)
        return (part.data == loader(LARGE, dist.get_rank(), 2).data).all()

    dist.simulate(3, save)
    assert dist.simulate(2, load) == [True, True]
    assert (checkpoint.load(None, tmp_path)["w"] == LARGE).all()
    output = tmp_path / "whole.safetensors"
    checkpoint.consolidate(tmp_path, output)
    with safe_open(output, "numpy") as file:
        assert (file.get_tensor("w") == LARGE).all()


def test_boxes_of_a_grid_of_which_two_ranks_each_have_one_are_written_once(tmp_path):
    """As FSDP on two groups of ranks, with tensor parallelism, divides and replicates."""
    whole = numbered((6, 1 << 19), np.uint8)

    def save():
        rank = dist.get_rank() % 3
        cuts = [whole.shape[1] * each // 3 for each in (rank, rank + 1)]
        checkpoint.save({"w": box_slice(whole, [(0, 6), tuple(cuts)])}, tmp_path)

    dist.simulate(6, save)
    _, manifest = open_checkpoint(str(tmp_path))
    assert sum(piece.box.size for piece in manifest.pieces["w"]) == whole.size
    assert len(manifest.files) == 3  # parts of less than a MiB are not cut
    assert (checkpoint.load(None, tmp_path)["w"] == whole).all()


def test_a_large_box_that_two_ranks_have_is_shared_out_between_them(tmp_path):
    whole = numbered((8, 2 << 20), np.uint8)
    half = whole.shape[1] // 2

    def save():
        first = dist.get_rank() // 2 * half
        checkpoint.save({"w": box_slice(whole, [(0, 8), (first, first + half)])}, tmp_path)

    dist.simulate(4, save)
    _, manifest = open_checkpoint(str(tmp_path))
    assert [piece.box.lengths for piece in manifest.pieces["w"]] == [(4, half)] * 4
    assert {size - (4 << 20) for _, size in manifest.files} == {4096}
    assert (checkpoint.load(None, tmp_path)["w"] == whole).all()


def test_safetensors_opens_a_box_under_the_name_and_in_the_shape_that_it_has(tmp_path):
    whole = numbered((4, 6))
    dist.simulate(2, lambda: checkpoint.save({"w": columns(whole, dist.get_rank(), 2)}, tmp_path))
    names = sorted(name for name in os.listdir(tmp_path) if name.endswith(".safetensors"))
    for name, (start, stop) in zip(names, [(0, 3), (3, 6)], strict=True):
        with safe_open(tmp_path / name, "numpy") as file:
            assert list(file.keys()) == [f"w[0:4, {start}:{stop}]"]
            assert (file.get_tensor(f"w[0:4, {start}:{stop}]") == whole[:, start:stop]).all()


def test_a_box_that_is_a_run_is_the_same_part_as_the_run(tmp_path):
    whole = numbered((4, 6))

    def save():
        if dist.get_rank() == 0:
            part = box_slice(whole, [(0, 2), (0, 6)])
        elif dist.get_rank() == 1:
            part = flat_slice(whole, (0, 12))
        else:
            part = box_slice(whole, [(2, 4), (0, 6)])
        checkpoint.save({"w": part}, tmp_path)

    dist.simulate(3, save)
    assert (checkpoint.load(None, tmp_path)["w"] == whole).all()


def test_a_slice_whose_data_is_strided_is_saved_and_filled(tmp_path):
    whole = numbered((6, 8))
    cuts = [0, 2, 5, 8]

    def save():
        start, stop = cuts[dist.get_rank()], cuts[dist.get_rank() + 1]
        checkpoint.save({"w": LocalSlice(whole[:, start:stop], (6, 8), (0, start))}, tmp_path)

    dist.simulate(3, save)
    given = np.zeros((6, 8))
    checkpoint.load({"w": LocalSlice(given[1:3, 1:6], (6, 8), (1, 1))}, tmp_path)
    expected = np.zeros((6, 8))
    expected[1:3, 1:6] = whole[1:3, 1:6]
    assert (given == expected).all()


def test_jax_data_of_a_slice_are_replaced(tmp_path):
    jnp = pytest.importorskip("jax.numpy")

    whole = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    checkpoint.save({"w": whole}, tmp_path)
    given = LocalSlice(jnp.zeros((3, 2)), (3, 4), (0, 1))
    loaded = checkpoint.load({"w": given}, tmp_path)["w"]
    assert type(loaded.data) is type(given.data)
    assert (loaded.data == whole[:, 1:3]).all()
    assert (loaded.global_shape, loaded.offsets) == ((3, 4), (0, 1))


def test_slices_of_a_device_are_saved_and_filled(tmp_path):
    from hpcdist.testing.slow_device import DEVICE

    whole = numbered((4, 6))

    def save():
        data = columns(whole, dist.get_rank(), 2).data
        part = LocalSlice(DEVICE.array(data), (4, 6), (0, 3 * dist.get_rank()))
        checkpoint.save({"w": part}, tmp_path)

    dist.simulate(2, save)
    given = DEVICE.array(np.zeros((2, 4)))
    checkpoint.load({"w": LocalSlice(given, (4, 6), (1, 1))}, tmp_path)
    assert (DEVICE.numbers(given) == whole[1:3, 1:5]).all()


# ---- how much is read


@pytest.fixture
def reads(monkeypatch):
    """The sizes of all reads of data files."""
    found = []
    preadv = os.preadv

    def counted(fd, buffers, offset):
        found.append(sum(map(len, buffers)))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    return found


def test_only_blocks_with_wanted_elements_are_read_and_each_once(tmp_path, reads):
    block = blocks.BLOCK
    whole = numbered((16, block // 2), np.uint8)  # two rows are a block
    checkpoint.save({"w": whole}, tmp_path)
    part = box_slice(whole, [(4, 7), (10, 500)], empty=True)
    checkpoint.load({"w": part}, tmp_path, check_first=False)
    assert reads == [block, block]
    assert (part.data == whole[4:7, 10:500]).all()


def test_long_rows_of_a_box_are_passed_over_where_nothing_is_wanted(tmp_path, reads):
    block = blocks.BLOCK
    whole = numbered((3, 8 * block), np.uint8)
    dist.simulate(2, lambda: checkpoint.save({"w": columns(whole, dist.get_rank(), 2)}, tmp_path))
    part = box_slice(whole, [(0, 3), (5 * block, 6 * block)], empty=True)
    checkpoint.load({"w": part}, tmp_path, check_first=False)
    assert sum(reads) == 3 * block
    assert (part.data == whole[:, 5 * block : 6 * block]).all()


def test_the_box_that_was_saved_is_read_where_it_belongs(tmp_path, reads, monkeypatch):
    from hpcdist.checkpoint import reading

    whole = numbered((64, 2 * blocks.BLOCK // 16), np.uint8)
    dist.simulate(2, lambda: checkpoint.save({"w": columns(whole, dist.get_rank(), 2)}, tmp_path))
    monkeypatch.setattr(reading, "put", None)  # nothing passes through other memory
    part = columns(whole, 1, 2, empty=True)
    checkpoint.load({"w": part}, tmp_path, check_first=False)
    assert reads == [blocks.BLOCK] * 4
    assert (part.data == columns(whole, 1, 2).data).all()


# ---- what is wrong is said on all ranks, before anything is written


BAD = {
    "outside": (
        LocalSlice(np.ones((2, 3)), (4, 5), (3, 0)),
        r"is \[3:5, 0:3\], .* inside",
    ),
    "before": (LocalSlice(np.ones((2, 3)), (4, 5), (-1, 0)), "not lie inside the 20 elements"),
    "a wrong dimension": (LocalSlice(np.ones(6), (4, 5), (0, 0)), r"data of shape \(6,\), but the"),
    "too few offsets": (LocalSlice(np.ones((2, 3)), (4, 5), (0,)), "has 1 offsets and data"),
    "too many offsets": (LocalSlice(np.ones((2, 3)), (4, 5), (0, 0, 0)), "has 3 offsets and data"),
    "half an offset": (LocalSlice(np.ones((2, 3)), (4, 5), (0.5, 0)), "must have integers"),
    "text": (LocalSlice(np.ones(2), (4,), "a"), "must have integers"),
    "no shape": (LocalSlice(np.ones(2), 4, 0), "must have integers"),
    "a negative shape": (LocalSlice(np.ones(2), (-4, -1), offset=0), "not lie inside"),
    "beyond the end": (LocalSlice(np.ones(3), (2, 2), offset=2), "3 elements from 2 on"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_wrong_slice_of_one_rank_is_an_error_on_all_and_nothing_is_written(tmp_path, what):
    wrong, message = BAD[what]
    right = LocalSlice(np.ones((4, 5)), (4, 5), (0, 0))

    def save():
        with pytest.raises(dist.UsageError, match=f"rank 1: the LocalSlice 'w' .*{message}"):
            checkpoint.save({"w": wrong if dist.get_rank() == 1 else right}, tmp_path)
        return os.listdir(tmp_path)

    assert dist.simulate(2, save) == [[], []]
    checkpoint.save({"w": np.zeros((4, 5))}, tmp_path / "good")
    with pytest.raises(dist.CheckpointError, match=message):
        checkpoint.load({"w": wrong}, tmp_path / "good")


def test_shapes_that_differ_between_ranks_are_refused(tmp_path):
    def save():
        rank = dist.get_rank()
        part = LocalSlice(np.ones((2, 3)), (2, 6 + rank), (0, 3 * rank))
        with pytest.raises(dist.MismatchError, match=r"shape \(2, 6\), but .* shape \(2, 7\)"):
            checkpoint.save({"w": part}, tmp_path)
        return os.listdir(tmp_path)

    assert dist.simulate(2, save) == [[], []]


@pytest.mark.parametrize(("shift", "message"), [(1, "no rank has the .*3:4"), (-1, "overlapping")])
def test_missing_and_doubled_boxes_are_named_on_all_ranks(tmp_path, shift, message):
    def save():
        start = dist.get_rank() * (3 + shift)
        part = LocalSlice(np.ones((2, 3)), (2, 6 + shift), (0, start))
        with pytest.raises(dist.UsageError, match=message):
            checkpoint.save({"w": part}, tmp_path)
        return os.listdir(tmp_path)

    assert dist.simulate(2, save) == [[], []]


def test_a_slice_of_another_shape_or_dtype_is_refused(tmp_path):
    checkpoint.save({"w": np.zeros((4, 6))}, tmp_path)
    for data, shape in ((np.ones((2, 2)), (4, 7)), (np.ones((2, 2), "f4"), (4, 6))):
        with pytest.raises(dist.CheckpointError, match="'w' is float64 of shape"):
            checkpoint.load({"w": LocalSlice(data, shape, (0, 0))}, tmp_path)
        assert (data == 1).all()


# ---- LocalSlice itself


def test_the_former_name_and_its_signature_are_accepted():
    data = np.ones(2)
    assert checkpoint.Shard is LocalSlice
    for shard in (
        checkpoint.Shard(data, (2, 3), 4),
        checkpoint.Shard(data, (2, 3), offset=4),
        checkpoint.Shard(data=data, global_shape=(2, 3), offset=4),
    ):
        assert isinstance(shard, checkpoint.Shard)
        assert (shard.data is data, shard.global_shape, shard.offset) == (True, (2, 3), 4)


def test_a_slice_knows_where_its_first_element_is_in_the_flattened_array():
    assert LocalSlice(np.ones((1, 1)), (4, 5), (2, 3)).offset == 13
    assert LocalSlice(np.ones((1, 1)), (4, 5), np.array([2, 3])).offset == 13
    assert LocalSlice(np.ones(()), (), ()).offset == 0


@pytest.mark.parametrize("given", [{}, {"offsets": (0,), "offset": 0}])
def test_a_slice_begins_once(given):
    with pytest.raises(dist.UsageError, match=r"give offsets=.*or offset="):
        LocalSlice(np.ones(2), (2,), **given)


def test_a_slice_is_copied_and_pickled_and_does_not_change():
    part = LocalSlice(np.ones((2, 3)), (4, 5), (1, 2))
    for other in (copy.copy(part), copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        assert (other.data == 1).all()
        assert (other.global_shape, other.offsets) == ((4, 5), (1, 2))
    with pytest.raises(AttributeError):
        part.offsets = (0, 0)
    assert repr(part) == "LocalSlice([1:3, 2:5] of shape (4, 5))"
    assert repr(checkpoint.Shard(np.ones(4), (2, 9), 5)) == (
        "LocalSlice(4 elements from 5 on, of shape (2, 9))"
    )


# ---- on the command line


def listed(*words):
    done = CliRunner().invoke(command, ["ls", *map(str, words)])
    return done.exit_code, " ".join(done.output.split())


def test_the_command_shows_how_arrays_are_divided(tmp_path):
    whole = numbered((4, 6))
    halves = [[(0, 2), (0, 6)], [(2, 4), (0, 4)], [(2, 4), (4, 6)], [(4, 4), (0, 0)]]

    def save():
        rank = dist.get_rank()
        row, column = 2 * (rank // 2), 3 * (rank % 2)
        state = {
            "same": whole[:1],
            "runs": flat_slice(whole, (6 * rank, 6 * rank + 6)),
            "grid": box_slice(whole, [(row, row + 2), (column, column + 3)]),
            "odd": box_slice(whole, halves[rank]),
        }
        checkpoint.save(state, tmp_path)

    dist.simulate(4, save)
    code, text = listed(tmp_path)
    assert code == 0
    for name, division in (
        ("same", "whole"),
        ("runs", "4 runs"),
        ("grid", "2 x 2 boxes"),
        ("odd", "3 parts"),
    ):
        assert re.search(f"{name} .{{,80}} {division}", text), text
    code, text = listed(tmp_path, "--array", "grid")
    assert code == 0
    assert "grid of shape (4, 6)" in text
    for rank, part in enumerate(["[0:2, 0:3]", "[0:2, 3:6]", "[2:4, 0:3]", "[2:4, 3:6]"]):
        assert re.search(rf"{re.escape(part)} . 48 . [0-9a-f]{{12}}-0000{rank}", text), text
    code, text = listed(tmp_path, "--array", "none")
    assert code == 2
    assert "has no array 'none'" in text
