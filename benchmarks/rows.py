"""Rows by id in one process: look-ups, pulls and pushes, beside what NumPy and a dict do.

    python benchmarks/rows.py [--rows 1000000] [--dim 64] [--ids 4096] [--rounds 30]

Everything is timed in turns, so that what else the machine does meets all alike; ratios are those
of the medians. Rates are millions of ids, or rows, per second.
"""

import argparse
import tempfile
import time
from statistics import median

import numpy as np

from hpcdist.compiled import load
from hpcdist.ps import RowStore
from hpcdist.ps.merging import group_in_python, merge, segment_add_in_python
from hpcdist.ps.slots import Slots


def filled(rows, dim, **settings):
    store = RowStore(dim, initializer=("constant", 0.5), **settings)
    for start in range(0, rows, 1 << 15):
        store.pull(np.arange(start, min(rows, start + (1 << 15))))
    return store


def in_turns(tasks, rounds):
    """Return the median seconds of each task; they take turns."""
    taken = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            taken[name].append(time.perf_counter() - start)
    return {name: median(each) for name, each in taken.items()}


def report(title, tasks, peer, count, rounds):
    """Print rates, and how many times that of `peer` each is."""
    seconds = in_turns(tasks, rounds)
    print(title)
    for name, each in seconds.items():
        print(f"  {name:30} {count / each / 1e6:8.2f} M/s  {seconds[peer] / each:6.2f} x {peer}")


def look_ups(ids, rows, rounds):
    table, ordered = Slots(), np.arange(rows)
    table.insert(ordered)
    known, listed = dict(zip(range(rows), range(rows), strict=True)), ids.tolist()
    tasks = {
        "Slots.find": lambda: table.find(ids),
        "Slots.find_in_python": lambda: table.find_in_python(ids),
        "np.searchsorted": lambda: np.searchsorted(ordered, ids),
        "dict": lambda: [known[each] for each in listed],
    }
    report("look-ups", tasks, "dict", ids.size, rounds)


def merging(ids, grads, rounds):
    def without_loops():
        _, order, starts = group_in_python(ids)
        segment_add_in_python(grads, order, starts)

    def with_numpy():
        found, inverse = np.unique(ids, return_inverse=True)
        np.add.at(np.zeros((found.size, grads.shape[1]), np.float32), inverse, grads)

    tasks = {
        "merge": lambda: merge(ids, grads),
        "merge, without loops": without_loops,
        "np.unique + np.add.at": with_numpy,
    }
    report("merging of a push", tasks, "np.unique + np.add.at", ids.size, rounds)


def pulls(ids, rows, dim, rounds):
    array, store = np.full((rows, dim), 0.5, np.float32), filled(rows, dim, optimizer="sgd")
    numbers, known = store.slots.arrays
    places = np.random.default_rng(1).integers(0, numbers.size, ids.size)

    def take_all_that_a_look_up_reads():
        np.take(numbers, places), np.take(known, ids), np.take(array, ids, axis=0)

    tasks = {
        "pull": lambda: store.pull(ids),
        "np.take": lambda: np.take(array, ids, axis=0),
        "np.take of numbers, ids, rows": take_all_that_a_look_up_reads,
    }
    report("pull", tasks, "np.take", ids.size, rounds)


def pulls_from_disk(ids, rows, dim, rounds):
    with tempfile.TemporaryDirectory() as folder:
        memory = filled(rows, dim, optimizer="sgd")
        disk = filled(rows, dim, optimizer="sgd", store="ssd", folder=folder)
        hot = ids % (rows // 10)
        tasks = {"ssd": lambda: disk.pull(hot), "memory": lambda: memory.pull(hot)}
        report("pull of the hot tenth", tasks, "memory", ids.size, rounds)
        disk.close()


def pushes(ids, grads, rows, rounds):
    tasks = {}
    for name in ("sgd", "adagrad", "adam"):
        store = filled(rows, grads.shape[1], optimizer=name)
        tasks[name] = lambda store=store: store.push(ids % rows, grads)
    report("push, merging included", tasks, "sgd", ids.size, rounds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--ids", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    ids = rng.integers(0, given.rows, given.ids)
    grads = rng.standard_normal((given.ids, given.dim)).astype(np.float32)
    print(
        f"{given.ids} of {given.rows} rows of {given.dim} float32; "
        f"compiled loops: {load('hpcdist.ps._native') is not None}"
    )
    look_ups(ids, given.rows, given.rounds)
    merging(ids, grads, given.rounds)
    pulls(ids, given.rows, given.dim, given.rounds)
    pulls_from_disk(ids, given.rows // 4, given.dim, given.rounds)
    pushes(ids, grads, given.rows // 4, given.rounds)


if __name__ == "__main__":
    main()
