"""`Bar`: how far a measurement is, on rank 0, as one line of a terminal.

The line is drawn by the rank that measures, which may see a pipe where its user has a terminal: the
launcher is between them. So it ends with a carriage return, which launchers pass on at once, and
is drawn only before a measurement: no thread runs beside it.
"""

from __future__ import annotations

import sys
from typing import final

import click
from rich.console import Console
from rich.progress import Progress

_ERASE = "\x1b[2K"
_WIDTH = 79

progress_option = click.option(
    "--progress/--no-progress",
    default=None,
    help="Show how far it is; by default where standard error is a terminal.",
)


def on_terminal(wanted: bool | None) -> bool:
    """Return whether progress is to be shown here: what was asked for, or the usual."""
    return sys.stderr.isatty() if wanted is None else wanted


@final
class Bar:
    """A line of progress on standard error; nothing at all where it is not `shown`."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._console = Console(
            stderr=True, force_terminal=True, width=_WIDTH, legacy_windows=False
        )
        self._progress = Progress(console=self._console, auto_refresh=False)
        self._task = self._progress.add_task("")

    def at(self, done: int, total: int, text: str) -> None:
        """Show how much of how much is done, and what comes next."""
        if not self._shown:
            return
        self._progress.update(self._task, completed=done, total=total, description=text)
        with self._console.capture() as line:
            self._console.print(self._progress.get_renderable(), end="")
        self._write(line.get().replace("\n", ""))

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            self._write("")

    def _write(self, line: str) -> None:
        sys.stderr.write(f"{_ERASE}{line}\r")
        sys.stderr.flush()
