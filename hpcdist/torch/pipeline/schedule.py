"""Schedules of a pipeline as tables: the actions of each rank, in order. Pure.

A schedule is a row of `RULES`, which says how far ranks may go ahead. `plan_pipeline` lets them
work, each doing what it can do earliest; what they did is the table. So a table never waits in a
circle, whatever the number of stages and micro-batches.

`times_of` computes when each action of a table begins and ends, `predict_bubble` how much of the
time ranks are idle.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Literal

from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple

Kind = Literal["F", "B", "I", "W"]
"""Forward; backward, whole or in two parts: gradients of inputs, and of weights."""

Placement = Literal["loop", "V"]
"""Stages on ranks: from the first to the last and again so, or from the last back to the first."""

UNIT_COSTS: Mapping[Kind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


class Action(NamedTuple):
    """What a rank does next: a part of the passes of one micro-batch through one stage."""

    kind: Kind
    stage: int
    micro: int


Limit = Callable[[int, int, int], float]
"""So many at a time; of the number of ranks, that of the chunks of each, and a rank."""


class Rule(NamedTuple):
    """When a rank may begin a forward pass, which it then prefers; the weights come last."""

    ahead: Limit
    """How many micro-batches a rank may have on their way to their backward pass."""
    kept: Limit
    """Of how many it may keep what backward passes need, weights included."""
    splits: bool = False
    """Whether backward passes are done in two parts."""
    forward_first: bool = False
    """Whether all forward passes come before the first backward pass."""
    breadth_first: bool = False
    """Whether all micro-batches pass a chunk before the first one passes the next."""
    placement: Placement | None = None
    """What it needs; None: any."""


def _any(ranks: int, chunks: int, rank: int) -> float:
    return math.inf


def _until_backward(ranks: int, chunks: int, rank: int) -> float:
    """Return how many forward passes there are before the first backward pass, and one more."""
    if chunks == 1:
        return ranks - rank
    return 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1


def _as_the_first_rank(ranks: int, chunks: int, rank: int) -> float:
    return _until_backward(ranks, chunks, 0)


def _one_of_each_stage(ranks: int, chunks: int, rank: int) -> float:
    return ranks * chunks


RULES: dict[str, Rule] = {
    "FThenB": Rule(_any, _any, forward_first=True, breadth_first=True),
    "1F1B": Rule(_until_backward, _any),
    "ZBH1": Rule(_until_backward, _as_the_first_rank, splits=True),
    "ZBV": Rule(_any, _one_of_each_stage, splits=True, placement="V"),
}

NAMES: dict[str, str] = {
    **{name: name for name in RULES},
    **dict.fromkeys(("F-then-B", "GPipe", "LoopedBFS"), "FThenB"),
    **dict.fromkeys(("VPP", "Interleaved1F1B"), "1F1B"),
    **dict.fromkeys(("ZBVPP", "InterleavedZeroBubble"), "ZBH1"),
    "ZBVZeroBubble": "ZBV",
}
"""The row for each name that Paddle or torch has for a schedule."""


class Plan(NamedTuple):
    """A schedule for so many ranks, chunks of each, and micro-batches."""

    schedule: str
    ranks: int
    microbatches: int
    chunks: int
    placement: Placement
    table: tuple[tuple[Action, ...], ...]
    """For each rank what it does, in order."""

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """Return the rank that has a stage.

        Args:
            stage: from 0.

        """
        return rank_of(stage, self.ranks, self.placement)


def rank_of(stage: int, ranks: int, placement: Placement) -> int:
    """Return the rank that has a stage. Pure."""
    turn, place = divmod(stage, ranks)
    return ranks - 1 - place if placement == "V" and turn % 2 else place


def stages_of(rank: int, ranks: int, chunks: int, placement: Placement) -> list[int]:
    """Return the stages that a rank has, ascending. Pure."""
    return [stage for stage in range(ranks * chunks) if rank_of(stage, ranks, placement) == rank]


def rule_of(schedule: str) -> Rule:
    """Return the rule of a schedule, by any of its names."""
    if schedule not in NAMES:
        raise UsageError(
            f"there is no schedule {schedule!r}; use one of {', '.join(map(repr, NAMES))}"
        )
    return RULES[NAMES[schedule]]


@lru_cache(maxsize=64)
def plan_pipeline(
    schedule: str,
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    placement: Placement | None = None,
    *,
    training: bool = True,
) -> Plan:
    """Return the table of a schedule: the actions of each rank, in order. Pure.

    Args:
        schedule: one of `NAMES`.
        ranks: how many ranks the pipeline has.
        microbatches: how many micro-batches go through it; any number of at least 1.
        chunks: how many stages each rank has ("virtual" stages).
        placement: where they are; None for what the schedule needs.
        training: False leaves out the backward passes.

    Raises:
        UsageError: there is no such schedule, or not for this placement.

    Example:
        >>> plan = plan_pipeline("1F1B", 2, 3)
        >>> for actions in plan.table:
        ...     print(*(f"{each.kind}{each.micro}" for each in actions))
        F0 F1 B0 F2 B1 B2
        F0 B0 F1 B1 F2 B2

    """
    rule = rule_of(schedule)
    if ranks < 1 or microbatches < 1 or chunks < 1:
        raise UsageError(
            f"a pipeline has at least 1 rank, 1 stage on each and 1 micro-batch, got {ranks}, "
            f"{chunks} and {microbatches}"
        )
    needed = rule.placement or placement or "loop"
    if placement not in (None, needed) or (rule.placement == "V" and chunks != 2):
        raise UsageError(
            f"schedule {schedule!r} is for 2 stages on each rank that are placed as a "
            f"{needed!r}, got {chunks} placed as {placement or needed!r}; make the PipelineLayer "
            f"with num_virtual_pipeline_stages=2 and placement={needed!r}"
        )
    made = _Work(rule, ranks, microbatches, chunks, needed, training).done()
    return Plan(schedule, ranks, microbatches, chunks, needed, made)


class _Work:
    """Ranks at work, to see in which order they do what.

    Each rank has rows of forward and of backward passes, of each of which the first is next.
    """

    def __init__(
        self,
        rule: Rule,
        ranks: int,
        microbatches: int,
        chunks: int,
        placement: Placement,
        training: bool,
    ) -> None:
        self.rule, self.ranks, self.last = rule, ranks, ranks * chunks - 1
        self.backward: Kind = "I" if rule.splits else "B"
        self.kinds: tuple[Kind, ...] = ("F",)
        if training:
            self.kinds = ("F", "I", "W") if rule.splits else ("F", "B")
        self.left = ranks * chunks * microbatches * len(self.kinds)
        self.ended: dict[Action, float] = {}
        self.free = [0.0] * ranks
        self.ahead, self.kept = [0] * ranks, [0] * ranks
        limits = (rule.ahead, rule.kept) if training else (_any, _any)
        self.limits = [[limit(ranks, chunks, rank) for limit in limits] for rank in range(ranks)]
        self.table: list[list[Action]] = [[] for _ in range(ranks)]
        self.rank_of = [rank_of(stage, ranks, placement) for stage in range(self.last + 1)]
        self.rows: list[dict[Kind, list[deque[Action]]]] = []
        rounds = microbatches if rule.breadth_first else min(ranks, microbatches)
        for rank in range(ranks):
            own = stages_of(rank, ranks, chunks, placement)
            orders = [own[::-1]] if placement == "loop" else [[each] for each in own[::-1]]
            back = [_row(self.backward, each, microbatches, rounds) for each in orders]
            forward = [_row("F", each[::-1], microbatches, rounds) for each in orders]
            self.rows.append({"F": forward, self.backward: back, "W": [deque()]})

    def done(self) -> tuple[tuple[Action, ...], ...]:
        """Return what each rank did until nothing was left."""
        best = [self._next(rank) for rank in range(self.ranks)]
        while self.left:
            chosen = min((each for each in best if each is not None), default=None)
            if chosen is None:  # all wait for ranks that may begin no more for now
                self.limits = [[each + 1 for each in limits] for limits in self.limits]
                best = [self._next(rank) for rank in range(self.ranks)]
                continue
            action = self._take(chosen)
            near = {action.stage, max(0, action.stage - 1), min(self.last, action.stage + 1)}
            for rank in {self.rank_of[stage] for stage in near}:
                best[rank] = self._next(rank)
        return tuple(map(tuple, self.table))

    def _next(self, rank: int) -> _Choice | None:
        """Return what a rank can begin earliest, and of that what it prefers."""
        choices = [
            _Choice(max(ready, self.free[rank]), preference, rank, row)
            for preference, kind in enumerate(self.kinds)
            for row, waiting in enumerate(self.rows[rank][kind])
            if waiting and (ready := self._ready(waiting[0], rank)) is not None
        ]
        return min(choices, default=None)

    def _ready(self, action: Action, rank: int) -> float | None:
        """Return from when on an action can be done; None while that is not known."""
        kind, stage, micro = action
        if kind == "W":
            return self.ended[Action("I", stage, micro)]
        if kind == "F":
            ahead, kept = self.limits[rank]
            if self.ahead[rank] >= ahead or self.kept[rank] >= kept:
                return None
            return self.ended.get(Action("F", stage - 1, micro)) if stage else 0.0
        if self.rule.forward_first and any(self.rows[rank]["F"]):
            return None
        if stage == self.last:
            return self.ended.get(Action("F", stage, micro))
        return self.ended.get(Action(self.backward, stage + 1, micro))

    def _take(self, choice: _Choice) -> Action:
        start, preference, rank, row = choice
        rows = self.rows[rank]
        action = rows[self.kinds[preference]][row].popleft()
        self.ended[action] = self.free[rank] = start + unit_cost(action)
        self.table[rank].append(action)
        self.left -= 1
        self.ahead[rank] += {"F": 1, "W": 0}.get(action.kind, -1)
        self.kept[rank] += {"F": 1, "I": 0}.get(action.kind, -1)
        if action.kind == "I":
            rows["W"][0].append(Action("W", action.stage, action.micro))
        return action


class _Choice(NamedTuple):
    """What a rank may do: when, how much it prefers that, and in which of its rows it is."""

    start: float
    preference: int
    rank: int
    row: int


def _row(kind: Kind, stages: Sequence[int], microbatches: int, rounds: int) -> deque[Action]:
    """Return passes in order: some micro-batches through all stages, then the next ones."""
    return deque(
        Action(kind, stage, micro)
        for first in range(0, microbatches, rounds)
        for stage in stages
        for micro in range(first, min(microbatches, first + rounds))
    )


# ---- time


class Span(NamedTuple):
    """When an action was done, in seconds or units of cost from the beginning of the step."""

    action: Action
    begin: float
    end: float


Cost = Callable[[Action], float]


def unit_cost(action: Action) -> float:
    """Return the usual proportions: a backward pass takes twice as long as a forward pass.

    Nobody waits for gradients of what the first stage is given: there all of it is for the weights.
    """
    kind, stage, _ = action
    if not stage and kind in "IW":
        return UNIT_COSTS["B"] if kind == "W" else 0.0
    return UNIT_COSTS[kind]


def times_of(plan: Plan, cost: Cost = unit_cost) -> list[list[Span]]:
    """Return for each rank when it does what, if messages take no time. Pure.

    Args:
        plan: what the ranks do, in which order, as `plan_pipeline` returns it.
        cost: returns how long an action takes, in any unit.

    Example:
        >>> plan = plan_pipeline("1F1B", 2, 3)
        >>> len(times_of(plan)), times_of(plan)[0][0].begin
        (2, 0.0)

    """
    ended: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in plan.table]
    ahead = [deque(actions) for actions in plan.table]
    waiting = list(range(plan.ranks))
    while waiting:
        rank = waiting.pop()
        free = spans[rank][-1].end if spans[rank] else 0.0
        while ahead[rank]:
            action = ahead[rank][0]
            ready = [ended.get(each) for each in needs(action, plan)]
            if None in ready:
                break
            begin = max([free, *(each for each in ready if each is not None)])
            free = ended[action] = begin + cost(action)
            spans[rank].append(Span(ahead[rank].popleft(), begin, free))
            waiting += [
                plan.rank_of(near)
                for near in (action.stage - 1, action.stage + 1)
                if 0 <= near < plan.stages and plan.rank_of(near) != rank
            ]
    return spans


def needs(action: Action, plan: Plan) -> list[Action]:
    """Return what another stage has to do before an action, its own forward pass included. Pure."""
    kind, stage, micro = action
    if kind == "F":
        return [Action("F", stage - 1, micro)] if stage else []
    if kind == "W":
        return [Action("I", stage, micro)]
    before = [Action("F", stage, micro)]
    return before if stage == plan.stages - 1 else [*before, Action(kind, stage + 1, micro)]


def bubble_of(spans: Sequence[Sequence[Span]]) -> float:
    """Return the part of the time in which ranks are idle, from 0 to 1. Pure."""
    last = max((span.end for each in spans for span in each), default=0.0)
    busy = sum(span.end - span.begin for each in spans for span in each)
    whole = last * len(spans)
    return (whole - busy) / whole if whole else 0.0


def predict_bubble(
    schedule: str,
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    placement: Placement | None = None,
    cost: Cost = unit_cost,
) -> float:
    """Return the share of a step in which ranks are idle, if messages take no time. Pure.

    Args:
        schedule: one of `NAMES`.
        ranks: how many ranks the pipeline has.
        microbatches: how many micro-batches go through it.
        chunks: how many stages each rank has.
        placement: where they are; None for what the schedule needs.
        cost: the time for each action; default: 1 for a forward pass and 2 for a backward pass.

    Example:
        >>> predict_bubble("1F1B", 2, 4)
        0.2

    """
    return bubble_of(
        times_of(plan_pipeline(schedule, ranks, microbatches, chunks, placement), cost)
    )
