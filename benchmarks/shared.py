"""What shared memory inside a node gains: ``mpiexec -n 2 python shared.py``.

Arrays made by `hpcdist.empty` and ordinary ones beside MPI's own collectives on the same number
of bytes, and beside the limit: every rank copying its bytes once. 16-bit floats beside the obvious
program, which converts to float32, because MPI cannot add them. Results of expressions, which NumPy
makes inside `hpcdist.shared_memory` and outside of it. Ratios are how many times as long the other
takes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from mpi4py import MPI
from mpi4py.util import pkl5
from report import Report, Row, read_options

import hpcdist as dist
from hpcdist.bench.interleaved import Candidates, interleave
from hpcdist.text import duration, times, volume

MiB = 1 << 20
SIZES = 8, 1 << 10, 8 << 10, 64 << 10, 256 << 10, MiB, 4 * MiB, 16 * MiB, 64 * MiB, 256 * MiB
QUICK_SIZES = 8, 64 << 10, 4 * MiB
EXPRESSION_SIZES = 256 << 10, MiB, 4 * MiB, 16 * MiB, 64 * MiB
HALVES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def filled(count: int, dtype: Any = np.float32) -> np.ndarray:
    """Return zeros (sums of them stay finite) whose memory is there already."""
    array = np.empty(count, dtype)
    array.fill(0)
    return array


def all_reduce(comm: MPI.Intracomm, nbytes: int) -> Candidates:
    x, shared, other = filled(nbytes // 4), dist.zeros(nbytes // 4, "f4"), filled(nbytes // 4)
    return {
        "shared": partial(dist.all_reduce, shared),
        "ordinary": partial(dist.all_reduce, x),
        "MPI": partial(comm.Allreduce, MPI.IN_PLACE, x),
        "copy": partial(np.copyto, other, x),
    }


def reduce_scatter(comm: MPI.Intracomm, nbytes: int) -> Candidates:
    count = max(1, nbytes // 4 // comm.size)
    x, out = filled(count * comm.size), filled(count)
    shared = dist.zeros(count * comm.size, "f4")
    return {
        "shared": partial(dist.reduce_scatter, out, shared),
        "ordinary": partial(dist.reduce_scatter, out, x),
        "MPI": partial(comm.Reduce_scatter_block, x, out),
        "copy": partial(np.copyto, filled(count * comm.size), x),
    }


def all_gather(comm: MPI.Intracomm, nbytes: int) -> Candidates:
    x, shared = filled(nbytes // 4), dist.zeros(nbytes // 4, "f4")
    out, other = filled(nbytes // 4 * comm.size), filled(nbytes // 4)
    return {
        "shared": partial(dist.all_gather, out, shared),
        "ordinary": partial(dist.all_gather, out, x),
        "MPI": partial(comm.Allgather, x, out),
        "copy": partial(np.copyto, other, x),
    }


def broadcast(comm: MPI.Intracomm, nbytes: int) -> Candidates:
    x, shared, other = filled(nbytes // 4), dist.zeros(nbytes // 4, "f4"), filled(nbytes // 4)
    return {
        "shared": partial(dist.broadcast, shared, 0),
        "ordinary": partial(dist.broadcast, x, 0),
        "MPI": partial(comm.Bcast, x, 0),
        "copy": partial(np.copyto, other, x),
    }


def alltoall(comm: MPI.Intracomm, nbytes: int) -> Candidates:
    count = max(1, nbytes // 4 // comm.size) * comm.size
    x, out, shared = filled(count), filled(count), dist.zeros(count, "f4")
    return {
        "shared": partial(dist.alltoall_single, out, shared),
        "ordinary": partial(dist.alltoall_single, out, x),
        "MPI": partial(comm.Alltoall, x, out),
        "copy": partial(np.copyto, filled(count), x),
    }


def expression(comm: MPI.Intracomm, nbytes: int, name: str) -> Candidates:
    """Return a sum of two arrays that is communicated; what is made for it is gone afterwards."""
    a, b = filled(nbytes // 4), filled(nbytes // 4)
    ours, mpis = {
        "all_reduce": (dist.all_reduce, lambda x: comm.Allreduce(MPI.IN_PLACE, x)),
        "broadcast": (lambda x: dist.broadcast(x, 0), lambda x: comm.Bcast(x, 0)),
        "all_gather": (
            lambda x: dist.all_gather(np.empty(x.size * comm.size, x.dtype), x),
            lambda x: comm.Allgather(x, np.empty(x.size * comm.size, x.dtype)),
        ),
    }[name]

    def inside() -> None:
        with dist.shared_memory():
            ours(a + b)

    return {
        "shared": inside,
        "ordinary": lambda: ours(a + b),
        "MPI": lambda: mpis(a + b),
    }


def touched(comm: MPI.Intracomm, nbytes: int) -> Candidates:
    """Return a new array all of which is written; nothing is communicated."""

    def inside() -> None:
        with dist.shared_memory():
            np.empty(nbytes // 4, np.float32).fill(1)

    return {"shared": inside, "ordinary": lambda: np.empty(nbytes // 4, np.float32).fill(1)}


OPERATIONS: dict[str, Callable[[MPI.Intracomm, int], Candidates]] = {
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "broadcast": broadcast,
    "alltoall": alltoall,
}


def halves(comm: MPI.Intracomm, nbytes: int, dtype: Any) -> Candidates:
    x, shared = filled(nbytes // 2, dtype), dist.zeros(nbytes // 2, dtype)

    def converted() -> None:
        wide = x.astype(np.float32)
        comm.Allreduce(MPI.IN_PLACE, wide)
        x[...] = wide

    return {
        "shared": partial(dist.all_reduce, shared),
        "ordinary": partial(dist.all_reduce, x),
        "MPI": converted,
    }


def large_object(comm: MPI.Intracomm) -> Candidates:
    thing = {"step": 1, "weights": filled(25_000_000)} if comm.rank == 0 else None
    objects, out_of_band = [thing], pkl5.Intracomm(comm)

    def read(received: Any) -> float:
        return float(received["weights"].sum())

    def ours() -> Any:
        objects[0] = thing
        dist.broadcast_object_list(objects, 0)
        return objects[0]

    return {
        "ordinary": ours,
        "MPI": lambda: out_of_band.bcast(thing, 0),
        "ordinary, and read": lambda: read(ours()),
        "MPI, and read": lambda: read(out_of_band.bcast(thing, 0)),
    }


def row(found: Any, **words: Any) -> Row:
    """Return medians, and how many times as long MPI (for shared: the copy, too) takes."""
    names = [name for name in ("shared", "ordinary", "MPI", "copy") if name in found.seconds]
    line = words | {name: found.median(name) for name in names}
    line["MPI / ordinary"] = found.ratio("MPI", to="ordinary")
    line["added"] = found.added("ordinary", to="MPI")
    if "shared" in found.seconds:
        line["MPI / shared"] = found.ratio("MPI", to="shared")
    if "copy" in found.seconds:
        line["shared / copy"] = found.ratio("shared", to="copy")
    return line


COLUMNS: dict[str, Any] = {
    "size": volume,
    **dict.fromkeys(("shared", "ordinary", "MPI", "copy"), duration),
    "MPI / shared": times,
    "MPI / ordinary": times,
    "shared / copy": times,
    "added": duration,
}


def main() -> None:
    options = read_options(__doc__, rounds=21)
    dist.init_parallel_env()
    comm = MPI.COMM_WORLD.Dup()
    report = Report("shared", options, comm)
    sizes = QUICK_SIZES if options.quick else SIZES
    for name, make in OPERATIONS.items():
        chosen = sizes if name in ("all_reduce", "reduce_scatter") else sizes[:-1]
        rows = [
            row(interleave(comm, make(comm, nbytes), rounds=options.rounds), size=nbytes)
            for nbytes in chosen
        ]
        report.table(f"{name} of float32", COLUMNS, rows)
    sizes = EXPRESSION_SIZES[:1] if options.quick else EXPRESSION_SIZES
    for name in ("all_reduce", "broadcast", "all_gather"):
        made = partial(expression, name=name)
        rows = [
            row(interleave(comm, made(comm, nbytes), rounds=options.rounds), size=nbytes)
            for nbytes in sizes
        ]
        report.table(f"{name} of a + b, made in shared memory or not", COLUMNS, rows)
    found = [interleave(comm, touched(comm, nbytes), rounds=options.rounds) for nbytes in sizes]
    report.table(
        "a new array, filled; made in shared memory or not",
        {"size": volume, "shared": duration, "ordinary": duration, "ordinary / shared": times},
        [
            {
                "size": nbytes,
                "shared": each.median("shared"),
                "ordinary": each.median("ordinary"),
                "ordinary / shared": each.ratio("ordinary", to="shared"),
            }
            for nbytes, each in zip(sizes, found, strict=True)
        ],
    )
    sizes = QUICK_SIZES if options.quick else SIZES
    for name, dtype in HALVES.items():
        rows = [
            row(interleave(comm, halves(comm, nbytes, dtype), rounds=options.rounds), size=nbytes)
            for nbytes in sizes
            if nbytes >= 64 << 10
        ]
        report.table(f"all_reduce of {name}, beside converting to float32", COLUMNS, rows)
    found = interleave(comm, large_object(comm), rounds=min(7, options.rounds))
    report.table(
        "broadcast of a dict with a 100 MB array, beside mpi4py.util.pkl5",
        dict.fromkeys(found.seconds, duration) | {"pkl5 / hpcdist": times, "and read": times},
        [
            {name: found.median(name) for name in found.seconds}
            | {
                "pkl5 / hpcdist": found.ratio("MPI", to="ordinary"),
                "and read": found.ratio("MPI, and read", to="ordinary, and read"),
            }
        ],
    )
    report.close()


if __name__ == "__main__":
    main()
