"""`fit`: from rows of the benchmark to a `Model` of each collective. Pure.

Terms of one node are fitted to the rows of one node, the network to rows of several nodes; without
these it is taken from a `Network`. Terms that the measured numbers of ranks cannot tell apart are
one: with one number of ranks the memory is taken to be shared, as it is for large arrays. ``late``
and ``beyond`` are used only where they explain much of what is left (Schwarz's criterion).

Fitted are relative errors, by non-negative least squares (Lawson, Hanson 1974, chapter 23): a call
of 1 us counts as much as one of 1 s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.bench.costs import Cost, cost_of
from hpcdist.bench.model import HDR, Model, Network, counts_of
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple

Row = Mapping[str, Any]
Array = npt.NDArray[np.float64]

_NEEDED = "case", "library", "ranks", "median_s"
_TERMS = "port_rounds", "port", "rounds", "shared", "core", "call", "late", "beyond"
"""Where two mean the same for what was measured, the first one stays."""
_TINY = 1e-300
_OPTIONAL = "late", "beyond"
_TURNS = 4
"""How often a network is fitted: which algorithm is the cheaper one depends on the network."""
_LARGEST_LATE = 1 << 20
"""Above this no library sends a message at once."""
_EXACT = 3e-3
"""A relative error below which a model cannot become better."""


class _Point(NamedTuple):
    local: int
    nodes: int
    nbytes: int
    seconds: float


def fit(rows: Iterable[Row]) -> list[Model]:
    """Fit a model to each case, library, dtype and memory; cases without a cost are left out.

    Args:
        rows: what `hpcdist bench --json` writes: ``case``, ``library``, ``dtype``, ``memory``,
            ``nbytes`` (what each rank hands in), ``ranks``, ``nodes`` and ``median_s``.

    Raises:
        UsageError: a row lacks something, no row is of hpcdist, or there are too few sizes.

    """
    series: dict[tuple[Any, ...], list[_Point]] = {}
    for row in rows:
        point = _read(row)
        if cost_of(row["case"], row["library"]) is not None:
            key = tuple(row.get(name) for name in ("case", "library", "dtype", "memory"))
            series.setdefault(key, []).append(point)
    if not any(library == "hpcdist" for _, library, *_ in series):
        raise UsageError(
            "there is nothing to predict from: no row is of a collective of the library 'hpcdist'; "
            "measure some, for example: srun -n 4 hpcdist bench --json measured.json"
        )
    return [_fit(key, points) for key, points in series.items()]


def _read(row: Row) -> _Point:
    missing = [name for name in _NEEDED if row.get(name) is None]
    if missing:
        raise UsageError(f"a row of the benchmark has no {', '.join(missing)}: {dict(row)}")
    ranks, nodes, seconds = int(row["ranks"]), int(row.get("nodes") or 1), float(row["median_s"])
    if not (1 <= nodes <= ranks and 0 < seconds < math.inf):
        raise UsageError(
            f"a row of the benchmark says {seconds:g} s on {ranks} ranks of {nodes} nodes: seconds "
            f"are above 0, and each node has a rank or more: {dict(row)}"
        )
    return _Point(-(-ranks // nodes), nodes, int(row.get("nbytes") or 0), seconds)


def _fit(key: tuple[Any, ...], points: list[_Point]) -> Model:
    case, library, dtype, memory = key
    cost = cost_of(case, library)
    assert cost is not None
    sizes = sorted({point.nbytes for point in points})
    _check_enough(", ".join(str(each) for each in key if each is not None), cost, sizes, points)
    model = Model(
        case,
        library,
        dtype,
        memory,
        seconds={},
        late_from=math.inf,
        cache=math.inf,
        local=max(point.local for point in points),
        nodes=max(point.nodes for point in points),
        sizes=(sizes[0], sizes[-1]) if sizes[-1] else None,
        residual=math.inf,
        points=len(points),
    )
    network = HDR
    for _ in range(_TURNS if model.nodes > 1 else 1):
        model = _best(model, cost, points, network)
        network = model.network()
    errors = [abs(model.time_of(*point[:3], network) / point.seconds - 1) for point in points]
    return model._replace(residual=float(np.median(errors)))


def _check_enough(name: str, cost: Cost, sizes: Sequence[int], points: Sequence[_Point]) -> None:
    if cost.moved(2) and len(sizes) < 2:
        raise UsageError(
            f"{name}: 1 size was measured ({sizes[0]} bytes); a model of latency and bandwidth "
            "needs two or more, best from 8 bytes to 64 MiB"
        )
    if not any(cost.rounds(point.local) or point.nodes > 1 for point in points):
        raise UsageError(
            f"{name}: it was measured on one rank only, where nothing travels; measure it on two "
            "or more"
        )


def _best(model: Model, cost: Cost, points: Sequence[_Point], network: Network) -> Model:
    """Return the model with the thresholds that the points speak for most."""
    best, lowest = model, math.inf
    for late_from, cache in _thresholds(cost, points):
        table = _table(cost, points, network, late_from, cache)
        terms = _distinct(table)
        found = fit_nonnegative(table[:, terms], np.ones(len(points)))
        errors = table[:, terms] @ found - 1
        knees = (late_from < math.inf) + (cache < math.inf)
        weight = np.count_nonzero(found) + 2 * knees
        score = len(points) * math.log(np.mean(errors**2) + _EXACT**2)
        score += weight * math.log(len(points))
        if score < lowest:
            seconds = dict(zip((_TERMS[term] for term in terms), found.tolist(), strict=True))
            lowest = score
            best = model._replace(seconds=seconds, late_from=late_from, cache=cache)
    return best


def _thresholds(cost: Cost, points: Sequence[_Point]) -> Iterator[tuple[float, float]]:
    """Give pairs (late_from, cache) to be tried; infinity is none."""
    sizes = sorted({point.nbytes for point in points})
    moved = [point.local * cost.moved(point.local * point.nodes) * point.nbytes for point in points]
    largest = int(max(moved))
    enough = len(sizes) > len(_TERMS) - len(_OPTIONAL)
    lates = [size for size in sizes[1:-1] if enough and size <= _LARGEST_LATE]
    caches = [1 << shift for shift in range(16, largest.bit_length()) if enough]
    for late_from in (math.inf, *lates):
        for cache in (math.inf, *caches):
            yield late_from, cache


def _table(
    cost: Cost, points: Sequence[_Point], network: Network, late_from: float, cache: float
) -> Array:
    """Return the terms of each point, of shape (points, terms), per second it took."""
    lines = []
    for local, nodes, nbytes, seconds in points:
        counts = counts_of(cost, local, nodes, nbytes, network, late_from, cache)
        lines.append([counts.get(term, 0.0) / seconds for term in _TERMS])
    return np.array(lines)


def _distinct(table: Array) -> list[int]:
    """Return the columns that those before them do not make up."""
    kept: list[int] = []
    basis: list[Array] = []
    for column in range(table.shape[1]):
        values = table[:, column]
        rest = values / (np.linalg.norm(values) or 1.0)
        for _ in range(2):  # once more for the rounding of the first time
            for each in basis:
                rest = rest - (each @ rest) * each
        length = float(np.linalg.norm(rest))
        if length > 1e-6:
            kept.append(column)
            basis.append(rest / length)
    return kept


def fit_nonnegative(table: Array, wanted: Array) -> Array:
    """Return x >= 0 that makes ``|table @ x - wanted|`` smallest (Lawson, Hanson 1974)."""
    scale = np.linalg.norm(table, axis=0)
    scaled = table / scale
    found, free = np.zeros(table.shape[1]), np.zeros(table.shape[1], bool)
    for _ in range(3 * found.size):
        slope = scaled.T @ (wanted - scaled @ found)
        slope[free] = 0.0
        if free.all() or slope.max() <= 1e-12:
            break
        free[slope.argmax()] = True
        while True:
            trial = np.zeros_like(found)
            trial[free] = np.linalg.lstsq(scaled[:, free], wanted, rcond=None)[0]
            below = free & (trial <= 0)
            if not below.any():
                break
            reach = np.where(below, found / np.where(below, found - trial + _TINY, 1.0), math.inf)
            found = found + reach.min() * (trial - found)
            free &= reach > reach.min()  # those that are 0 first
            found[~free] = 0.0
        found = trial
    result: Array = found / scale
    return result
