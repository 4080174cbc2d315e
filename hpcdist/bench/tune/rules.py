"""From timings to rules: which algorithm is worth using, where each was measured beside MPI.

`rules_from` makes the rules of one number of ranks, `merge_ranks` joins those of several. An
algorithm is used only where it beats MPI by `MARGIN` in the median round and is no slower in the
fastest one; elsewhere the rule says MPI, so that nothing becomes slower than plain MPI. `measure`
measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, Literal

from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.base import LinkCost
from hpcdist.transport.tuning import STAGED_UP_TO, Algorithm, TuningRule

Arrays = Literal["ordinary", "shared"]
Numbers = Literal["any", "short", "wide"]
Nodes = Literal["one", "several"]

MARGIN = 0.05
"""Differences of this share and less do not count: another run may have it the other way round."""

LARGE = 4 << 20
"""From this many bytes on, what is best stays best: the last rule has no end."""

NUMBERS: Mapping[str, Numbers] = {"float32": "wide", "bfloat16": "short", "float16": "short"}
"""The dtypes that are measured, and for which ones each of them stands."""

REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter", "scan", "exscan"})
"""The operations for which the dtype makes a difference."""


class Timing(NamedTuple):
    """One algorithm at one size, measured in the same rounds as MPI.

    Attributes:
        ratio: its time over MPI's in the same round; the median.
        min_ratio: its fastest round over MPI's fastest one.
        median_s, min_s: seconds of one call.

    """

    operation: str
    arrays: Arrays
    dtype: str
    nbytes: int
    ranks: int
    nodes: Nodes
    algorithm: Algorithm
    ratio: float
    min_ratio: float
    median_s: float
    min_s: float


class Cost(NamedTuple):
    """Times over MPI's, the worst of the dtypes at hand."""

    ratio: float
    min_ratio: float

    @property
    def wins(self) -> bool:
        """Whether this is faster than MPI beyond doubt."""
        return self.ratio < 1 - MARGIN and self.min_ratio <= 1


class Series(NamedTuple):
    """What has steps of its own."""

    operation: str
    arrays: Arrays
    numbers: Numbers


class Step(NamedTuple):
    """Operations of at most `up_to` bytes (None: any) that no step before took."""

    up_to: int | None
    algorithm: Algorithm


Costs = Mapping[Algorithm, Cost]
Good = Mapping[Algorithm, float]
"""The algorithms that are good enough at one size, and their times over MPI's."""


# ---- costs


def costs_of(timings: Iterable[Timing]) -> dict[Series, dict[int, dict[Algorithm, Cost]]]:
    """Return what each algorithm costs, by series and size."""
    found: dict[Series, dict[int, dict[Algorithm, Cost]]] = {}
    for each in timings:
        series = Series(each.operation, each.arrays, _numbers(each))
        algorithms = found.setdefault(series, {}).setdefault(each.nbytes, {})
        known = algorithms.get(each.algorithm, Cost(0, 0))
        algorithms[each.algorithm] = Cost(
            max(known.ratio, each.ratio), max(known.min_ratio, each.min_ratio)
        )
    return found


def _numbers(timing: Timing) -> Numbers:
    """Between nodes one rule serves all numbers, hence the worst of them decides."""
    alike = timing.operation not in REDUCING or timing.nodes == "several"
    return "any" if alike else NUMBERS[timing.dtype]


def link_cost(small_s: float, large_s: float, ranks: int, nbytes: int) -> LinkCost:
    """Return what a message and a byte cost, from gathering nothing and from gathering much.

    As the planner of arrays across ranks has it: messages follow each other in a tree, then all
    that is there has been written once, as fast as memory is copied.

    Args:
        small_s: seconds of an all_gather of next to nothing.
        large_s: seconds of one of large parts.
        ranks: how many there are.
        nbytes: of each part.

    """
    rounds = (ranks - 1).bit_length() + 1
    moved = large_s - small_s - COPY_S * nbytes * ranks
    floor = COPY_S / 10  # what is gained by copying past the caches is not free
    return LinkCost(small_s / rounds, max(moved / (nbytes * (ranks - 1)), floor))


COPY_S = 1e-10
"""Seconds a byte copied, as in `mesh.planner`."""


# ---- which algorithms are good enough at a size


def good_ways(costs: Costs) -> Good:
    """Return the fastest algorithm and those within `MARGIN` of it; MPI alone if none beats it."""
    winners = {
        algorithm: cost.ratio
        for algorithm, cost in costs.items()
        if algorithm is not Algorithm.MPI and cost.wins
    }
    enough = min(winners.values(), default=0.0) * (1 + MARGIN)
    return {algorithm: ratio for algorithm, ratio in winners.items() if ratio <= enough} or {
        Algorithm.MPI: 1.0
    }


def good_shared_ways(costs: Costs, otherwise: Algorithm) -> Good:
    """Return the same for arrays in shared memory.

    They are taken where they are, or like ordinary arrays, which use `otherwise`.
    """
    both = {otherwise: costs[otherwise].ratio if otherwise in costs else 1.0}
    direct = costs.get(Algorithm.DIRECT)
    if direct is not None and (direct.wins or otherwise is not Algorithm.MPI):
        both[Algorithm.DIRECT] = direct.ratio
    enough = min(both.values()) * (1 + MARGIN)
    return {algorithm: ratio for algorithm, ratio in both.items() if ratio <= enough}


# ---- from sizes to steps


def fewest_steps(good: Mapping[int, Good]) -> list[Step]:
    """Return the fewest steps that use a good algorithm at each size, and the fastest such ones."""
    runs: list[tuple[list[int], set[Algorithm]]] = []
    for nbytes in sorted(good):
        common = runs[-1][1] & set(good[nbytes]) if runs else set()
        if common:
            runs[-1] = [*runs[-1][0], nbytes], common
        else:
            runs.append(([nbytes], set(good[nbytes])))
    chosen = [
        (sizes, _fastest(algorithms, [good[size] for size in sizes])) for sizes, algorithms in runs
    ]
    steps = [
        Step(_border(sizes[-1], following[0], next_way), algorithm)
        for (sizes, algorithm), (following, next_way) in pairwise(chosen)
    ]
    last, algorithm = chosen[-1]
    steps.append(Step(None if last[-1] >= LARGE else last[-1], algorithm))
    return [_within_reach(step) for step in steps]


def _fastest(algorithms: Iterable[Algorithm], good: Sequence[Good]) -> Algorithm:
    order = list(Algorithm)
    return min(
        algorithms,
        key=lambda algorithm: (math.prod(each[algorithm] for each in good), order.index(algorithm)),
    )


def _border(last: int, following: int, next_way: Algorithm) -> int:
    """Return where, between two sizes measured, one algorithm ends; what lies between is MPI's."""
    middle = 1 << round(math.log2(last * following) / 2)
    return last if next_way is Algorithm.MPI or not last <= middle < following else middle


def _within_reach(step: Step) -> Step:
    if step.algorithm is not Algorithm.STAGED:
        return step
    return step._replace(up_to=min(step.up_to or STAGED_UP_TO, STAGED_UP_TO))


def way_at(steps: Sequence[Step], nbytes: int) -> Algorithm:
    """Return the algorithm at a size; MPI where the steps end."""
    return next(
        (algorithm for up_to, algorithm in steps if up_to is None or nbytes <= up_to), Algorithm.MPI
    )


# ---- rules


def rules_from(timings: Iterable[Timing], ranks: int, nodes: Nodes) -> list[TuningRule]:
    """Return the rules for groups of `ranks` ranks on one node or on several.

    Args:
        timings: of such groups; those of others are left aside.
        ranks: how many ranks a group has.
        nodes: where they are.

    """
    own = [each for each in timings if (each.ranks, each.nodes) == (ranks, nodes)]
    return [
        TuningRule(
            series.operation, series.arrays, algorithm, up_to, series.numbers, (ranks, ranks), nodes
        )
        for series, steps in _merge_series(_steps(costs_of(own))).items()
        for up_to, algorithm in steps
    ]


def _steps(costs: Mapping[Series, Mapping[int, Costs]]) -> dict[Series, list[Step]]:
    found: dict[Series, list[Step]] = {}
    for series, by_size in costs.items():
        if series.arrays == "ordinary":
            good = {nbytes: good_ways(each) for nbytes, each in by_size.items()}
            found[series] = fewest_steps(good)
    for series, by_size in costs.items():
        if series.arrays == "shared":
            ordinary = found.get(series._replace(arrays="ordinary"), [])
            good = {
                nbytes: good_shared_ways(each, way_at(ordinary, nbytes))
                for nbytes, each in by_size.items()
            }
            found[series] = fewest_steps(good)
    return found


def _merge_series(steps: Mapping[Series, list[Step]]) -> dict[Series, list[Step]]:
    """Make one series of wide and short numbers that have the same steps."""
    found: dict[Series, list[Step]] = {}
    for series, own in steps.items():
        alike = [steps.get(series._replace(numbers=numbers)) for numbers in ("wide", "short")]
        same = series.numbers != "any" and alike[0] == alike[1]
        found[series._replace(numbers="any") if same else series] = own
    return found


def merge_ranks(rules: Iterable[TuningRule]) -> list[TuningRule]:
    """Give one rule to neighbouring numbers of ranks that have the same ones.

    Args:
        rules: those of `rules_from`, for several numbers of ranks.

    """
    table: dict[tuple[str, str, str], dict[int, list[TuningRule]]] = {}
    counts = set()
    for rule in rules:
        counts.add(rule.ranks[0])
        series = table.setdefault((rule.operation, rule.arrays, rule.nodes), {})
        series.setdefault(rule.ranks[0], []).append(rule._replace(ranks=(0, 0)))
    merged: list[TuningRule] = []
    for by_count in table.values():
        for same, run in groupby(sorted(counts), by_count.get):
            members = list(run)
            merged += [rule._replace(ranks=(members[0], members[-1])) for rule in same or ()]
    return merged


def tuned(timings: Sequence[Timing]) -> list[TuningRule]:
    """Return the rules of everything that was measured."""
    groups = dict.fromkeys((each.ranks, each.nodes) for each in timings)
    return merge_ranks(rule for group in groups for rule in rules_from(timings, *group))


def timings_as_json(timings: Iterable[Timing]) -> list[dict[str, Any]]:
    """Return timings as a tuning file holds them."""
    return [{**each._asdict(), "algorithm": each.algorithm.value} for each in timings]
