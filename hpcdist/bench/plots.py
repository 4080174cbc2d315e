"""Pictures of a run: time over size, log-log, one line for each library; PNG or SVG.

The line is the median; the band around it, or the whisker of a bar, goes from the fastest round
to the 99th percentile.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist.bench.rows import COPY, PINNED, Row
from hpcdist.bench.runfile import check_writable
from hpcdist.bench.tables import several, title_of
from hpcdist.errors import UsageError
from hpcdist.text import duration, volume

ENDINGS = (".png", ".svg")
_COLOURS = {"hpcdist": "C0", "mpi4py": "C1", "torch": "C2", "paddle": "C3", "nccl": "C4"}
_LIMIT_STYLES = {
    COPY: {"color": "grey", "linestyle": "--", "label": "copying the bytes once"},
    PINNED: {"color": "grey", "linestyle": ":", "label": "copying to locked host memory and back"},
}

_LOG_FROM = 100
"""Bars whose lengths differ by this factor or more are drawn logarithmically."""

Panel = tuple[str, Callable[[Any], None]]
"""One part of a picture: its title, and what draws it on matplotlib's axes."""


def check_plot(path: str) -> None:
    """Raise `UsageError` where no picture `path` can be drawn."""
    if Path(path).suffix.lower() not in ENDINGS:
        raise UsageError(f"--plot {path}: a picture ends in {' or '.join(ENDINGS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib, or leave it out")
    check_writable(path)


def predicted_path(path: str) -> str:
    """Return where the picture of the prediction goes beside the one of the run."""
    target = Path(path)
    return str(target.with_name(f"{target.stem}-predicted{target.suffix}"))


def heading_of(setting: Mapping[str, Any]) -> str:
    """Write where and when a run was measured, then its MPI, device, ranks and nodes, if known."""
    where = [setting.get("host"), setting.get("date", "")[:10]]
    what = [setting.get("mpi"), setting.get("device")]
    what += [several(setting[f"{of}s"], of) for of in ("rank", "node") if f"{of}s" in setting]
    lines = [", ".join(filter(None, words)) for words in (where, what)]
    return "\n".join(filter(None, lines))


def draw_rows(rows: Sequence[Row], path: str, heading: str = "") -> bool:
    """Draw a run, a panel for each case, dtype, kind of memory and number of ranks.

    Returns:
        Whether there was anything to draw.

    """
    return draw_panels(panels_of(rows), path, heading)


def panels_of(rows: Sequence[Row]) -> list[Panel]:
    """Return the panels of a run: curves over the sizes, bars where there are not several."""
    parts: dict[str, list[Row]] = {}
    for row in rows:
        title = title_of(row["case"], row["dtype"], row["memory"], row["ranks"], row["nodes"])
        parts.setdefault(title, []).append(row)
    return [(title, _panel_of(part)) for title, part in parts.items()]


def _panel_of(rows: list[Row]) -> Callable[[Any], None]:
    sized = [row for row in rows if row["nbytes"]]
    if len({row["nbytes"] for row in sized}) > 1:
        return lambda axes: _curves(axes, sized)
    return lambda axes: _bars(axes, rows)


def _curves(axes: Any, rows: list[Row]) -> None:
    for library in dict.fromkeys(row["library"] for row in rows):
        own = sorted((row["nbytes"], *_spread(row)) for row in rows if row["library"] == library)
        sizes, fastest, medians, slowest = zip(*own, strict=True)
        style = {"label": library, "marker": "o", "markersize": 3, "color": _COLOURS.get(library)}
        (line,) = axes.plot(sizes, medians, **_LIMIT_STYLES.get(library, style))
        if library not in _LIMIT_STYLES:
            axes.fill_between(
                sizes, fastest, slowest, color=line.get_color(), alpha=0.15, linewidth=0
            )
    _set_scales(axes, sorted({row["nbytes"] for row in rows}), volume, "size")


def _spread(row: Row) -> tuple[float, float, float]:
    """Return the fastest time, the median, and the 99th percentile where a run has it."""
    return row["min_s"], row["median_s"], max(row.get("p99_s", 0.0), row["median_s"])


def _bars(axes: Any, rows: list[Row]) -> None:
    several = len({row["nbytes"] for row in rows}) > 1
    names = [
        f"{row['library']}, {volume(row['nbytes'])}" if several else row["library"] for row in rows
    ]
    colours = [_COLOURS.get(row["library"], "grey") for row in rows]
    fastest, medians, slowest = map(np.array, zip(*map(_spread, rows), strict=True))
    whiskers = [np.maximum(medians - fastest, 0), slowest - medians]
    axes.barh(names, medians, color=colours, xerr=whiskers, error_kw={"alpha": 0.6, "capsize": 2})
    axes.invert_yaxis()
    if medians.min() > 0 and slowest.max() >= _LOG_FROM * fastest.min():
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.xaxis.set_major_formatter(lambda value, _: _short(duration, value))
    axes.tick_params(axis="x", rotation=30)


def draw_predictions(predicted: Sequence[Mapping[str, Any]], path: str, heading: str = "") -> bool:
    """Draw predicted times over ranks, a curve for each size; tell whether there were any."""
    parts: dict[str, list[Mapping[str, Any]]] = {}
    for row in predicted:
        words = (row["case"], row["library"], row["dtype"], row["memory"], "predicted")
        parts.setdefault(", ".join(filter(None, words)), []).append(row)
    panels = [(title, _prediction(part)) for title, part in parts.items()]
    return draw_panels(panels, path, heading)


def _prediction(rows: list[Mapping[str, Any]]) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        for nbytes in dict.fromkeys(row["nbytes"] for row in rows):
            own = sorted((row["ranks"], row["seconds"]) for row in rows if row["nbytes"] == nbytes)
            label = None if nbytes is None else volume(nbytes)
            axes.plot(*zip(*own, strict=True), marker="o", markersize=3, label=label)
        _set_scales(axes, sorted({row["ranks"] for row in rows}), "{:g}".format, "ranks")

    return draw


def _set_scales(
    axes: Any, marks: Sequence[float], show: Callable[[float], str], label: str
) -> None:
    """Make both axes logarithmic, with a label at some of the marks and readable times."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    shown = marks[:: -(-len(marks) // 8)]
    axes.set_xticks(shown, [show(mark) for mark in shown], rotation=30, ha="right")
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(lambda value, _: _short(duration, value))
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.set(xlabel=label, ylabel="time")


def _short(show: Callable[[float], str], value: float) -> str:
    """Show a value without zeros behind the point."""
    number, _, unit = show(value).partition(" ")
    return f"{float(number):g} {unit}"


def draw_panels(panels: Sequence[Panel], path: str, heading: str = "") -> bool:
    """Draw panels into one file, under a heading; tell whether there were any."""
    if not panels:
        return False
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.8 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, (title, draw) in zip(grid, panels, strict=False):
        draw(axes)
        axes.set_title(title, fontsize="medium")
        axes.grid(alpha=0.3)
    for axes in grid[len(panels) :]:
        axes.remove()
    if heading:
        figure.suptitle(heading, fontsize="medium", x=0.01, ha="left")
    _add_legend(figure)
    figure.savefig(path, dpi=120)
    return True


def _add_legend(figure: Any) -> None:
    """Add a legend for the lines of all panels below them."""
    lines: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        lines |= dict(zip(labels, handles, strict=True))
    if lines:
        figure.legend(lines.values(), lines.keys(), loc="outside lower left", ncols=3)
