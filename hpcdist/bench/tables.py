"""Rows as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from hpcdist.bench.rows import ENOUGH_SAMPLES
from hpcdist.text import bandwidth, duration, percent, rate, times, volume

Columns = Mapping[str, Callable[[Any], str]]
"""How the value of each column is shown, by heading."""

_TAKES = "hpcdist takes"
_RATIO = f"{_TAKES}: its time / the time of the row; above 1 x it is slower"

# Heading, key of the row, how it is shown. A column without values is left out.
_SHOWN: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("size", "nbytes", volume),
    ("library", "library", str),
    ("median", "median_s", duration),
    ("min", "min_s", duration),
    ("p99", "p99_s", duration),
    ("straggler", "straggler", times),
    ("algbw", "bandwidth", bandwidth),
    ("busbw", "bus_bandwidth", bandwidth),
    ("messages", "rate", rate),
    ("alone", "alone_s", duration),
    ("hidden", "hidden", percent),
    ("communication", "communication_s", duration),
    (_TAKES, "ratio", times),
)


def plain_console() -> Console:
    """Return a console for a rank's output: plain text of a fixed width."""
    # a rank's terminal is the launcher's invention
    return Console(width=130, force_terminal=False, highlight=False)


def print_table(
    console: Console,
    title: str,
    columns: Columns,
    rows: Sequence[Mapping[str, Any]],
    caption: str | None = None,
) -> None:
    """Print a table; None is an empty cell."""
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for heading, show in columns.items():
        table.add_column(heading, justify="left" if show is str else "right")
    for row in rows:
        values = {heading: row.get(heading) for heading in columns}
        table.add_row(
            *("" if value is None else columns[key](value) for key, value in values.items())
        )
    console.print(table)


def print_rows(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows of one case, in one table for each dtype, kind of memory and ranks."""
    for title, part in _parts(rows):
        compared = {row["library"] for row in part} - {"hpcdist"}
        used = [
            each
            for each in _SHOWN
            if any(row.get(each[1]) is not None for row in part)
            and (compared or each[1] != "ratio")
        ]
        columns = {heading: show for heading, _, show in used}
        shown = [{heading: row.get(key) for heading, key, _ in used} for row in part]
        print_table(console, title, columns, shown, _caption(part, columns))


def _caption(rows: Sequence[Mapping[str, Any]], columns: Columns) -> str | None:
    """Return the caption of a table."""
    fewest = min(row["samples"] for row in rows)
    few = 1 < fewest < ENOUGH_SAMPLES
    words = [_RATIO] if _TAKES in columns else []
    words += [f"p99 of {fewest} samples is nearly their largest"] if few else []
    return "\n".join(words) or None


def _parts(
    rows: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    def where(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return row["case"], row["dtype"], row["memory"], row["ranks"], row["nodes"]

    for (case, dtype, memory, ranks, nodes), part in groupby(rows, where):
        yield title_of(case, dtype, memory, ranks, nodes), list(part)


def title_of(case: str, dtype: str | None, memory: str | None, ranks: int, nodes: int) -> str:
    """Return what was measured where, in words."""
    kind = f", {dtype}" if dtype else ""
    kind += f", {memory} memory" if memory not in (None, "ordinary") else ""
    return f"{case}{kind}, {several(ranks, 'rank')} on {several(nodes, 'node')}"


def several(number: int, what: str) -> str:
    """Return how many there are, in words."""
    return f"{number} {what}{'s' * (number != 1)}"
