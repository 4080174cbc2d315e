"""Tables on simulated ranks: against a dict of rows, for any number of servers, in all modes."""

import contextlib
import os
import threading
import time
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from table_checks import RATE, SGD, check_programs, check_saves, check_worlds, initial, run_program

import hpcdist as dist
from hpcdist import fleet, ps
from hpcdist.comm.session import require_session
from hpcdist.ps import load, slabs
from hpcdist.ps.cluster import cluster_of
from hpcdist.ps.ids import coins
from hpcdist.ps.load import load_tables
from hpcdist.ps.save import save_tables
from hpcdist.ps.worker import Clocked, Queued


def simulate(n, check, *args, **options):
    """Run a check on ranks whose world is the group that it gets."""
    return dist.simulate(n, lambda: check(dist.init_parallel_env(), *args), **options)


def with_servers(servers, workers, train, **options):
    """Run `train` on workers, and beside them ranks that only serve; return what workers return."""

    def rank():
        fleet.init(server_num=servers)
        table = ps.SparseTable("rows", 3, **{"optimizer": SGD, "initializer": initial, **options})
        if fleet.is_server():
            fleet.run_server()
            return None
        fleet.init_worker()
        try:
            return train(table, fleet.worker_index())
        finally:
            fleet.stop_worker()

    found = dist.simulate(servers + workers, rank)
    return found[:workers]


# ---- lock step


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_table_does_what_a_dict_of_rows_does(ranks):
    simulate(ranks, check_programs)


@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "ftrl"])
def test_rows_have_the_same_bits_for_any_number_of_servers(optimizer):
    def train(table, worker):
        rng = np.random.default_rng(worker)
        for _ in range(4):
            ids = rng.integers(0, 9, 30)
            table.push(ids, rng.normal(size=(30, 3)).astype(np.float32))
        return table.pull(np.arange(12)).tobytes()

    found = [
        set(with_servers(servers, 2, train, optimizer=optimizer, initializer=("uniform", 0.1)))
        for servers in (0, 1, 2, 3)
    ]
    assert len(found[0]) == 1
    assert found == [found[0]] * 4


def test_a_worker_with_fewer_batches_holds_nobody_up():
    def train(table, worker):
        for _ in range(1 + worker):
            table.push([7], np.ones((1, 3), np.float32))
        return table.pull([7])[0, 0] if worker == 2 else None

    for servers in (0, 1):
        assert with_servers(servers, 3, train)[2] == 7 - RATE * (3 + 2 + 1)


def odd_ids():
    return [
        np.array([], np.int64),
        [],
        np.array([-5, -5, -5]),
        np.array([2**64 - 1, 0, 2**63], np.uint64),
        np.array([[1, 2], [3, 1]], np.int32).T,
        np.arange(20)[::3],
        [2**64 - 1],
        range(3),
    ]


@pytest.mark.parametrize("which", range(8))
def test_ids_of_all_kinds_are_ids(which):
    def check(world):
        ids = odd_ids()[which]
        table = ps.SparseTable("rows", 2, optimizer=SGD)
        shape = (*np.shape(ids), 2)
        before = table.pull(ids)
        assert before.shape == shape
        table.push(ids, np.ones(shape, np.float32))
        count = np.array([np.sum(np.asarray(ids) == each) for each in np.ravel(ids)])
        change = (before - table.pull(ids)).reshape(-1, 2)
        assert np.allclose(change, RATE * world.nranks * count.reshape(-1, 1), atol=1e-5)

    simulate(2, check)


@pytest.mark.parametrize("mode", ["sync", "async", "ssp", "geo"])
def test_a_worker_may_have_no_ids_in_any_mode(mode):
    def check(world):
        table = ps.SparseTable("rows", 2, mode=mode, dtype="float64")
        for ids in ([], np.empty((3, 0), np.int64)):
            rows = table.pull(ids)
            assert (rows.shape, rows.dtype) == ((*np.shape(ids), 2), np.float64)
            table.push(ids, rows)
        table.flush()
        dist.barrier()  # the other one may ask this rank still

    simulate(2, check)


def test_uint64_max_is_the_id_minus_one():
    def check(_):
        table = ps.SparseTable("rows", 2)
        assert np.array_equal(table.pull(np.array([2**64 - 1], np.uint64)), table.pull([-1]))

    simulate(2, check)


def test_ids_beyond_32_bits_have_rows_of_their_own_and_beyond_64_there_are_none():
    ids = [1, 1 + 2**31, 1 + 2**32, 2**62, 2**63, 2**63 + 1, 2**64 - 2]

    def check(world):
        table = ps.SparseTable("rows", 3, optimizer=SGD, initializer=("constant", 0.0))
        table.push(ids, np.arange(1, 8, dtype=np.float32)[:, None] + np.zeros((7, 3), np.float32))
        assert np.array_equal(table.pull(ids)[:, 0], -RATE * world.nranks * np.arange(1, 8))
        assert table.stats()["rows"] == 7
        for wrong in ([2**64], [-(2**63) - 1], [1, 2**100]):
            with pytest.raises(dist.UsageError, match=r"between -2\*\*63 and 2\*\*64 - 1|integers"):
                table.pull(wrong)
        assert table.stats()["rows"] == 7

    simulate(2, check)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_gradients_that_are_not_finite_are_taken_or_refused_on_all_ranks(bad):
    def check(world):
        grads = np.ones((2, 3), np.float32)
        strict, open_ = (
            ps.SparseTable(name, 3, optimizer=SGD, initializer=initial, check_finite=finite)
            for name, finite in (("strict", True), ("open", False))
        )
        told = np.isfinite(grads)
        told[1, 2] = False
        if world.rank == 0:
            grads[1, 2] = bad
        kind = dist.UsageError if world.rank == 0 else dist.RemoteError
        with pytest.raises(kind, match=r"the gradients of 1 ids are not finite, the first.* id 9"):
            strict.push([7, 9], grads)
        run_program(strict, world.nranks, world.rank, 2)
        open_.push([7, 9], grads)
        assert np.array_equal(np.isfinite(open_.pull([7, 9])), told)

    with np.errstate(invalid="ignore"):
        simulate(2, check)


WRONG = {
    "ids that are no integers": lambda table: table.pull([0.5]),
    "another dim": lambda table: table.push([1], np.ones((1, 4), np.float32)),
    "another count": lambda table: table.push([1, 2], np.ones((1, 3), np.float32)),
    "another dtype": lambda table: table.push([1], np.ones((1, 3))),
    "an out that does not fit": lambda table: table.pull([1], out=np.ones((2, 3), np.float32)),
    "clicks without an entry": lambda table: table.push(
        [1], np.ones((1, 3), np.float32), clicks=[1]
    ),
    "a mode of saving": lambda table: table.save("/nowhere", mode=3),
    "no path to save to": lambda table: table.save(None),
    "no path to load from": lambda table: table.load(3),
    "an out that cannot be written to": lambda table: table.pull([1], out=read_only(1, 3)),
    "a folder that is not there": lambda table: ps.SparseTable(
        "others", 3, store="ssd", folder="/nowhere"
    ),
    "a shape that is none": lambda table: ps.DenseTable("others", (3, -1)),
    "a dtype that is none": lambda table: ps.DenseTable("others", 3, dtype="number"),
    "a value of another shape": lambda table: ps.DenseTable("others", 3, value=read_only(4)),
    "a value that is no array": lambda table: ps.DenseTable("others", 3, value="zeros"),
}


def read_only(*shape):
    return np.broadcast_to(np.float32(0), shape)


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_on_one_rank_is_an_error_on_all_and_nothing_has_changed(what):
    def check(world):
        table = ps.SparseTable("rows", 3, optimizer=SGD, initializer=initial)
        kind = dist.UsageError if world.rank == 0 else dist.RemoteError
        act = WRONG[what] if world.rank == 0 else lambda table: table.pull([1])
        with pytest.raises(kind):
            act(table)
        run_program(table, world.nranks, world.rank, 2)

    simulate(2, check)


WRONG_FOR_DENSE = {
    "a gradient of another shape": lambda table: table.push(read_only(3, 2)),
    "a gradient of another dtype": lambda table: table.push(np.zeros((2, 3))),
    "a gradient that is no array": lambda table: table.push(0.5),
    "an out of another shape": lambda table: table.pull(out=np.zeros((3, 2), np.float32)),
    "an out that cannot be written to": lambda table: table.pull(out=read_only(2, 3)),
}


@pytest.mark.parametrize("what", WRONG_FOR_DENSE)
def test_what_is_wrong_on_one_rank_is_an_error_on_all_ranks_of_a_dense_table(what):
    def check(world):
        table = ps.DenseTable("weights", (2, 3), optimizer=SGD)
        kind = dist.UsageError if world.rank == 0 else dist.RemoteError
        act = WRONG_FOR_DENSE[what] if world.rank == 0 else ps.DenseTable.pull
        with pytest.raises(kind):
            act(table)
        assert np.array_equal(table.pull(), np.zeros((2, 3)))

    simulate(2, check)


@pytest.mark.parametrize("clicks", [[None], ["many"], [1j], [[1]]])
def test_clicks_that_are_no_numbers_are_refused_on_all_ranks(clicks):
    def check(world):
        table = ps.SparseTable("rows", 2, entry=ps.ShowClickEntry("show", "click"))
        kind = dist.UsageError if world.rank == 0 else dist.RemoteError
        with pytest.raises(kind, match="a number for each id"):
            table.push([1], np.ones((1, 2), np.float32), clicks=None if world.rank else clicks)
        assert table.stats()["rows"] == 0

    simulate(2, check)


def without_13(ids, dim):
    if (ids == 13).any():
        raise ValueError("no row for 13")
    return np.zeros((len(ids), dim), np.float32)


@pytest.mark.parametrize("servers", [0, 1, 2])
def test_what_fails_on_a_server_is_an_error_on_all_workers_and_the_table_goes_on(servers):
    def train(table, worker):
        for act in (lambda: table.pull([13]), lambda: table.push([13], np.ones((1, 3), "f4"))):
            with pytest.raises((dist.UsageError, dist.RemoteError), match="no row for 13"):
                act()
        table.push([1], np.ones((1, 3), "f4"))
        return table.pull([1])[0, 0]

    assert with_servers(servers, 2, train, initializer=without_13) == [-2 * RATE] * 2


@pytest.mark.parametrize("mode", ["sync", "async", "ssp"])
def test_a_pull_that_has_failed_says_so_whenever_it_is_asked_and_gives_no_rows(mode):
    def train(table, worker):
        table.pull([1])
        refused = pytest.raises((dist.HpcdistError, ValueError), match="no row for 13")
        work = table.pull([1, 13], sync_op=False)
        for ask in (work.wait, work.result, work.result):
            with refused:
                ask()
        out = np.full((2, 3), 7, np.float32)
        with refused:
            table.pull([1, 13], out=out)
        assert (out[1] == 7).all()
        return table.pull([1, 2]).tolist()

    found = with_servers(1, 2, train, initializer=without_13, mode=mode)
    assert found == [[[0.0] * 3] * 2] * 2


@pytest.mark.parametrize("act", ["stats", "save"])
def test_what_is_done_together_tells_all_of_a_push_that_has_failed_on_the_way(act, tmp_path):
    def train(table, worker):
        if worker == 0:
            table.push([13], np.ones((1, 3), "f4"))
        kind = dist.RemoteError if worker else dist.UsageError
        with pytest.raises(kind, match="no row for 13"):
            _ = table.stats() if act == "stats" else table.save(tmp_path)
        return table.stats()["rows"]

    assert with_servers(1, 2, train, initializer=without_13, mode="async") == [0, 0]


def test_a_worker_whose_push_has_failed_stops_with_the_others_and_says_so():
    def rank():
        fleet.init(server_num=1)
        table = ps.SparseTable("rows", 3, initializer=without_13, mode="async")
        if fleet.is_server():
            fleet.run_server()
            return
        fleet.init_worker()
        table.push([13 - fleet.worker_index()], np.ones((1, 3), "f4"))
        says = pytest.raises(dist.RemoteError, match="no row for 13")
        with contextlib.nullcontext() if fleet.worker_index() else says:
            fleet.stop_worker()

    dist.simulate(3, rank)


WRONG_FOR_FLEET = {
    "a table to save": (lambda name: fleet.save_one_table(name, "/nowhere", 0), "others"),
    "a table to load": (lambda number: fleet.load_one_table(number, "/nowhere", 0), 9),
    "a table to tell of": (lambda name: fleet.print_table_stat(name, 0, 0.0), "others"),
    "a folder to load from": (lambda path: fleet.load_model(path, 0), None),
    "a folder to save all in": (lambda path: fleet.save_persistables(None, path), None),
    "a folder to save tables in": (fleet.save_cache_model, None),
}


@pytest.mark.parametrize("what", WRONG_FOR_FLEET)
def test_what_one_worker_asks_of_fleet_in_vain_holds_nobody_up(what, tmp_path):
    act, wrong = WRONG_FOR_FLEET[what]
    right = 0 if "table to" in what else tmp_path

    def train(table, worker):
        with pytest.raises(dist.RemoteError if worker else dist.UsageError):
            act(right if worker else wrong)
        return table.pull([1])[0, 0]

    assert with_servers(1, 2, train) == [1, 1]
    assert not any(tmp_path.iterdir())


def test_a_rank_that_only_serves_waits_for_no_worker():
    def rank():
        fleet.init(server_num=1)
        if fleet.is_server():
            with pytest.raises(dist.UsageError, match="this rank is a parameter server"):
                fleet.barrier_worker()
            fleet.run_server()
            return
        fleet.init_worker()
        fleet.stop_worker()

    dist.simulate(2, rank)


def test_a_threshold_that_is_no_number_is_refused_and_servers_go_on():
    def train(table, worker):
        with pytest.raises(dist.UsageError, match="threshold must be a number"):
            table.shrink("all")
        return table.shrink()

    assert with_servers(1, 2, train) == [0, 0]


def test_ranks_that_differ_about_a_table_hear_of_it():
    def check(world):
        with pytest.raises(dist.MismatchError, match="rank 0 has dim=3, but rank 1 has dim=4"):
            ps.SparseTable("rows", 3 + world.rank)
        with pytest.raises(dist.MismatchError, match="name='rows 0', but rank 1 has name='rows 1'"):
            ps.SparseTable(f"rows {world.rank}", 3)
        table = ps.SparseTable("rows", 3)
        with pytest.raises(dist.MismatchError, match="rank 0 is in pull of table 'rows', but rank"):
            _ = table.push([1], np.ones((1, 3), np.float32)) if world.rank else table.pull([1])
        with pytest.raises(dist.MismatchError, match=r"with optimizer='adagrad'.*optimizer='adam'"):
            ps.SparseTable("rows", 3, optimizer="adam")
        same = ps.SparseTable("rows", 3)
        assert np.array_equal(same.pull([1]), table.pull([1]))

    simulate(2, check)


@pytest.mark.parametrize(
    "options",
    [{"dim": 0}, {"dim": 2.0}, {"name": ""}, {"mode": "fast"}, {"dtype": "int64"}, {"store": "?"}],
)
def test_options_that_cannot_be_are_refused(options):
    def check(_):
        with pytest.raises(dist.UsageError):
            ps.SparseTable(**{"name": "rows", "dim": 2, **options})

    simulate(2, check)


def test_a_pull_into_an_array_and_one_that_is_waited_for():
    def check(_):
        table = ps.SparseTable("rows", 3, initializer=initial)
        out = np.empty((2, 3), np.float32)
        assert table.pull([4, 9], out=out) is out
        work = table.pull([9, 4], sync_op=False)
        assert np.array_equal(work.result(), out[::-1])
        assert work.is_completed()

    simulate(2, check)


def test_what_was_prefetched_is_pulled_anew_after_a_push():
    def check(world):
        table = ps.SparseTable("rows", 3, optimizer=SGD, initializer=initial)
        table.prefetch([4])
        assert table.pull([4])[0, 0] == 4
        table.prefetch([4])
        table.push([4], np.ones((1, 3), np.float32))
        assert table.pull([4])[0, 0] == 4 - RATE * world.nranks
        table.prefetch([5])
        table.prefetch([4])  # the one before is never used
        assert table.pull([4])[0, 0] == 4 - RATE * world.nranks
        table.prefetch([4])
        with pytest.raises(dist.UsageError, match="must be of the same ids"):
            _ = table.pull([5]) if world.rank == 0 else table.pull([0.5])

    simulate(1, check)


def test_the_hottest_ids_are_told_with_about_how_often():
    def check(world):
        table = ps.SparseTable("rows", 3, optimizer=SGD)
        rng = np.random.default_rng(world.rank)
        for _ in range(200):
            table.pull(np.concatenate([[5, -(2**40)], rng.integers(100, 10_000, 300)]))
        table.push([5], np.ones((1, 3), np.float32))
        (first, often), (second, less), *others = table.stats()["hot"]
        assert {first, second} == {5, -(2**40)}
        assert len(others) == 8
        assert all(count < min(often, less) / 2 for _, count in others)
        assert 100 < less <= often < 2000
        assert ps.SparseTable("empty", 3).stats()["hot"] == []

    simulate(3, check)


def test_a_dense_table_is_an_array_that_gradients_change():
    def check(world):
        value = np.arange(600, dtype=np.float32).reshape(3, 200)
        table = ps.DenseTable("weights", (3, 200), value=value, optimizer=SGD)
        table.push(np.ones((3, 200), np.float32))
        expected = value - np.float32(RATE * world.nranks)
        assert np.array_equal(table.pull(), expected)
        out = np.empty_like(value)
        assert table.pull(out=out) is out
        assert np.array_equal(out, expected)
        with pytest.raises(dist.UsageError, match="must be of shape"):
            table.push(np.ones(3, np.float32))

    simulate(2, check)


@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_a_dense_table_is_prefetched_like_a_sparse_one_and_never_shrinks(mode):
    def check(world):
        value = np.arange(700, dtype=np.float32).reshape(7, 100)
        table = ps.DenseTable("weights", (7, 100), value=value, optimizer=SGD, mode=mode)
        asked = []
        table._table.core.worker.pull, pull = (
            lambda ids, rows: asked.append(len(ids)) or pull(ids, rows),
            table._table.core.worker.pull,
        )
        table.prefetch()
        for _ in range(2):
            np.testing.assert_array_equal(table.pull(), value)
        assert asked == [3, 3]  # the first pull took what was prefetched
        assert table.shrink(10.0) == table.shrink() == 0
        np.testing.assert_array_equal(table.pull(), value)
        dist.barrier()  # the other one may ask this rank still

    simulate(2, check)


def test_entries_count_what_all_workers_push():
    def check(world):
        entry = ps.CountFilterEntry(2 * world.nranks)
        table = ps.SparseTable("rows", 1, optimizer=SGD, initializer=initial, entry=entry)
        table.push([8], np.ones((1, 1), np.float32))
        assert table.pull([8])[0, 0] == 8
        assert table.stats()["rows"] == 0
        table.push([8], np.ones((1, 1), np.float32))
        assert table.stats()["rows"] == 1
        shown = ps.SparseTable("shown", 1, optimizer=SGD, entry=ps.ShowClickEntry("show", "click"))
        shown.push([1, 2], np.ones((2, 1), np.float32), clicks=[1, 0])
        assert shown.stats()["rows"] == 2
        assert shown.shrink(1e9) == 2
        assert shown.stats()["rows"] == 0

    simulate(2, check)


# ---- saves


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_was_saved_comes_back(ranks, tmp_path):
    simulate(ranks, check_saves, str(tmp_path / "saved"))


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_saved_with_three_servers_and_loaded_with_five_training_goes_on_alike(optimizer, tmp_path):
    def first(table, worker):
        for step in range(3):
            ids = np.arange(40) + worker + step
            table.push(ids, np.ones((40, 3), np.float32))
        table.save(tmp_path / "saved")
        return then(table, worker)

    def then(table, worker):
        ids = np.arange(50)
        table.push(ids, np.full((50, 3), 0.5 + worker, np.float32))
        return table.pull(ids).tobytes()

    def again(table, worker):
        table.load(tmp_path / "saved")
        return then(table, worker)

    options = {"optimizer": optimizer, "initializer": ("uniform", 0.1)}
    expected = with_servers(3, 2, first, **options)
    assert with_servers(5, 2, again, **options) == expected
    assert with_servers(0, 2, again, **options) == expected


def test_a_delta_has_what_has_changed_and_what_was_removed(tmp_path):
    def check(world):
        table = ps.SparseTable("rows", 3, entry=ps.ShowClickEntry("show", "click"))
        many = np.arange(1000)
        table.push(many, np.ones((1000, 3), np.float32))
        for mode in (0, 1):
            table.save(tmp_path / "a", mode)
            table.push([7], np.ones((1, 3), np.float32), clicks=[1])
        table.save(tmp_path / "a", 1)
        sizes = [_bytes(tmp_path / "a" / f"step-{step:06d}") for step in range(3)]
        assert sizes[2] < sizes[0] / 5
        expected = table.pull(many)
        table.shrink(0.8 + 1e6)
        table.load(tmp_path / "a")
        assert np.array_equal(table.pull(many), expected)
        table.save(tmp_path / "a", 0)
        assert sorted(os.listdir(tmp_path / "a")) == ["step-000003"]
        table.shrink(1e9)
        table.save(tmp_path / "a", 1)
        table.push(many, np.ones((1000, 3), np.float32))
        table.load(tmp_path / "a")
        assert table.stats()["rows"] == 0

    simulate(2, check)


def content_of(table):
    """Return all rows of a table with what is kept beside, by id, on every rank. Collective."""
    own = {}
    if table.core.shard is not None:
        for id, *kept in zip(
            *map(np.ndarray.tolist, table.core.shard.store.content()), strict=True
        ):
            own[id] = kept
    parts = []
    dist.all_gather_object(parts, own)
    return {id: kept for part in parts for id, kept in part.items()}


SHOWN = {"entry": dist.ShowClickEntry("show", "click"), "optimizer": "adagrad"}


@pytest.mark.parametrize("seed", range(4))
def test_deltas_bring_back_what_there_was_on_any_number_of_servers(seed, tmp_path):
    def rows(most):
        return ps.SparseTable("rows", 3, max_rows=most, **SHOWN)

    def program(world):
        table, rng, expected = rows(100), np.random.default_rng(seed), {}
        for step in range(9):
            for _ in range(3):  # rows make room for others
                ids = rng.integers(0, 700, 60)
                table.push(ids, np.ones((60, 3), np.float32), clicks=rng.integers(0, 4, 60))
            if rng.random() < 0.3:
                table.shrink(float(rng.random() * 9), decay=float(rng.choice([1.0, 0.5])))
            table.save(tmp_path / "a", mode=int(step > 0), async_save=bool(step % 2))
        assert sum(each["evicted"] for each in table.stats()["servers"]) > 0
        expected = content_of(table)
        table.push([1], np.ones((1, 3), np.float32))
        table.load(tmp_path / "a")
        assert content_of(table) == expected
        table.push([2], np.ones((1, 3), np.float32))
        table.save(tmp_path / "a", 1)
        table.load(tmp_path / "a")
        return content_of(table)

    def loaded(world):
        table = rows(None)
        table.load(tmp_path / "a")
        return content_of(table)

    expected = simulate(2, program)[0]
    for ranks in (1, 2, 3):
        assert simulate(ranks, loaded) == [expected] * ranks


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_delta_without_the_save_that_it_goes_on_from_is_refused(missing, tmp_path):
    def check(world):
        table = ps.SparseTable("rows", 3, optimizer=SGD, initializer=initial)
        for step in range(4):
            table.push([step], np.ones((1, 3), np.float32))
            table.save(tmp_path / "a", mode=int(step > 0))
        if world.rank == 0:
            (tmp_path / "a" / f"step-00000{missing}").rename(tmp_path / "elsewhere")
        dist.barrier()
        before = content_of(table)
        told = rf"step-00000{missing + 1} has only the changes since one that is missing"
        with pytest.raises(dist.CheckpointError, match=told):
            table.load(tmp_path / "a")
        assert content_of(table) == before
        if world.rank == 0:
            (tmp_path / "elsewhere").rename(tmp_path / "a" / f"step-00000{missing}")
        dist.barrier()
        table.load(tmp_path / "a")
        assert content_of(table) == before

    simulate(2, check)


def test_a_delta_that_would_go_on_from_the_save_of_another_job_is_whole(tmp_path):
    def check(world):
        mine, others = (
            ps.SparseTable("rows", 3, optimizer=SGD, initializer=initial, group=group)
            for group in (None, world.split(0))
        )
        for table, id in ((mine, 1), (others, 2)):
            table.push([id], np.ones((1, 3), np.float32))
            table.save(tmp_path / "a")
        mine.push([3], np.ones((1, 3), np.float32))
        mine.save(tmp_path / "a", 1)
        assert sorted(os.listdir(tmp_path / "a")) == ["step-000002"]
        mine.load(tmp_path / "a")
        assert content_of(mine).keys() == {1, 3}

    simulate(2, check)


def test_deltas_of_some_of_the_tables_leave_the_others_as_they_were_saved(tmp_path):
    def check(world):
        strategy = {"optimizer": SGD, "initializer": initial}
        first, other = (ps.SparseTable(name, 3, **strategy) for name in ("first", "other"))
        names, cluster = ["first", "other"], cluster_of()
        one = np.ones((1, 3), np.float32)
        for table in (first, other):
            table.push([1], one)
        save_tables(cluster, names, tmp_path / "a")
        first.push([2], one)
        first.save(tmp_path / "a", 1)
        first.save(tmp_path / "a", 1)
        other.push([3], one)
        other.save(tmp_path / "a", 1)
        first.push([4], one)
        save_tables(cluster, names, tmp_path / "a", 1)
        assert len(os.listdir(tmp_path / "a")) == 5  # none of them is whole
        expected = content_of(first), content_of(other)
        for table in (first, other):
            table.push([5], one)
        load_tables(cluster, names, tmp_path / "a")
        assert (content_of(first), content_of(other)) == expected

    simulate(2, check)


def test_what_a_rank_cannot_load_is_an_error_on_all_and_the_table_stays(tmp_path):
    def check(world):
        table = ps.SparseTable("rows", 3, optimizer=SGD)
        table.push(np.arange(40), np.ones((40, 3), np.float32))
        table.save(tmp_path / "a")
        small = ps.SparseTable("rows", 3, optimizer=SGD, max_rows=15, group=world.split(0))
        with pytest.raises(dist.HpcdistError, match="exceed max_rows=15"):
            small.load(tmp_path / "a")
        assert small.stats()["rows"] == 0
        small.push([1], np.ones((1, 3), np.float32))
        assert small.stats()["rows"] == 1
        if world.rank == 0:
            damage(next((tmp_path / "a").glob("*/*.safetensors")))
        dist.barrier()
        before = content_of(table)
        with pytest.raises(dist.CheckpointError, match="damaged"):
            table.load(tmp_path / "a")
        assert content_of(table) == before

    simulate(2, check)


@pytest.mark.parametrize("servers", [1, 2])
def test_what_a_server_cannot_load_is_an_error_on_all_workers_and_the_table_goes_on(
    servers, tmp_path
):
    def first(table, worker):
        table.push(np.arange(41), np.ones((41, 3), np.float32))
        table.save(tmp_path / "a")

    def then(table, worker):
        with pytest.raises(dist.HpcdistError, match="exceed max_rows=20"):
            table.load(tmp_path / "a")
        table.push([1], np.ones((1, 3), np.float32))
        return table.stats()["rows"], table.pull([1])[0, 0]

    with_servers(servers, 2, first)
    found = with_servers(servers, 2, then, max_rows=20)  # one of two servers has more
    assert found == [(1, 1 - 2 * RATE)] * 2


def damage(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_loading_takes_little_more_memory_than_the_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(slabs, "_SLAB_BYTES", 1 << 16)
    monkeypatch.setattr(load, "_PIECE_BYTES", 1 << 16)
    ids = np.arange(1 << 17)

    def check(_, again):
        table = ps.SparseTable("rows", 16, optimizer="adam")
        if not again:
            table.push(ids, np.ones((ids.size, 16), np.float32))
            table.save(tmp_path / "a")
            return table.pull(ids[::97]).tobytes()
        before = tracemalloc.get_traced_memory()[0]
        table.load(tmp_path / "a")
        most = tracemalloc.get_traced_memory()[1] - before
        assert most < 1.3 * table.stats()["bytes"]
        return table.pull(ids[::97]).tobytes()

    expected = simulate(1, check, False)
    tracemalloc.start()
    try:
        assert simulate(1, check, True) == expected
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("count", "nbytes"), [(0, 0), (1, 8), (5, 40), (10**6, 10**8), (97, 10**10)]
)
def test_every_rank_reads_as_many_runs_and_all_rows_are_read_once(size, count, nbytes):
    runs = [load.runs_of(count, nbytes, rank, size) for rank in range(size)]
    assert len({len(each) for each in runs}) == 1
    flat = [each for found in runs for each in found]
    assert flat[0][0] == 0
    assert flat[-1][1] == count
    assert all(before[1] == after[0] for before, after in pairwise(flat))


def _bytes(folder):
    return sum(each.stat().st_size for each in folder.glob("*.safetensors"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_rows_of_any_dtype_are_saved_and_loaded_to_the_bit(dtype, optimizer, tmp_path):
    ids = np.arange(40)

    def train(table):
        table.push(ids, (np.ones((40, 3)) / (1 + ids[:, None])).astype(table.dtype))
        return table.pull(ids).tobytes()

    def first(table, worker):
        train(table)
        table.save(tmp_path / "a")
        return train(table)

    def again(table, worker):
        table.load(tmp_path / "a")
        return train(table)

    options = {"dtype": dtype, "optimizer": optimizer}
    expected = with_servers(1, 2, first, **options)
    assert expected == with_servers(3, 2, again, **options)


def test_ids_that_wait_for_their_row_are_saved(tmp_path):
    def check(world):
        entry = ps.CountFilterEntry(2 * world.nranks)
        table = ps.SparseTable("rows", 1, optimizer=SGD, entry=entry)
        table.push([8], np.ones((1, 1), np.float32))
        table.save(tmp_path / "a")
        table.load(tmp_path / "a")
        table.push([8], np.ones((1, 1), np.float32))
        assert table.stats()["rows"] == 1

    simulate(2, check)


def test_a_save_that_is_not_of_this_table_changes_nothing(tmp_path):
    def check(_):
        table = ps.SparseTable("rows", 3, initializer=initial)
        table.push([1], np.ones((1, 3), np.float32))
        table.save(tmp_path / "a")
        for other, told in [
            (ps.SparseTable("others", 3), "has no table 'others'; tables there: rows"),
            (ps.SparseTable("rows of 4", 4), "has no table"),
        ]:
            with pytest.raises(dist.CheckpointError, match=told):
                other.load(tmp_path / "a")
        before = table.pull([1])
        with pytest.raises(dist.CheckpointError, match="no whole save of tables"):
            table.load(tmp_path / "nothing")
        assert np.array_equal(table.pull([1]), before)

    def other_dim(_):
        table = ps.SparseTable("rows", 4)
        with pytest.raises(dist.CheckpointError, match=r"dim and dtype \(3, 'float32'\)"):
            table.load(tmp_path / "a")
        table = ps.SparseTable("others", 3, optimizer="sgd")
        assert table.pull([1]).shape == (1, 3)

    def other_optimizer(_):
        with pytest.raises(dist.CheckpointError, match="another optimizer"):
            ps.SparseTable("rows", 3, optimizer="sgd").load(tmp_path / "a")

    for each in (check, other_dim, other_optimizer):
        simulate(2, each)


def test_a_save_beside_the_training_is_of_the_moment_it_began(tmp_path):
    def check(world):
        table = ps.SparseTable("rows", 3, optimizer=SGD, initializer=initial)
        work = table.save(tmp_path / "a", async_save=True)
        for _ in range(5):
            table.push([1], np.ones((1, 3), np.float32))
        work.wait()
        moved = table.save(tmp_path / "a", 1, async_save=True)
        table.push([1], np.ones((1, 3), np.float32))
        moved.wait()
        table.load(tmp_path / "a")
        assert table.pull([1])[0, 0] == 1 - 5 * RATE * world.nranks

    simulate(2, check)


# ---- without lock step


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("mode", [ps.Async(2, 3), ps.Ssp(2), ps.Ssp(0)])
def test_no_push_is_lost_or_doubled_when_nobody_waits_for_all(mode, servers):
    def train(table, worker):
        for step in range(12):
            ids = np.arange(30) + step % 3
            table.pull(ids)
            table.push(ids, np.ones((30, 3), np.float32))
        table.flush()
        fleet.barrier_worker()
        return table.pull(np.arange(32))

    pushed = np.array([4 * min(id + 1, 3, 32 - id) for id in range(32)])
    expected = initial(np.arange(32), 3) - RATE * 3 * pushed[:, None]
    found = with_servers(servers, 3, train, mode=mode)
    assert all(np.array_equal(each, expected) for each in found)


def test_a_save_without_lock_step_has_what_was_pushed_before_and_nothing_after(tmp_path):
    def train(table, worker):
        ids = np.arange(200)
        ones = np.ones((200, 3), np.float32)
        for _ in range(5):
            table.push(ids, ones)
        table.save(tmp_path / "a", async_save=True)
        for _ in range(5):
            table.push(ids, ones)
        table.load(tmp_path / "a")
        return table.pull(ids)

    expected = initial(np.arange(200), 3) - RATE * 2 * 5
    for each in with_servers(2, 2, train, mode=ps.Async(4, 2)):
        assert np.array_equal(each, expected)


def test_the_fastest_waits_for_the_slowest_and_names_it():
    def train(table, worker):
        one = np.ones((1, 3), np.float32)
        if worker == 0:
            for _ in range(2):
                table.pull([1])
                table.push([1], one)
            with pytest.raises(dist.CollectiveTimeout, match="rank 1, more than 1 pushes") as told:
                table.pull([1])
            assert told.value.missing == (1,)
        fleet.barrier_worker()
        if worker == 1:
            table.push([1], one)
        fleet.barrier_worker()
        return table.pull([1])[0, 0]

    found = with_servers(1, 2, train, mode=ps.Ssp(1, timeout=2))
    assert found == [1 - RATE * 3] * 2


def test_a_pull_that_nobody_asks_for_yet_does_not_wait_for_the_slowest():
    def train(table, worker):
        one = np.ones((1, 3), np.float32)
        if worker == 0:
            for _ in range(2):
                table.push([1], one)
            work = table.pull([1], sync_op=False)
            assert not work.is_completed()
            table.prefetch([2])
            fleet.barrier_worker()
            table.push([1], one)  # also before the pull: it has not been begun
            fleet.barrier_worker()
            assert work.result()[0, 0] in (1 - RATE * 4, 1 - RATE * 5)
            assert work.is_completed()
            late = table.pull([1], sync_op=False)
            while not late.is_completed():  # who asks need not wait
                time.sleep(0.001)
            assert table.pull([2])[0, 0] == 2
        else:
            fleet.barrier_worker()
            table.push([1], one)
            fleet.barrier_worker()
            table.push([1], one)
        return True

    for servers in (0, 1):
        assert with_servers(servers, 2, train, mode=ps.Ssp(1)) == [True] * 2


def test_a_worker_that_has_gone_is_named_and_nobody_waits_for_it():
    told, heard = [], threading.Event()

    def train(table, worker):
        table.push([1], np.ones((1, 3), np.float32))
        fleet.barrier_worker()
        if worker == 1:
            require_session().end("it has died")
            assert heard.wait(60)
            return
        table.push([1], np.ones((1, 3), np.float32))
        table.push([1], np.ones((1, 3), np.float32))
        with pytest.raises(dist.RemoteError, match="rank 1") as caught:
            table.pull([1])
        told.append(caught.value)
        heard.set()

    with pytest.raises((dist.HpcdistError, dist.UsageError)):  # it did not stop in good order
        with_servers(1, 2, train, mode=ps.Ssp(1, timeout=100))
    assert told[0].rank == 1
    assert "has ended without stop_worker" in str(told[0])


class Answer:
    """What a worker says of itself, once `ended` is set: that it has gone."""

    def __init__(self):
        self.ended = False

    def done(self):
        return self.ended

    def exception(self):
        return ConnectionError("its process has ended")


class Behind:
    """A server that says `patience` times that worker 1 is behind; its `answers` come then."""

    timeout_s, names = 20, (0, 1)

    def __init__(self, patience):
        self.patience, self.answers = patience, []

    def on_all(self, _, clock):
        self.patience -= 1
        if not self.patience:
            for each in self.answers:
                each.ended = True
        return [[1]]

    def is_there(self, worker):
        self.answers.append(Answer())
        return self.answers[-1]


def test_a_worker_that_answers_late_is_asked_once_and_its_answer_is_heard(monkeypatch):
    monkeypatch.setattr("hpcdist.ps.worker._ASK_S", 0)
    server = Behind(patience=5)
    clocked = Clocked(server, ps.Ssp(0))
    clocked.clock = 1
    with pytest.raises(dist.RemoteError, match=r"rank 1.*its process has ended") as told:
        clocked.pull(np.array([1]), np.empty((1, 2))).result()
    assert told.value.rank == 1
    assert len(server.answers) == 1


class Dead:
    """Servers that have died."""

    def by_owner(self, *_):
        raise dist.RemoteError("rank 2 (worker2) has not answered: its process has ended", 2)


def test_a_queue_for_a_server_that_has_died_holds_nobody_up_and_says_so():
    threads = threading.active_count()
    queue = Queued(Dead(), ps.Async(send_queue_size=2))
    arrays = np.arange(3), np.ones((3, 2), np.float32), np.empty((3, 0), np.float32)

    def push_and(end):
        for _ in range(50):
            queue.push(*arrays)
        end()

    with pytest.raises(dist.RemoteError, match="rank 2"):
        push_and(queue.flush)
    with pytest.raises(dist.RemoteError, match="rank 2"):
        push_and(queue.stop)
    with contextlib.suppress(dist.RemoteError):
        queue.stop()
    assert threading.active_count() <= threads


def test_nobody_waits_for_a_worker_that_has_stopped():
    def train(table, worker):
        for _ in range(1 if worker else 9):
            table.pull([1])
            table.push([1], np.ones((1, 3), np.float32))
        return table.pull([1])[0, 0] if worker == 0 else None

    assert with_servers(0, 2, train, mode=ps.Ssp(1))[0] == 1 - RATE * 10


def test_workers_of_rows_of_their_own_meet_every_k_steps():
    def train(table, worker):
        one = np.ones((1, 3), np.float32)
        table.pull([5])
        fleet.barrier_worker()
        for step in range(4):
            table.push([5], one * (1 + worker))
            if step == 0:
                assert table.pull([5])[0, 0] == 5 - RATE * (1 + worker)
        fleet.barrier_worker()
        table.push([5], one * 0)
        table.flush()
        return table.pull([5])[0, 0]

    found = with_servers(1, 2, train, mode=ps.Geo(2))
    assert found == [5 - RATE * (4 * 1 + 4 * 2) / 2] * 2


@pytest.mark.parametrize("servers", [0, 1, 2])
def test_ids_get_rows_of_workers_own_as_the_entry_says(servers):
    one = np.ones((1, 3), np.float32)

    def train(table, worker):
        found = []
        for step in range(4):
            ids = [5, 6] if step == 0 else [5]
            table.push(ids, np.repeat(one, len(ids), axis=0))
            found.append(table.pull([5])[0, 0])
            fleet.barrier_worker()
        table.flush()
        fleet.barrier_worker()
        rows = table.stats()["rows"], table.pull([6])[0, 0]
        return found, rows

    entry = dist.CountFilterEntry(5)
    for found, rows in with_servers(servers, 2, train, mode=ps.Geo(1), entry=entry):
        # of 8 pushes the fifth or sixth gives the row: what came before changes nothing
        assert found[:2] == [5, 5]
        assert found[3] in (5 - RATE, 5 - RATE / 2)
        assert rows == (1, 6)


@pytest.mark.parametrize("servers", [0, 2])
def test_ids_without_a_row_stay_as_they_were_in_mode_geo(servers):
    ids = np.arange(200)

    def train(table, worker):
        table.pull(ids)
        fleet.barrier_worker()
        for step in range(3):
            table.push(ids, np.ones((200, 3), np.float32))
            if step == 0:
                early = (initial(ids, 3) - table.pull(ids))[:, 0] / RATE
        table.flush()
        fleet.barrier_worker()
        table.push(ids, np.zeros((200, 3), np.float32))
        table.flush()
        change = (initial(ids, 3) - table.pull(ids))[:, 0] / RATE
        return early.tolist(), change.tolist(), table.stats()["rows"]

    for entry in (dist.ProbabilityEntry(0.3), None):
        found = with_servers(servers, 2, train, mode=ps.Geo(2), entry=entry)
        assert found[0] == found[1]
        (early, change, rows), told = found[0], coins(ids, 0) < (0.3 if entry else 1)
        assert rows == told.sum()
        assert early == told.tolist()
        assert change == [3 * each for each in told]


@pytest.mark.parametrize("mode", [ps.Geo(3), ps.Sync(), ps.Async(4, 2), ps.Ssp(1)])
def test_shows_and_clicks_count_alike_in_all_modes(mode, tmp_path):
    def train(table, worker):
        for _ in range(4):
            table.push([1, 2, 2, 3], np.ones((4, 3), np.float32), clicks=[0, 1, 0, worker])
        table.flush()
        fleet.barrier_worker()
        # scores: of 1, 0.1 x 8; of 2, 0.1 x 8 + 8; of 3, 0.1 x 4 + 4
        removed = [table.shrink(each) for each in (0.79, 0.81, 4.39, 4.41, 8.79, 8.81)]
        fleet.barrier_worker()
        return removed

    entry = dist.ShowClickEntry("show", "click")
    assert with_servers(1, 2, train, mode=mode, entry=entry) == [[0, 1, 0, 1, 0, 1]] * 2


@pytest.mark.parametrize("mode", [ps.Sync(), ps.Async(4, 2), ps.Ssp(1), ps.Geo(2)])
@pytest.mark.parametrize("servers", [0, 1])
def test_the_learning_rate_changes_for_what_is_pushed_later(mode, servers, tmp_path):
    one = np.ones((1, 3), np.float32)

    def push(table, id):
        table.push([id], one)
        table.flush()
        fleet.barrier_worker()
        table.push([id], one * 0)  # in mode geo a worker hears of the others
        table.flush()
        fleet.barrier_worker()
        return initial(np.array([id]), 3)[0, 0] - table.pull([id])[0, 0]

    def train(table, worker):
        found = [table.get_lr(), push(table, 1)]
        table.set_lr(0.25)
        found += [table.get_lr(), push(table, 2)]
        table.save(tmp_path / "a")
        table.load(tmp_path / "a")  # whose rows learn at the rate of now
        found += [push(table, 3)]
        with pytest.raises(dist.UsageError, match="learning_rate must be a number, at least 0"):
            table.set_lr("fast")
        with pytest.raises(dist.MismatchError, match="differ in set_lr"):
            table.set_lr(0.5 + worker)
        return [*found, table.get_lr()]

    workers = 1 if isinstance(mode, ps.Geo) else 2  # of which the rows have the mean
    expected = [0.5, 0.5 * workers, 0.25, 0.25 * workers, 0.25 * workers, 0.25]
    assert with_servers(servers, 2, train, mode=mode) == [expected] * 2


def test_the_learning_rate_of_an_array_changes():
    def check(world):
        table = ps.DenseTable("weights", (2, 3), optimizer=SGD)
        table.set_lr(2)
        table.push(np.ones((2, 3), np.float32))
        assert table.get_lr() == 2
        assert (table.pull() == -2 * world.nranks).all()

    simulate(2, check)


@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
@pytest.mark.parametrize(("servers", "workers"), [(0, 1), (0, 3), (1, 2), (3, 2)])
def test_every_row_is_in_the_share_of_one_worker(mode, servers, workers):
    def train(table, worker):
        ids = np.arange(worker, 100, workers) * 3 - 7
        table.push(ids, np.ones((len(ids), 3), np.float32))
        return table.export()

    found = with_servers(servers, workers, train, mode=mode)
    ids = np.concatenate([ids for ids, _ in found])
    assert sorted(ids) == [*range(-7, 293, 3)]
    for ids, rows in found:
        assert (np.diff(ids) > 0).all()
        assert len(ids) > 10
        step = RATE / workers if mode == "geo" else RATE
        np.testing.assert_allclose(rows, initial(ids, 3) - step, rtol=1e-6)


def test_an_empty_table_has_an_empty_share():
    def check(_):
        ids, rows = ps.SparseTable("rows", 3, dtype="float16").export()
        assert (ids.dtype, rows.shape, rows.dtype) == (np.int64, (0, 3), np.float16)

    simulate(2, check)


@pytest.mark.parametrize("servers", [0, 1])
def test_rows_that_nobody_pushes_leave_after_some_time_also_when_they_were_saved(servers, tmp_path):
    one = np.ones((1, 3), np.float32)

    def first(table, worker):
        table.push([1], one)
        table.push([2], one)
        table.save(tmp_path / "a")
        assert table.shrink(0.0, decay=0.5, unseen=2) == 0
        table.push([2], one)
        assert table.shrink(0.0, unseen=2) == 0
        table.save(tmp_path / "a", mode=1)
        with pytest.raises(dist.UsageError, match="decay must be a number"):
            table.shrink(decay=2)

    def then(table, worker):
        table.load(tmp_path / "a")
        removed = [table.shrink(0.0, unseen=2), table.shrink(0.29), table.shrink(0.31)]
        return [*removed, table.stats()["rows"]]

    options = {"entry": dist.ShowClickEntry("show", "click")}
    with_servers(servers, 2, first, **options)
    # the score of 2 is 0.1 (2 x 0.5 + 2), for two workers have pushed it
    found = with_servers(2 - servers, 2, then, **options)
    assert found == [[1, 0, 1, 0]] * 2


# ---- fleet


def test_ranks_that_serve_know_who_they_are_and_train_nothing():
    def rank():
        fleet.init(server_num=2)
        table = ps.SparseTable("rows", 3)
        assert (fleet.worker_num(), fleet.server_num()) == (2, 2)
        assert fleet.server_endpoints() == ["localhost:2", "localhost:3"]
        assert fleet.worker_endpoints() == ["localhost:0", "localhost:1"]
        if not fleet.is_server():
            assert fleet.is_worker()
            assert fleet.is_first_worker() == (fleet.worker_index() == 0)
            with pytest.raises(dist.UsageError, match="this rank is not a parameter server"):
                fleet.server_index()
            with pytest.raises(dist.UsageError, match="is for ranks that only serve"):
                fleet.run_server()
            fleet.init_worker()
            fleet.stop_worker()
            return fleet.get_hybrid_communicate_group().nranks
        for wrong in (fleet.stop_worker, fleet.init_worker, fleet.shrink):
            with pytest.raises(dist.UsageError, match="is for workers, and this rank only serves"):
                wrong()
        with pytest.raises(dist.UsageError, match="only serves table 'rows'"):
            table.pull([1])
        with pytest.raises(dist.UsageError, match="it has no place on the grid"):
            fleet.get_hybrid_communicate_group()
        fleet.run_server()
        fleet.run_server()
        return -1 - fleet.server_index()

    def again():
        found = rank()
        assert fleet.init(server_num=2) is fleet.init(server_num=2)
        return found

    assert dist.simulate(4, again)[2:] == [-1, -2]


@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_servers_take_part_in_what_all_do(servers, workers):
    dist.simulate(servers + workers, check_worlds, servers)


def test_after_the_end_nothing_is_pulled_and_stopping_twice_is_stopping_once():
    def train(table, worker):
        fleet.stop_worker()
        fleet.stop_worker()
        one = np.ones((1, 3), np.float32)
        for late in (lambda: table.pull([1]), lambda: table.push([1], one), fleet.shrink):
            with pytest.raises(dist.UsageError, match="stop_worker"):
                late()

    for servers in (0, 1):
        with_servers(servers, 2, train)


def test_servers_that_were_told_where_begin_with_what_was_saved(tmp_path, capfd):
    def job(servers, begin):
        fleet.init(server_num=servers)
        table = ps.SparseTable("rows", 3, optimizer=SGD, initializer=initial)
        if begin:
            fleet.init_server(str(tmp_path), ["rows"])
        if fleet.is_server():
            fleet.run_server()
            return None
        fleet.init_worker()
        table.push([1], np.ones((1, 3), np.float32))
        late = ps.DenseTable("bias", (2,), value=np.ones(2, np.float32))
        found = table.pull([1])[0, 0], late.pull()[0]
        fleet.save_persistables(None, str(tmp_path))
        table.push([1], np.ones((1, 3), np.float32))
        fleet.save_persistables(None, str(tmp_path), mode=1)
        fleet.load_model(str(tmp_path), 0)
        fleet.save_one_table("rows", str(tmp_path / "one"), 0)
        fleet.load_one_table(0, str(tmp_path / "one"), 0)
        fleet.save_dense_params(None, str(tmp_path / "dense"), None, None)
        fleet.set_date(0, "20260101")
        fleet.print_table_stat(0, 3, 0.0)
        fleet.check_save_pre_patch_done()
        assert fleet.save_cache_model(str(tmp_path / "cache")) == 2
        with pytest.raises(dist.UsageError, match="keeps no cache"):
            fleet.save_cache_table(0, 1)
        with pytest.raises(dist.UsageError, match=r"no table 7; tables there are: 0 \('rows'\)"):
            fleet.print_table_stat(7, 0, 0.0)
        fleet.stop_worker()
        return found

    with pytest.raises(dist.UsageError, match="init_server takes dirname and var_names"):
        dist.simulate(1, lambda: fleet.init() and fleet.init_server(1, 2, 3))
    assert dist.simulate(3, job, 1, False)[:2] == [(1 - 2 * RATE, 1.0)] * 2
    assert "table 'rows', pass 3, day 20260101: 1 rows" in capfd.readouterr().out
    assert dist.simulate(4, job, 2, True)[:2] == [(1 - 6 * RATE, 1.0)] * 2
    assert dist.simulate(2, job, 0, True) == [(1 - 10 * RATE, 1.0)] * 2


def test_a_strategy_tells_the_mode_of_tables_that_say_nothing():
    def modes(**fields):
        def rank():
            strategy = fleet.DistributedStrategy()
            for name, value in fields.items():
                setattr(strategy, name, value)
            fleet.init(strategy=strategy)
            return ps.SparseTable("rows", 3).mode

        return dist.simulate(1, rank)[0]

    assert modes() == modes(a_sync=False) == ps.Sync()
    assert modes(a_sync=True) == ps.Async(16, 1)
    queue = {"send_queue_size": 3, "max_merge_var_num": 2}
    assert modes(a_sync=True, a_sync_configs=queue) == ps.Async(3, 2)
    assert modes(a_sync_configs={"k_steps": 5}) == ps.Geo(5)
