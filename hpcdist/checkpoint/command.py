"""The command `hpcdist checkpoint`: look at checkpoints, verify them, make one file of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from hpcdist.checkpoint.inspection import consolidate, division_of, summary_of, verify
from hpcdist.checkpoint.storage import find_checkpoint, open_checkpoint, step_folder, steps_of
from hpcdist.errors import CheckpointError, UsageError

_DAMAGED = 1
_STEP = click.option("--step", type=int, help="This checkpoint of a series; default: the last.")


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    except CheckpointError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from error


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def checkpoint() -> None:
    """Show checkpoints, verify them, and make one ordinary file of them."""


@checkpoint.command()
@click.argument("path")
@_STEP
@click.option("--array", help="Show the parts of this array, and the file of each.")
def ls(path: str, step: int | None, array: str | None) -> None:
    """Show the checkpoints of the series at PATH, or the arrays of the checkpoint there."""
    with _reported():
        steps = steps_of(path) if step is None and array is None else []
        if steps:
            _show_series(path, steps)
        elif array is None:
            _show_arrays(path, step)
        else:
            _show_parts(path, step, array)


def _show_series(path: str, steps: list[int]) -> None:
    table = Table("step", "arrays", "files", "bytes", "saved by", title=path)
    for step in steps:
        try:
            found = summary_of(*open_checkpoint(path, step))
        except CheckpointError as error:
            table.add_row(str(step), "", "", "", str(error))
            continue
        ranks = f"{found.ranks} rank{'s' if found.ranks > 1 else ''}"
        table.add_row(str(step), str(found.arrays), str(found.files), f"{found.nbytes:,}", ranks)
    _console().print(table)


def _show_arrays(path: str, step: int | None) -> None:
    folder, manifest = open_checkpoint(path, step)
    table = Table("array", "dtype", "shape", "bytes", "division", title=folder)
    for name, array in manifest.arrays.items():
        nbytes, division = f"{manifest.nbytes(name):,}", division_of(manifest, name)
        table.add_row(_shown(name), str(array.dtype), str(array.shape), nbytes, division)
    _console().print(table)


def _show_parts(path: str, step: int | None, name: str) -> None:
    folder, manifest = open_checkpoint(path, step)
    if name not in manifest.arrays:
        raise UsageError(f"{folder} has no array {name!r}; name one of those that ls shows")
    shape, itemsize = manifest.arrays[name].shape, manifest.itemsize(name)
    table = Table("part", "bytes", "file", title=f"{_shown(name)} of shape {shape} in {folder}")
    for file, _, box, _ in manifest.pieces[name]:
        table.add_row(str(box), f"{box.size * itemsize:,}", manifest.files[file][0])
    _console().print(table)


def _shown(name: str) -> str:
    """Return a name as a terminal can show it: whoever wrote the checkpoint has chosen it."""
    return name if name.isprintable() else ascii(name)


def _console() -> Console:
    """Return a console that a pipe or a file gives room enough."""
    console = Console(markup=False)
    return console if console.is_terminal else Console(markup=False, width=200)


@checkpoint.command("verify")
@click.argument("path")
@_STEP
def verify_command(path: str, step: int | None) -> None:
    """Compare the checkpoint at PATH with its checksums, or all of a series.

    The exit code is 1 if something is damaged or missing.
    """
    with _reported():
        steps = steps_of(path) if step is None else []
        folders = [step_folder(path, each) for each in steps] or [find_checkpoint(path, step)]
        damaged = [folder for folder in folders if not _is_sound(folder)]
    if damaged:
        sys.exit(_DAMAGED)


def _is_sound(folder: str) -> bool:
    try:
        total = open_checkpoint(folder)[1].total
        with _bar(folder, total) as advance:
            found = verify(folder, progress=advance)
    except (CheckpointError, OSError) as error:
        click.echo(f"{folder}: damaged\n{error}", err=True)
        return False
    click.echo(f"{folder}: {found.arrays} arrays, {found.nbytes:,} bytes, as they were saved")
    return True


@checkpoint.command("consolidate")
@click.argument("path")
@click.argument("output")
@_STEP
def consolidate_command(path: str, output: str, step: int | None) -> None:
    """Write all arrays of the checkpoint at PATH to the new file OUTPUT, in safetensors format."""
    with _reported():
        total = open_checkpoint(path, step)[1].total
        with _bar(output, total) as advance:
            found = consolidate(path, output, step=step, progress=advance)
    click.echo(f"{output}: {found.arrays} arrays, {found.nbytes:,} bytes")


@contextmanager
def _bar(text: str, total: int) -> Iterator[Callable[[int], Any]]:
    """Show how far it is, on a terminal."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=total)
        yield lambda nbytes: progress.advance(task, nbytes)
