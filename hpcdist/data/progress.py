"""`shown`: a bar on rank 0 that says how far a loop over batches is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

T = TypeVar("T")


def shown(
    batches: Iterator[T], length: int | None, first: bool, wanted: bool | None
) -> Iterator[T]:
    """Return what iterates over the same batches, and shows on the first rank how many were.

    Args:
        batches: what is iterated over.
        length: how many there are, if that is known.
        first: whether this is the rank that shows.
        wanted: None where standard error is a terminal.

    """
    if not first or not (sys.stderr.isatty() if wanted is None else wanted):
        return batches
    return _with_bar(batches, length)


def _with_bar(batches: Iterator[T], length: int | None) -> Iterator[T]:
    columns = (TextColumn("batches"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=length)
        for batch in batches:
            yield batch
            bar.advance(task)
