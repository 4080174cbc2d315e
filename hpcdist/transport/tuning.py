"""`Selection`: which way an operation takes, as one table.

Rules are read from the first to the last; the first that fits an operation names its way. The
default rules hold what was measured on common hardware and fall back to MPI wherever shared
memory does not win; `hpcdist tune` measures a site and writes rules of its own, which
``HPCDIST_TUNING`` puts before the default ones. All ranks must read equal rules.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

from hpcdist.errors import UsageError
from hpcdist.transport.call import Kind

FORMAT = 1
KiB, MiB = 1 << 10, 1 << 20


class Way(Enum):
    """The ways an operation can take; see `explain`."""

    MPI = "mpi"
    STAGED = "staged"
    PIPE = "pipe"
    DIRECT = "direct"
    LANES = "lanes"


EXPLAINED = {
    Way.MPI: "MPI's own collective",
    Way.STAGED: "copied once to shared staging memory, read there by the others",
    Way.PIPE: "through shared staging memory part by part, each rank reduces its slice",
    Way.DIRECT: "arrays in shared memory: read where they are, nothing is copied",
    Way.LANES: "reduced inside each node, between the nodes by all ranks at once, shared inside",
}


class Rule(NamedTuple):
    """One row: operations of at most `up_to` bytes (None: any) take `way`.

    `arrays` are "shared" if all contributions are in shared memory. `numbers` are "short" for
    float16 and bfloat16, and for means: there MPI needs passes of ours before and after. `ranks`
    is the range of ranks per node, both ends included.
    """

    operation: str
    arrays: Literal["ordinary", "shared"]
    way: Way
    up_to: int | None = None
    numbers: Literal["any", "short", "wide"] = "any"
    ranks: tuple[int, int] = (2, 1 << 30)
    nodes: Literal["one", "several", "any"] = "one"


STAGED_UP_TO = MiB
"""Bytes of the largest contribution that fits into the staging memory as a whole."""

_COPIED = (Way.MPI, Way.STAGED)
_MOVED = (*_COPIED, Way.DIRECT)
_REDUCED = (*_COPIED, Way.PIPE, Way.DIRECT)
# The ways an operation can take inside a node. Scans are never direct: a rank's result would
# overwrite what others still read.
_WAYS: dict[str, tuple[Way, ...]] = {
    **dict.fromkeys(("all_reduce", "reduce", "reduce_scatter"), _REDUCED),
    **dict.fromkeys(("broadcast", "all_gather", "gather", "scatter", "alltoall"), _MOVED),
    **dict.fromkeys(("scan", "exscan"), _COPIED),
}
_WAYS_BETWEEN_NODES = {"all_reduce": (Way.MPI, Way.LANES)}

OPERATIONS = tuple(_WAYS)
"""The operations that have a choice."""


def possible_ways(operation: str, arrays: str, *, several_nodes: bool) -> tuple[Way, ...]:
    """Return the ways that `operation` can take with such arrays; rules for others are ignored."""
    if several_nodes:
        return _WAYS_BETWEEN_NODES.get(operation, (Way.MPI,))
    ways = _WAYS.get(operation, (Way.MPI,))
    return ways if arrays == "shared" else tuple(way for way in ways if way is not Way.DIRECT)


DEFAULT: tuple[Rule, ...] = (
    Rule("all_reduce", "shared", Way.DIRECT),
    Rule("reduce", "shared", Way.DIRECT),
    Rule("reduce_scatter", "shared", Way.DIRECT),
    Rule("broadcast", "shared", Way.DIRECT),
    Rule("all_gather", "shared", Way.DIRECT),
    Rule("gather", "shared", Way.DIRECT),
    Rule("scatter", "shared", Way.DIRECT),
    Rule("alltoall", "shared", Way.DIRECT),
    Rule("all_reduce", "ordinary", Way.PIPE),
    Rule("reduce", "ordinary", Way.PIPE, numbers="short"),
    Rule("reduce_scatter", "ordinary", Way.PIPE, numbers="short"),
    Rule("reduce", "ordinary", Way.PIPE, up_to=512 * KiB),
    Rule("reduce_scatter", "ordinary", Way.PIPE, up_to=512 * KiB),
    Rule("broadcast", "ordinary", Way.STAGED, up_to=MiB),
    Rule("scan", "ordinary", Way.STAGED, up_to=MiB),
    Rule("exscan", "ordinary", Way.STAGED, up_to=MiB),
    Rule("all_reduce", "ordinary", Way.MPI, up_to=64 * KiB, nodes="several"),
    Rule("all_reduce", "ordinary", Way.LANES, nodes="several"),
)


@final
class Selection:
    """The rules of one job, asked for one group; `rules` are those that fit it."""

    def __init__(self, rules: Sequence[Rule], ranks: int, *, several_nodes: bool) -> None:
        self.rules = tuple(
            rule
            for rule in rules
            if rule.ranks[0] <= ranks <= rule.ranks[1]
            and rule.nodes in ("any", "several" if several_nodes else "one")
            and rule.way in possible_ways(rule.operation, rule.arrays, several_nodes=several_nodes)
        )
        self._found: dict[tuple[Kind, bool, bool], tuple[tuple[float, Way], ...]] = {}

    def way(self, kind: Kind, nbytes: int, *, short: bool, shared: bool) -> Way:
        """Return the way of an operation whose largest contribution has `nbytes`."""
        key = kind, short, shared
        steps = self._found.get(key)
        if steps is None:
            steps = self._found.setdefault(key, self._steps(*key))
        for up_to, way in steps:
            if nbytes <= up_to:
                return way
        return Way.MPI

    def explain(
        self, kind: Kind, nbytes: int, *, short: bool, shared: bool
    ) -> tuple[Way, Rule | None]:
        """Return the same way, and the rule that names it; None if there is no rule."""
        for rule in self._fitting(kind, short, shared):
            if nbytes <= _limit(rule):
                return rule.way, rule
        return Way.MPI, None

    def _steps(self, kind: Kind, short: bool, shared: bool) -> tuple[tuple[float, Way], ...]:
        return tuple((_limit(rule), rule.way) for rule in self._fitting(kind, short, shared))

    def _fitting(self, kind: Kind, short: bool, shared: bool) -> Iterator[Rule]:
        name, arrays = kind.name.lower(), "shared" if shared else "ordinary"
        numbers = "any", "short" if short else "wide"
        for rule in self.rules:
            if (rule.operation, rule.arrays) == (name, arrays) and rule.numbers in numbers:
                yield rule


def _limit(rule: Rule) -> float:
    """Return the most bytes that a rule is for."""
    limit = math.inf if rule.up_to is None else rule.up_to
    return min(limit, STAGED_UP_TO) if rule.way is Way.STAGED else limit


def read_rules(path: str | None) -> tuple[Rule, ...]:
    """Return the rules of the tuning file at `path` (None: no file), then the default ones.

    Raises:
        UsageError: the file cannot be read or is not a tuning file.

    """
    if path is None:
        return DEFAULT
    try:
        given = json.loads(Path(path).read_text())
        if given["format"] != FORMAT:
            raise ValueError(f"format {given['format']}, expected {FORMAT}")
        return (*(_rule(row) for row in given["rules"]), *DEFAULT)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"HPCDIST_TUNING={path} is not a usable tuning file: {type(error).__name__}: {error}; "
            "write one with `hpcdist tune`, or unset the variable"
        ) from error


def _rule(row: dict[str, Any]) -> Rule:
    known = {name: row[name] for name in Rule._fields if name in row}
    rule = Rule(**known)._replace(way=Way(row["way"]))
    if str(rule.operation).upper() not in Kind.__members__:
        raise ValueError(f"unknown operation {rule.operation!r}")
    for name, choices in _CHOICES.items():
        if getattr(rule, name) not in choices:
            raise ValueError(f"{name} {getattr(rule, name)!r} is none of {', '.join(choices)}")
    first, last = rule.ranks
    up_to = None if rule.up_to is None else int(rule.up_to)
    return rule._replace(ranks=(int(first), int(last)), up_to=up_to)


_CHOICES = {
    "arrays": ("ordinary", "shared"),
    "numbers": ("any", "short", "wide"),
    "nodes": ("one", "several", "any"),
}


def rules_as_json(rules: Iterable[Rule]) -> list[dict[str, Any]]:
    """Return rules the way a tuning file holds them."""
    return [{**rule._asdict(), "way": rule.way.value, "ranks": list(rule.ranks)} for rule in rules]
