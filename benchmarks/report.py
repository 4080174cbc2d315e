"""`Report`: what a benchmark found, as tables, as JSON and as a picture."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"

Row = Mapping[str, Any]
Points = Sequence[tuple[float, float]]


class Panel(NamedTuple):
    """One part of the picture: data by contestant, and how they are drawn."""

    draw: Callable[[Any, Mapping[str, Any]], None]
    data: Mapping[str, Any]


class Options(NamedTuple):
    """What every benchmark is told on its command line."""

    rounds: int
    quick: bool
    json: bool
    plot: str | None


def read_options(what: str, *, rounds: int) -> Options:
    """Parse the command line; `rounds` is the default number of rounds."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--rounds", type=int, help=f"rounds of each race (default {rounds})")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it works")
    parser.add_argument("--json", action="store_true", help="write to benchmarks/results/")
    parser.add_argument("--plot", metavar="FILE.png", help="draw a picture (needs matplotlib)")
    given = parser.parse_args()
    chosen = given.rounds or (3 if given.quick else rounds)
    return Options(chosen, given.quick, given.json, given.plot)


class Report:
    """The findings of one run; only rank 0 prints and writes."""

    def __init__(self, name: str, options: Options, comm: Any = None, mpi: str = "") -> None:
        self._name, self._options = name, options
        self._quiet = comm is not None and comm.rank > 0
        self._setting = {} if self._quiet else _setting(comm, mpi)
        self._tables: dict[str, Sequence[Row]] = {}
        self._panels: dict[str, Panel] = {}
        # a rank's terminal is the launcher's invention: plain text of a fixed width
        self._console = Console(width=120, force_terminal=False, highlight=False)
        if not self._quiet:
            self._console.print(f"[bold]{name}[/bold]: {', '.join(self._setting.values())}")

    def table(
        self, title: str, columns: Mapping[str, Callable[[Any], str]], rows: Sequence[Row]
    ) -> None:
        """Print a table. `columns` says how each is shown; None is an empty cell."""
        if self._quiet:
            return
        table = Table(title=title, title_justify="left")
        for number, heading in enumerate(columns):
            table.add_column(heading, justify="right" if number else "left")
        for row in rows:
            values = {heading: row.get(heading) for heading in columns}
            table.add_row(
                *("" if value is None else columns[key](value) for key, value in values.items())
            )
        self._console.print(table)
        self._tables[title] = rows

    def panel(self, title: str, curves: Mapping[str, Points]) -> None:
        """Keep curves for the picture: by contestant, (bytes, seconds)."""
        self._panels[title] = Panel(_curves, curves)

    def boxes(self, title: str, samples: Mapping[str, Sequence[float]]) -> None:
        """Keep seconds for the picture: by contestant, one for each round."""
        self._panels[title] = Panel(_boxes, samples)

    def close(self) -> None:
        """Write the files that were asked for."""
        if self._quiet:
            return
        if self._options.json:
            words = f"{self._name} {self._setting['MPI']}".replace(",", "")
            path = RESULTS / (words.replace(" ", "-") + ".json")
            path.parent.mkdir(exist_ok=True)
            curves = {title: panel.data for title, panel in self._panels.items()}
            found = {"setting": self._setting, "tables": self._tables, "curves": curves}
            path.write_text(json.dumps(found, indent=1, default=float) + "\n")
            self._console.print(f"wrote {path}")
        if self._options.plot and self._panels:
            _draw(self._panels, self._options.plot)


def _setting(comm: Any, mpi: str) -> dict[str, str]:
    """Say where the numbers come from; a benchmark that starts the ranks names its `mpi`."""
    ranks = ""
    if comm is not None:
        from mpi4py import MPI

        vendor, numbers = MPI.get_vendor()
        mpi = f"{vendor.replace(' ', '')} {'.'.join(map(str, numbers))}".lower()
        ranks = f", {comm.size} rank{'s' * (comm.size > 1)}"
    return {
        "MPI": f"{mpi or 'no MPI'}{ranks}",
        "mpi4py": f"mpi4py {version('mpi4py')}",
        "numpy": f"numpy {version('numpy')}",
        "python": f"Python {platform.python_version()}",
        "cores": f"{os.cpu_count()} cores (load {os.getloadavg()[0]:.1f})",
        "date": time.strftime("%Y-%m-%d"),
    }


def _draw(panels: Mapping[str, Panel], path: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed", file=sys.stderr)
        return
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns, 3.6 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, (title, panel) in zip(grid, panels.items(), strict=False):
        panel.draw(axes, panel.data)
        axes.set(title=title)
        axes.grid(alpha=0.3)
    for axes in grid[len(panels) :]:
        axes.remove()
    if grid[0].get_legend_handles_labels()[1]:
        grid[0].legend()
    figure.savefig(path, dpi=120)


def _curves(axes: Any, curves: Mapping[str, Points]) -> None:
    """Draw log-log: time over size, one line per contestant."""
    for name, points in curves.items():
        axes.loglog(*zip(*points, strict=True), marker=".", label=name)
    axes.set(xlabel="bytes", ylabel="seconds")


def _boxes(axes: Any, samples: Mapping[str, Sequence[float]]) -> None:
    """Draw how long the middle half of the rounds took, and the middle one, per contestant."""
    axes.boxplot([[1e3 * each for each in taken] for taken in samples.values()], showfliers=False)
    axes.set_xticks(range(1, len(samples) + 1), samples, rotation=30, ha="right")
    axes.set(ylabel="milliseconds", ylim=(0, None))


# ---- numbers for people


def duration(seconds: float) -> str:
    """Show seconds with a fitting unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def volume(nbytes: int) -> str:
    """Show bytes with a binary unit."""
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):g} {unit}"
    return f"{nbytes} B"


def times(ratio: float) -> str:
    """Show a ratio."""
    return f"{ratio:.2f} x"


def percent(share: float) -> str:
    """Show a share."""
    return f"{100 * share:.0f} %"
