"""The names of the reference from A to Z: `python -m website.names` writes their page."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs/reference"
PAGE = FOLDER / "names.md"
HEAD = """\
# Names from A to Z

Every name that the reference describes, without the `hpcdist.` before it.
"""


def places() -> list[tuple[str, str]]:
    """Return each name with its page, by the last part of the name."""
    found = [
        (name, page.name)
        for page in FOLDER.glob("*.md")
        for name in re.findall(r"^::: hpcdist\.(\S+)$", page.read_text(), re.M)
    ]
    return sorted(found, key=lambda place: (_last(place[0]).lower(), place))


def page() -> str:
    """Return the page: a paragraph of links for each letter."""
    letters = [
        f"## {letter}\n\n"
        + ",\n".join(f"[`{name}`]({file}#hpcdist.{name})" for name, file in group)
        + "\n"
        for letter, group in groupby(places(), key=lambda place: _last(place[0])[0].upper())
    ]
    return "\n".join([HEAD, *letters])


def _last(name: str) -> str:
    return name.rpartition(".")[2]


if __name__ == "__main__":
    PAGE.write_text(page())
