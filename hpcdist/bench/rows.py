"""A `Row` is what is kept of one measurement: one library, one case, one size.

Times are seconds of one call (of one message, in the cases made of messages). `BUS_FACTOR` says
how bandwidths of different collectives become comparable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from hpcdist.bench.race import Race

Row = dict[str, Any]

KEY = ("case", "library", "dtype", "memory", "nbytes", "ranks")
"""What tells two rows of a run apart, and finds the same row in another run."""

ENOUGH_SAMPLES = 100
"""Below this the 99th percentile is nearly the largest sample."""

BUS_FACTOR: Mapping[str, Callable[[int], float]] = {
    "latency": lambda n: 1,
    "bandwidth": lambda n: 1,
    "bidirectional": lambda n: 1,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce": lambda n: 1,
    "broadcast": lambda n: 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "all_gather_list": lambda n: n - 1,
    "gather": lambda n: n - 1,
    "scatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "alltoall_single": lambda n: (n - 1) / n,
}
"""Bus bandwidth over bandwidth, by the number of ranks; that of nccl-tests.

It makes of bytes over time the bytes that each link must carry, which the hardware limits
whatever the number of ranks. nccl-tests counts the larger one of what a rank hands in and gets;
here size is always what a rank hands in, which is 1/n of it for gathers, so their factor is n
times as large.
"""
_TIMES_AS_MANY_BYTES = {"bidirectional": 2}
OWN = "hpcdist"
COPY = "copy"
"""The library of the rows that tell what copying the bytes once takes."""


class Spot(NamedTuple):
    """Where something is measured; None where it makes no difference."""

    case: str
    dtype: str | None = None
    memory: str | None = None
    nbytes: int | None = None


def row_of(
    found: Race, lane: str, library: str, spot: Spot, *, ranks: int, nodes: int, parts: int = 1
) -> Row:
    """Return the row of the contestant `lane`, whose call has `parts` equal parts."""
    seconds = found.seconds[lane] / parts
    samples = found.samples[lane] / parts
    row = {
        "case": spot.case,
        "library": library,
        "dtype": spot.dtype,
        "memory": spot.memory,
        "nbytes": spot.nbytes,
        "ranks": ranks,
        "nodes": nodes,
        "median_s": float(np.median(seconds)),
        "min_s": float(seconds.min()),
        "p99_s": float(np.percentile(samples, 99)),
        "straggler": found.straggler(lane),
        "samples": int(samples.size),
    }
    return row | bandwidths(row)


def bandwidths(row: Mapping[str, Any]) -> Row:
    """Return ``bandwidth`` and ``bus_bandwidth`` in bytes per second, where they mean something."""
    case, nbytes = row["case"], row["nbytes"]
    if not nbytes or case not in BUS_FACTOR or row["median_s"] <= 0:
        return {}
    if row["library"] == COPY:
        return {"bandwidth": nbytes / row["median_s"]}
    found = _TIMES_AS_MANY_BYTES.get(case, 1) * nbytes / row["median_s"]
    bus = found * BUS_FACTOR[case](row["ranks"])
    return {"bandwidth": found} | ({"bus_bandwidth": bus} if bus else {})


def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells this row from the others of its run."""
    return tuple(row[name] for name in KEY)
