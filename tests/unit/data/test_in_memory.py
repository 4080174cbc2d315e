"""Datasets in memory: one order for any number of ranks, and everybody hears of what fails."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from itertools import chain, pairwise
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
from requirements import needs_room_for_workers

import hpcdist as dist
from hpcdist.comm.together import Together
from hpcdist.data import formats, settle, store
from hpcdist.data.ahead import Ahead
from hpcdist.data.columns import Columns, Fixed
from hpcdist.data.nodes import Nodes

TOTAL = 53
RANKS = [1, 2, 3, 4, 8]


@pytest.fixture
def files(tmp_path):
    return write_files(tmp_path, TOTAL)


def shuffled(files, epoch=0, **settings):
    dataset = loaded(files, seed=5, **settings)
    dataset.global_shuffle(epoch=epoch)
    return dataset


@pytest.mark.parametrize("ranks", RANKS)
def test_a_shuffled_order_is_the_same_for_any_number_of_ranks(files, ranks):
    def epochs():
        dataset = shuffled(files, tail="keep", thread_num=2)
        return [steps_of(dataset.batches(epoch)) for epoch in (0, 1, 5)]

    found = dist.simulate(ranks, epochs)
    for number, epoch in enumerate((0, 1, 5)):
        assert in_order([each[number] for each in found]) == expected_order(TOTAL, 5, epoch)


@pytest.mark.parametrize("ranks", RANKS)
def test_without_a_shuffle_the_order_is_that_of_the_files(files, ranks):
    found = dist.simulate(ranks, lambda: steps_of(loaded(files, tail="keep")))
    assert in_order(found) == list(range(TOTAL))


@pytest.mark.parametrize("ranks", RANKS)
def test_tails_repeat_or_leave_out_a_few_samples(files, ranks):
    order = expected_order(TOTAL, 5, 0)
    padded = in_order(dist.simulate(ranks, lambda: steps_of(shuffled(files, tail="pad"))))
    assert padded == (order * 2)[: -(-TOTAL // ranks) * ranks]
    dropped = in_order(dist.simulate(ranks, lambda: steps_of(shuffled(files, tail="drop"))))
    assert dropped == order[: TOTAL // ranks * ranks]


@pytest.mark.parametrize(("ranks", "later"), [(1, 3), (3, 1), (2, 4), (4, 2), (8, 3), (3, 3)])
@pytest.mark.parametrize("kind", ["global", "local", "natural"])
def test_any_number_of_ranks_goes_on_at_every_boundary_of_batches(tmp_path, ranks, later, kind):
    total, files = 29, write_files(tmp_path, 29)

    def begun(steps):
        dataset = loaded(files, seed=5, batch_size=3, tail="keep")
        if kind != "natural":
            getattr(dataset, f"{kind}_shuffle")()
        if steps is None:
            return steps_of(dataset.batches(0))
        batches = dataset.batches(0)
        return [ids_of(next(batches)) for _ in range(steps)], dataset.state_dict()

    def resumed(state):
        dataset = loaded(files, seed=5, batch_size=2, tail="keep")
        dataset.load_state_dict(state)
        return steps_of(dataset), dataset.state_dict(), steps_of(dataset.batches(1))

    whole = in_order(dist.simulate(ranks, begun, None))
    next_epoch = None
    for steps in range(-(-total // (3 * ranks)) + 1):
        before = dist.simulate(ranks, begun, steps)
        states = [state for _, state in before]
        assert all(state == states[0] for state in states)
        after = dist.simulate(later, resumed, states[0])
        if states[0]["epoch"] == 1:
            assert in_order([taken for taken, _ in before]) == whole
            continue
        seen = in_order([taken for taken, _ in before])
        assert seen + in_order([rest for rest, _, _ in after]) == whole
        assert all(state["epoch"] == 1 for _, state, _ in after)
        found = in_order([epoch for _, _, epoch in after])
        assert next_epoch in (None, found)
        next_epoch = found
    assert sorted(next_epoch) == list(range(total))


def test_a_loop_that_shuffles_every_epoch_goes_on_in_the_middle(files):
    def first():
        dataset = shuffled(files)
        next(dataset.batches())
        return dataset.state_dict()

    def second(state):
        dataset = loaded(files, seed=5, tail="keep")
        dataset.load_state_dict(state)
        dataset.global_shuffle()
        rest = steps_of(dataset)
        dataset.global_shuffle()
        return rest, steps_of(dataset)

    found = dist.simulate(2, second, dist.simulate(2, first)[0])
    assert in_order([rest for rest, _ in found]) == expected_order(TOTAL, 5, 0)[8:]
    assert in_order([later for _, later in found]) == expected_order(TOTAL, 5, 1)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_shuffling_twice_loses_and_repeats_nothing(files, ranks):
    def twice():
        dataset = shuffled(files, epoch=3)
        dataset.global_shuffle()
        dataset.local_shuffle()
        dataset.global_shuffle(epoch=3)
        dataset.update_settings(tail="keep")
        return steps_of(dataset)

    assert in_order(dist.simulate(ranks, twice)) == expected_order(TOTAL, 5, 3)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_local_shuffle_deals_every_sample_once(files, ranks):
    def local():
        dataset = dataset_of(files, tail="keep")
        dataset.load_into_memory(is_shuffle=True)
        return steps_of(dataset)

    found = dist.simulate(ranks, local)
    assert sorted(in_order(found)) == list(range(TOTAL))
    first = sorted(chain(*found[0]))
    assert first == list(range(len(first)))
    assert [*chain(*found[0])] != first


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shuffled_slots_give_other_samples_values_until_that_is_undone(files, ranks):
    def values():
        dataset = shuffled(files, tail="keep")
        dataset.slots_shuffle(["x"])
        batches = list(dataset)
        shuffled_x = [
            [int(x[0][x[1][row]]) for row in range(len(batch["id"]))]
            for batch in batches
            for x in [batch["x"]]
        ]
        dataset.slots_shuffle([])
        return [batch["id"].tolist() for batch in batches], shuffled_x, steps_of(dataset)

    found = dist.simulate(ranks, values)
    order = expected_order(TOTAL, 5, 0)
    assert in_order([ids for ids, _, _ in found]) == order
    assert in_order([own for _, _, own in found]) == order
    of_x = in_order([x for _, x, _ in found])
    assert sorted(of_x) == list(range(TOTAL))
    assert sum(one == other for one, other in zip(order, of_x, strict=True)) < 10
    assert of_x == in_order([x for _, x, _ in dist.simulate(4, values)])


def test_batches_may_be_larger_than_the_data_and_ranks_without_rows(tmp_path):
    files = write_files(tmp_path, 3, 1)

    def all_of(tail):
        dataset = loaded(files, batch_size=100, tail=tail)
        dataset.global_shuffle()
        return steps_of(dataset), dataset.get_memory_data_size(), len(dataset)

    kept = dist.simulate(8, all_of, "keep")
    assert sorted(chain(*chain(*(steps for steps, _, _ in kept)))) == [0, 1, 2]
    assert {len(steps) for steps, _, _ in kept} == {1}
    assert sum(rows for _, rows, _ in kept) == 3
    padded = dist.simulate(8, all_of, "pad")
    assert [len(steps[0]) for steps, _, _ in padded] == [1] * 8
    assert {length for _, _, length in dist.simulate(8, all_of, "drop")} == {0}


@pytest.mark.parametrize("ranks", [1, 3])
def test_sizes_are_of_a_rank_or_summed(files, ranks):
    def sizes():
        dataset = dataset_of(files)
        assert (dataset.get_memory_data_size(), dataset.get_shuffle_data_size(1)) == (0, 0)
        dataset.load_into_memory()
        dataset.global_shuffle()
        of_rank = dataset.get_memory_data_size(), dataset.get_shuffle_data_size()
        of_all = dataset.get_memory_data_size(object()), dataset.get_shuffle_data_size(object())
        dataset.release_memory()
        assert dataset.get_memory_data_size() == 0
        return of_rank, of_all

    found = dist.simulate(ranks, sizes)
    assert [sum(each) for each in zip(*(own for own, _ in found), strict=True)] == [TOTAL, TOTAL]
    assert {of_all for _, of_all in found} == {(TOTAL, TOTAL)}


def test_what_needs_samples_says_so_after_a_release(files):
    dataset = loaded(files)
    dataset.release_memory()
    for call in (dataset.batches, dataset.global_shuffle, dataset.local_shuffle, dataset.to_arrow):
        with pytest.raises(dist.UsageError, match="nothing is loaded: call load_into_memory"):
            call()
    dataset.load_into_memory()
    assert sorted(chain(*steps_of(dataset))) == list(range(TOTAL))


def test_an_empty_list_and_wrong_lists_are_refused(files):
    with pytest.raises(dist.UsageError, match="list of files"):
        loaded([])
    for wrong in ("a.txt", 3, ["a", 3]):
        with pytest.raises(dist.UsageError, match="must be a list of paths"):
            dist.InMemoryDataset().set_filelist(wrong)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"batchsize": 3}, "no setting 'batchsize'; did you mean 'batch_size'"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"thread_num": True}, "thread_num must be an integer of at least 1"),
        ({"tail": "cut"}, "tail must be one of 'pad', 'drop', 'keep'"),
        ({"fea_eval": 1}, "fea_eval must be True or False"),
        ({"merge_size": 2}, "merge_size=2 is not supported here"),
        ({"spill": -1}, "spill must be a folder"),
        ({"spill": "/no/such/folder"}, "'/no/such/folder', which is not one on this node"),
        ({"group": 1}, "group must be a Group"),
        ({"separator": "::"}, "separator must be one ASCII character"),
        ({"separator": ""}, "separator must be one ASCII character"),
        ({"pipe_timeout": -1}, "pipe_timeout must be a number of seconds"),
        ({"pipe_timeout": float("nan")}, "pipe_timeout must be a number of seconds"),
    ],
)
def test_wrong_settings_change_nothing(setting, words):
    dataset = dist.InMemoryDataset()
    for change in (dataset.init, dataset.update_settings, dataset._init_distributed_settings):
        with pytest.raises(dist.UsageError, match=words):
            change(**{"queue_num": 5, **setting})
    assert dataset._feed.settings["queue_num"] == -1


def released(files, rank):
    """Load a dataset, and release it where a rank is not the first."""
    dataset = loaded(files)
    if rank:
        dataset.release_memory()
    return dataset


@pytest.mark.parametrize(
    ("name", "do"),
    [
        ("seed", lambda files, rank: loaded(files, seed=rank)),
        ("epoch", lambda files, rank: loaded(files).global_shuffle(epoch=rank)),
        ("epoch", lambda files, rank: loaded(files).batches(rank)),
        ("tail", lambda files, rank: loaded(files, tail="keep" if rank else "pad")),
        ("batch_size", lambda files, rank: loaded(files, batch_size=4 + rank)),
        (
            "the list of shuffled slots",
            lambda files, rank: loaded(files).slots_shuffle(["x"][rank:]),
        ),
        (
            "batch_size",
            lambda files, rank: dataset_of(files, dist.QueueDataset, batch_size=4 + rank).batches(),
        ),
        (
            "whether something is loaded (by load_into_memory, on every rank)",
            lambda files, rank: released(files, rank).batches(),
        ),
        (
            "whether something is loaded (by load_into_memory, on every rank)",
            lambda files, rank: released(files, rank).local_shuffle(),
        ),
    ],
)
def test_ranks_that_would_miss_samples_of_each_other_hear_of_it(files, name, do):
    def hear():
        with pytest.raises(dist.MismatchError) as caught:
            do(files, dist.get_rank())
        dist.barrier()
        return str(caught.value)

    first, second = dist.simulate(2, hear)
    assert first == second
    assert first.startswith(f"{name} is ")
    assert "on rank 1, but" in first


@pytest.mark.parametrize("kind", [dist.InMemoryDataset, dist.QueueDataset])
@pytest.mark.parametrize(
    "other",
    [{"pipe_command": "head -n 3"}, {"on_bad": "skip"}, {"format": "csv"}, {"thread_num": 2}],
)
def test_ranks_that_would_read_otherwise_hear_of_it_before_anything_is_read(
    kind, other, monkeypatch
):
    ((name, value),) = other.items()
    default = kind()._feed.settings[name]
    monkeypatch.setattr(formats.Format, "read", lambda *_: pytest.fail("it reads"))

    def hear():
        dataset = dataset_of(["nowhere.txt"], kind, **other if dist.get_rank() else {})
        with pytest.raises(dist.MismatchError) as caught:
            dataset.load_into_memory() if kind is dist.InMemoryDataset else dataset.batches()
        return str(caught.value)

    first, second = dist.simulate(2, hear)
    assert first == second
    assert first.startswith(f"{name} is {value!r} on rank 1, but {default!r} on rank 0; give it")


@pytest.mark.parametrize("kind", [dist.InMemoryDataset, dist.QueueDataset])
def test_a_setting_is_the_same_on_all_ranks_unless_its_row_lets_it_differ(kind):
    def hear(name):
        feed = kind()._feed
        if dist.get_rank() == 1:
            feed.settings[name] = [object(), dist.get_group(0)][name == "group"]
        try:
            feed.agree()
        except dist.MismatchError as error:
            return str(error).startswith(f"{name} is <object")
        return False

    names = {*kind()._feed.settings}
    compared = {name for name in names if dist.simulate(2, hear, name) == [True, True]}
    assert names - compared == names & {
        "group", "spill", "fleet_send_batch_size", "fleet_send_sleep_seconds"
    }  # fmt: skip


def test_ranks_with_other_kinds_of_datasets_hear_of_it(files):
    def hear():
        kind = [dist.InMemoryDataset, dist.QueueDataset][dist.get_rank()]
        with pytest.raises(dist.MismatchError, match="the dataset is 'QueueDataset' on rank 1"):
            dataset_of(files, kind)._feed.agree()

    dist.simulate(2, hear)


def test_nodes_may_spill_into_other_folders_and_have_other_amounts_of_memory(files, tmp_path):
    def load():
        rank = dist.get_rank()
        (tmp_path / str(rank)).mkdir(exist_ok=True)
        dataset = loaded(files, tail="keep", spill=(str(tmp_path / str(rank)), rank << 30))
        return dataset._settled.in_files, steps_of(dataset)

    (there, first), (here, second) = dist.simulate(2, load)
    assert there
    assert here
    assert in_order([first, second]) == list(range(TOTAL))

    def differ():
        spill = {"spill": tmp_path} if dist.get_rank() else {}
        with pytest.raises(dist.MismatchError, match="spill is True on rank 1, but False"):
            loaded(files, **spill)

    dist.simulate(2, differ)


def test_names_of_paddle_are_there():
    dataset = dist.InMemoryDataset()
    dataset.init(
        batch_size=1, thread_num=1, use_var=[], pipe_command="cat", input_type=0, fs_name="",
        fs_ugi="", download_cmd="cat", queue_num=-1,
    )  # fmt: skip
    dataset.update_settings(
        merge_size=-1, parse_ins_id=False, parse_content=False, fleet_send_batch_size=1024,
        fleet_send_sleep_seconds=0, fea_eval=True, candidate_size=10000,
    )  # fmt: skip
    dataset.set_date("20260131")
    with pytest.raises(dist.UsageError, match="date must be a string such as"):
        dataset.set_date("soon")
    with pytest.raises(dist.UsageError, match="tree index"):
        dataset.tdm_sample("tree", ["a"], [0, 1], 0, False, 1)
    with pytest.raises(dist.UsageError, match="no preload is under way"):
        dataset.wait_preload_done()
    assert isinstance(dataset, dist.fleet.DatasetBase)
    assert dist.fleet.InMemoryDataset is dist.InMemoryDataset


def test_a_preload_reads_while_the_program_goes_on(files, monkeypatch):
    reads, may_read = formats.Format.read, threading.Event()

    def read_later(*args, **kwargs):
        assert may_read.wait(60)
        yield from reads(*args, **kwargs)

    dataset = loaded(files)
    monkeypatch.setattr(formats.Format, "read", read_later)
    dataset.preload_into_memory(2)
    with pytest.raises(dist.UsageError, match="a preload is under way"):
        dataset.load_into_memory()
    assert sorted(chain(*steps_of(dataset))) == list(range(TOTAL))
    may_read.set()
    dataset.wait_preload_done()
    assert sorted(chain(*steps_of(dataset))) == list(range(TOTAL))


@pytest.mark.parametrize("way", ["load", "preload"])
def test_a_rank_that_cannot_read_is_an_error_on_every_rank(files, monkeypatch, way):
    def load():
        dataset = loaded(files)
        try:
            if way == "load":
                dataset.load_into_memory()
            else:
                dataset.preload_into_memory()
                dataset.wait_preload_done()
        except (dist.RemoteError, OSError) as error:
            assert sorted(chain(*steps_of(dataset)))[0] == 0  # what was there stays
            return type(error).__name__, str(error)

    reads, calls = formats.Format.read, []

    def read(self, path, *args, start=0, **kwargs):
        calls.append(path)
        if len(calls) > 3 + 2 and "-3-2" in path:  # again, and the file of the last rank
            raise OSError(errno.EIO, "the disk is gone", path)
        return reads(self, path, *args, start=start, **kwargs)

    monkeypatch.setattr(formats.Format, "read", read)
    found = dist.simulate(2, load)
    assert [name for name, _ in found] == ["RemoteError", "OSError"]
    assert all("the disk is gone" in words for _, words in found)


@pytest.mark.parametrize("kind", [dist.InMemoryDataset, dist.QueueDataset])
def test_malformed_records_are_told_or_left_out(tmp_path, kind):
    (tmp_path / "bad.txt").write_text("1 0 1 0\n1 a 1 1\n1 2 3 2 2 2\n")

    def all_of(on_bad):
        dataset = dataset_of([str(tmp_path / "bad.txt")], kind, on_bad=on_bad)
        if kind is dist.InMemoryDataset:
            dataset.load_into_memory()
        return steps_of(dataset)

    with pytest.raises(dist.DatasetError, match=r"bad\.txt:2"):
        all_of("raise")
    assert all_of("skip") == [[0, 2]]
    with pytest.warns(dist.DatasetWarning, match=r"1 malformed record.*bad\.txt:2"):
        assert all_of("count") == [[0, 2]]


@pytest.mark.parametrize("kind", [dist.InMemoryDataset, dist.QueueDataset])
@pytest.mark.parametrize("command", ["cat", "grep -v '^1 1 ' || true"])
def test_files_and_commands_may_be_empty_where_that_is_allowed(tmp_path, kind, command):
    for name, text in {"a": "1 0 1 0\n", "b": "" if command == "cat" else "1 1 1 1\n"}.items():
        (tmp_path / name).write_text(text)

    def all_of(**settings):
        files = [str(tmp_path / name) for name in ("a", "b")]
        dataset = dataset_of(files, kind, pipe_command=command, **settings)
        if kind is dist.InMemoryDataset:
            dataset.load_into_memory()
        return steps_of(dataset)

    with pytest.raises(dist.DatasetError, match=r"b: (is empty|pipe_command .* written nothing)"):
        all_of()
    assert all_of(allow_empty=True) == [[0]]


def test_text_is_parsed_in_blocks_of_so_many_bytes(files, monkeypatch):
    reads, blocks = formats.Format.read, []

    def read(self, *args, **kwargs):
        for rows in reads(self, *args, **kwargs):
            blocks.append(len(rows))
            yield rows

    monkeypatch.setattr(formats.Format, "read", read)
    found = [steps_of(loaded(files, block_bytes=nbytes)) for nbytes in (32, 1 << 20)]
    assert found[0] == found[1]
    assert len(blocks) > TOTAL // 4 + 3
    assert sum(blocks[-3:]) == TOTAL


# ---- spilling


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_that_are_spilled_are_the_same_and_leave_nothing_behind(files, tmp_path, ranks):
    folder = tmp_path / "spilled"
    folder.mkdir()

    def spilled():
        dataset = shuffled(files, tail="keep", spill=(str(folder), 0))
        mapped = Path("/proc/self/maps").read_text().count(str(folder))
        return steps_of(dataset), mapped, os.listdir(folder)

    found = dist.simulate(ranks, spilled)
    assert in_order([steps for steps, _, _ in found]) == expected_order(TOTAL, 5, 0)
    assert all(mapped and not names for _, mapped, names in found)


KILLED = """
import os, signal, sys
import hpcdist as dist
from hpcdist.data import store

def die(*args):
    assert sys.argv[1] in open("/proc/self/maps").read()
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[2] == "while rows are written":
    store.pour = die
dataset = dist.InMemoryDataset()
dataset.init(use_var=[("id", "int64", ()), ("x", "int64")], spill=(sys.argv[1], 0))
dataset.set_filelist(sys.argv[3:])
dataset.load_into_memory()
die()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["while rows are written", "then"])
def test_a_process_that_is_killed_leaves_no_rows_on_the_disk(files, tmp_path, when):
    folder = tmp_path / "spilled"
    folder.mkdir()
    command = [sys.executable, "-c", KILLED, str(folder), when, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert os.listdir(folder) == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("there is no command mount")
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"nothing can be mounted here: {tried.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_rows_that_do_not_fit_on_a_disk_are_an_error_and_leave_it_empty(tmp_path, small_disk):
    many = write_files(tmp_path, 5000)

    def load():
        dataset = dataset_of(many, spill=(str(small_disk), 0))
        with pytest.raises((dist.RemoteError, OSError), match=r"No space left on device: no room"):
            dataset.load_into_memory()
        dist.barrier()
        left = os.listdir(small_disk), os.statvfs(small_disk).f_bfree
        dist.barrier()
        dataset.update_settings(spill=None)
        dataset.load_into_memory()
        return left, dataset.get_memory_data_size(object())

    blocks = os.statvfs(small_disk).f_blocks
    assert dist.simulate(2, load) == [(([], blocks), 5000)] * 2


def test_rows_that_fit_stay_in_memory(files, tmp_path):
    dataset = shuffled(files, spill=(str(tmp_path), 1 << 30))
    assert Path("/proc/self/maps").read_text().count(f"{tmp_path}/.hpcdist") == 0
    assert len(dataset) == -(-TOTAL // 4)


def test_a_full_disk_is_an_error_on_every_rank(files, tmp_path, monkeypatch):
    allocate = os.posix_fallocate

    def full(descriptor, start, nbytes):
        if dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(descriptor, start, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", full)

    def load():
        try:
            shuffled(files, spill=(str(tmp_path), 0))
        except (dist.RemoteError, OSError) as error:
            return type(error).__name__, str(error)

    found = dist.simulate(3, load)
    assert [name for name, _ in found] == ["RemoteError", "OSError", "RemoteError"]
    assert all("No space left on device" in words for _, words in found)
    assert [name for name in os.listdir(tmp_path) if name.startswith(".hpcdist")] == []


def test_a_shuffle_that_fails_on_a_rank_leaves_no_rank_with_half_of_the_rows(files, monkeypatch):
    def shuffle():
        dataset = loaded(files)
        dist.barrier()
        try:
            dataset.global_shuffle()
        except (dist.RemoteError, MemoryError) as error:
            with pytest.raises(dist.UsageError, match="nothing is loaded"):
                dataset.batches()
            return type(error).__name__

    make = store.private_memory

    def full(nbytes, folder=None):
        if dist.get_rank() == 1 and len(made) >= 4:
            raise MemoryError
        made.append(nbytes)
        return make(nbytes, folder)

    made = []
    monkeypatch.setattr(store, "private_memory", full)
    assert dist.simulate(2, shuffle) == ["RemoteError", "MemoryError"]


# ---- what has been read


def numbered(sizes):
    """Return columns of these numbers of rows, each row a number."""
    ends = np.cumsum([0, *sizes])
    return [Columns({"id": Fixed(np.arange(a, b))}) for a, b in pairwise(ends)]


@pytest.mark.parametrize(("kept", "fit"), [(None, 3), (0, 0), (3 << 20, 2)])
@pytest.mark.parametrize("compact", [False, True])
def test_rows_keep_their_order_whether_they_are_copied_or_not(tmp_path, compact, kept, fit):
    large = 1 << 17
    given = numbered([3, large, 5, 7, large + 1, large, 2, 1])
    hoard = store.Hoard(kept or 0, None if kept is None else str(tmp_path), compact)
    for rows in given:
        hoard.add(rows)
    parts = hoard.parts()
    values = np.concatenate([part["id"].values for part in parts])
    assert values.tolist() == list(range(3 * large + 19))
    same = [any(part is rows for rows in given) for part in parts]
    assert sum(same) == compact * fit


def test_rows_are_freed_part_by_part_as_they_go_to_the_store(monkeypatch):
    given = numbered([1 << 17] * 4)
    arrays = [weakref.ref(rows["id"].values) for rows in given]
    alive = []

    def pour(part, target, at):
        alive.append(sum(each() is not None for each in arrays))
        return original(part, target, at)

    original = settle.pour
    monkeypatch.setattr(settle, "pour", pour)
    settled = settle.settle(given, Together(), None)
    assert alive == [4, 3, 2, 1]
    assert not given
    assert settled.store.batch(0, 1 << 19)["id"].values.tolist() == list(range(1 << 19))


def test_a_dataset_keeps_nothing_of_what_a_parquet_file_was_decoded_to(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    numbers = np.arange(1 << 18)
    parquet.write_table(pa.table({"id": numbers}), tmp_path / "part", row_group_size=1 << 17)
    before = pa.total_allocated_bytes()
    for ahead in (False, True):
        dataset = dist.InMemoryDataset()
        dataset.init(format="parquet", use_var=[("id", "int64", ())], batch_size=1 << 18)
        dataset.set_filelist([str(tmp_path / "part")])
        if ahead:
            dataset.preload_into_memory()
            dataset.wait_preload_done()
        else:
            dataset.load_into_memory()
        assert pa.total_allocated_bytes() - before < numbers.nbytes // 4
        (batch,) = dataset
        assert np.array_equal(batch["id"], numbers)


# ---- several nodes


@pytest.mark.parametrize(
    ("ranks", "per_node"), [(2, 1), (3, 2), (4, 2), (4, 3), (8, 1), (8, 3), (8, 4)]
)
def test_ranks_of_a_node_keep_one_copy_of_what_comes_to_them(files, ranks, per_node, monkeypatch):
    def nodes_of(ranks):
        return Nodes.of([rank // per_node for rank in range(ranks.size)])

    monkeypatch.setattr(settle, "nodes_of", nodes_of)

    def epochs():
        dataset = shuffled(files, tail="keep")
        found = [steps_of(dataset.batches(epoch)) for epoch in (0, 1)]
        dataset.slots_shuffle(["x"])
        dataset.slots_shuffle([])
        found.append(steps_of(dataset.batches(5)))
        (kept,) = [held.rows for held in dataset._settled.store._held if "id" in held.rows.names]
        dist.barrier()
        if dist.get_rank() % per_node == 0:
            kept["id"].values[:] = -1
        dist.barrier()
        assert {*kept["id"].values.tolist()} <= {-1}
        return found, len(kept)

    found = dist.simulate(ranks, epochs)
    for number, epoch in enumerate((0, 1, 5)):
        assert in_order([each[number] for each, _ in found]) == expected_order(TOTAL, 5, epoch)
    assert sum(found[rank][1] for rank in range(0, ranks, per_node)) == TOTAL


# ---- batches that are made ahead


@pytest.mark.parametrize("ranks", [1, 3])
def test_batches_that_are_made_ahead_are_the_same_and_count_when_they_are_taken(files, ranks):
    def steps(**settings):
        dataset = shuffled(files, tail="keep", **settings)
        batches, found = dataset.batches(), []
        for batch in batches:
            found.append((ids_of(batch), dataset.state_dict()["consumed"]))
        return found

    assert dist.simulate(ranks, lambda: steps(read_ahead=3)) == dist.simulate(
        ranks, lambda: steps(read_ahead=0)
    )


def test_batches_are_made_ahead_where_that_is_worth_it(files, tmp_path, monkeypatch):
    made = []

    def noted(*args):
        made.append(args)
        return Ahead(*args)

    monkeypatch.setattr("hpcdist.data.in_memory.Ahead", noted)

    def makes_ahead(**settings):
        made.clear()
        batches = shuffled(files, **settings).batches()
        next(batches)
        batches.close()
        assert "hpcdist-batches" not in [each.name for each in threading.enumerate()]
        return bool(made)

    assert not makes_ahead()
    assert makes_ahead(read_ahead=1)
    assert makes_ahead(batch_size=1 << 20)
    assert makes_ahead(spill=(str(tmp_path), 0))
    assert not makes_ahead(spill=(str(tmp_path), 0), read_ahead=0)


@pytest.mark.parametrize("read_ahead", [0, 1, 5])
@pytest.mark.parametrize("change", ["shuffle", "loop", "release"])
def test_a_loop_ends_when_the_samples_are_needed_for_another(files, read_ahead, change):
    dataset = shuffled(files, read_ahead=read_ahead)
    batches = dataset.batches()
    assert ids_of(next(batches)) == expected_order(TOTAL, 5, 0)[:4]
    if change == "shuffle":
        dataset.global_shuffle(epoch=1)
    elif change == "loop":
        assert ids_of(next(dataset.batches(1))) == expected_order(TOTAL, 5, 1)[:4]
    else:
        dataset.release_memory()
    with pytest.raises(dist.UsageError, match="this loop cannot go on"):
        next(batches)
    assert list(batches) == []


def test_what_fails_ahead_is_raised_where_the_batch_would_come(files, monkeypatch):
    dataset = shuffled(files, read_ahead=2)
    make, made = store.Whole.batch, []

    def batch(self, first, stop):
        made.append(first)
        if len(made) > 2:
            raise MemoryError("no room for a batch")
        return make(self, first, stop)

    monkeypatch.setattr(store.Whole, "batch", batch)
    batches = dataset.batches()
    assert [*ids_of(next(batches)), *ids_of(next(batches))] == expected_order(TOTAL, 5, 0)[:8]
    with pytest.raises(MemoryError, match="no room for a batch"):
        next(batches)
    assert dataset.state_dict()["consumed"] == 8


# ---- states and loops


def test_a_state_of_another_dataset_is_refused(files):
    dataset = shuffled(files)
    state = dataset.state_dict()
    for wrong, words in [
        ({**state, "length": 3}, "made with length=3, but here it is 53"),
        ({**state, "seed": 6}, "made with seed=6"),
        ({**state, "digest": 6}, "made with other files, or with these in another order"),
        ({**state, "consumed": 1000}, "this is not a possible state"),
        ({**state, "order": "random"}, "this is not a possible state"),
        ({}, "not a state of a dataset"),
        (None, "not a state of a dataset"),
    ]:
        with pytest.raises(dist.UsageError, match=words):
            dataset.load_state_dict(wrong)
    assert dataset.state_dict() == state


KILLED_AFTER_A_BATCH = """
import json, os, signal, sys
import hpcdist as dist
saved, seen, files = sys.argv[1], sys.argv[2], sys.argv[3:]

def train():
    dataset = dist.InMemoryDataset()
    dataset.init(use_var=[("id", "int64", ()), ("x", "int64")], batch_size=7, tail="keep", seed=5)
    dataset.set_filelist(files)
    dataset.load_into_memory()
    if os.path.exists(saved):
        dataset.load_state_dict(json.load(open(saved)))
    else:
        dataset.global_shuffle()
    batch = next(dataset.batches())
    with open(seen, "a") as file:
        file.write("".join(f"{sample}\\n" for sample in batch["id"].tolist()))
    with open(saved + "-new", "w") as file:
        json.dump(dataset.state_dict(), file)
    os.replace(saved + "-new", saved)
    os.kill(os.getpid(), signal.SIGKILL)

while not os.path.exists(saved) or json.load(open(saved))["epoch"] < 2:
    if (job := os.fork()) == 0:
        try:
            train()
        finally:
            os._exit(1)
    assert os.waitpid(job, 0)[1] == signal.SIGKILL
"""


@pytest.mark.thorough
def test_a_job_that_is_killed_after_every_batch_sees_every_sample_once(files, tmp_path):
    saved, seen = tmp_path / "saved", tmp_path / "seen"
    command = [sys.executable, "-c", KILLED_AFTER_A_BATCH, str(saved), str(seen), *files]
    subprocess.run(command, check=True, timeout=600)
    found = [int(line) for line in seen.read_text().split()]
    assert found == expected_order(TOTAL, 5, 0) + expected_order(TOTAL, 5, 1)


def test_training_calls_the_step_with_every_batch(files, capsys):
    def train():
        seen = []
        dataset = shuffled(files)
        return dataset.train(lambda batch: seen.append(ids_of(batch)), progress=True), seen

    found = dist.simulate(2, train)
    assert {count for count, _ in found} == {7}
    assert in_order([seen for _, seen in found])[:TOTAL] == expected_order(TOTAL, 5, 0)


def test_a_step_that_fails_leaves_where_the_loop_stood(files):
    dataset = shuffled(files)
    with pytest.raises(ZeroDivisionError):
        dataset.train(lambda batch: 1 // 0)
    assert dataset.state_dict()["consumed"] == 4


def test_a_rank_s_samples_are_a_table_of_arrow(files):
    pa = pytest.importorskip("pyarrow")
    dataset = shuffled(files)
    table = dataset.to_arrow()
    table.validate(full=True)
    assert isinstance(table, pa.Table)
    assert table["id"].to_pylist() == expected_order(TOTAL, 5, 0)
    assert all(set(x) == {i} for i, x in zip(*table.to_pydict().values(), strict=True))


def test_batches_of_tensors(files):
    torch = pytest.importorskip("torch")
    from hpcdist.torch.dataset import BatchesOf

    dataset = shuffled(files)
    loader = torch.utils.data.DataLoader(BatchesOf(dataset), batch_size=None)
    batches = list(loader)
    assert len(batches) == len(dataset)
    assert torch.cat([batch["id"] for batch in batches]).tolist() == expected_order(TOTAL, 5, 0)
    assert [type(each) for each in batches[0]["x"]] == [torch.Tensor] * 2
    with pytest.raises(dist.UsageError, match="takes an InMemoryDataset"):
        BatchesOf(np.zeros(3))
    needs_room_for_workers()
    with pytest.raises(dist.UsageError, match="num_workers=0"):
        list(torch.utils.data.DataLoader(BatchesOf(dataset), batch_size=None, num_workers=1))
