"""Checkpoints of several ranks, planned and simulated: any division saves, any other loads."""

import os
import tempfile
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from safetensors import safe_open

import hpcdist as dist
from hpcdist import checkpoint
from hpcdist.checkpoint import LocalSlice
from hpcdist.checkpoint.boxes import Box, run
from hpcdist.checkpoint.cover import flaw_of
from hpcdist.checkpoint.plan import CUT, Array, Held, Share, Shared, join_holdings, share_out

F4 = "float32"


def held(name, start, stop, size=100):
    return Held(name, F4, (size,), run(start, stop))


def nbytes_of(shares):
    return [sum(4 * share.box.size for share in each) for each in shares]


# ---- the plan


def test_what_all_ranks_hold_is_held_once():
    arrays, shared = join_holdings([[held("w", 0, 100)]] * 3, range(3))
    assert arrays == {"w": Array(F4, (100,))}
    assert shared == [Shared("w", run(0, 100), (0, 1, 2))]


def test_slices_of_one_array_are_told_with_their_holders():
    _, shared = join_holdings(
        [[held("w", 50, 100)], [held("w", 0, 50)], [held("w", 0, 50)]], range(3)
    )
    assert shared == [Shared("w", run(0, 50), (1, 2)), Shared("w", run(50, 100), (0,))]


def columns(start, stop, rows=100, first=0):
    """Return what a rank holds of an array of 100 rows of 8."""
    return Held("w", F4, (100, 8), Box((first, start), (rows, stop - start)))


def test_boxes_of_one_array_are_told_with_their_holders():
    left, right = columns(0, 3), columns(3, 8)
    _, shared = join_holdings([[right], [left], [right], [left]], range(4))
    assert shared == [Shared("w", left.box, (1, 3)), Shared("w", right.box, (0, 2))]


@pytest.mark.parametrize(
    ("everyone", "message"),
    [
        ([columns(0, 3), columns(4, 8)], r"elements \[0:100, 3:4\] of 'w', .* shape \(100, 8\)"),
        ([columns(0, 3), columns(3, 8, 99)], r"no rank has the elements \[99:100, 3:8\]"),
        ([columns(0, 4), columns(3, 8)], r"overlapping parts of 'w': elements \[0:100, 3:4\]"),
        (
            [columns(0, 4), columns(4, 8), columns(3, 5, 9, 7)],
            r"overlapping parts of 'w': elements \[7:16, [34]:[45]\] are in two",
        ),
        (
            [columns(0, 4), Held("w", F4, (100, 8), run(0, 800))],
            r"overlapping parts of 'w': elements \[0:100, 0:4\]",
        ),
    ],
)
def test_boxes_that_are_missing_or_overlap_are_named(everyone, message):
    with pytest.raises(dist.UsageError, match=message):
        join_holdings([[each] for each in everyone], range(len(everyone)))


@pytest.mark.parametrize(
    ("everyone", "error", "message"),
    [
        ([(0, 50), (60, 100)], dist.UsageError, "no rank has the elements 50 to 59 of 'w'"),
        ([(0, 50), (0, 50)], dist.UsageError, "elements 50 to 99"),
        ([(10, 100)], dist.UsageError, "elements 0 to 9"),
        ([(0, 60), (50, 100)], dist.UsageError, "overlapping parts of 'w': elements 50 to 59"),
        ([(0, 100), (0, 50)], dist.UsageError, "overlapping"),
    ],
)
def test_gaps_and_overlaps_are_named(everyone, error, message):
    with pytest.raises(error, match=message):
        join_holdings([[held("w", *bounds)] for bounds in everyone], range(len(everyone)))


def test_arrays_that_differ_are_named_with_their_world_ranks():
    other = Held("w", "float64", (100,), run(0, 100))
    with pytest.raises(dist.MismatchError, match=r"rank 4 has float32 .* but rank 7 has float64"):
        join_holdings([[held("w", 0, 100)], [other]], [4, 7])


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3 * CUT), min_size=1, max_size=12),
    ranks=st.integers(1, 7),
    data=st.data(),
)
def test_every_element_is_written_once_by_one_of_its_holders(sizes, ranks, data):
    arrays = {str(number): Array(F4, (size,)) for number, size in enumerate(sizes)}
    members = st.lists(st.integers(0, ranks - 1), min_size=1, unique=True).map(sorted).map(tuple)
    shared = [
        Shared(name, run(0, array.size), data.draw(members)) for name, array in arrays.items()
    ]
    shares = share_out(arrays, shared, ranks)
    for name, box, holders in shared:
        own = [(each.box, r) for r, found in enumerate(shares) for each in found if each[0] == name]
        assert {rank for _, rank in own} <= set(holders)
        assert own
        assert flaw_of([box for box, _ in own], arrays[name].shape) is None
        assert sum(each.size for each, _ in own) == box.size


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(2, 40),
    length=st.sampled_from([1, 7, 1000, CUT // 2]),
    ranks=st.integers(1, 5),
    planes=st.integers(1, 3),
)
def test_a_box_that_several_ranks_hold_is_divided_between_them(rows, length, ranks, planes):
    shape = (planes, rows, 3 * length)
    box = Box((0, 0, length), (planes, rows, length))
    others = [Box((0, 0, 0), (planes, rows, length)), Box((0, 0, 2 * length), box.lengths)]
    shared = [Shared("w", box, tuple(range(ranks)))]
    shares = share_out({"w": Array(F4, shape)}, shared, ranks)
    written = [share.box for each in shares for share in each]
    assert flaw_of([*written, *others], shape) is None
    level = box.size * 4 / ranks
    assert max(nbytes_of(shares)) - level <= 1.5 * max(CUT, 4 * rows * length)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 5 * CUT), min_size=1, max_size=12), ranks=st.integers(1, 7))
def test_ranks_write_nearly_equal_shares_of_what_all_have(sizes, ranks):
    arrays = {str(number): Array(F4, (size,)) for number, size in enumerate(sizes)}
    everyone = tuple(range(ranks))
    shared = [Shared(name, run(0, array.size), everyone) for name, array in arrays.items()]
    written = nbytes_of(share_out(arrays, shared, ranks))
    assert max(written) - sum(sizes) * 4 / ranks <= 1.5 * CUT


def test_ranks_that_write_their_slices_leave_the_rest_to_the_others():
    arrays = {"slice": Array(F4, (4 * CUT,)), "all": Array(F4, (4 * CUT,))}
    every = run(0, 4 * CUT)
    shared = [Shared("slice", every, (1,)), Shared("all", every, (0, 1))]
    assert share_out(arrays, shared, 2) == [[Share("all", every)], [Share("slice", every)]]


# ---- simulated ranks


def divided(size, cuts):
    """Return the bounds of parts between sorted cuts; parts may be empty."""
    bounds = [0, *sorted(cuts), size]
    return list(pairwise(bounds))


def slice_of(whole, bounds, fill=None):
    begin, end = bounds
    data = whole.reshape(-1)[begin:end].copy()
    if fill is not None:
        data[...] = fill
    return LocalSlice(data, whole.shape, offset=begin)


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple),
    savers=st.integers(1, 5),
    loaders=st.integers(1, 5),
    data=st.data(),
)
def test_any_division_is_loaded_in_any_other(shape, savers, loaders, data):
    whole = np.random.default_rng(0).random(shape)
    cut = st.integers(0, whole.size)
    saved = divided(whole.size, data.draw(st.lists(cut, min_size=savers - 1, max_size=savers - 1)))
    wanted = divided(
        whole.size, data.draw(st.lists(cut, min_size=loaders - 1, max_size=loaders - 1))
    )

    def save(folder):
        rank = dist.get_rank()
        state = {"shards": slice_of(whole, saved[rank]), "same": whole, f"own {rank}": whole + rank}
        checkpoint.save(state, folder)

    def load(folder):
        part = slice_of(whole, wanted[dist.get_rank()], fill=-1)
        plain, last = np.full(shape, -1.0), np.full(shape, -1.0)
        others = {f"own {rank}": None for rank in range(savers - 1)}
        state = {"shards": part, "same": plain, f"own {savers - 1}": last, **others}
        checkpoint.load(state, folder)
        begin, end = wanted[dist.get_rank()]
        assert (part.data == whole.reshape(-1)[begin:end]).all()
        assert state["shards"].data is part.data
        assert (plain == whole).all()
        assert (last == whole + (savers - 1)).all()
        assert (checkpoint.load(None, folder)["shards"] == whole).all()

    with tempfile.TemporaryDirectory() as folder:
        dist.simulate(savers, save, folder)
        dist.simulate(loaders, load, folder)
        with pytest.warns(dist.CheckpointWarning, match="'same' is in the checkpoint"):
            checkpoint.load({"shards": slice_of(whole, (0, whole.size))}, folder, strict=False)


def test_a_large_array_that_all_have_is_cut_into_equal_parts(tmp_path):
    whole = np.arange(6 * CUT, dtype=np.uint8)
    dist.simulate(3, lambda: checkpoint.save({"x": whole}, tmp_path))
    names = sorted(name for name in os.listdir(tmp_path) if name.endswith("safetensors"))
    bounds = [(0, 2 * CUT), (2 * CUT, 4 * CUT), (4 * CUT, 6 * CUT)]
    for name, (start, stop) in zip(names, bounds, strict=True):
        with safe_open(tmp_path / name, "numpy") as file:
            assert list(file.keys()) == [f"x[{start}:{stop}]"]
            assert (file.get_tensor(f"x[{start}:{stop}]") == whole[start:stop]).all()
    assert (checkpoint.load(None, tmp_path)["x"] == whole).all()


def test_ranks_that_disagree_about_a_number_save_nothing(tmp_path):
    with pytest.raises(dist.MismatchError, match="rank 0 has value 0, but rank 1 has value 1"):
        dist.simulate(2, lambda: checkpoint.save({"rank": dist.get_rank()}, tmp_path))
    assert os.listdir(tmp_path) == []


def test_ranks_that_name_different_folders_save_nothing(tmp_path):
    with pytest.raises(dist.MismatchError, match="let all ranks make the same call"):
        dist.simulate(2, lambda: checkpoint.save({}, tmp_path / str(dist.get_rank())))
    assert os.listdir(tmp_path) == []


def test_keys_of_single_ranks_are_united(tmp_path):
    def save():
        rank = dist.get_rank()
        checkpoint.save({"state": {rank: {"m": np.full(2, rank)}}, "n": 2}, tmp_path)

    dist.simulate(3, save)
    loaded = checkpoint.load(None, tmp_path)
    assert sorted(loaded["state"]) == [0, 1, 2]
    assert (loaded["state"][2]["m"] == 2).all()


def test_only_the_first_rank_looks_at_folders(tmp_path, monkeypatch):
    """The others see a file system without the checkpoint, as a node with an old cache does."""
    looks = []
    listdir, lstat = os.listdir, os.lstat

    def noting(look):
        def looked(path, *args):
            if not str(path).endswith(".safetensors"):  # of these, each rank reads its own
                looks.append(dist.get_rank())
            return look(path, *args)

        return looked

    monkeypatch.setattr(os, "listdir", noting(listdir))
    monkeypatch.setattr(os, "lstat", noting(lstat))

    def work():
        for step in range(3):
            checkpoint.save({"x": np.full(2, step)}, tmp_path, step=step, keep=1)
        checkpoint.latest(tmp_path)
        return checkpoint.load(None, tmp_path)["x"][0]

    assert dist.simulate(3, work) == [2, 2, 2]
    assert set(looks) == {0}


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_cannot_write_is_an_error_on_all_and_leaves_no_file(
    tmp_path, monkeypatch, failing
):
    checkpoint.save({"x": np.ones(3)}, tmp_path)
    before = sorted(os.listdir(tmp_path))
    pwrite = os.pwrite

    def write(*args):
        if dist.get_rank() == failing:
            raise OSError(28, "No space left on device")
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", write)

    def save():
        state = {f"x{dist.get_rank()}": np.zeros(3)}
        with pytest.raises(dist.CheckpointError, match=f"rank {failing}: .*No space left"):
            checkpoint.save(state, tmp_path)
        return True

    assert dist.simulate(3, save) == [True] * 3
    assert sorted(os.listdir(tmp_path)) == before
    assert (checkpoint.load(None, tmp_path)["x"] == 1).all()


def test_a_place_where_nothing_can_be_made_is_an_error_on_all():
    def save():
        with pytest.raises(dist.CheckpointError, match=r"rank 0: /sys/checkpoint: .*"):
            checkpoint.save({"x": np.ones(3)}, "/sys/checkpoint")
        return True

    assert dist.simulate(2, save) == [True, True]


def test_ranks_share_the_verifying(tmp_path):
    def save():
        checkpoint.save({f"x{dist.get_rank()}": np.full(3, dist.get_rank())}, tmp_path)
        return checkpoint.verify(tmp_path)

    assert {(s.arrays, s.files, s.ranks, s.nbytes) for s in dist.simulate(3, save)} == {
        (3, 3, 3, 72)
    }
    for name in os.listdir(tmp_path):
        if name.endswith("safetensors"):
            os.truncate(tmp_path / name, 10)

    def verify():
        with pytest.raises(dist.CheckpointError) as caught:
            checkpoint.verify(tmp_path)
        return str(caught.value).count("is damaged")

    assert dist.simulate(2, verify) == [3, 3]


def test_async_saves_of_a_group_follow_each_other(tmp_path):
    def save():
        group = dist.new_group([0, 2])
        if not group.is_member():
            return None
        x = np.zeros(100_000)
        for step in range(4):
            x += 1
            saving = checkpoint.save({"x": x}, tmp_path, group, step=step, async_save=True)
            dist.all_reduce(np.ones(3), group=group)
        assert saving.result() == str(tmp_path / "step-000003")
        return [checkpoint.load(None, tmp_path, group, step=step)["x"][0] for step in range(4)]

    assert dist.simulate(3, save) == [[1, 2, 3, 4], None, [1, 2, 3, 4]]


def test_a_rank_outside_the_group_is_warned_and_does_nothing(tmp_path):
    def save():
        group = dist.new_group([0])
        if dist.get_rank() == 0:
            checkpoint.save({"x": 1}, tmp_path, group)
            return checkpoint.load({"x": 0}, tmp_path, group)
        with pytest.warns(dist.NotInGroupWarning):
            assert checkpoint.save({"x": 2}, tmp_path, group).wait()
        with pytest.warns(dist.NotInGroupWarning):
            return checkpoint.load({"x": 0}, tmp_path, group)

    assert dist.simulate(2, save) == [{"x": 1}, {"x": 0}]


def test_another_rank_can_lead(tmp_path):
    def save():
        dist.save_state_dict({"x": np.ones(2)}, tmp_path, coordinator_rank=1)
        state = {"x": np.zeros(2)}
        dist.load_state_dict(state, tmp_path, coordinator_rank=2)
        with pytest.raises(dist.UsageError, match="coordinator_rank=7"):
            dist.save_state_dict({"x": 1}, tmp_path, coordinator_rank=7)
        return state["x"].sum()

    assert dist.simulate(3, save) == [2, 2, 2]


# ---- arrays of a device


@pytest.mark.parametrize(
    "layout", [lambda x: x, lambda x: x[:, ::2]], ids=["contiguous", "strided"]
)
@pytest.mark.parametrize("dtype", [np.float64, ml_dtypes.bfloat16])
def test_what_a_device_has_computed_is_saved_and_filled(tmp_path, dtype, layout):
    from hpcdist.testing.slow_device import DEVICE

    numbers = layout(np.arange(60.0).reshape(6, 10)).astype(dtype)
    whole = layout(np.arange(60).reshape(6, 10).astype(dtype))
    array = DEVICE.array(whole)
    dist.simulate(2, lambda: checkpoint.save({"x": array}, tmp_path))
    assert (checkpoint.load(None, tmp_path)["x"] == numbers).all()
    given = DEVICE.array(layout(np.zeros((6, 10), dtype)))
    state = {"x": given}
    checkpoint.load(state, tmp_path)
    assert state["x"] is given
    assert (DEVICE.numbers(given) == numbers).all()


# ---- sharded models


class Line:
    """A model of two arrays, one of which does not divide evenly."""

    def __init__(self):
        chance = np.random.default_rng(0)
        self.w = dist.Parameter(chance.random((5, 7)))
        self.b = dist.Parameter(chance.random(3))

    def named_parameters(self):
        return [("w", self.w), ("b", self.b)]

    def __call__(self):
        return self.w.data.sum() + self.b.data.sum()


def sharded(level):
    line = Line()
    optimizer = dist.optim.Adam(line.named_parameters(), learning_rate=0.1)
    model, optimizer, _ = dist.group_sharded_parallel(line, optimizer, level)
    return line, model, optimizer


def one_step(line, model, optimizer):
    model()
    line.b.grad = np.arange(3.0)
    line.w.grad = np.arange(35.0).reshape(5, 7)
    optimizer.step()


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
@pytest.mark.parametrize("other", ["os", "p_g_os"])
def test_a_sharded_model_goes_on_at_another_level_on_other_ranks(tmp_path, level, other):
    def save():
        line, model, optimizer = sharded(level)
        one_step(line, model, optimizer)
        dist.save_group_sharded_model(model, tmp_path, optimizer)
        one_step(line, model, optimizer)
        return model.state_dict()

    def load():
        line, model, optimizer = sharded(other)
        one_step(line, model, optimizer)
        one_step(line, model, optimizer)
        state = {"model": model.sharded_state_dict(), "optimizer": optimizer.sharded_state_dict()}
        checkpoint.load(state, tmp_path)
        model.load_sharded_state_dict(state["model"])
        optimizer.load_sharded_state_dict(state["optimizer"])
        one_step(line, model, optimizer)
        return model.state_dict()

    wanted = dist.simulate(3, save)[0]
    for found in dist.simulate(2, load):
        assert {name: array.shape for name, array in found.items()} == {"w": (5, 7), "b": (3,)}
        for name, array in found.items():
            assert np.allclose(array, wanted[name], rtol=1e-12)


@pytest.mark.parametrize("level", ["os", "p_g_os"])
def test_a_sharded_model_and_its_optimizer_are_objects_of_a_state(tmp_path, level):
    def save():
        line, model, optimizer = sharded(level)
        one_step(line, model, optimizer)
        checkpoint.save({"model": model, "optimizer": optimizer}, tmp_path)
        one_step(line, model, optimizer)
        return model.state_dict()

    def load():
        line, model, optimizer = sharded("os_g")
        checkpoint.load({"model": model, "optimizer": optimizer}, tmp_path)
        one_step(line, model, optimizer)
        return model.state_dict()

    wanted = dist.simulate(3, save)[0]
    for found in dist.simulate(2, load):
        assert found.keys() == wanted.keys()
        assert all(np.allclose(found[name], wanted[name], rtol=1e-12) for name in wanted)
