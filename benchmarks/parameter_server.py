"""What rows of a table cost: ``mpiexec -n 2 python parameter_server.py``.

Pull and push of 4096 ids with rows of 64 float32, of a table of a million rows: ids drawn by Zipf's
law or evenly: by the collective route (mode "sync"), by RPC (mode "ssp", of a staleness that nobody
reaches), the same where rows of the node are read past their server (`shared`; what is pushed goes
by RPC), and `numpy.take` of as many rows of one array.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI
from report import Report, Row, read_options

import hpcdist as dist
from hpcdist import ps
from hpcdist.bench.interleaved import interleave
from hpcdist.ps.shared import Reader
from hpcdist.text import duration, times

ROWS, QUICK_ROWS = 1_000_000, 50_000
IDS, DIM = 4096, 64
AHEAD = 1 << 60


def drawn(how: str, rows: int) -> Any:
    """Return ids, other ones on each rank."""
    rng = np.random.default_rng(dist.get_rank())
    if how == "even":
        return rng.integers(0, rows, IDS)
    return np.minimum(rng.zipf(1.2, IDS), rows) - 1


def candidates(
    tables: dict[str, ps.SparseTable], whole: Any, how: str, what: str
) -> dict[str, Callable[[], Any]]:
    """Return what is timed: a pull or a push by each route, beside `numpy.take`."""
    ids = drawn(how, len(whole))
    grads = np.ones((IDS, DIM), np.float32)
    found: dict[str, Callable[[], Any]] = {"take": lambda: whole.take(ids, axis=0)}
    for name, table in tables.items():
        if what == "pull":
            found[name] = partial(table.pull, ids)
        else:
            found[name] = partial(table.push, ids, grads)
    return found


COLUMNS: dict[str, Any] = {
    "ids": str,
    "call": str,
    "take": duration,
    "collective": duration,
    "rpc": duration,
    "shared": duration,
    "collective / take": times,
    "rpc / take": times,
    "rpc / collective": times,
    "shared / rpc": times,
}


def main() -> None:
    options = read_options(__doc__, rounds=15)
    dist.init_parallel_env()
    comm = MPI.COMM_WORLD.Dup()
    count = QUICK_ROWS if options.quick else ROWS
    tables = {
        "collective": ps.SparseTable("sync", DIM, optimizer="sgd"),
        "rpc": ps.SparseTable("ssp", DIM, optimizer="sgd", mode=ps.Ssp(AHEAD)),
        "shared": ps.SparseTable("past", DIM, optimizer="sgd", mode=ps.Ssp(AHEAD)),
    }
    asked: Any = tables["rpc"].core.worker
    asked._calls.reader = Reader(comm.size, lambda *_: None)  # servers are asked for all rows
    for table in tables.values():
        for begin in range(0, count, 65536):
            table.pull(np.arange(begin, min(begin + 65536, count)))
    whole = np.full((count, DIM), 1, np.float32)
    report = Report("parameter server", options, comm)
    rows: list[Row] = []
    for how in ("zipf", "even"):
        for what in ("pull", "push"):
            found = interleave(
                comm, candidates(tables, whole, how, what), rounds=options.rounds, sample_s=0.02
            )
            line = {name: found.median(name) for name in ("take", *tables)}
            ratios = {f"{name} / take": found.ratio(name, to="take") for name in tables}
            between = {
                "rpc / collective": found.ratio("rpc", to="collective"),
                "shared / rpc": found.ratio("shared", to="rpc"),
            }
            rows.append({"ids": how, "call": what, **line, **ratios, **between})
    report.table(f"{IDS} rows of {DIM} float32, of {count}", COLUMNS, rows)
    report.close()


if __name__ == "__main__":
    main()
