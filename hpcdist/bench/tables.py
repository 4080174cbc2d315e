"""Rows as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from hpcdist.bench.figures import bandwidth, duration, percent, rate, times
from hpcdist.bench.rows import ENOUGH_SAMPLES
from hpcdist.diagnostics.sizes import volume

Columns = Mapping[str, Callable[[Any], str]]
"""How the value of each column is shown, by heading."""

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
    ("hpcdist takes", "ratio", times),
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
        fewest = min(row["samples"] for row in part)
        caption = f"p99 of {fewest} samples is nearly their largest"
        few = 1 < fewest < ENOUGH_SAMPLES
        print_table(console, title, columns, shown, caption if few else None)


def _parts(
    rows: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    def where(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return row["case"], row["dtype"], row["memory"], row["ranks"], row["nodes"]

    for (case, dtype, memory, ranks, nodes), part in groupby(rows, where):
        yield title_of(case, dtype, memory, ranks, nodes), list(part)


def title_of(case: str, dtype: str | None, memory: str | None, ranks: int, nodes: int) -> str:
    """Say what was measured where."""
    kind = f", {dtype}" if dtype else ""
    kind += f", {memory} memory" if memory not in (None, "ordinary") else ""
    return f"{case}{kind}, {_several(ranks, 'rank')} on {_several(nodes, 'node')}"


def _several(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
