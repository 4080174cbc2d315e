"""Diagrams in fenced blocks, rendered when the site is built: no script draws them in the browser.

A `mermaid` block that is a chain of boxes, a `flowchart TB` with lines such as
`a["<b>name</b><br>text"] --> b`, becomes a list in HTML. GitHub draws the same block itself.
"""

from __future__ import annotations

import re
from html import escape
from typing import Any

_BOX = r'(?P<name>\w+)(?:\["<b>(?P<title>[^"<]+)</b><br>(?P<about>[^"<]+)"\])'
_LINE = re.compile(rf"\s*{_BOX}(?:\s*-->\s*(?P<next>\w+))?\s*")


def chain(source: str) -> list[tuple[str, str]]:
    """Return title and text of each box from the first one to the last; refuse other diagrams."""
    head, *lines = [line for line in source.splitlines() if line.strip()]
    boxes = [_LINE.fullmatch(line) for line in lines]
    if head.strip() != "flowchart TB" or None in boxes:
        raise ValueError(f"only a flowchart TB of boxes in a chain is rendered, got:\n{source}")
    found = [box for box in boxes if box is not None]
    follows = [box["next"] for box in found]
    if follows != [*[box["name"] for box in found[1:]], None]:
        raise ValueError(f"each box must point to the one on the next line, got:\n{source}")
    return [(box["title"], box["about"]) for box in found]


def flowchart(source: str, language: str, css_class: str, options: Any, md: Any, **_: Any) -> str:
    """Format a fenced block (the signature is that of `pymdownx.superfences`)."""
    items = "".join(
        f"<li><strong>{escape(title)}</strong><span>{escape(about)}</span></li>"
        for title, about in chain(source)
    )
    return f'<ol class="chain">{items}</ol>'
