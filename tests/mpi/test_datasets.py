"""Datasets on real ranks: one copy in a node's memory, or exchanged; nothing is left behind."""

import errno
import os
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from dataset_checks import (
    dataset_of,
    expected_order,
    ids_of,
    in_order,
    loaded,
    steps_of,
    write_files,
)

import hpcdist as dist
from hpcdist.data import spill
from hpcdist.data.columns import Columns, Fixed, Ragged
from hpcdist.data.order import Shuffled
from hpcdist.data.settle import settle
from hpcdist.data.shares import plan_shares
from hpcdist.data.store import Hoard, Parts, Whole

TOTAL = 61


def of_all_ranks(mine):
    parts = []
    dist.all_gather_object(parts, mine)
    return parts


@pytest.fixture
def files(folder):
    def write():
        Path(folder).mkdir(parents=True, exist_ok=True)
        return write_files(Path(folder), TOTAL)

    return dist.together().lead(write)


@pytest.fixture(params=["shared", "nodes", "apart"])
def way(request, size):
    """Whether all ranks share their rows, or those of pretended nodes, or none."""
    per_node = {"shared": None, "nodes": 2 if size > 2 else 1, "apart": 1}[request.param]
    if per_node is not None:
        request.getfixturevalue("world_with")(ranks_per_node=per_node)
    return request.param


def test_the_order_is_that_of_one_rank(files, way, size):
    dataset = loaded(files, seed=5, tail="keep", thread_num=2)
    assert isinstance(dataset._settled.store, Parts if way != "shared" and size > 1 else Whole)
    for epoch in (0, 1):
        dataset.global_shuffle(epoch=epoch)
        found = in_order(of_all_ranks(steps_of(dataset)))
        assert found == expected_order(TOTAL, 5, epoch)
    assert dataset.get_memory_data_size(True) == dataset.get_shuffle_data_size(True) == TOTAL


def test_the_ranks_of_a_node_see_the_rows_of_all_of_them(files, world_with, rank, size):
    world_with(ranks_per_node=2)
    dataset = loaded(files, tail="keep")
    dataset.global_shuffle()
    store = dataset._settled.store
    seen = len(store._held[0].rows if isinstance(store, Parts) else store._rows)
    assert isinstance(store, Parts) == (size > 2)
    assert sum(of_all_ranks(seen)[::2]) == TOTAL
    assert of_all_ranks(seen)[rank // 2 * 2] == seen


def test_one_rank_goes_on_where_all_have_stopped(files, way, rank):
    dataset = loaded(files, seed=5, tail="keep", batch_size=2)
    dataset.global_shuffle()
    batches = dataset.batches()
    begun = of_all_ranks([ids_of(next(batches)) for _ in range(3)])
    state = dataset.state_dict()
    assert of_all_ranks(state) == [state] * len(begun)
    one = dist.new_group([0])
    if rank == 0:
        alone = loaded(files, seed=5, tail="keep", group=one)
        alone.load_state_dict(state)
        rest = list(chain(*steps_of(alone)))
        assert in_order(begun) + rest == expected_order(TOTAL, 5, 0)
    dist.barrier()


def test_slots_are_shuffled_alike(files, way):
    dataset = loaded(files, seed=5, tail="keep")
    dataset.slots_shuffle(["x"])
    firsts = [batch["x"][0][batch["x"][1][:-1]].tolist() for batch in dataset]
    found = in_order(of_all_ranks(firsts))
    assert sorted(found) == list(range(TOTAL))
    assert found != list(range(TOTAL))
    dataset.slots_shuffle([])
    assert in_order(of_all_ranks(steps_of(dataset))) == list(range(TOTAL))


def named_memory():
    """Return the files of /dev/shm that this rank maps, but for those of MPI."""
    mapped = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    return {name for name in mapped if name.startswith("/dev/shm/hpcdist")}


def test_rows_in_files_leave_nothing_behind(files, way, folder):
    before = named_memory()
    spilled = Path(folder) / "spilled"
    dist.together().lead(lambda: spilled.mkdir(exist_ok=True))
    dataset = loaded(files, seed=5, tail="keep", spill=(str(spilled), 0))
    dataset.global_shuffle()
    assert in_order(of_all_ranks(steps_of(dataset))) == expected_order(TOTAL, 5, 0)
    assert os.listdir(spilled) == []
    dataset.release_memory()
    dist.barrier()
    assert named_memory() == before


def test_a_rank_without_room_is_an_error_on_every_rank(files, way, rank, size, monkeypatch):
    if rank == size - 1:

        def full(nbytes):
            raise OSError(errno.ENOSPC, "no room at all")

        monkeypatch.setattr(spill, "_in_memory", full)
        monkeypatch.setattr(spill, "own_memory", full)
    with pytest.raises(OSError if rank == size - 1 else dist.RemoteError, match="no room at all"):
        loaded(files)
    dist.barrier()


def test_ranks_that_name_other_files_hear_of_it(files, rank, size):
    if size == 1:
        pytest.skip("one rank agrees with itself")
    dataset = dataset_of(files if rank else files[:-1])
    with pytest.raises(dist.MismatchError, match="different files"):
        dataset.load_into_memory()


@pytest.mark.parametrize("kind", [dist.InMemoryDataset, dist.QueueDataset])
def test_ranks_that_would_read_otherwise_hear_of_it(files, kind, rank, size):
    if size == 1:
        pytest.skip("one rank agrees with itself")
    command = "head -n 3" if rank == size - 1 else "cat"
    dataset = dataset_of(files, kind, pipe_command=command)
    with pytest.raises(dist.MismatchError, match=f"'head -n 3' on rank {size - 1}, but 'cat' on"):
        dataset.load_into_memory() if kind is dist.InMemoryDataset else dataset.batches()
    dist.barrier()


@pytest.mark.parametrize("tail", ["pad", "drop", "keep"])
def test_a_queue_gives_equally_many_batches_to_every_rank(files, tail):
    dataset = dataset_of(files, dist.QueueDataset, tail=tail, thread_num=2)
    found = of_all_ranks(steps_of(dataset))
    assert len({len(steps) for steps in found}) == 1
    every = sorted(chain(*chain(*found)))
    if tail == "keep":
        assert every == list(range(TOTAL))
    if tail == "pad":
        assert sorted({*every}) == list(range(TOTAL))
        assert len({tuple(map(len, steps)) for steps in found}) == 1
    if tail == "drop":
        assert len({*every}) == len(every)
        assert len({tuple(map(len, steps)) for steps in found}) == 1


def test_a_large_row_is_more_than_a_chunk(folder, rank, size, way, monkeypatch):
    monkeypatch.setattr("hpcdist.data.store.CHUNK_NBYTES", 1000)
    path = Path(folder) / "large.txt"

    def write():
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"1 {i} {n} {' '.join([str(i)] * n)}" for i, n in enumerate([1, 2000, 3, 900])]
        path.write_text("\n".join(lines) + "\n")

    dist.together().lead(write)
    dataset = dataset_of([str(path)], tail="keep")
    dataset.load_into_memory()
    dataset.global_shuffle()
    lengths = {}
    for batch in dataset:
        lengths |= dict(zip(batch["id"].tolist(), np.diff(batch["x"][1]).tolist(), strict=True))
    together = {}
    for each in of_all_ranks(lengths):
        together |= each
    assert together == {0: 1, 1: 2000, 2: 3, 3: 900}


def blocks_of_text(rank, nbytes):
    """Return rows of 300 bytes, as a reader gives them."""
    rows = (4 << 20) // 300
    for first in range(0, nbytes // 300, rows):
        text = np.full(300 * rows, rank % 256, np.uint8)
        ids = np.arange(first, first + rows)
        offsets = np.arange(0, 300 * rows + 1, 300)
        yield Columns({"id": Fixed(ids), "text": Ragged(text, offsets, "bytes")})


def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


@pytest.mark.thorough
def test_a_shuffle_takes_little_more_memory_than_the_rows(way, rank, size):
    ranks, nbytes = dist.together(), 64 << 20
    Path("/proc/self/clear_refs").write_text("5")  # the most was now
    before = resident("VmRSS")
    hoard = Hoard()
    for rows in blocks_of_text(rank, nbytes):
        hoard.add(rows)
    settled = settle(hoard.parts(), ranks, None)
    total = sum(settled.rows)
    for epoch in range(2):
        settled.store.arrange(Shuffled(total, 1, epoch), plan_shares(total, 0, size, "pad"), {})
    grown = resident("VmHWM") - before
    assert grown <= 1.15 * settled.nbytes / size + (64 << 20)
    mine = settled.store.batch(0, 5)["text"].values
    assert len(mine) == 5 * 300
    assert mine.max() < size


def test_one_rank_goes_on_with_a_queue_where_all_have_stopped(files, rank):
    settings = {"batch_size": 2, "tail": "keep", "shuffle_buffer": 8, "seed": 5, "thread_num": 2}
    dataset = dataset_of(files, dist.QueueDataset, **settings)
    batches = dataset.batches(3)
    begun = of_all_ranks([ids_of(next(batches)) for _ in range(3)])
    state = dataset.state_dict()
    batches.close()
    assert of_all_ranks(state) == [state] * len(begun)
    one = dist.new_group([0])
    if rank == 0:
        alone = dataset_of(files, dist.QueueDataset, group=one, **settings)
        alone.load_state_dict(state)
        rest = [*chain(*steps_of(alone))]
        assert sorted([*rest, *chain(*chain(*begun))]) == list(range(TOTAL))
    dist.barrier()
