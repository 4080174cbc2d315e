"""`UtilBase`: what workers do together is really done across ranks."""

import numpy as np
import pytest

import hpcdist as dist
from hpcdist import fleet
from hpcdist.fleet.workers import part_of


def on_workers(count, check):
    """Run a check on simulated workers and return what each returns."""

    def each():
        fleet.init()
        return check(fleet.worker_index())

    return dist.simulate(count, each)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_numbers_lists_and_arrays_are_reduced(size):
    def check(rank):
        util = fleet.util
        ranks = np.arange(size)
        assert util.all_reduce(rank + 1) == (ranks + 1).sum()
        assert util.all_reduce(rank + 0.5, "min").item() == 0.5
        assert util.all_reduce([[rank, 1], [2, -rank]], "max").tolist() == [[size - 1, 1], [2, 0]]
        given = np.full((2, 3), rank, np.float32)
        found = util.all_reduce(given, "sum", "all")
        assert (found.dtype, found.shape) == (np.float32, (2, 3))
        assert (found == ranks.sum()).all()
        assert (given == rank).all()
        assert util.all_reduce(rank == 0) == 1
        assert util.all_reduce([]).shape == (0,)
        assert isinstance(util.all_reduce(1.0), np.ndarray)
        assert fleet.all_reduce(rank, "mean") == ranks.mean()
        assert fleet.all_reduce(float(rank), "max") == size - 1
        assert fleet.all_reduce([rank]).tolist() == [ranks.sum()]

    on_workers(size, check)


@pytest.mark.parametrize("size", [1, 3])
def test_values_are_gathered_in_order(size):
    def check(rank):
        assert fleet.util.all_gather(rank * 2) == [each * 2 for each in range(size)]
        assert fleet.util.all_gather("x", "all") == ["x"] * size
        fleet.util.barrier()
        fleet.util.barrier("all")

    on_workers(size, check)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda util: util.all_reduce(1, "mean"), "no mode 'mean'"),
        (lambda util: util.all_reduce(1, "sum", "server"), "a collective job has no servers"),
        (lambda util: util.all_reduce(1, comm_world="workers"), "must be one of worker, server"),
        (lambda util: util.all_reduce([[1], [2, 3]]), "nested lists of equal lengths"),
        (lambda util: util.all_reduce("one"), "got 'one'"),
        (lambda util: util.all_reduce(None), "got None"),
        (lambda util: util.all_reduce({"a": 1}), "got {'a': 1}"),
    ],
)
@pytest.mark.parametrize("wrong", [[0, 1, 2], [1]])
def test_what_cannot_be_reduced_is_an_error_on_every_rank(call, told, wrong):
    def check(rank):
        with pytest.raises(dist.HpcdistError, match=told):
            (call if rank in wrong else lambda util: util.all_reduce(1))(fleet.util)
        assert fleet.util.all_reduce(1) == 3

    on_workers(3, check)


@pytest.mark.parametrize("name", ["all_gather", "barrier"])
@pytest.mark.parametrize("wrong", [[0, 1], [1]])
def test_a_wrong_world_is_an_error_on_every_rank(name, wrong):
    def check(rank):
        given = (1,) if name == "all_gather" else ()
        with pytest.raises(dist.HpcdistError, match="no servers"):
            getattr(fleet.util, name)(*given, "server" if rank in wrong else "worker")
        fleet.util.barrier()

    on_workers(2, check)


def test_ranks_that_reduce_other_things_all_hear_of_it():
    def check(rank):
        with pytest.raises(dist.MismatchError, match="different values"):
            fleet.util.all_reduce([1.0] * (1 + rank))
        with pytest.raises(dist.MismatchError):
            fleet.util.all_reduce(1, "max" if rank else "sum")

    on_workers(2, check)


# ---- files


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 3, 7, 10])
def test_parts_follow_each_other_and_the_first_are_longer(size, count):
    files = [f"part-{each}" for each in range(count)]
    parts = [part_of(files, rank, size) for rank in range(size)]
    assert [each for part in parts for each in part] == files
    lengths = [len(part) for part in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


def test_each_rank_gets_its_files():
    files = ["a", "b", "c", "d", "e"]
    found = on_workers(2, lambda _: fleet.util.get_file_shard(files))
    assert found == [["a", "b", "c"], ["d", "e"]]
    assert on_workers(2, lambda _: fleet.util.get_heter_file_shard(files)) == found
    assert on_workers(1, lambda _: fleet.util.get_file_shard([])) == [[]]


def test_ranks_that_list_other_files_all_hear_which():
    def check(rank):
        with pytest.raises(
            dist.MismatchError,
            match=r"different files; .* file 1, .* rank 0 has 'b', but rank 1 has",
        ):
            fleet.util.get_file_shard(["a", "x" if rank == 1 else "b"])
        with pytest.raises(dist.MismatchError, match=r"but rank 2 has no more.*sorted"):
            fleet.util.get_file_shard(["a", "b"][: 1 + (rank < 2)])

    on_workers(3, check)


@pytest.mark.parametrize("files", ["a,b", ("a",), [1], None])
def test_what_is_no_list_of_files_is_an_error_on_every_rank(files):
    def check(rank):
        with pytest.raises(dist.HpcdistError, match="files should be a list"):
            fleet.util.get_file_shard(files if rank else ["a"])

    on_workers(2, check)


def test_one_rank_prints(capsys):
    def check(rank):
        fleet.util.print_on_rank(f"I am {rank}", 1)
        with pytest.raises(dist.UsageError, match="has ranks 0 to 2, got 3"):
            fleet.util.print_on_rank("nobody", 3)

    on_workers(3, check)
    assert capsys.readouterr().out == "I am 1\n"
