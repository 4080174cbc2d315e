"""`picture_of`: a grid of ranks as text, with the nodes they are on. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from itertools import product

from rich import box as borders
from rich.console import Console
from rich.table import Table

from hpcdist.parallel.topology import describe_degrees


def picture_of(degrees: Mapping[str, int], ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return a picture: a row for each place along the outer axes, a column along the last one.

    Args:
        degrees: how many ranks there are along each axis; the last one is the fastest.
        ranks: the rank at each place, in C order.
        hosts: the node of each of them.

    """
    drawn = {axis: degree for axis, degree in degrees.items() if degree > 1}
    nodes = [*dict.fromkeys(hosts)]
    where = f"on {nodes[0]}" if len(nodes) == 1 else f"on {len(nodes)} nodes"
    told = f"{describe_degrees(drawn) or 'dp=1'}: {len(ranks)} rank{'s' * (len(ranks) > 1)} {where}"
    if not drawn:
        return told
    *outer, last = drawn
    across = drawn[last]
    if across > _COLUMNS:
        outer, across = [*outer, last], 1
    headers = [f"{last} {at}" for at in range(across)] if across > 1 else ["rank"]
    table = Table(*outer, *headers, box=borders.SQUARE, header_style="")
    if len(nodes) > 1:
        table.add_column("nodes", no_wrap=True)
    places = [*product(*(range(drawn[axis]) for axis in outer))]
    for row, place in enumerate(places[:_ROWS]):
        run = slice(row * across, (row + 1) * across)
        on = [", ".join(dict.fromkeys(hosts[run]))] if len(nodes) > 1 else []
        table.add_row(*map(str, place), *map(str, ranks[run]), *on)
    left = len(places) - _ROWS
    more = f"\n... and {left} row{'s' * (left > 1)} more" if left > 0 else ""
    return f"{told}\n{_as_text(table)}{more}"


def _as_text(table: Table) -> str:
    out = StringIO()
    Console(file=out, width=200, force_terminal=False, highlight=False, markup=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


_COLUMNS = 8
"""Ranks of the last axis that are drawn side by side; more are drawn one below the other."""
_ROWS = 64
"""Rows that are drawn."""
