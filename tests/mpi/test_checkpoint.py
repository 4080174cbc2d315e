"""Checkpoints under MPI: groups of any size save, any other loads, and what fails fails on all."""

import os

import numpy as np
import pytest

import hpcdist as dist
from hpcdist import checkpoint
from hpcdist.checkpoint import LocalSlice, loading, saving


def part_of(whole, rank, size, fill=None):
    """Return the part of `whole` that a rank has, the first ones a bit larger."""
    begin, end = (-(-whole.size * each // size) for each in (rank, rank + 1))
    data = whole.reshape(-1)[begin:end].copy()
    if fill is not None:
        data[...] = fill
    return LocalSlice(data, whole.shape, offset=begin)


WHOLE = np.random.default_rng(0).random((7, 50_001))


def state_of(group):
    return {
        "same": WHOLE,
        "shards": part_of(WHOLE, group.rank, group.nranks),
        "own": {group.rank: np.full(3, group.rank)},
        "epoch": 4,
    }


def test_what_any_number_of_ranks_has_saved_any_other_loads(folder, world, rank, size):
    for savers in range(1, size + 1):
        path = f"{folder}-{savers}"
        group = dist.new_group(range(savers))
        if group.is_member():
            checkpoint.save(state_of(group), path, group)
        dist.barrier()
        for loaders in range(1, size + 1):
            other = dist.new_group(range(size - loaders, size))
            if other.is_member():
                part = part_of(WHOLE, other.rank, loaders, fill=-1)
                state = {"same": np.zeros_like(WHOLE), "shards": part, "own": None, "epoch": 0}
                checkpoint.load(state, path, other)
                assert (state["same"] == WHOLE).all()
                assert (part.data == part_of(WHOLE, other.rank, loaders).data).all()
                assert sorted(state["own"]) == list(range(savers))
                assert state["epoch"] == 4
        summary = checkpoint.verify(path)
        assert summary.ranks == savers
        assert summary.nbytes == 2 * WHOLE.nbytes + savers * 24


def test_all_ranks_write_nearly_the_same(folder, rank, size):
    checkpoint.save({"x": np.zeros(size << 20, np.uint8)}, folder)
    dist.barrier()
    sizes = [os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder)]
    assert len(sizes) == size + 1
    assert max(sizes) <= (1 << 20) + 4096


def test_a_series_is_kept_and_found_by_all(folder, size):
    for step in range(4):
        checkpoint.save({"step": step}, folder, step=step, keep=2)
    assert checkpoint.latest(folder) == os.path.join(folder, "step-000003")
    assert checkpoint.load(None, folder) == {"step": 3}
    assert sorted(os.listdir(folder)) == ["step-000002", "step-000003"]


def test_an_async_save_mixes_with_other_operations(folder, rank, size):
    x = np.zeros(500_000)
    for step in range(3):
        x += 1
        saving = checkpoint.save({"x": x}, folder, step=step, async_save=True)
        for _ in range(5):
            total = np.ones(3)
            dist.all_reduce(total)
            assert total[0] == size
    assert saving.wait()
    for step in range(3):
        assert (checkpoint.load(None, folder, step=step)["x"] == step + 1).all()


def test_saving_begins_anew_after_the_world_has(folder, world_with):
    checkpoint.save({"x": np.ones(3)}, folder, async_save=True).wait()
    world_with()
    checkpoint.save({"x": np.zeros(3)}, folder, async_save=True).wait()
    assert checkpoint.load(None, folder)["x"].sum() == 0


@pytest.mark.parametrize("async_save", [False, True])
def test_a_disk_that_is_full_for_one_rank_is_an_error_on_all(
    folder, rank, size, monkeypatch, and_the_world_goes_on, async_save
):
    checkpoint.save({"x": np.ones(3)}, folder)
    if rank == size - 1:
        monkeypatch.setattr(os, "pwrite", full_disk)
    with pytest.raises(dist.CheckpointError, match=r"No space left on device"):
        checkpoint.save({f"x{rank}": np.ones(3)}, folder, async_save=async_save).wait()
    monkeypatch.undo()
    assert checkpoint.load(None, folder)["x"].sum() == 3
    assert len(os.listdir(folder)) == 2


def full_disk(*_):
    raise OSError(28, "No space left on device")


def test_a_state_that_one_rank_cannot_save_is_an_error_on_all(
    folder, rank, size, and_the_world_goes_on
):
    state = {"x": np.ones(3), "f": print if rank == size - 1 else None}
    with pytest.raises(dist.UsageError, match="'f' is a builtin_function_or_method"):
        checkpoint.save(state, folder)
    assert not os.path.exists(folder)


def test_a_checkpoint_that_does_not_fit_one_rank_fills_none(
    folder, rank, size, and_the_world_goes_on
):
    checkpoint.save({"x": np.ones(3)}, folder)
    state = {"x": np.zeros(4 if rank == size - 1 else 3)}
    with pytest.raises(dist.CheckpointError, match=r"of shape \(3,\) .* of shape \(4,\) here"):
        checkpoint.load(state, folder)
    assert state["x"].sum() == 0


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_damage_that_one_rank_meets_fills_none(folder, rank, size, and_the_world_goes_on, damage):
    checkpoint.save({f"x{rank}": np.ones(1000)}, folder)
    dist.barrier()
    if rank == 0:
        names = sorted(name for name in os.listdir(folder) if name.endswith("safetensors"))
        harm(os.path.join(folder, names[-1]), damage)
    dist.barrier()
    state = {f"x{rank}": np.zeros(1000)}
    with pytest.raises(dist.CheckpointError, match=r"damaged|missing"):
        checkpoint.load(state, folder)
    assert state[f"x{rank}"].sum() == 0
    with pytest.raises(dist.CheckpointError, match=r"damaged|missing"):
        checkpoint.verify(folder)


def harm(path, damage):
    if damage == "missing":
        os.unlink(path)
    elif damage == "cut":
        os.truncate(path, os.path.getsize(path) - 8)
    else:
        with open(path, "r+b") as file:
            file.seek(-9, os.SEEK_END)
            file.write(b"\x55")


def test_an_interrupt_between_the_steps_of_a_save_or_a_load_ends_it_on_all(
    folder, rank, size, monkeypatch, and_the_world_goes_on
):
    def interrupted(*_):
        raise KeyboardInterrupt

    def save():
        checkpoint.save({"x": np.arange(9.0)}, folder)

    def load():
        assert (checkpoint.load({"x": np.empty(9)}, folder)["x"] == np.arange(9.0)).all()

    for call, module, step in (save, saving, "_write"), (load, loading, "load_small"):
        with monkeypatch.context() as patch:
            if rank == 0:
                patch.setattr(module, step, interrupted)
            with pytest.raises(KeyboardInterrupt if rank == 0 else dist.RemoteError):
                call()
        call()


def test_nothing_to_load_is_an_error_on_all(folder, and_the_world_goes_on):
    with pytest.raises(dist.CheckpointError, match="there is no checkpoint"):
        checkpoint.load(None, folder)
    assert checkpoint.latest(folder) is None


def test_ranks_that_save_differently_are_told(folder, rank, size, and_the_world_goes_on):
    if size == 1:
        pytest.skip("one rank agrees with itself")
    with pytest.raises(dist.MismatchError, match="let all ranks make the same call"):
        checkpoint.save({}, folder, step=rank)
    with pytest.raises(dist.MismatchError, match=r"'x': rank 0 has float64 of shape \(1,\)"):
        checkpoint.save({"x": np.ones(1 + rank)}, folder)
    assert not os.path.exists(folder)


def test_the_memory_of_each_process_is_no_place_for_what_all_save(size, and_the_world_goes_on):
    if size == 1:
        pytest.skip("one rank sees all of its memory")
    with pytest.raises(dist.UsageError, match=r"memory of one process.* that all ranks see"):
        checkpoint.save({"x": np.ones(2)}, "memory://run")
