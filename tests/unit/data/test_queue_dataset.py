"""Datasets that are read while they are used: equal batches, little memory, no silent error."""

import threading
from itertools import chain

import pytest
from dataset_checks import dataset_of, ids_of, steps_of, write_files

import hpcdist as dist
from hpcdist.data import formats

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
    with pytest.raises(dist.UsageError, match="no setting 'seed'"):
        dataset.init(seed=1)
    assert dataset.train(ids_of, progress=False) == -(-TOTAL // 4)
