"""Where pages were before: their addresses lead to where their text is today.

Zensical's plugin for this lets every page ask a server for a list, which fails where the site is
read from files.
"""

from __future__ import annotations

from pathlib import Path

MOVED = {
    "errors": "troubleshooting.html#errors",
    "faq": "troubleshooting.html#questions",
    "file-systems": "checkpoints.html#file-systems",
    "fleet-layers": "fleet.html#layers-that-are-cut",
    "fleet-pipeline": "fleet.html#pipelines",
    "hanging": "troubleshooting.html#when-a-job-hangs",
    "rpc-tasks": "rpc.html#tasks-on-other-ranks",
    "tuning": "benchmarks.html#tuning-a-site",
}
"""Pages that are gone, and the sections that have their text under the same headings."""

PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Moved</title>
<link rel="canonical" href="{page}">
<script>location.replace("{page}" + (location.hash || "#{section}"))</script>
<noscript><meta http-equiv="refresh" content="0; url={page}#{section}"></noscript>
<p>This page is now <a href="{page}#{section}">a section of another one</a>.</p>
</html>
"""


def write(site: Path) -> None:
    """Write a page at each old address."""
    for old, place in MOVED.items():
        page, _, section = place.partition("#")
        (site / f"{old}.html").write_text(PAGE.format(page=page, section=section))
