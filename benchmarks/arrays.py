"""What computing with arrays across ranks costs: ``mpiexec -n 2 python arrays.py``.

Against NumPy on the same part, which communicates nothing, and what has to be communicated against
raw mpi4py, written by hand for just this case. Each rank has `size`, or the part of it for the
matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
from mpi4py import MPI
from report import Report, Row, read_options

import hpcdist as dist
from hpcdist.bench.interleaved import Candidates, interleave
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import layout_of
from hpcdist.text import duration, times, volume

MiB = 1 << 20
AIMS = {
    "a + b": "at most 1 us more than NumPy",
    "a + b of a new shape": "at most 50 us more",
    "y + vector of a new shape": "at most 50 us more",
    "sum(axis=1) of a new shape": "at most 50 us more",
    "(a * 2 + b) * a - b / 3": "at most 1.02 times",
    "sum(axis=0)": "at most 1.1 times the local one",
    "std()": "at most 1.05 times the local one",
    "a @ b": "at most 1.02 times mpi4py",
    "np.sort(a)": "at most 1.2 times the local one",
    "fft2(z)": "at most 0.8 times mpi4py",
}


def rows_of(comm: MPI.Intracomm, rows: int, columns: int) -> tuple[Any, Any, Any]:
    """Return an array cut along its rows, its part, and the layout."""
    mesh = dist.ProcessMesh([*range(comm.size)])
    layout = layout_of(mesh, (rows, columns), [dist.Shard(0)])
    part = np.random.default_rng(comm.rank).random(layout.local_shape(mesh.coordinate))
    return DistArray._of(part, layout), part, layout


def small(comm: MPI.Intracomm) -> Iterator[tuple[str, int, Candidates]]:
    a, x, _ = rows_of(comm, 4 * comm.size, 4)
    b, y, _ = rows_of(comm, 4 * comm.size, 4)
    yield "a + b", x.nbytes, {"hpcdist": lambda: a + b, "numpy": lambda: x + y}
    yield "a * 2.0", x.nbytes, {"hpcdist": lambda: a * 2.0, "numpy": lambda: x * 2.0}
    yield "np.exp(a)", x.nbytes, {"hpcdist": lambda: np.exp(a), "numpy": lambda: np.exp(x)}
    yield "a[1:3]", x.nbytes, {"hpcdist": lambda: a[:, 1:3], "numpy": lambda: x[:, 1:3]}


def new_shapes(comm: MPI.Intracomm) -> Iterator[tuple[str, int, Candidates]]:
    mesh = dist.ProcessMesh([*range(comm.size)])
    vector = DistArray._of(np.ones(4), layout_of(mesh, (4,), []))
    numbers = count()

    def made() -> tuple[DistArray, Any]:
        # Nobody remembers the layout of an array that is gone, so that it is as new again.
        length = (4 + next(numbers) % 500) * comm.size
        layout = layout_of(mesh, (length, 4), [dist.Shard(0)])
        part = np.ones(layout.local_shape(mesh.coordinate))
        return DistArray._of(part, layout), part

    functions: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "a + b of a new shape": (lambda a: a + a, lambda x: x + x),
        "y + vector of a new shape": (lambda a: a + vector, lambda x: x + vector.local),
        "sum(axis=1) of a new shape": (lambda a: a.sum(1), lambda x: x.sum(1)),
    }
    for name, (ours, numpys) in functions.items():
        yield (
            name,
            8 << 10,
            {
                "hpcdist": lambda ours=ours: ours(made()[0]),
                "numpy": lambda numpys=numpys: numpys(made()[1]),
            },
        )


def large(comm: MPI.Intracomm, nbytes: int) -> Iterator[tuple[str, int, Candidates]]:
    rows, columns = nbytes // 8 // 1024 * comm.size, 1024
    a, x, _ = rows_of(comm, rows, columns)
    b, y, _ = rows_of(comm, rows, columns)
    yield (
        "(a * 2 + b) * a - b / 3",
        nbytes,
        {
            "hpcdist": lambda: (a * 2.0 + b) * a - b / 3.0,
            "numpy": lambda: (x * 2.0 + y) * x - y / 3.0,
        },
    )

    def summed() -> Any:
        total = x.sum(0)
        comm.Allreduce(MPI.IN_PLACE, total)
        return total

    def deviation() -> Any:
        total = comm.allreduce(x.sum())
        apart = x - total / (rows * columns)
        return np.sqrt(comm.allreduce(np.square(apart, out=apart).sum()) / (rows * columns))

    yield (
        "sum(axis=0)",
        nbytes,
        {"hpcdist": lambda: a.sum(0), "numpy": lambda: x.sum(0), "mpi4py": summed},
    )
    yield "std()", nbytes, {"hpcdist": a.std, "numpy": x.std, "mpi4py": deviation}


def products(comm: MPI.Intracomm, length: int) -> Iterator[tuple[str, int, Candidates]]:
    a, x, _ = rows_of(comm, length, length)
    b, y, _ = rows_of(comm, length, length)
    if length % comm.size:
        return

    def multiplied() -> Any:
        whole = np.empty((length, length))
        comm.Allgather(np.ascontiguousarray(y), whole)
        return x @ whole

    local = np.ones((length, length))
    yield (
        "a @ b",
        x.nbytes,
        {"hpcdist": lambda: a @ b, "numpy": lambda: x @ local, "mpi4py": multiplied},
    )


def sorting(comm: MPI.Intracomm, length: int) -> Iterator[tuple[str, int, Candidates]]:
    mesh = dist.ProcessMesh([*range(comm.size)])
    part = np.random.default_rng(comm.rank).random(length)
    a = dist.dtensor_from_local(part, mesh, [dist.Shard(0)], shape=(length * comm.size,))
    yield "np.sort(a)", part.nbytes, {"hpcdist": lambda: np.sort(a), "numpy": lambda: np.sort(part)}
    yield (
        "np.argsort(a)",
        part.nbytes,
        {"hpcdist": lambda: np.argsort(a), "numpy": lambda: np.argsort(part, kind="stable")},
    )


def transforms(comm: MPI.Intracomm, length: int) -> Iterator[tuple[str, int, Candidates]]:
    _, x, layout = rows_of(comm, length, length)
    z = x + 1j * x
    a = DistArray._of(z, layout)
    if length % comm.size:
        return
    each = length // comm.size

    def transposed() -> Any:
        rows = np.fft.fft(z, axis=1)
        sent = np.ascontiguousarray(rows.reshape(each, comm.size, each).swapaxes(0, 1))
        taken = np.empty_like(sent)
        comm.Alltoall(sent, taken)
        return np.fft.fft(taken.reshape(length, each), axis=0)

    yield (
        "fft2(z)",
        z.nbytes,
        {
            "hpcdist": lambda: np.fft.fft2(a),
            "numpy": lambda: np.fft.fft(np.fft.fft(z, axis=1), axis=1),
            "mpi4py": transposed,
        },
    )


COLUMNS: dict[str, Any] = {
    "operation": str,
    "size": volume,
    "hpcdist": duration,
    "numpy": duration,
    "more": duration,
    "times": times,
    "mpi4py": lambda value: "" if value is None else duration(value),
    "/ mpi4py": lambda value: "" if value is None else times(value),
    "aim": str,
}


def main() -> None:
    options = read_options(__doc__, rounds=15)
    dist.init_parallel_env()
    comm = MPI.COMM_WORLD.Dup()
    report = Report("arrays", options, comm)
    nbytes, length = (MiB, 256) if options.quick else (32 * MiB, 2048)
    tables = {
        "small arrays": small(comm),
        "shapes never seen": new_shapes(comm),
        "large arrays": large(comm, nbytes),
        "matrix products": products(comm, length),
        "sorting": sorting(comm, 10_000 if options.quick else 1_000_000),
        "Fourier transforms": transforms(comm, length),
    }
    for title, cases in tables.items():
        rows: list[Row] = []
        for name, size, candidates in cases:
            found = interleave(comm, candidates, rounds=options.rounds)
            raw = "mpi4py" in candidates
            rows.append(
                {
                    "operation": name,
                    "size": size,
                    "hpcdist": found.median("hpcdist"),
                    "numpy": found.median("numpy"),
                    "more": found.added("hpcdist", to="numpy"),
                    "times": found.ratio("hpcdist", to="numpy"),
                    "mpi4py": found.median("mpi4py") if raw else None,
                    "/ mpi4py": found.ratio("hpcdist", to="mpi4py") if raw else None,
                    "aim": AIMS.get(name, ""),
                }
            )
        report.table(title, COLUMNS, rows)
    report.close()


if __name__ == "__main__":
    main()
