"""`visualize_sharding`: a picture of which ranks have which part of an array. Local."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

from rich import box as borders
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcdist.boxes import Box, volume
from hpcdist.errors import UsageError
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout
from hpcdist.text import an

Span = tuple[int, int]


def visualize_sharding(a: DistArray, ax: Any = None) -> None:
    """Print which ranks have which part of an array. Local.

    The fields contain the ranks: ``0, 1`` have the same, ``0 + 1`` have contributions to the value.
    For an array that is cut along more than two dimensions, the parts are listed.

    Args:
        a: the array.
        ax: axes of matplotlib in which the picture is drawn instead.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> mesh = dist.ProcessMesh([0])
        >>> dist.visualize_sharding(dist.shard_tensor(np.ones((4, 6)), mesh, [dist.Shard(1)]))
        (4, 6), [Shard(1)] on ProcessMesh(d0=1)
        ┌─────┬─────┐
        │     │ 0:6 │
        ├─────┼─────┤
        │ 0:4 │ 0   │
        └─────┴─────┘

    """
    if not isinstance(a, DistArray):
        raise UsageError(f"a picture is of a DistArray, got {an(type(a).__name__)}")
    layout = a.layout
    dims = _drawn(layout)
    if ax is None:
        told = f"{layout.shape}, {[*layout.placements]} on {layout.mesh!r}"
        console = Console()
        console.print(Text(told), soft_wrap=True)
        console.print(_list(layout) if dims is None else _grid(layout, dims))
    elif dims is None:
        raise UsageError(f"{layout!r} is cut along more than two dimensions: it cannot be drawn")
    else:
        _draw(layout, dims, ax)


def holders_of(layout: Layout) -> dict[Box, str]:
    """Return who has each part: ``0, 1`` have the same, ``0 + 1`` contributions. Pure."""
    mesh, found = layout.mesh, defaultdict[Box, dict[Any, list[int]]](dict)
    axes = [axis for axis, kind in enumerate(layout.partial) if kind is not None]
    for place in mesh.coordinates():
        box, contribution = layout.box(place), tuple(place[axis] for axis in axes)
        if volume(box):
            found[box].setdefault(contribution, []).append(mesh.rank_at(place))
    return {box: _describe_contributions([*parts.values()]) for box, parts in found.items()}


def _describe_contributions(contributions: list[list[int]]) -> str:
    told = [", ".join(map(str, sorted(ranks))) for ranks in contributions]
    several = len(told) > 1 and len(contributions[0]) > 1
    return " + ".join(f"({each})" if several else each for each in told)


def _drawn(layout: Layout) -> tuple[int, int] | None:
    """Return the dimensions from top to bottom and from left to right, -1 for none.

    They are those that are cut, and then the first ones; None if more than two are cut.
    """
    cut = [dim for dim, axes in enumerate(layout.axes) if axes]
    if len(cut) > 2:
        return None
    others = [dim for dim in range(len(layout.shape)) if dim not in cut]
    first, second = sorted([*cut, *others, -1, -2][:2]) if layout.shape else (-1, -1)
    return (first, second) if first >= 0 else (-1, second)


def _spans(layout: Layout, dim: int) -> list[Span]:
    """Return the parts along a dimension that have elements; for none that of a row."""
    if dim < 0:
        return [(0, 1)]
    return [each for each in pairwise(layout.cuts[dim]) if each[0] < each[1]]


def _fields(layout: Layout, dims: tuple[int, int]) -> dict[tuple[Span, Span], str]:
    """Return who has the part in each row and column."""
    down, across = dims
    return {
        (box[down] if down >= 0 else (0, 1), box[across] if across >= 0 else (0, 1)): ranks
        for box, ranks in holders_of(layout).items()
    }


def _grid(layout: Layout, dims: tuple[int, int]) -> Table:
    (rows, columns), fields = [_spans(layout, dim) for dim in dims], _fields(layout, dims)
    table = Table(box=borders.SQUARE, show_lines=True, header_style="")
    for header in ["", *[_told(each, dims[1]) for each in columns]]:
        table.add_column(header)
    for row in rows:
        table.add_row(_told(row, dims[0]), *[fields[row, column] for column in columns])
    return table


def _told(span: Span, dim: int) -> str:
    return "" if dim < 0 else f"{span[0]}:{span[1]}"


def _list(layout: Layout) -> Table:
    table = Table("part", "ranks", box=borders.SQUARE, header_style="")
    for box, ranks in holders_of(layout).items():
        table.add_row(Text(f"[{', '.join(f'{lo}:{hi}' for lo, hi in box)}]"), ranks)
    return table


def _draw(layout: Layout, dims: tuple[int, int], ax: Any) -> None:
    for ((top, bottom), (left, right)), ranks in _fields(layout, dims).items():
        ax.fill([left, right, right, left], [top, top, bottom, bottom], alpha=0.5, edgecolor="k")
        ax.text((left + right) / 2, (top + bottom) / 2, ranks, ha="center", va="center")
    ax.invert_yaxis()
    ax.set_title(f"{layout.shape}, {[*layout.placements]}")
