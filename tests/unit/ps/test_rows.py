"""`RowStore`: rows by id, where they lie, and what is refused."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import hpcdist as dist
from hpcdist.errors import ExecuteError, UsageError
from hpcdist.ps import RowStore, slabs, slots as slots_module
from hpcdist.ps.accessors import Accessor
from hpcdist.runtime.scratch import node_folder

IDS = np.array([3, -1, 2**40, 0, 77])


@pytest.fixture(params=["memory", "ssd"])
def where(request, tmp_path):
    return {"store": "ssd", "folder": str(tmp_path)} if request.param == "ssd" else {}


def sgd(dim, **settings):
    return RowStore(dim, optimizer=("sgd", {"learning_rate": 1.0}), **settings)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"])
def test_rows_are_pulled_as_they_were_pushed(dtype, where):
    store = sgd(3, dtype=dtype, initializer=("constant", 2.0), **where)
    grads = np.arange(15).reshape(5, 3)[::-1] / 4
    store.push(IDS, grads)
    pulled = store.pull(np.array([[77, 5], [3, 77]]))
    assert pulled.dtype == np.dtype(dtype)
    expected = [[2 - grads[4], [2] * 3], [2 - grads[0], 2 - grads[4]]]
    np.testing.assert_array_equal(pulled.astype(float), expected)


@pytest.mark.usefixtures("loops")
def test_a_table_of_many_slabs_is_like_a_dict_of_rows(monkeypatch, where):
    monkeypatch.setattr(slabs, "_SLAB_BYTES", 4096)  # a slab is 128 rows
    store, model = sgd(8, **where), {}
    rng = np.random.default_rng(1)
    for _ in range(8):
        ids = rng.integers(-700, 700, 300)
        pulled = store.pull(ids)
        for number, row in zip(ids.tolist(), pulled, strict=True):
            np.testing.assert_array_equal(row, model.setdefault(number, row))
        grads = rng.integers(-4, 4, (300, 8)).astype(np.float32)
        store.push(ids, grads)
        merged = dict.fromkeys(ids.tolist(), np.float32(0))
        for number, grad in zip(ids.tolist(), grads, strict=True):
            merged[number] = merged[number] + grad
        for number, grad in merged.items():
            model[number] = model[number] - grad
    assert len(store) == len(model)
    assert len(store.rows.slabs) > 5
    (chunk,) = store.chunks()
    for number, row in zip(chunk.ids.tolist(), chunk.rows, strict=True):
        np.testing.assert_array_equal(row, model[number])


@pytest.mark.usefixtures("loops")
def test_equal_ids_are_one_push():
    one, other = (RowStore(2, optimizer="adam") for _ in range(2))
    one.push([4, 9, 4], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    other.push([4, 9], [[6.0, 8.0], [3.0, 4.0]])
    np.testing.assert_array_equal(one.pull([4, 9]), other.pull([4, 9]))


@pytest.mark.parametrize("kind", [("uniform", 0.5), ("normal", 0.1), ("constant", 3)])
def test_initial_values_are_a_function_of_seed_and_id(kind):
    ids = np.arange(1000)
    at_once, one_by_one, other_seed = (
        RowStore(16, initializer=kind, seed=seed) for seed in (1, 1, 2)
    )
    rows = at_once.pull(ids)
    again = np.stack([one_by_one.pull([number])[0] for number in ids[::-50]])
    np.testing.assert_array_equal(rows[::-50], again)
    np.testing.assert_array_equal(one_by_one.pull(ids, create=False), rows)
    assert (kind[0] == "constant") == bool((other_seed.pull(ids) == rows).any())


def test_initial_values_are_spread_as_they_are_told():
    ids = np.arange(4000)
    uniform = RowStore(16, initializer=("uniform", 0.5)).pull(ids).astype(float)
    assert abs(uniform.mean()) < 0.005
    assert abs(uniform.std() - 0.5 / np.sqrt(3)) < 0.005
    assert -0.5 <= uniform.min() < -0.499
    assert 0.499 < uniform.max() <= 0.5
    normal = RowStore(16, initializer=("normal", 2.0)).pull(ids).astype(float)
    assert abs(normal.mean()) < 0.05
    assert abs(normal.std() - 2) < 0.05
    assert abs(np.corrcoef(normal[:, 0], normal[:, 1])[0, 1]) < 0.06


def test_a_function_can_give_the_initial_values():
    store = RowStore(2, initializer=lambda ids, dim: np.stack([ids] * dim, axis=1) / 2)
    np.testing.assert_array_equal(store.pull([4, -3]), [[2, 2], [-1.5, -1.5]])
    with pytest.raises(UsageError, match=r"returned shape \(1, 3\)"):
        RowStore(2, initializer=lambda ids, dim: np.ones((ids.size, 3))).pull([1])


def test_a_pull_that_creates_nothing_leaves_the_store_as_it_is():
    store = RowStore(2)
    first = store.pull([1, 2], create=False)
    assert len(store) == 0
    np.testing.assert_array_equal(store.pull([1, 2]), first)
    assert len(store) == 2


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16])
def test_chunks_restore_a_store_to_the_bit(dtype, where):
    settings = {"dtype": dtype, "optimizer": "adam", "entry": dist.ShowClickEntry("s", "c")}
    store = RowStore(3, **settings)
    rng = np.random.default_rng(3)
    for _ in range(3):
        ids = np.unique(rng.integers(0, 50, 30))
        store.push(ids, rng.standard_normal((ids.size, 3)), clicks=ids % 2)
    other = RowStore(3, **settings, **where)
    for chunk in store.chunks(7):
        other.restore(*chunk)
    for each in (store, other):
        each.push(np.arange(50), np.ones((50, 3)))
    (mine,), (theirs,) = store.chunks(), other.chunks()
    for one, another in zip(mine, theirs, strict=True):
        one, another = one[np.argsort(mine.ids)], another[np.argsort(theirs.ids)]
        np.testing.assert_array_equal(one.view(np.uint8), another.view(np.uint8))


def test_rows_that_are_restored_without_state_start_anew():
    fresh, other = (RowStore(2, optimizer="momentum") for _ in range(2))
    fresh.assign([1], np.ones((1, 2)))
    other.push([1], np.ones((1, 2)))
    other.restore([1], np.ones((1, 2)))
    for store in (fresh, other):
        store.push([1], np.ones((1, 2)))
    np.testing.assert_array_equal(fresh.pull([1]), other.pull([1]))


def test_the_last_of_equal_ids_is_assigned():
    store = RowStore(2)
    store.assign([5, 6, 5], [[1, 1], [2, 2], [3, 3]])
    np.testing.assert_array_equal(store.pull([5, 6]), [[3, 3], [2, 2]])


def test_assigned_rows_of_short_floats_replace_their_master():
    store = sgd(1, dtype=ml_dtypes.bfloat16, initializer=("constant", 1.0))
    store.push([1], [[0.001]])
    store.assign([1], [[5.0]])
    store.push([1], [[1.0]])
    assert float(store.pull([1])[0, 0]) == 4


@pytest.mark.parametrize(
    "grads",
    [
        np.ones((2, 3), np.float32),
        np.ones((3, 2), np.float32),
        np.ones((4, 3), np.float32),
        np.ones((3, 3), np.int64),
        np.ones((3, 3), np.complex64),
        np.full((3, 3), "a"),
        np.ones(9, np.float32),
    ],
    ids=lambda grads: f"{grads.shape}-{grads.dtype}",
)
def test_gradients_that_do_not_fit_are_refused(grads):
    store = RowStore(3)
    with pytest.raises(UsageError, match="grad"):
        store.push([1, 2, 3], grads)
    assert len(store) == 0


def test_nothing_is_pushed_and_pulled_for_no_ids():
    store = RowStore(3)
    store.push([], np.empty((0, 3), np.float32))
    assert store.pull([]).shape == (0, 3)
    assert store.pull(np.empty((2, 0), np.int32)).shape == (2, 0, 3)
    assert list(store.chunks()) == []


def test_gradients_that_are_not_finite_are_refused_if_wanted():
    grads = np.ones((3, 2))
    grads[1, 1] = np.nan
    store = sgd(2, check_finite=True)
    with pytest.raises(UsageError, match="not finite, the first that of id 6"):
        store.push([5, 6, 7], grads)
    assert len(store) == 0
    lenient = sgd(2)
    lenient.push([5, 6, 7], grads)
    assert np.isnan(lenient.pull([6])).any()


@pytest.mark.parametrize(
    "settings",
    [
        {"dim": 0},
        {"dim": 2.0},
        {"max_rows": 0},
        {"seed": -1},
        {"store": "disk"},
        {"folder": "/tmp"},
        {"initializer": "uniform"},
        {"initializer": ("cauchy", 1)},
        {"initializer": ("uniform", float("nan"))},
        {"entry": "show"},
        {"store": "ssd", "slab": np.empty},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(UsageError, match=next(iter(settings))):
        RowStore(**{"dim": 2, **settings})


def test_the_learning_rate_can_change():
    store = sgd(1, initializer=("constant", 0.0))
    store.push([1], [[1.0]])
    store.learning_rate = 0.25
    store.push([1], [[1.0]])
    assert store.learning_rate == 0.25
    assert store.pull([1])[0, 0] == -1.25


def test_a_slab_can_come_from_elsewhere():
    made = []

    def slab(shape, dtype):
        made.append(np.zeros(shape, dtype))
        return made[-1]

    store = RowStore(2, slab=slab, optimizer="adagrad")
    store.assign([9], [[1.5, 2.5]])
    assert len(made) == 2
    np.testing.assert_array_equal(made[0][0], [1.5, 2.5])
    with pytest.raises(UsageError, match="slab"):
        RowStore(2, slab=lambda shape, dtype: np.zeros(3)).pull([1])


def test_a_store_that_is_closed_says_so(where):
    store = RowStore(2, **where)
    store.pull([1])
    store.close()
    store.close()
    with pytest.raises(UsageError, match="closed"):
        store.pull([1])


# ---- on disk


def test_the_file_of_rows_has_no_name_and_goes_with_the_store(tmp_path):
    store = RowStore(4, store="ssd", folder=str(tmp_path))
    store.pull(IDS)
    assert list(tmp_path.iterdir()) == []
    maps = Path("/proc/self/maps").read_text
    assert f"{tmp_path}/hpcdist-rows" in maps()
    store.close()
    del store
    assert f"{tmp_path}/hpcdist-rows" not in maps()


def test_nothing_is_left_of_a_process_that_dies(tmp_path):
    program = (
        "import os, sys; from hpcdist.ps import RowStore; "
        f"store = RowStore(4, store='ssd', folder={str(tmp_path)!r}); store.pull([1, 2]); "
        "sys.stdout.write('pulled'); sys.stdout.flush(); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False)
    assert done.stdout == b"pulled"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_before_anything_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(slabs, "_SLAB_BYTES", 4096)
    store = sgd(8, store="ssd", folder=str(tmp_path))
    store.push(IDS, np.ones((5, 8)))
    before = store.pull(IDS)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ExecuteError, match="No space left on device"):
        store.push(np.arange(1000, 2000), np.ones((1000, 8)))
    assert len(store) == 5
    np.testing.assert_array_equal(store.pull(IDS), before)
    monkeypatch.undo()
    store.push(np.arange(1000, 2000), np.ones((1000, 8)))
    assert len(store) == 1005


class Lacking:
    """Memory of which the next asking but `left` is refused."""

    def __init__(self, monkeypatch, *also):
        self.left = None
        for owner, name in [
            (slots_module.Slots, "_made"),
            (slots_module.Slots, "_lengthen"),
            (slots_module.Slots, "live"),
            (slabs.Slabs, "_made"),
            (Accessor, "start"),
            *also,
        ]:
            monkeypatch.setattr(owner, name, self.asked(getattr(owner, name)))

    def asked(self, function):
        def ask(*args):
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise MemoryError(f"{function.__name__}: none is left")
            return function(*args)

        return ask


def content(store):
    found = {}
    for chunk in store.chunks():
        for id, *rest in zip(*(each.tolist() for each in chunk), strict=True):
            found[id] = rest
    return found


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("left", [0, 1, 2, 4])
@pytest.mark.parametrize("most", [None, 1200])
def test_without_memory_an_operation_leaves_the_rows_as_they_are_and_succeeds_later(
    left, most, monkeypatch
):
    monkeypatch.setattr(slabs, "_SLAB_BYTES", 4096)
    entry = dist.ShowClickEntry("show", "click")
    store = RowStore(4, optimizer="adagrad", entry=entry, max_rows=most)
    memory = Lacking(monkeypatch, *([] if most else [(slabs.Slabs, "read")]))
    rng, refused = np.random.default_rng(left), 0
    for step in range(8):
        ids = rng.integers(0, 9000, 400)
        grads, clicks = np.ones((400, 4), np.float32), rng.integers(0, 5, 400)
        acts = {
            0: lambda ids=ids: store.pull(ids),
            1: lambda ids=ids, grads=grads, clicks=clicks: store.push(ids, grads, clicks=clicks),
            2: lambda ids=ids, grads=grads: store.assign(ids, grads),
            3: lambda: store.shrink(3),
        }
        before = content(store)
        memory.left = left
        try:
            acts[step % 4]()
        except MemoryError:
            memory.left = None
            refused += 1
            after = content(store)
            assert {id: after.get(id) for id in before} == before  # new rows may be there
        memory.left = None
        if step % 4 == 3:
            store.shrink(3)
            weak = [0.1 * (show - click) + click < 3 for *_, (show, click, _) in before.values()]
            assert sum(weak) > len(weak) / 2
            assert len(store) == len(before) - sum(weak)
            np.testing.assert_array_equal(
                store.slots.find(np.array([*content(store)])), store.slots.live()
            )
            assert store.rows.capacity < len(store) + 2 * (4096 // 16)
        else:
            acts[step % 4]()
            assert content(store).keys() >= set(ids.tolist())
    assert refused > 0


def test_no_row_makes_room_for_one_that_there_is_no_memory_for(monkeypatch):
    store = RowStore(4, entry=dist.ShowClickEntry("show", "click"), max_rows=100)
    store.push(np.arange(100), np.ones((100, 4)))
    before = content(store)
    memory = Lacking(monkeypatch)
    for act in (store.pull, lambda ids: store.push(ids, np.ones((2, 4)))):
        for left in (0, 1, 2):
            store.slots._removed = store.slots._index.size  # the next row needs a new index
            memory.left = left
            with pytest.raises(MemoryError, match="none is left"):
                act(np.array([500, 501]))
            memory.left = None
            assert content(store) == before
    store.pull([500, 501])
    assert len(store) == 100


def test_a_folder_that_is_not_there_is_named():
    with pytest.raises(ExecuteError, match="/nowhere"):
        RowStore(2, store="ssd", folder="/nowhere/at/all")


def test_rows_go_to_the_folder_of_the_job(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path))
    assert node_folder() == str(tmp_path)
    store = RowStore(2, store="ssd")
    assert store._file.folder == str(tmp_path)
    monkeypatch.delenv("SLURM_TMPDIR")
    assert Path(node_folder()).is_dir()


# ---- size


def test_a_row_costs_its_numbers_and_24_bytes():
    store, rows = sgd(4), 1 << 18
    for start in range(0, rows, 1 << 15):
        store.assign(np.arange(start, start + (1 << 15)), np.ones((1 << 15, 4)))
    assert store.stats()["bytes"] - store.rows.nbytes < 24 * rows
    assert store.rows.nbytes - rows * 16 <= slabs._SLAB_BYTES


@pytest.mark.slow
def test_a_store_of_more_than_2_to_the_31_bytes_finds_its_last_row():
    store = sgd(1 << 20)
    store.assign([1], np.full((1, 1 << 20), 7, np.float32))
    rows = 600
    for number in range(2, rows):
        store.assign([number], np.full((1, 1 << 20), number, np.float32))
    assert store.rows.nbytes > 1 << 31
    assert store.pull([rows - 1])[0, -1] == rows - 1
    assert store.pull([1])[0, 0] == 7
