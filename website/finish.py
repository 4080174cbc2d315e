"""What is done to the site after Zensical has built it: `python -m website.finish site`."""

from __future__ import annotations

import sys
from pathlib import Path

from website import moved, search


def finish(site: Path) -> None:
    """Arrange what the search finds, and let old addresses lead on."""
    search.arrange(site)
    moved.write(site)


if __name__ == "__main__":
    finish(Path(sys.argv[1]))
