"""`Observed`: what the ranks of a pipeline computed in a step, and when."""

from __future__ import annotations

from pathlib import Path

from hpcdist.comm.group import Group
from hpcdist.comm.objects import tell_all
from hpcdist.comm.together import Together
from hpcdist.named_tuple import NamedTuple
from hpcdist.torch.pipeline.schedule import Plan, Span, bubble_of, times_of
from hpcdist.torch.pipeline.timeline import (
    Bubble,
    Spans,
    check_picture,
    measured_bubble,
    picture_of,
)


class Observed(NamedTuple):
    """A step: its plan, and when this rank of `group` did which action."""

    plan: Plan
    spans: list[Span]
    group: Group

    def bubble(self) -> Bubble:
        """Return in which part of the step ranks were idle. Collective."""
        return _bubble(self.plan, self.timeline())

    def timeline(self) -> list[list[Span]]:
        """Return for each rank what it did when. Collective."""
        everyone = tell_all("the timeline of a pipeline", self.spans, self.group)
        return [[Span(*each) for each in spans] for spans in everyone]

    def draw(self, path: str | Path) -> None:
        """Draw on the first rank, to a file, what all ranks did. Collective."""
        plan, spans = self.plan, self.timeline()
        heading = (
            f"{plan.schedule}, {plan.stages} stages on {plan.ranks} ranks, {plan.microbatches} "
            f"micro-batches: {_bubble(plan, spans)}"
        )

        def write() -> None:
            check_picture(path).write_text(picture_of(spans, heading))

        Together(self.group).lead(write)


def _bubble(plan: Plan, spans: Spans) -> Bubble:
    return Bubble(measured_bubble(spans), bubble_of(times_of(plan)))
