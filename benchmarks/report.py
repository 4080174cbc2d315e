"""`Report`: what a benchmark found, as tables, as JSON and as a picture."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcdist.bench.plots import Panel, check_plot, draw_panels, heading_of, panels_of
from hpcdist.bench.runfile import describe_setting
from hpcdist.bench.tables import plain_console, print_rows, print_table
from hpcdist.errors import UsageError

RESULTS = Path(__file__).parent / "results"

Row = Mapping[str, Any]


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
    given = parse(parser)
    chosen = given.rounds or (3 if given.quick else rounds)
    return Options(chosen, given.quick, given.json, given.plot)


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, which has ``--plot``: whether it can be drawn is known at once."""
    given = parser.parse_args()
    if given.plot:
        try:
            check_plot(given.plot)
        except UsageError as error:
            parser.error(str(error))
    return given


class Report:
    """The findings of one run; only rank 0 prints and writes."""

    def __init__(self, name: str, options: Options, comm: Any = None, mpi: str = "") -> None:
        self._name, self._options = name, options
        self._quiet = comm is not None and comm.rank > 0
        self._setting = _setting(comm, mpi)
        self._tables: dict[str, Sequence[Row]] = {}
        self._panels: list[Panel] = []
        self._console = plain_console()
        if not self._quiet:
            words = (f"{key} {value}" for key, value in self._setting.items())
            self._console.print(f"[bold]{name}[/bold]: {', '.join(words)}")

    def table(
        self, title: str, columns: Mapping[str, Callable[[Any], str]], rows: Sequence[Row]
    ) -> None:
        """Print a table. `columns` says how each is shown; None is an empty cell."""
        if self._quiet:
            return
        print_table(self._console, title, columns, rows)
        self._tables[title] = rows

    def rows(self, title: str, rows: list[dict[str, Any]]) -> None:
        """Print rows of `hpcdist.bench`, and keep them for the picture."""
        if self._quiet:
            return
        print_rows(self._console, rows)
        self._tables[title] = rows
        self._panels += panels_of(rows)

    def boxes(self, title: str, samples: Mapping[str, Sequence[float]]) -> None:
        """Keep seconds for the picture: by candidate, one for each round."""
        self._panels.append((title, lambda axes: _boxes(axes, samples)))

    def panel(self, title: str, draw: Callable[[Any], None]) -> None:
        """Keep a part of the picture: what draws it on matplotlib's axes."""
        self._panels.append((title, draw))

    def note(self, *notes: str) -> None:
        """Print what there is to say beside the tables."""
        if not self._quiet:
            for note in notes:
                self._console.print(note)

    def close(self) -> None:
        """Write the files that were asked for."""
        if self._quiet:
            return
        if self._options.json:
            mpi, ranks = self._setting["mpi"].replace(" MPI", "mpi").lower(), self._setting["ranks"]
            path = RESULTS / f"{self._name} {mpi} {ranks} ranks.json".replace(" ", "-")
            path.parent.mkdir(exist_ok=True)
            found = {"setting": self._setting, "tables": self._tables}
            path.write_text(json.dumps(found, indent=1, default=float) + "\n")
            self._console.print(f"wrote {path}")
        if self._options.plot:
            draw_panels(self._panels, self._options.plot, heading_of(self._setting))


def _setting(comm: Any, mpi: str) -> dict[str, Any]:
    """Say where the numbers come from; a benchmark that starts the ranks names its `mpi`."""
    if comm is None:
        return describe_setting(mpi or "no MPI", 1, 1)
    from hpcdist.bench.libraries.mpi4py import version

    nodes = len(set(comm.allgather(socket.gethostname())))
    return describe_setting(version(), comm.size, nodes)


def _boxes(axes: Any, samples: Mapping[str, Sequence[float]]) -> None:
    """Draw how long the middle half of the rounds took, and the middle one, per candidate."""
    axes.boxplot([[1e3 * each for each in taken] for taken in samples.values()], showfliers=False)
    axes.set_xticks(range(1, len(samples) + 1), samples, rotation=30, ha="right")
    axes.set(ylabel="milliseconds", ylim=(0, None))
