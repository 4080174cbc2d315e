"""Datasets that are read while they are used: equal batches, little memory, no silent error."""

import json
import threading
from collections import Counter
from functools import partial
from itertools import chain

import numpy as np
import pytest
from dataset_checks import dataset_of, ids_of, steps_of, write_files

import hpcdist as dist
from hpcdist.data import formats
from hpcdist.data.columns import Columns, Fixed
from hpcdist.data.stream import shuffled

TOTAL = 53


@pytest.fixture
def files(tmp_path):
    return write_files(tmp_path, TOTAL)


def streamed(files, **settings):
    return dataset_of(files, dist.QueueDataset, **settings)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_rank_has_equally_many_batches(files, ranks, threads):
    def steps(tail):
        return steps_of(streamed(files, tail=tail, thread_num=threads))

    kept = dist.simulate(ranks, steps, "keep")
    assert sorted(chain(*chain(*kept))) == list(range(TOTAL))
    padded = dist.simulate(ranks, steps, "pad")
    assert {*chain(*chain(*padded))} == {*range(TOTAL)}
    dropped = dist.simulate(ranks, steps, "drop")
    assert len({*chain(*chain(*dropped))}) == len([*chain(*chain(*dropped))])
    for found in (padded, dropped):
        assert len({tuple(map(len, each)) for each in found}) == 1
    assert len({len(each) for each in kept}) == 1
    assert kept == dist.simulate(ranks, steps, "keep")


def test_one_reader_gives_the_order_of_the_files(files):
    assert [*chain(*steps_of(streamed(files)))] == list(range(TOTAL))


def test_batches_of_lists_have_their_own_values_and_offsets_from_0(files):
    for batch in streamed(files).batches():
        values, offsets = batch["x"]
        assert offsets[0] == 0
        assert offsets[-1] == len(values)
        assert len(offsets) == len(batch["id"]) + 1


def test_a_rank_without_rows_repeats_another_s_or_ends_all(tmp_path):
    files = write_files(tmp_path, 2, 1)

    def steps(tail):
        return steps_of(streamed(files, tail=tail))

    padded = dist.simulate(4, steps, "pad")
    assert all([len(step) for step in each] == [1] for each in padded)
    with pytest.raises(dist.UsageError, match="a rank has no rows at all"):
        dist.simulate(4, steps, "drop")


def test_a_reader_that_fails_is_an_error_on_every_rank(files, monkeypatch):
    reads = formats.Format.read

    def read(self, path, *args, **kwargs):
        if "-3-2" in path:
            raise OSError("the disk is gone")
        return reads(self, path, *args, **kwargs)

    monkeypatch.setattr(formats.Format, "read", read)

    def steps():
        try:
            steps_of(streamed(files))
        except (OSError, dist.RemoteError) as error:
            return type(error).__name__, str(error)

    found = dist.simulate(2, steps)
    assert [name for name, _ in found] == ["RemoteError", "OSError"]
    assert all("the disk is gone" in words for _, words in found)


def test_readers_wait_until_there_is_room(files, monkeypatch):
    reads, counted = formats.Format.read, []

    def read(self, path, *args, **kwargs):
        for rows in reads(self, path, *args, **kwargs):
            for row in range(len(rows)):
                counted.append(row)
                yield rows.slice(row, row + 1)

    monkeypatch.setattr(formats.Format, "read", read)
    batches = streamed(files, batch_size=1, queue_num=2).batches()
    for taken in range(1, 11):
        next(batches)
        assert len(counted) <= taken + 2 + 1  # those that wait, and one in the reader's hand
    batches.close()


def test_a_loop_that_is_left_ends_its_readers(files):
    batches = streamed(files, batch_size=1, queue_num=1, thread_num=2).batches()
    ids_of(next(batches))
    readers = [each for each in threading.enumerate() if each.name == "hpcdist-queue"]
    assert readers
    batches.close()
    for each in readers:
        each.join(60)
        assert not each.is_alive()


def test_a_queue_is_a_dataset_of_fleet_and_has_no_length(files):
    dataset = streamed(files)
    assert isinstance(dataset, dist.fleet.DatasetBase)
    assert dist.fleet.QueueDataset is dist.QueueDataset
    with pytest.raises(TypeError):
        len(dataset)
    with pytest.raises(dist.UsageError, match="no setting 'spill'"):
        dataset.init(spill=True)
    assert dataset.train(ids_of, progress=False) == -(-TOTAL // 4)


# ---- going on


def streamed_from(files, state, steps=None, **settings):
    """Return what this rank gets from a state on, and the state after so many steps."""
    dataset = streamed(files, batch_size=2, tail="keep", **settings)
    if state is not None:
        dataset.load_state_dict(state)
    batches = dataset.batches()
    found = steps_of(batches if steps is None else (next(batches) for _ in range(steps)))
    after = dataset.state_dict()
    batches.close()
    return found, after


def of_all(ranks, *args, **settings):
    """Return the samples of each rank, and the state, which is the same on all."""
    found = dist.simulate(ranks, partial(streamed_from, *args, **settings))
    (state,) = {json.dumps(state) for _, state in found}
    return [[*chain(*samples)] for samples, _ in found], json.loads(state)


@pytest.mark.parametrize("settings", [{}, {"thread_num": 2}, {"shuffle_buffer": 7, "seed": 3}])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_loop_goes_on_where_it_stood_also_more_than_once(files, ranks, settings):
    whole, _ = of_all(ranks, files, None, **settings)
    first, state = of_all(ranks, files, None, 2, **settings)
    then, state = of_all(ranks, files, state, 3, **settings)
    rest, state = of_all(ranks, files, state, **settings)
    assert [a + b + c for a, b, c in zip(first, then, rest, strict=True)] == whole
    assert (state["epoch"], state["taken"]) == (1, [])


@pytest.mark.parametrize("settings", [{"thread_num": 3}, {"shuffle_buffer": 7, "seed": 3}])
@pytest.mark.parametrize("ranks", [(1, 2, 3), (4, 1, 4), (2, 5, 3), (3, 3, 8), (5, 2, 1)])
def test_other_numbers_of_ranks_go_on_and_each_sample_comes_once(files, ranks, settings):
    state, every = None, []
    for number, steps in zip(ranks, (1, 2, None), strict=True):
        found, state = of_all(number, files, state, steps, **settings)
        every += chain(*found)
    assert sorted(every) == list(range(TOTAL))


@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_the_rest_of_an_epoch_may_be_nothing(files, tail):
    def rest():
        dataset = streamed(files, batch_size=TOTAL, tail=tail)
        next(dataset.batches())
        again = streamed(files, batch_size=3, tail=tail)
        again.load_state_dict(dataset.state_dict())
        return steps_of(again), steps_of(again.batches()) == steps_of(again.batches())

    assert dist.simulate(2, rest) == [([], True)] * 2


def test_a_state_of_other_files_or_settings_or_none_is_refused(files):
    def state_of(**settings):
        dataset = streamed(files, **settings)
        next(dataset.batches())
        return dataset.state_dict()

    state = state_of()
    dataset = streamed(files[:2])
    dataset.load_state_dict(state)
    with pytest.raises(dist.UsageError, match=r"made with 3 files of .* but here are 2"):
        dataset.batches()
    with pytest.raises(dist.UsageError, match="made with seed=1, but here it is 0"):
        streamed(files).load_state_dict(state_of(seed=1))
    wrongs = [
        None,
        {},
        {**state, "epoch": -1},
        {**state, "taken": [[0, 1, 2]]},
        {**state, "taken": 1},
    ]
    for wrong in wrongs:
        with pytest.raises(dist.UsageError, match="not a state of a QueueDataset"):
            streamed(files).load_state_dict(wrong)


def test_ranks_that_go_on_elsewhere_hear_of_it(files):
    def hear():
        dataset = streamed(files)
        with pytest.raises(dist.MismatchError, match="epoch is 1 on rank 1, but 0 on rank 0"):
            dataset.batches(dist.get_rank())

    dist.simulate(2, hear)


# ---- shuffling


def test_each_epoch_has_an_order_of_its_own_which_any_run_has(files):
    def orders(size, **settings):
        dataset = streamed(files, shuffle_buffer=size, seed=1, tail="keep", **settings)
        return [[*chain(*steps_of(dataset.batches(epoch)))] for epoch in (0, 1, 0)]

    first, second, again = orders(10, block_bytes=64)
    assert first == again != second
    assert sorted(first) == sorted(second) == list(range(TOTAL))
    assert [first, second, again] == orders(10)
    assert [*chain(*steps_of(streamed(files, shuffle_buffer=1, seed=1)))] != first


def test_the_next_loop_is_the_next_epoch(files):
    dataset = streamed(files, shuffle_buffer=10)
    first, second = steps_of(dataset), steps_of(dataset)
    assert first != second
    assert [steps_of(dataset.batches(epoch)) for epoch in (0, 1)] == [first, second]


def test_a_buffer_for_all_gives_all_orders_as_often():
    rows = Columns({"x": Fixed(np.arange(4))})
    found = Counter(
        tuple(np.concatenate([part["x"].values for part in shuffled(iter([rows]), 9, seed)]))
        for seed in range(6000)
    )
    assert len(found) == 24
    expected = 6000 / 24
    assert sum((count - expected) ** 2 / expected for count in found.values()) < 23 + 4 * 46**0.5


def test_a_buffer_mixes_over_its_size_and_holds_no_more():
    waiting = []

    def rows():
        for i in range(400):
            waiting.append(i)
            yield Columns({"x": Fixed(np.array([i]))})

    places = []
    for part in shuffled(rows(), 40, 5):
        assert len(waiting) - len(places) <= 40
        places += part["x"].values.tolist()
    assert sorted(places) == list(range(400))
    moved = np.abs(np.array(places) - np.arange(400))
    assert 10 < moved.mean() < 60
