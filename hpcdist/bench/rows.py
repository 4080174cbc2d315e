"""A `Row` is what is kept of one measurement: one library, one case, one size.

Times are seconds of one call (of one message, in the cases made of messages). `BUS_FACTOR` says
how bandwidths of different collectives become comparable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hpcdist.bench.interleaved import Interleaved
from hpcdist.named_tuple import NamedTuple

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
    "all_gather": lambda n: (n - 1) / n,
    "all_gather_list": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "alltoall_single": lambda n: (n - 1) / n,
}
"""Bus bandwidth over algorithm bandwidth, by the number of ranks.

Source: nccl-tests, doc/PERFORMANCE.md. It makes of bytes over time the bytes that each link must
carry, which the hardware limits whatever the number of ranks.
"""
_TIMES_AS_MANY_BYTES: Mapping[str, Callable[[int], float]] = {
    "bidirectional": lambda n: 2,
    "all_gather": lambda n: n,
    "all_gather_list": lambda n: n,
    "gather": lambda n: n,
}
"""The bytes that algorithm bandwidth counts, over those that a rank hands in.

nccl-tests counts the larger one of what a rank hands in and gets.
"""
OWN = "hpcdist"
COPY = "copy"
"""The library of the rows that tell what copying the bytes once takes, where they are."""
PINNED = "pinned copy"
"""That of the bytes to locked host memory and as many back, both at the same time."""
LIMITS = (COPY, PINNED)


class Point(NamedTuple):
    """Where something is measured; None where it makes no difference."""

    case: str
    dtype: str | None = None
    memory: str | None = None
    nbytes: int | None = None


def row_of(
    found: Interleaved,
    candidate: str,
    library: str,
    point: Point,
    *,
    ranks: int,
    nodes: int,
    parts: int = 1,
) -> Row:
    """Return the row of `candidate`, whose call has `parts` equal parts."""
    seconds = found.seconds[candidate] / parts
    samples = found.samples[candidate] / parts
    row = {
        "case": point.case,
        "library": library,
        "dtype": point.dtype,
        "memory": point.memory,
        "nbytes": point.nbytes,
        "ranks": ranks,
        "nodes": nodes,
        "median_s": float(np.median(seconds)),
        "min_s": float(seconds.min()),
        "p99_s": float(np.percentile(samples, 99)),
        "straggler": found.straggler(candidate),
        "samples": int(samples.size),
    }
    return row | bandwidths(row)


def bandwidths(row: Mapping[str, Any]) -> Row:
    """Return ``bandwidth`` and ``bus_bandwidth`` in bytes per second, where they mean something.

    They are the algorithm bandwidth and the bus bandwidth of nccl-tests; of a limit, the bytes that
    a rank hands in over its time.
    """
    case, nbytes, ranks = row["case"], row["nbytes"], row["ranks"]
    if not nbytes or case not in BUS_FACTOR or row["median_s"] <= 0:
        return {}
    once = nbytes / row["median_s"]
    if row["library"] in LIMITS:
        return {"bandwidth": once}
    times = _TIMES_AS_MANY_BYTES.get(case)
    found = once * times(ranks) if times else once
    bus = found * BUS_FACTOR[case](ranks)
    return {"bandwidth": found} | ({"bus_bandwidth": bus} if bus else {})


def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells this row from the others of its run."""
    return tuple(row[name] for name in KEY)
