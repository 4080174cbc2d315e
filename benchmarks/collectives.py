"""Collectives and messages by size: ``mpiexec -n 2 python collectives.py``.

hpcdist beside mpi4py and torch's gloo, all on the same float32 arrays, and beside the limit:
every rank copying the same bytes once. Size is what each rank hands in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from gloo import start_gloo, stop_gloo, tensor_of
from mpi4py import MPI
from race import Contestants, Race, race
from report import Report, Row, duration, read_options, times, volume

import hpcdist as dist

F4 = np.dtype("f4")
SIZES = (*(8 << shift for shift in range(0, 24, 3)), 64 << 20)
QUICK_SIZES = 8, 32 << 10, 2 << 20

Operation = Callable[[MPI.Intracomm, int, Any], Contestants]
"""Makes the contestants for a number of float32 elements; the last argument is gloo or None."""


def zeros(count: int, dtype: np.dtype = F4) -> np.ndarray:
    """Return zeros (sums of them stay finite) whose memory is there already."""
    array = np.empty(count, dtype)
    array.fill(0)
    return array


def all_reduce(comm: MPI.Intracomm, count: int, gloo: Any) -> Contestants:
    x = zeros(count)
    return {
        "hpcdist": partial(dist.all_reduce, x),
        "mpi4py": partial(comm.Allreduce, MPI.IN_PLACE, x),
        **with_gloo(gloo, lambda: partial(gloo.all_reduce, tensor_of(x))),
    }


def reduce(comm: MPI.Intracomm, count: int, gloo: Any) -> Contestants:
    x = zeros(count)
    at_root = comm.rank == 0
    raw = (MPI.IN_PLACE, x) if at_root else (x, None)
    return {
        "hpcdist": partial(dist.reduce, x, 0),
        "mpi4py": partial(comm.Reduce, *raw),
        **with_gloo(gloo, lambda: partial(gloo.reduce, tensor_of(x), 0)),
    }


def reduce_scatter(comm: MPI.Intracomm, count: int, gloo: Any) -> Contestants:
    out = zeros(max(1, count // comm.size))
    x = zeros(out.size * comm.size)
    return {
        "hpcdist": partial(dist.reduce_scatter, out, x),
        "mpi4py": partial(comm.Reduce_scatter_block, x, out),
        **with_gloo(
            gloo, lambda: partial(gloo.reduce_scatter_tensor, tensor_of(out), tensor_of(x))
        ),
    }


def broadcast(comm: MPI.Intracomm, count: int, gloo: Any) -> Contestants:
    x = zeros(count)
    return {
        "hpcdist": partial(dist.broadcast, x, 0),
        "mpi4py": partial(comm.Bcast, x, 0),
        **with_gloo(gloo, lambda: partial(gloo.broadcast, tensor_of(x), 0)),
    }


def all_gather(comm: MPI.Intracomm, count: int, gloo: Any) -> Contestants:
    x, out = zeros(count), zeros(count * comm.size)
    return {
        "hpcdist": partial(dist.all_gather, out, x),
        "mpi4py": partial(comm.Allgather, x, out),
        **with_gloo(
            gloo, lambda: partial(gloo.all_gather_into_tensor, tensor_of(out), tensor_of(x))
        ),
    }


def all_gather_list(comm: MPI.Intracomm, count: int, gloo: Any) -> Contestants:
    """Into one array per rank; mpi4py gathers into one and copies."""
    x, staged = zeros(count), zeros(count * comm.size)
    out = [zeros(count) for _ in range(comm.size)]

    def gather_and_copy() -> None:
        comm.Allgather(x, staged)
        for rank, each in enumerate(out):
            each[...] = staged[rank * count : (rank + 1) * count]

    return {
        "hpcdist": partial(dist.all_gather, out, x),
        "mpi4py": gather_and_copy,
        **with_gloo(
            gloo, lambda: partial(gloo.all_gather, [tensor_of(each) for each in out], tensor_of(x))
        ),
    }


def alltoall(comm: MPI.Intracomm, count: int, gloo: Any) -> Contestants:
    rows = max(1, count // comm.size) * comm.size
    x, out = zeros(rows), zeros(rows)
    return {
        "hpcdist": partial(dist.alltoall_single, out, x),
        "mpi4py": partial(comm.Alltoall, x, out),
        **with_gloo(gloo, lambda: partial(gloo.all_to_all_single, tensor_of(out), tensor_of(x))),
    }


def ping_pong(comm: MPI.Intracomm, count: int, gloo: Any) -> Contestants:
    """There and back between ranks 0 and 1."""
    x = zeros(count)
    contestants: dict[str, Callable[[], Any]] = {
        "hpcdist": _there_and_back(comm.rank, partial(dist.send, x), partial(dist.recv, x)),
        "mpi4py": _there_and_back(comm.rank, partial(comm.Send, x), partial(comm.Recv, x)),
    }
    if gloo is not None:
        tensor = tensor_of(x)
        contestants["gloo"] = _there_and_back(
            comm.rank, partial(gloo.send, tensor), partial(gloo.recv, tensor)
        )
    return contestants


def _there_and_back(rank: int, send: Callable[[int], Any], recv: Callable[[int], Any]) -> Any:
    if rank == 0:
        return lambda: (send(1), recv(1))
    return (lambda: (recv(0), send(0))) if rank == 1 else (lambda: None)


OPERATIONS: dict[str, Operation] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "all_gather, list": all_gather_list,
    "alltoall": alltoall,
    "send and back": ping_pong,
}


def with_gloo(gloo: Any, make: Callable[[], Callable[[], Any]]) -> Contestants:
    """Return gloo's contestant; nothing without torch, or where gloo has no such operation."""
    if gloo is None:
        return {}
    call = make()
    try:
        call()
    except RuntimeError:
        return {}
    return {"gloo": call}


def by_size(
    comm: MPI.Intracomm, operation: Operation, sizes: Sequence[int], gloo: Any, rounds: int
) -> dict[int, Race]:
    found = {}
    for nbytes in sizes:
        contestants = dict(operation(comm, nbytes // F4.itemsize, gloo))
        contestants["copy"] = partial(np.copyto, zeros(nbytes // 4), zeros(nbytes // 4))
        found[nbytes] = race(comm, contestants, rounds=rounds)
    return found


def size_row(nbytes: int, found: Race) -> Row:
    row: dict[str, Any] = {"size": nbytes}
    row |= {name: found.median(name) for name in found.seconds}
    row |= {f"/ {name}": found.ratio("hpcdist", to=name) for name in row if name in OPPONENTS}
    return row | {"added": found.added("hpcdist", to="mpi4py")}


OPPONENTS = "mpi4py", "gloo", "copy"
SIZE_COLUMNS = {
    "size": volume,
    **dict.fromkeys(("hpcdist", *OPPONENTS), duration),
    **{f"/ {name}": times for name in OPPONENTS},
    "added": duration,
}


# ---- short floats


def short_floats(comm: MPI.Intracomm, count: int, gloo: Any) -> dict[str, Contestants]:
    """Return the all_reduce of `count` numbers of 16 bits, and of as many of 32.

    MPI cannot add them: mpi4py's part is the obvious program, which converts to float32.
    """

    def converted(x: np.ndarray) -> None:
        wide = x.astype(F4)
        comm.Allreduce(MPI.IN_PLACE, wide)
        x[...] = wide

    found: dict[str, Contestants] = {}
    for dtype in (np.dtype("f2"), np.dtype(ml_dtypes.bfloat16)):
        x = zeros(count, dtype)
        found[dtype.name] = {
            "hpcdist": partial(dist.all_reduce, x),
            "mpi4py": partial(converted, x),
            "float32": partial(dist.all_reduce, zeros(count)),
            **with_gloo(gloo, partial(_gloo_all_reduce, gloo, x)),
        }
    return found


def _gloo_all_reduce(gloo: Any, x: np.ndarray) -> Callable[[], Any]:
    return partial(gloo.all_reduce, tensor_of(x))


def short_rows(comm: MPI.Intracomm, counts: Sequence[int], gloo: Any, rounds: int) -> list[Row]:
    rows: list[Row] = []
    for count in counts:
        for name, contestants in short_floats(comm, count, gloo).items():
            found = race(comm, contestants, rounds=rounds)
            row: dict[str, Any] = {"dtype": name, "elements": count}
            row |= {each: found.median(each) for each in found.seconds}
            others = [each for each in found.seconds if each != "hpcdist"]
            rows.append(row | {f"/ {each}": found.ratio("hpcdist", to=each) for each in others})
    return rows


SHORT_COLUMNS = {
    "dtype": str,
    "elements": str,
    **dict.fromkeys(("hpcdist", "float32", "mpi4py", "gloo"), duration),
    **dict.fromkeys(("/ float32", "/ mpi4py", "/ gloo"), times),
}


def main() -> None:
    options = read_options(__doc__, rounds=21)
    dist.init_parallel_env()
    comm = MPI.COMM_WORLD.Dup()
    if comm.size == 1:
        raise SystemExit("give it ranks: mpiexec -n 2 python benchmarks/collectives.py")
    gloo = start_gloo(comm)
    report = Report("collectives", options, comm)
    sizes = QUICK_SIZES if options.quick else SIZES
    for name, operation in OPERATIONS.items():
        found = by_size(comm, operation, sizes, gloo, options.rounds)
        rows = [size_row(nbytes, each) for nbytes, each in found.items()]
        report.table(f"{name}: hpcdist takes ... times as long as", SIZE_COLUMNS, rows)
        report.panel(
            name,
            {
                who: [(nbytes, each.median(who)) for nbytes, each in found.items() if who in each]
                for who in ("hpcdist", *OPPONENTS)
            },
        )
    counts = [nbytes // F4.itemsize for nbytes in sizes[1:]]
    rows = short_rows(comm, counts, gloo, options.rounds)
    report.table(
        "all_reduce of 16-bit floats: hpcdist takes ... times as long as", SHORT_COLUMNS, rows
    )
    report.close()
    stop_gloo(gloo)


if __name__ == "__main__":
    main()
