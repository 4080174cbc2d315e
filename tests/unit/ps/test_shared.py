"""Rows that others of the node read past their owner."""

import gc
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import hpcdist as dist
from hpcdist import fleet, ps
from hpcdist.ps.calls import Calls
from hpcdist.ps.ids import mixed, owners
from hpcdist.ps.rows import RowStore
from hpcdist.ps.server import Shard
from hpcdist.ps.shared import Reader, Window, can_share, new_owned

pytestmark = pytest.mark.skipif(not can_share(), reason="no compiled loops, or another processor")
SGD = ("sgd", {"learning_rate": 1.0})
DIM = 5


def shard_of(**options):
    options = {"optimizer": SGD, "initializer": ("constant", 0.0), **options}
    return Shard(RowStore(DIM, owned=new_owned(), **options), 1)


def window_of(shard, before=None):
    return Window(shard.layout(), {} if before is None else before.mapped)


def reader_of(shard, opened):
    """Return what reads a shard as another process does, and notes each time it looks where."""

    def window(_, before):
        opened.append(before)
        return window_of(shard, before)

    return Reader(1, window)


def read(reader, shard, ids):
    rows = np.empty((len(ids), DIM), shard.store.dtype)
    absent = reader.read(np.ascontiguousarray(ids), rows)
    return rows, absent.tolist()


def test_what_is_read_past_the_owner_is_what_it_would_have_given():
    shard, opened = shard_of(initializer=("uniform", 1.0)), []
    reader = reader_of(shard, opened)
    assert read(reader, shard, np.arange(3))[1] == [0, 1, 2]
    rng = np.random.default_rng(0)
    ids = rng.permutation(np.concatenate([np.arange(20_000), -np.arange(1, 2**62, 2**50)]))
    for times, part in enumerate(np.array_split(ids, 7), 1):  # it grows
        shard.pull(part)
        assert len(opened) == times
        asked = np.concatenate([part[::-1], [2**63 - 1], part[:2]])
        rows, absent = read(reader, shard, asked)
        assert absent == [len(part)]
        there = np.delete(rows, absent, axis=0)
        assert np.array_equal(there, shard.pull(np.delete(asked, absent)))
    shard.push(ids[:9], np.ones((9, DIM), np.float32), np.empty((9, 0), np.float32))
    assert np.array_equal(read(reader, shard, ids[:20])[0], shard.pull(ids[:20]))
    assert len(opened) == 8


@pytest.mark.parametrize("servers", [2, 3])
def test_rows_of_several_owners_come_in_the_order_of_the_ids(servers):
    shards, shut = [shard_of(initializer=("uniform", 1.0)) for _ in range(servers)], servers - 1
    ids = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 5000)
    ids = np.concatenate([ids, ids[:50]])
    owner, right = owners(ids, servers), np.empty((ids.size, DIM), np.float32)
    for number, shard in enumerate(shards):
        right[owner == number] = shard.pull(ids[owner == number])
    reader = Reader(servers, lambda i, _: None if i == shut else window_of(shards[i]))
    rows, absent = read(reader, shards[0], ids)
    assert absent == np.flatnonzero(owner == shut).tolist()
    assert np.array_equal(rows[owner != shut], right[owner != shut])
    with shards[0].store.owned.changing():  # all the time: the others are read nevertheless
        rows, absent = read(reader, shards[0], ids)
    asked = (owner == shut) | (owner == 0)
    assert absent == np.flatnonzero(asked).tolist()
    assert np.array_equal(rows[~asked], right[~asked])


def test_a_row_is_not_taken_for_that_of_another_id_of_the_same_place_and_tag():
    ids = np.arange(300_000)
    upper = (mixed(ids) >> np.uint64(33)).view(np.int64)
    order = np.argsort(upper)
    same = np.flatnonzero(np.diff(upper[order]) == 0)
    first, second = ids[order[same]], ids[order[same + 1]]
    shard = shard_of(initializer=("uniform", 1.0))
    shard.store.slots._key = np.uint64(1)  # places and tags are these bits, at any size
    reader = reader_of(shard, [])
    right = shard.pull(first)
    both = np.concatenate([second, first])
    rows, absent = read(reader, shard, both)
    assert absent == [*range(second.size)]
    assert np.array_equal(rows[second.size :], right)
    right = np.concatenate([shard.pull(second), right])
    rows, absent = read(reader, shard, both)
    assert absent == []
    assert np.array_equal(rows, right)


def test_without_the_compiled_loop_every_owner_is_asked(monkeypatch):
    shard, opened, ids = shard_of(), [], np.arange(10)
    shard.pull(ids)
    reader = reader_of(shard, opened)
    monkeypatch.setattr("hpcdist.ps.shared._read", None)
    assert read(reader, shard, ids)[1] == ids.tolist()
    assert not opened


def test_rows_that_have_gone_are_absent_and_so_are_all_of_a_store_that_is_closed():
    entry = dist.ShowClickEntry("show", "click")
    shard, ids = shard_of(entry=entry), np.arange(10_000)
    shard.pull(ids)
    marks = np.zeros((10, 2), np.float32)
    marks[:, 1] = 5
    shard.push(ids[:10], np.ones((10, DIM), np.float32), marks)
    readers = reader_of(shard, []), Reader(1, lambda *_: shard.window())
    for reader in readers:
        assert read(reader, shard, ids)[1] == []
    assert shard.shrink(1.0) == 9_990  # the others move together
    for reader in readers:
        rows, absent = read(reader, shard, ids)
        assert absent == [*range(10, 10_000)]
        assert np.array_equal(rows[:10], -np.ones((10, DIM)))
    shard.store.close()
    for reader in readers:
        assert read(reader, shard, ids)[1] == [*range(10_000)]


@pytest.mark.parametrize("count", [1, 30, 100, 10_000])
def test_a_store_of_any_size_is_read_no_more_when_it_is_closed(count):
    shard, ids = shard_of(), np.arange(count)
    shard.pull(ids)
    readers = reader_of(shard, []), Reader(1, lambda *_: shard.window())
    for reader in readers:
        assert read(reader, shard, ids)[1] == []
    closed, shard.store = shard.store, shard_of(initializer=("constant", 3.0)).store
    closed.close()
    shard.pull(ids)
    for reader in readers:
        rows, absent = read(reader, shard, ids)
        assert absent == []
        assert (rows == 3).all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_rows_are_those_of_one_moment(dtype):
    shard, ids, stop = shard_of(dtype=dtype), np.arange(3000), threading.Event()
    shard.pull(ids)
    minus = np.full((ids.size, DIM), -1).astype(shard.store.dtype)

    def push():
        for _ in range(200):
            shard.push(ids, minus, np.empty((ids.size, 0), np.float32))
        stop.set()

    reader, seen, thread = reader_of(shard, []), set(), threading.Thread(target=push)
    thread.start()
    while not stop.is_set():
        rows, absent = read(reader, shard, ids)
        if not absent:
            assert (rows == rows[0, 0]).all()
            seen.add(float(rows[0, 0]))
    thread.join()
    assert seen <= {*map(float, range(201))}
    assert float(read(reader, shard, ids)[0][0, 0]) == 200


def test_a_table_that_is_dropped_keeps_no_descriptor():
    gc.collect()  # what other tests have dropped goes now, not in between
    before = len(os.listdir("/proc/self/fd"))
    shard = shard_of()
    shard.pull(np.arange(1000))
    window = window_of(shard)
    assert len(os.listdir("/proc/self/fd")) == before + 4
    shard.store.close()
    del shard
    assert len(os.listdir("/proc/self/fd")) == before
    assert window.is_old


def test_a_table_that_moves_while_it_is_opened_is_opened_again(monkeypatch):
    asked, opened = [], []

    class Moving:
        def __init__(self, layout, before):
            opened.append(layout)
            if layout < 3 or unreachable:
                raise OSError("no such file")

    class Server:
        def wait(self):
            return asked[-1]

    def begin(*_):
        asked.append(asked[-1] if unreachable and asked[-1:] == [5] else len(asked) + 1)
        return Server()

    monkeypatch.setattr("hpcdist.ps.calls.Window", Moving)
    one = Calls.__new__(Calls)
    one._begin, one._own, one._servers = begin, None, [1]
    one._agent = SimpleNamespace(is_near=lambda _: True)
    unreachable = False
    assert isinstance(one._opened(0, None), Moving)
    assert opened == [1, 2, 3]
    unreachable = True
    assert one._opened(0, None) is None
    assert opened == [1, 2, 3, 4, 5]


def calls():
    return dist.rpc.stats().get("hpcdist.ps.calls._on_shard", {}).get("calls", 0)


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("mode", [ps.Ssp(10**6), ps.Async()])
def test_workers_of_the_node_read_without_a_call_and_see_what_was_pushed(mode, servers, tmp_path):
    def rank():
        fleet.init(server_num=servers)
        table = ps.SparseTable("rows", DIM, optimizer=SGD, initializer=("constant", 0.0), mode=mode)
        if fleet.is_server():
            fleet.run_server()
            return
        fleet.init_worker()
        ids, ones = np.arange(500), np.ones((500, DIM), np.float32)
        assert not table.pull(ids).any()
        fleet.barrier_worker()
        table.push(ids, ones)
        table.flush()
        fleet.barrier_worker()
        table.pull(ids)  # here it learns where the rows are now
        before = calls()
        assert (table.pull(ids[::-1].reshape(5, 100)) == -2).all()
        assert calls() == before
        fleet.barrier_worker()
        assert (table.pull([3, 10**6 + fleet.worker_index()])[:, 0] == [-2, 0]).all()
        table.save(tmp_path / "a")
        table.push(ids, ones)
        table.load(tmp_path / "a")
        assert (table.pull(ids) == -2).all()
        fleet.stop_worker()

    dist.simulate(2 + servers, rank)
