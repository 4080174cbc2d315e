"""When stages computed: the bubble that was measured, and pictures of schedules, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.text import duration
from hpcdist.torch.pipeline.schedule import Kind, Span, bubble_of

Spans = Sequence[Sequence[Span]]
"""For each rank what it did, and when."""


class Bubble(NamedTuple):
    """The part of a step in which ranks were idle, from 0 to 1."""

    measured: float
    predicted: float
    """If a backward pass takes twice as long as a forward pass, and messages take no time."""

    def __str__(self) -> str:
        return f"bubble {self.measured:.3f} (predicted {self.predicted:.3f})"


def measured_bubble(spans: Spans) -> float:
    """Return the part of the time from the first action to the last in which ranks were idle."""
    first = min((span.begin for each in spans for span in each), default=0.0)
    moved = [
        [Span(action, begin - first, end - first) for action, begin, end in each] for each in spans
    ]
    return bubble_of(moved)


_COLOURS: dict[Kind, str] = {"F": "#4c78a8", "B": "#59a14f", "I": "#59a14f", "W": "#b6d7a8"}
_MEANINGS: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward, inputs",
    "W": "backward, weights",
}
_WIDTH, _ROW, _LEFT, _TOP = 960.0, 28, 56, 34


def check_picture(path: str | Path) -> Path:
    """Return where a picture goes; it must be an SVG."""
    target = Path(path)
    if target.suffix.lower() != ".svg":
        raise UsageError(f"a picture of a schedule is an SVG, got {str(path)!r}; end it in .svg")
    return target


def picture_of(spans: Spans, heading: str, *, in_seconds: bool = True) -> str:
    """Return a picture of what each rank did, time from left to right, as SVG. Pure.

    In the boxes are the numbers of the micro-batches; those of further stages of a rank are darker.
    """
    last = max((span.end for each in spans for span in each), default=0.0) or 1.0
    scale = (_WIDTH - _LEFT - 8) / last
    stages = [sorted({span.action.stage for span in each}) for each in spans]
    height = _TOP + _ROW * len(spans) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:g}" height="{height}" '
        f'viewBox="0 0 {_WIDTH:g} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH:g}" height="{height}" fill="white"/>',
        f'<text x="8" y="20" font-size="13">{escape(heading)}</text>',
    ]
    for rank, own in enumerate(spans):
        top = _TOP + _ROW * rank
        parts.append(f'<text x="8" y="{top + 17}">rank {rank}</text>')
        for span in own:
            chunk = stages[rank].index(span.action.stage)
            parts += _box(span, top, scale, chunk)
    parts += _legend(spans, _TOP + _ROW * len(spans) + 8)
    end = duration(last) if in_seconds else f"{last:g} units"
    parts.append(
        f'<text x="{_WIDTH - 8:g}" y="{height - 14}" text-anchor="end">{escape(end)}</text></svg>'
    )
    return "\n".join(parts) + "\n"


def _box(span: Span, top: float, scale: float, chunk: int) -> list[str]:
    (kind, stage, micro), begin, end = span
    left, width = _LEFT + begin * scale, max(0.5, (end - begin) * scale)
    title = f"{_MEANINGS[kind]}, stage {stage}, micro-batch {micro}"
    dark = min(0.6, 0.25 * chunk)
    shade = f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_ROW - 6}"'
    box = [f'{shade} fill="{_COLOURS[kind]}" stroke="white"><title>{title}</title></rect>']
    if dark:
        box.append(f'{shade} fill="black" fill-opacity="{dark:g}" pointer-events="none"/>')
    if width >= 7 * len(str(micro)):
        middle = left + width / 2
        box.append(
            f'<text x="{middle:.1f}" y="{top + 15}" text-anchor="middle" fill="white" '
            f'pointer-events="none">{micro}</text>'
        )
    return box


def _legend(spans: Spans, top: float) -> list[str]:
    used = {span.action.kind for each in spans for span in each}
    parts, left = [], float(_LEFT)
    for kind in (each for each in _MEANINGS if each in used):
        parts.append(
            f'<rect x="{left:g}" y="{top}" width="12" height="12" fill="{_COLOURS[kind]}"/>'
            f'<text x="{left + 17:g}" y="{top + 10}">{_MEANINGS[kind]}</text>'
        )
        left += 40 + 7 * len(_MEANINGS[kind])
    return parts
