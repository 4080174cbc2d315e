"""`TuningTable`: which way an operation takes, as one table.

Rules are read from the first to the last; the first that fits an operation names its way. The
default rules hold what was measured on common hardware and fall back to MPI wherever shared
memory does not win; `hpcdist tune` measures a site and writes rules of its own, which
``HPCDIST_TUNING`` puts before the default ones. All ranks must read equal rules.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, Literal, final, get_args

from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.base import LinkCost
from hpcdist.transport.call.kinds import Kind

FORMAT = 1
KiB, MiB = 1 << 10, 1 << 20


class Algorithm(Enum):
    """How an operation can be carried out; `EXPLAINED` tells each in words."""

    MPI = "mpi"
    STAGED = "staged"
    PIPELINED = "pipelined"
    DIRECT = "direct"
    HIERARCHICAL = "hierarchical"
    ATTACHED = "attached"


EXPLAINED = {
    Algorithm.MPI: "MPI's own collective",
    Algorithm.STAGED: "copied once to shared staging memory, read there by the others",
    Algorithm.PIPELINED: "through shared staging memory part by part, each rank reduces its slice",
    Algorithm.DIRECT: "arrays in shared memory: read where they are, nothing is copied",
    Algorithm.HIERARCHICAL: "inside each node through shared memory, between the nodes by all "
    "ranks at once",
    Algorithm.ATTACHED: "ordinary arrays: the kernel copies them from rank to rank, by all ranks "
    "at once, and each reduces its share (cross-memory attach)",
}


Copies = Literal["any", "fast", "early"]
_COPIES: Sequence[Copies] = get_args(Copies)


class TuningRule(NamedTuple):
    """One row: operations of at most `up_to` bytes (None: any) take `algorithm`.

    `arrays` are "shared" if all contributions are in shared memory. `numbers` are "short" for
    float16 and bfloat16, and for means: there MPI needs passes of ours before and after. `ranks`
    is the range of ranks per node, both ends included. `copies` are "fast" where the kernel copies
    much from another process in less time than we copy it twice, "early" where it copies few KiB as
    well: see `attached.copying_takes`.
    """

    operation: str
    arrays: Literal["ordinary", "shared"]
    algorithm: Algorithm
    up_to: int | None = None
    numbers: Literal["any", "short", "wide"] = "any"
    ranks: tuple[int, int] = (2, 1 << 30)
    nodes: Literal["one", "several", "any"] = "one"
    copies: Copies = "any"


STAGED_UP_TO = MiB
"""Bytes of the largest contribution that fits into the staging memory as a whole."""

_COPIED = (Algorithm.MPI, Algorithm.STAGED)
_MOVED = (*_COPIED, Algorithm.ATTACHED, Algorithm.DIRECT)
_REDUCED = (Algorithm.MPI, Algorithm.PIPELINED, Algorithm.ATTACHED, Algorithm.DIRECT)
# The ways an operation can take inside a node. Scans are never direct: a rank's result would
# overwrite what others still read. Reductions are never staged: each rank would combine all of
# everybody's contribution, which takes up to five times as long as the pipe, and was ahead of it by
# a few percent at best. MPI is what is left where there is no compiled kernel, or arrays that
# others cannot read.
_ALGORITHMS: dict[str, tuple[Algorithm, ...]] = {
    **dict.fromkeys(("all_reduce", "reduce", "reduce_scatter"), _REDUCED),
    **dict.fromkeys(("broadcast", "all_gather", "gather", "scatter", "alltoall"), _MOVED),
    **dict.fromkeys(("scan", "exscan"), _COPIED),
}
_BETWEEN_NODES = (Algorithm.MPI, Algorithm.HIERARCHICAL)

OPERATIONS = tuple(_ALGORITHMS)
"""The operations that have a choice."""


def possible_algorithms(
    operation: str, arrays: str, *, several_nodes: bool
) -> tuple[Algorithm, ...]:
    """Return the ways that `operation` can take with such arrays; rules for others are ignored."""
    if several_nodes:
        return _BETWEEN_NODES if operation in _ALGORITHMS else (Algorithm.MPI,)
    algorithms = _ALGORITHMS.get(operation, (Algorithm.MPI,))
    return (
        algorithms
        if arrays == "shared"
        else tuple(algorithm for algorithm in algorithms if algorithm is not Algorithm.DIRECT)
    )


# Ordinary arrays are reduced where they are, from the size on where that wins over the pipe: there
# the kernel looks for the pages of others in every call. More ranks have not been measured.
_ATTACHED = tuple(
    rule
    for operation in ("all_reduce", "reduce", "reduce_scatter")
    for rule in (
        TuningRule(operation, "ordinary", Algorithm.PIPELINED, 4 * MiB, ranks=(2, 4)),
        TuningRule(operation, "ordinary", Algorithm.PIPELINED, MiB, ranks=(5, 16)),
        TuningRule(operation, "ordinary", Algorithm.ATTACHED, ranks=(2, 16)),
    )
)

# Between nodes the bytes count that leave a node, of which the lanes send the fewest; of small
# arrays the messages, of which MPI sends fewer. In an alltoall no bytes can be saved.
_BY_NODES = tuple(
    TuningRule(operation, "ordinary", algorithm, up_to, nodes="several")
    for operation in OPERATIONS
    for algorithm, up_to in (
        (Algorithm.MPI, None if operation == "alltoall" else 64 * KiB),
        (Algorithm.HIERARCHICAL, None),
    )
)

# Where the kernel copies few KiB fast, too, from these sizes on. More ranks than two would wait for
# each other longer than that saves.
_COPIED_EARLY = (
    *(
        TuningRule(each, "ordinary", Algorithm.ATTACHED, None, "wide", (2, 2), copies="early")
        for each in ("all_reduce", "reduce", "reduce_scatter")
    ),
    *(
        TuningRule(operation, "ordinary", algorithm, up_to, ranks=(2, 2), copies="early")
        for operation, most in (
            ("broadcast", 16),
            ("all_gather", 0),
            ("alltoall", 16),
            ("gather", 16),
            ("scatter", 32),
        )
        for algorithm, up_to in ((Algorithm.STAGED, most * KiB), (Algorithm.ATTACHED, None))
    ),
)

# Where it copies much fast, from these sizes on (measured with 2 and 4 ranks).
_COPIED_FAST = tuple(
    TuningRule(operation, "ordinary", algorithm, up_to, ranks=(2, 4), copies="fast")
    for operation, small, most in (
        *((each, Algorithm.PIPELINED, 256) for each in ("all_reduce", "reduce", "reduce_scatter")),
        ("broadcast", Algorithm.STAGED, 64),
        ("all_gather", Algorithm.STAGED, 32),
        ("alltoall", Algorithm.STAGED, 64),
        ("gather", Algorithm.STAGED, 128),
        ("scatter", Algorithm.STAGED, 128),
    )
    for algorithm, up_to in ((small, most * KiB), (Algorithm.ATTACHED, None))
)

# Elsewhere what is moved is copied twice up to here: in the caches that takes less than the kernel
# needs to find the pages of others.
_COPIED_TWICE = tuple(
    TuningRule(operation, "ordinary", Algorithm.STAGED, up_to, ranks=(2, 4))
    for operation, up_to in {
        "broadcast": MiB,
        **dict.fromkeys(("all_gather", "gather", "scatter", "alltoall"), 512 * KiB),
    }.items()
)

DEFAULT: tuple[TuningRule, ...] = (
    TuningRule("all_reduce", "shared", Algorithm.DIRECT),
    TuningRule("reduce", "shared", Algorithm.DIRECT),
    TuningRule("reduce_scatter", "shared", Algorithm.DIRECT),
    TuningRule("broadcast", "shared", Algorithm.DIRECT),
    TuningRule("all_gather", "shared", Algorithm.DIRECT),
    TuningRule("gather", "shared", Algorithm.DIRECT),
    TuningRule("scatter", "shared", Algorithm.DIRECT),
    TuningRule("alltoall", "shared", Algorithm.DIRECT),
    *_COPIED_EARLY,
    *_COPIED_FAST,
    *_ATTACHED,
    *_COPIED_TWICE,
    TuningRule("all_reduce", "ordinary", Algorithm.PIPELINED),
    TuningRule("reduce", "ordinary", Algorithm.PIPELINED, numbers="short"),
    TuningRule("reduce_scatter", "ordinary", Algorithm.PIPELINED, numbers="short"),
    TuningRule("reduce", "ordinary", Algorithm.PIPELINED, up_to=512 * KiB),
    TuningRule("reduce_scatter", "ordinary", Algorithm.PIPELINED, up_to=512 * KiB),
    TuningRule("broadcast", "ordinary", Algorithm.ATTACHED),
    TuningRule("broadcast", "ordinary", Algorithm.STAGED, up_to=MiB),
    TuningRule("all_gather", "ordinary", Algorithm.ATTACHED),
    TuningRule("gather", "ordinary", Algorithm.ATTACHED),
    TuningRule("scatter", "ordinary", Algorithm.ATTACHED),
    TuningRule("alltoall", "ordinary", Algorithm.ATTACHED),
    TuningRule("scan", "ordinary", Algorithm.STAGED, up_to=MiB),
    TuningRule("exscan", "ordinary", Algorithm.STAGED, up_to=MiB),
    *_BY_NODES,
)


@final
class TuningTable:
    """The rules of one job, asked for one group; `rules` are those that fit it.

    `attaches` says whether its ranks can read each other's ordinary memory, and `copies` how fast:
    see `TuningRule`.
    """

    def __init__(
        self,
        rules: Sequence[TuningRule],
        ranks: int,
        *,
        several_nodes: bool,
        attaches: bool = True,
        copies: Copies = "any",
    ) -> None:
        self.rules = tuple(
            rule
            for rule in rules
            if rule.ranks[0] <= ranks <= rule.ranks[1]
            and rule.nodes in ("any", "several" if several_nodes else "one")
            and (attaches or rule.algorithm is not Algorithm.ATTACHED)
            and _COPIES.index(rule.copies) <= (_COPIES.index(copies) if attaches else 0)
            and rule.algorithm
            in possible_algorithms(rule.operation, rule.arrays, several_nodes=several_nodes)
        )
        self._found: dict[tuple[Kind, bool, bool], tuple[tuple[float, Algorithm], ...]] = {}

    def algorithm(
        self, kind: Kind, nbytes: int, *, short: bool, shared: bool, but: Algorithm | None = None
    ) -> Algorithm:
        """Return the way of an operation whose largest contribution has `nbytes`.

        `but` is one that the arrays at hand turned out not to be fit for.
        """
        for up_to, algorithm in self._steps(kind, short, shared):
            if nbytes <= up_to and algorithm is not but:
                return algorithm
        return Algorithm.MPI

    def first_range(
        self, kind: Kind, algorithm: Algorithm, *, short: bool, shared: bool
    ) -> tuple[int, int] | None:
        """Return the smallest operations that go one way: from and up to how many bytes."""
        low = 0
        for up_to, found in self._steps(kind, short, shared):
            high = min(int(min(up_to, sys.maxsize)), sys.maxsize)
            if found is algorithm and high >= low:
                return low, high
            low = max(low, high + 1)
        return None

    def explain(
        self, kind: Kind, nbytes: int, *, short: bool, shared: bool
    ) -> tuple[Algorithm, TuningRule | None]:
        """Return the same way, and the rule that names it; None if there is no rule."""
        for rule in self._fitting(kind, short, shared):
            if nbytes <= _limit(rule):
                return rule.algorithm, rule
        return Algorithm.MPI, None

    def _steps(self, kind: Kind, short: bool, shared: bool) -> tuple[tuple[float, Algorithm], ...]:
        key = kind, short, shared
        steps = self._found.get(key)
        if steps is None:
            fitting = self._fitting(*key)
            steps = self._found[key] = tuple((_limit(rule), rule.algorithm) for rule in fitting)
        return steps

    def _fitting(self, kind: Kind, short: bool, shared: bool) -> Iterator[TuningRule]:
        name, arrays = kind.name.lower(), "shared" if shared else "ordinary"
        numbers = "any", "short" if short else "wide"
        for rule in self.rules:
            if (rule.operation, rule.arrays) == (name, arrays) and rule.numbers in numbers:
                yield rule


def _limit(rule: TuningRule) -> float:
    """Return the most bytes that a rule is for."""
    limit = math.inf if rule.up_to is None else rule.up_to
    return min(limit, STAGED_UP_TO) if rule.algorithm is Algorithm.STAGED else limit


def read_rules(path: str | None) -> tuple[TuningRule, ...]:
    """Return the rules of the tuning file at `path` (None: no file), then the default ones.

    Raises:
        UsageError: the file cannot be read or is not a tuning file.

    """
    with _reading(path):
        return (*(_rule(row) for row in _content(path)["rules"]), *DEFAULT)


def read_costs(path: str | None) -> dict[str, LinkCost]:
    """Return what moving data costs by the tuning file at `path`: on "one" node, on "several".

    What was not measured is left out.

    Raises:
        UsageError: the file cannot be read or is not a tuning file.

    """
    with _reading(path):
        costs = _content(path).get("costs", {})
        return {nodes: _cost(costs[nodes]) for nodes in ("one", "several") if nodes in costs}


def _content(path: str | None) -> dict[str, Any]:
    if path is None:
        return {"rules": []}
    given: dict[str, Any] = json.loads(Path(path).read_text())
    if given["format"] != FORMAT:
        raise ValueError(f"format {given['format']}, expected {FORMAT}")
    return given


@contextmanager
def _reading(path: str | None) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"HPCDIST_TUNING={path} is not a usable tuning file: {type(error).__name__}: {error}; "
            "write one with `hpcdist tune`, or unset the variable"
        ) from error


def _cost(given: dict[str, Any]) -> LinkCost:
    cost = LinkCost(float(given["alpha"]), float(given["beta"]))
    if not all(0 < each < math.inf for each in cost):
        raise ValueError(f"alpha and beta are seconds above 0, got {given}")
    return cost


def _rule(row: dict[str, Any]) -> TuningRule:
    known = {name: row[name] for name in TuningRule._fields if name in row}
    if "way" in row:  # as the column was called
        known.setdefault("algorithm", row["way"])
    rule = TuningRule(**known)
    rule = rule._replace(algorithm=_algorithm(rule.algorithm))
    if str(rule.operation).upper() not in Kind.__members__:
        raise ValueError(f"unknown operation {rule.operation!r}")
    for name, choices in _CHOICES.items():
        if getattr(rule, name) not in choices:
            raise ValueError(f"{name} {getattr(rule, name)!r} is none of {', '.join(choices)}")
    first, last = rule.ranks
    up_to = None if rule.up_to is None else int(rule.up_to)
    return rule._replace(ranks=(int(first), int(last)), up_to=up_to)


_FORMER_NAMES = {"pipe": Algorithm.PIPELINED, "lanes": Algorithm.HIERARCHICAL}
"""As earlier versions wrote them."""


def _algorithm(name: Any) -> Algorithm:
    return _FORMER_NAMES.get(name) or Algorithm(name)


_CHOICES = {
    "arrays": ("ordinary", "shared"),
    "numbers": ("any", "short", "wide"),
    "nodes": ("one", "several", "any"),
    "copies": _COPIES,
}


def rules_as_json(rules: Iterable[TuningRule]) -> list[dict[str, Any]]:
    """Return rules the way a tuning file holds them."""
    return [
        {**rule._asdict(), "algorithm": rule.algorithm.value, "ranks": list(rule.ranks)}
        for rule in rules
    ]
