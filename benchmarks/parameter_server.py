"""What rows of a table cost: ``mpiexec -n 2 python parameter_server.py``.

Pull and push of 4096 ids with rows of 64 float32, of a table of a million rows: ids drawn by Zipf's
law or evenly: by the collective route (mode "sync"), by RPC (mode "ssp", of a staleness that nobody
reaches), the same where rows of the node are read past their server (`shared`; what is pushed goes
by RPC), and `numpy.take` of as many rows of one array.

Ids are the same in every call, or others in each ("fresh"), which is what training does.

Then what a pull adds to the time of ranks that are out of step: between two pulls each computes for
a while, now longer, now shorter, all in all as long as the others. In lock step the others wait.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
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


STEPS = 16
SETS = 64
"""Sets of ids that calls take in turn where they are fresh: of 64 MiB of rows."""


def drawn(how: str, rows: int, sets: int = 1) -> Any:
    """Return sets of ids, other ones on each rank."""
    rng = np.random.default_rng(dist.get_rank())
    if how == "even":
        return rng.integers(0, rows, (sets, IDS))
    return np.minimum(rng.zipf(1.2, (sets, IDS)), rows) - 1


def candidates(
    tables: dict[str, ps.SparseTable], whole: Any, sets: Any, what: str
) -> dict[str, Callable[[], Any]]:
    """Return what is timed: a pull or a push by each route, beside `numpy.take`."""
    grads = np.ones((IDS, DIM), np.float32)
    found: dict[str, Callable[[], Any]] = {"take": _each(partial(whole.take, axis=0), sets)}
    for name, table in tables.items():
        act = table.pull if what == "pull" else partial(_push, table, grads)
        found[name] = _each(act, sets)
    return found


def _each(act: Callable[[Any], Any], sets: Any) -> Callable[[], Any]:
    """Return what acts on one set after the other."""
    following = cycle(sets)
    return lambda: act(next(following))


def _push(table: ps.SparseTable, grads: Any, ids: Any) -> None:
    table.push(ids, grads)


def out_of_step(tables: dict[str, ps.SparseTable], ids: Any) -> dict[str, Callable[[], Any]]:
    """Return runs of steps that compute, or compute and pull; the ranks in orders of their own."""
    lengths = -np.log1p(-(np.arange(STEPS) + 0.5) / STEPS)  # quantiles of an exponential law
    work = np.random.default_rng(dist.get_rank()).permutation(np.ceil(lengths * 40).astype(int))
    array = np.ones(32 << 10, np.float32)

    def run(pull: Callable[[Any], Any] | None) -> None:
        for units in work:
            for _ in range(units):
                np.sqrt(array, out=array)
            if pull is not None:
                pull(ids)

    return {
        "compute": partial(run, None),
        **{name: partial(run, table.pull) for name, table in tables.items()},
    }


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

OUT_OF_STEP: dict[str, Any] = {
    "ids": str,
    "compute": duration,
    "collective": duration,
    "rpc": duration,
    "shared": duration,
    "rpc / collective": times,
    "shared / collective": times,
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
    for how, what, sets in (
        ("zipf", "pull", 1),
        ("zipf", "pull", SETS),
        ("zipf", "push", 1),
        ("even", "pull", 1),
        ("even", "pull", SETS),
        ("even", "push", 1),
    ):
        ids = drawn(how, count, sets)
        found = interleave(
            comm, candidates(tables, whole, ids, what), rounds=options.rounds, sample_s=0.02
        )
        line = {name: found.median(name) for name in ("take", *tables)}
        ratios = {f"{name} / take": found.ratio(name, to="take") for name in tables}
        between = {
            "rpc / collective": found.ratio("rpc", to="collective"),
            "shared / rpc": found.ratio("shared", to="rpc"),
        }
        named = how if sets == 1 else f"{how}, fresh"
        rows.append({"ids": named, "call": what, **line, **ratios, **between})
    report.table(f"{IDS} rows of {DIM} float32, of {count}", COLUMNS, rows)
    rows = []
    for how in ("zipf", "even"):
        found = interleave(
            comm, out_of_step(tables, drawn(how, count)[0]), rounds=options.rounds, sample_s=0.05
        )
        added = {name: (found.seconds[name] - found.seconds["compute"]) / STEPS for name in tables}
        line = {name: float(np.median(each)) for name, each in added.items()}
        ratios = {
            f"{name} / collective": float(np.median(added[name] / added["collective"]))
            for name in ("rpc", "shared")
        }
        rows.append({"ids": how, "compute": found.median("compute") / STEPS, **line, **ratios})
    report.table("what a pull adds where the ranks are out of step", OUT_OF_STEP, rows)
    report.close()


if __name__ == "__main__":
    main()
