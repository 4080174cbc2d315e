"""A picture as SVG: a few shapes, in the colours of ranks, the same bytes whenever it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

RANKS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
"""The colours of ranks 0 to 3, which colour-blind readers can tell apart."""

INK, QUIET, PAPER = "#1f2430", "#6b7280", "#ffffff"

MOTION = """\
<style>
@media screen and (prefers-reduced-motion: no-preference) {
  .moves { animation: move 9s ease-in-out infinite; }
  .arrives { animation: arrive 9s infinite; }
  @keyframes move {
    0%, 35%, 85%, 100% { transform: none; }
    35.01%, 50% { transform: translate(var(--x), var(--y)); }
  }
  @keyframes arrive {
    0%, 35%, 85%, 100% { opacity: 1; }
    35.01%, 80% { opacity: 0; }
  }
}
</style>"""
"""Shows the end first, then how it comes to it. Without motion, as in print, it is the end."""

Point = tuple[float, float]


class Picture:
    """A drawing in points from the upper left corner; `title` is for readers who cannot see it."""

    def __init__(self, width: float, height: float, title: str):
        self.width, self.height, self.title = width, height, title
        self.has_motion = False
        self.shapes = [f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>']

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = "none",
        stroke: str = "none",
        dashed: bool = False,
    ) -> None:
        """Draw a rectangle."""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'fill="{fill}" stroke="{stroke}" stroke-width="1.5"{dashes}/>'
        )

    def patch(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """Draw a rectangle without a frame, whose corners are not round."""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"/>'
        )

    def line(self, points: Sequence[Point], stroke: str, width: float) -> None:
        """Draw a curve through points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width:g}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 13,
        fill: str = INK,
        anchor: str = "middle",
        mono: bool = False,
        bold: bool = False,
    ) -> None:
        """Write a line whose middle is at `y`."""
        family = "ui-monospace, monospace" if mono else "system-ui, sans-serif"
        weight = ' font-weight="600"' if bold else ""
        self.shapes.append(
            f'<text x="{x:g}" y="{y + size * 0.35:g}" font-family="{family}" font-size="{size:g}" '
            f'fill="{fill}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, stroke: str = QUIET) -> None:
        """Draw a line that ends in a head."""
        self.shapes.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{stroke}" '
            'stroke-width="1.8" marker-end="url(#head)"/>'
        )

    def cell(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        ranks: Sequence[int],
        words: str = "",
        origins: Sequence[Point] = (),
    ) -> None:
        """Draw what comes from `ranks`, a stripe for each; from none of them an empty frame.

        With `origins` each stripe comes from the cell whose upper left corner is there.
        """
        fill = "#f3f4f6" if origins or not ranks else "none"
        self.box(x, y, width, height, fill=fill, stroke="#d1d5db")
        stripe = width / max(len(ranks), 1)
        for place, rank in enumerate(ranks):
            left = x + place * stripe
            self.shapes.append(
                f'<rect x="{left:g}" y="{y:g}" width="{stripe:g}" height="{height:g}" '
                f'fill="{RANKS[rank]}"{_moving_by(origins, place, (left, y))}/>'
            )
        if words and ranks:
            self.text(x + width / 2, y + height / 2, words, 12, fill=PAPER, bold=True)
        if origins:
            self.has_motion = True
            if words:
                self.shapes[-1] = self.shapes[-1].replace("<text", '<text class="arrives"', 1)

    def __str__(self) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img">',
                f"<title>{escape(self.title)}</title>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
                f'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{QUIET}"/>'
                "</marker></defs>",
                *([MOTION] if self.has_motion else []),
                *self.shapes,
                "</svg>\n",
            ]
        )


def _moving_by(origins: Sequence[Point], place: int, end: Point) -> str:
    if not origins:
        return ""
    (x, y), (end_x, end_y) = origins[place], end
    return f' class="moves" style="--x:{x - end_x:g}px;--y:{y - end_y:g}px"'
