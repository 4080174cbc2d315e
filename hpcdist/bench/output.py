"""`Output`: what rank 0 prints and writes, while the ranks measure and after that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console

from hpcdist.bench.baseline import compare, summary
from hpcdist.bench.cases import CASES, USUAL_SIZES
from hpcdist.bench.plots import draw_predictions, draw_rows, heading_of, predicted_path
from hpcdist.bench.progress import Bar
from hpcdist.bench.request import Request
from hpcdist.bench.rows import LIMITS, OWN, Row
from hpcdist.bench.runfile import write_run
from hpcdist.bench.tables import Columns, plain_console, print_rows, print_table
from hpcdist.text import duration, times, volume

REGRESSED = 1

_REGRESSIONS: Columns = {
    **dict.fromkeys(("case", "library", "dtype", "memory"), str),
    "nbytes": volume,
    "ranks": str,
    **dict.fromkeys(("was_s", "median_s"), duration),
    **dict.fromkeys(("median_ratio", "min_ratio"), times),
}
_MODELS: Columns = {
    **dict.fromkeys(("case", "library", "dtype", "memory"), str),
    "alpha_us": "{:.2f}".format,
    "GB_per_s": "{:.2f}".format,
    "residual": "{:.0%}".format,
    "points": str,
    "network": str,
}
_PREDICTIONS: Columns = {
    **dict.fromkeys(("case", "library", "dtype", "memory", "ranks", "nodes"), str),
    "nbytes": volume,
    "seconds": duration,
    "assumed": str,
}


class Output:
    """Prints tables to standard output and, if wanted, progress to standard error."""

    def __init__(self, setting: dict[str, Any], progress: bool) -> None:
        self._setting = setting
        self._console = plain_console()
        self._bar = Bar(progress)
        self.at = self._bar.at
        self.close = self._bar.clear
        self._console.print(_describe_setting(setting))
        if setting["ranks"] == 1:
            self._console.print("one rank has nobody to talk to: start more by -n, srun or mpiexec")

    def found(self, case: str, rows: list[Row]) -> None:
        """Print the rows of one case."""
        self._bar.clear()  # it may be on the same terminal
        if rows:
            print_rows(self._console, rows)
        elif CASES[case].least > 1:
            self._console.print(f"{case} needs {CASES[case].least} ranks")

    def finish(
        self, request: Request, rows: list[Row], baseline: list[Row], notes: Sequence[str]
    ) -> int:
        """Write, draw, compare and predict what was asked for; return the exit code."""
        say = self._console.print
        for note in dict.fromkeys(notes):
            say(note)
        if request.json_file:
            write_run(request.json_file, self._setting, rows)
            say(f"wrote {request.json_file}")
        if request.plot:
            _draw(say, draw_rows, rows, request.plot, self._setting)
        code = self._compare(request, rows, baseline) if request.baseline else 0
        if request.predict:
            print_predictions(self._console, request, rows, self._setting)
        return code

    def _compare(self, request: Request, rows: list[Row], baseline: list[Row]) -> int:
        found = compare(rows, baseline, request.tolerance)
        if found.regressions:
            print_table(self._console, "Slower than before", _REGRESSIONS, found.regressions)
        self._console.print(summary(found, request.tolerance))
        return REGRESSED if found.regressions else 0


def _describe_setting(setting: dict[str, Any]) -> str:
    ranks, nodes = setting["ranks"], setting["nodes"]
    device = f"; arrays on {setting['device']}" if "device" in setting else ""
    return (
        f"{setting['mpi']}, mpi4py {setting['mpi4py']}, NumPy {setting['numpy']}, Python "
        f"{setting['python']}; ranks: {ranks}, nodes: {nodes}, processors of this node: "
        f"{setting['cores']}{device}"
    )


def print_predictions(
    console: Console, request: Request, rows: Iterable[Row], setting: dict[str, Any]
) -> None:
    """Fit models to the rows and print, and draw, what they say for more ranks."""
    from hpcdist.bench.predict import explain, fit, predict

    models = fit(predictable(rows))
    print_table(console, "Fitted models", _MODELS, explain(models))
    found = predict(models, request.predict, request.plan.sizes or USUAL_SIZES)
    print_table(console, "Predicted", _PREDICTIONS, found)
    if request.plot:
        _draw(console.print, draw_predictions, found, predicted_path(request.plot), setting)


def predictable(rows: Iterable[Row]) -> list[Row]:
    """Return the rows to fit models to: of libraries, and not of a case with one size only.

    Where nothing of hpcdist would be left, all rows: their fit says what is missing.
    """
    rows = [row for row in rows if row["library"] not in LIMITS]
    sizes: dict[tuple[Any, ...], set[Any]] = {}
    for row in rows:
        sizes.setdefault(_series(row), set()).add(row["nbytes"])
    fit = [row for row in rows if row["nbytes"] is None or len(sizes[_series(row)]) > 1]
    return fit if any(row["library"] == OWN and row["nbytes"] is not None for row in fit) else rows


def _series(row: Row) -> tuple[Any, ...]:
    return row["case"], row["library"], row["dtype"], row["memory"]


def _draw(
    say: Callable[..., Any],
    draw: Callable[[Any, str, str], bool],
    rows: Any,
    path: str,
    setting: dict[str, Any],
) -> None:
    drawn = draw(rows, path, heading_of(setting))
    say(f"wrote {path}" if drawn else f"nothing to draw: {path} was not written")
