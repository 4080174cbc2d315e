"""Calls between two ranks: hpcdist, torch.distributed.rpc and mpi4py.futures in turns, and ratios.

``mpiexec -n 2 python benchmarks/rpc.py`` (``--quick``: few rounds). Rank 0 calls, rank 1 is called;
of each case and library the median over the rounds is taken, in which the libraries take turns, and
in a round the median over the calls, except for those that are under way together.

Any other number of ranks (``mpiexec -n 64 python benchmarks/rpc.py``) measures how long the slowest
one is in `init_rpc`, and in `shutdown`; ``python benchmarks/rpc.py --simulate 64`` does for
simulated ranks.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

import hpcdist as dist

RANK = MPI.COMM_WORLD.rank
MIB = np.zeros(1 << 17)
LARGE = np.zeros(12_500_000)
MIB_TENSOR: Any = None


def same(x: Any = None) -> Any:
    return x


def one_mib() -> Any:
    return MIB


def one_mib_tensor() -> Any:
    return MIB_TENSOR


def size(x: Any) -> int:
    return len(x)


def cpu_s() -> float:
    return time.process_time()


class Busy:
    """A thread of the rank that is called computes in NumPy meanwhile."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._compute)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _compute(self) -> None:
        x = np.ones(200_000)
        while not self._stop.is_set():
            np.sqrt(x, out=x)


BUSY = Busy()
GATE = threading.Event()


def open_gate() -> None:
    GATE.set()


def busy(on: bool) -> None:
    (BUSY.start if on else BUSY.stop)()


class Library(NamedTuple):
    name: str
    sync: Callable[..., Any]
    start: Callable[..., Callable[[], Any]]


def ours() -> Library:
    rpc = dist.rpc

    def start(fn: Any, *args: Any) -> Callable[[], Any]:
        return rpc.rpc_async(1, fn, args).wait

    return Library("hpcdist", lambda fn, *args: rpc.rpc_sync(1, fn, args), start)


def torchs() -> Library | None:
    try:
        import torch
        from torch.distributed import rpc
    except ImportError:
        return None
    global MIB_TENSOR
    MIB_TENSOR = torch.from_numpy(MIB)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = MPI.COMM_WORLD.bcast(free.getsockname()[1])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    rpc.init_rpc(f"worker{RANK}", rank=RANK, world_size=2)

    def start(fn: Any, *args: Any) -> Callable[[], Any]:
        return rpc.rpc_async("worker1", fn, args).wait

    return Library("torch", lambda fn, *args: rpc.rpc_sync("worker1", fn, args), start)


def timed(run: Callable[[], Any], repeats: int) -> float:
    """Return the seconds that `run` takes, the median of so many times."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def burst(library: Library, calls: int) -> float:
    """Return the seconds that one of many asynchronous calls takes."""
    begun = time.perf_counter()
    for wait in [library.start(same) for _ in range(calls)]:
        wait()
    return (time.perf_counter() - begun) / calls


def idle(library: Library, seconds: float) -> float:
    """Return the share of a core that the called rank takes while nobody calls.

    Measured before torch's threads are there, which look around all the time.
    """
    before = library.sync(cpu_s)
    time.sleep(seconds)
    return (library.sync(cpu_s) - before) / seconds


def cases(quick: bool) -> dict[str, Callable[[Library], float]]:
    some = 50 if quick else 300
    found: dict[str, Callable[[Library], float]] = {
        "small call": lambda each: timed(lambda: each.sync(same), some),
        "1 MiB result": lambda each: timed(lambda: each.sync(one_mib), some // 10),
        "100 MB argument": lambda each: timed(lambda: each.sync(size, LARGE), 1),
        "async call": lambda each: burst(each, 10 * some),
    }
    if MIB_TENSOR is not None:
        found["1 MiB tensor"] = lambda each: timed(lambda: each.sync(one_mib_tensor), some // 10)
    return found


def with_busy_callee(library: Library, repeats: int) -> float:
    library.sync(busy, True)
    try:
        return timed(lambda: library.sync(same), repeats)
    finally:
        library.sync(busy, False)


def measure(libraries: list[Library], rounds: int, quick: bool) -> dict[str, dict[str, float]]:
    table = cases(quick)
    table["busy callee"] = lambda each: with_busy_callee(each, 20 if quick else 100)
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for case, run in table.items():
            for each in libraries:
                if each.name == "mpi4py.futures" and case == "busy callee":
                    continue  # its rank does nothing else than wait for tasks, and spins
                found.setdefault(case, {}).setdefault(each.name, []).append(run(each))
    return {
        case: {name: statistics.median(times) for name, times in row.items()}
        for case, row in found.items()
    }


def show(found: dict[str, dict[str, float]], names: list[str]) -> None:
    print(f"{'':18}" + "".join(f"{name:>16}" for name in names) + "   hpcdist / the others")
    for case, row in found.items():
        unit, scale = ("%", 100) if case == "idle core" else ("us", 1e6)
        cells = "".join(
            f"{row[name] * scale:13.1f} {unit:2}" if name in row else f"{'':16}" for name in names
        )
        own = row["hpcdist"]
        ratios = [f"{own / row[name]:.3f}" for name in names[1:] if row.get(name)]
        print(f"{case:18}{cells}   {'  '.join(ratios)}")


def begin_and_end() -> tuple[float, float]:
    """Return the seconds that this rank is in `init_rpc`, and in `shutdown`."""
    times = []
    for run in (dist.rpc.init_rpc, dist.rpc.shutdown):
        dist.barrier()
        times.append(timed(run, 1))
    return times[0], times[1]


def slowest(rounds: int) -> list[tuple[float, float]]:
    """Return the same of each round, of the rank that takes longest."""
    found: list[list[tuple[float, float]]] = []
    dist.all_gather_object(found, [begin_and_end() for _ in range(rounds)])
    return [(max(a for a, _ in each), max(b for _, b in each)) for each in zip(*found, strict=True)]


def show_begin_and_end(what: str, found: list[tuple[float, float]]) -> None:
    (begin, end), (begins, ends) = found[0], map(statistics.median, zip(*found, strict=True))
    print(
        f"{what}: init_rpc {begin * 1e3:.0f} ms, shutdown {end * 1e3:.0f} ms the first time; "
        f"{begins * 1e3:.0f} ms, {ends * 1e3:.0f} ms in the median of {len(found)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it works")
    parser.add_argument("--simulate", type=int, metavar="RANKS", help="begin and end only")
    given = parser.parse_args()
    rounds = 2 if given.quick else 5
    if given.simulate:
        found = dist.simulate(given.simulate, slowest, rounds)[0]
        show_begin_and_end(f"{given.simulate} simulated ranks", found)
        return
    dist.init_parallel_env()
    begins_and_ends = slowest(rounds)
    if RANK == 0:
        show_begin_and_end(f"{MPI.COMM_WORLD.size} ranks", begins_and_ends)
    if MPI.COMM_WORLD.size == 2:
        compare(rounds, given.quick)


def compare(rounds: int, quick: bool) -> None:
    dist.rpc.init_rpc()
    own = ours()
    alone = while_the_other_waits(lambda: {"idle core": {own.name: idle(own, 1.0)}})
    libraries = [each for each in (own, torchs()) if each is not None]
    found = while_the_other_waits(lambda: measure(libraries, rounds, quick)) | alone
    if len(libraries) == 2:
        from torch.distributed import rpc

        rpc.shutdown()
    dist.rpc.shutdown()
    for case, row in measure_futures(rounds, quick).items():
        found[case].update(row)
    if RANK == 0:
        show(found, [*(each.name for each in libraries), "mpi4py.futures"])


def while_the_other_waits(run: Callable[[], Any]) -> Any:
    """Return what `run` returns on rank 0; rank 1 waits meanwhile, without the processor."""
    if RANK == 1:
        GATE.wait()
        GATE.clear()
        return {}
    found = run()
    dist.rpc.rpc_sync(1, open_gate)
    return found


def measure_futures(rounds: int, quick: bool) -> dict[str, dict[str, float]]:
    """Measure what takes the other rank captive, after the others."""
    from mpi4py.futures import MPICommExecutor

    with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
        if executor is None:
            return {}
        library = Library(
            "mpi4py.futures",
            lambda fn, *args: executor.submit(fn, *args).result(),
            lambda fn, *args: executor.submit(fn, *args).result,
        )
        return measure([library], rounds, quick)


if __name__ == "__main__":
    main()
