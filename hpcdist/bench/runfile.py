"""A run as a JSON file: where it was measured, and its rows."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hpcdist.bench.rows import KEY, Row
from hpcdist.errors import UsageError

FORMAT = 1
_NUMBERS = ("median_s", "min_s")


def describe_setting(mpi: str, ranks: int, nodes: int, device: str | None = None) -> dict[str, Any]:
    """Return where the numbers come from.

    Args:
        mpi: the MPI library and its version.
        ranks: those of the job.
        nodes: those they are on.
        device: what the arrays are on, None for the host.

    """
    where = {} if device is None else {"device": device}
    return {
        "host": platform.node(),
        "mpi": mpi,
        "mpi4py": version("mpi4py"),
        "numpy": version("numpy"),
        "python": platform.python_version(),
        "ranks": ranks,
        "nodes": nodes,
        "cores": os.cpu_count() or 1,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **where,
    }


def write_run(path: str, setting: dict[str, Any], rows: Sequence[Row], **more: Any) -> None:
    """Write a run, complete or not at all."""
    run = {"format": FORMAT, "setting": setting, "rows": list(rows), **more}
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    partial.write_text(json.dumps(run, indent=1) + "\n")
    partial.replace(target)


def read_run(path: str) -> dict[str, Any]:
    """Read what `write_run` wrote; anything else is a `UsageError`."""
    try:
        run = json.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON ({error}): give a file that --json wrote") from error
    if not isinstance(run, dict) or run.get("format") != FORMAT:
        found = run.get("format") if isinstance(run, dict) else type(run).__name__
        raise UsageError(
            f"{path} is not a run of hpcdist bench in format {FORMAT} (it has {found!r}): give a "
            "file that --json wrote"
        )
    rows = run.get("rows")
    if not isinstance(rows, list) or not all(map(_is_row, rows)):
        raise UsageError(f"{path} has rows without {', '.join((*KEY, *_NUMBERS))}")
    return run


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and all(name in row for name in KEY)
        and all(isinstance(row.get(name), (int, float)) and row[name] > 0 for name in _NUMBERS)
    )


def check_writable(path: str) -> None:
    """Raise `UsageError` where no file `path` can be made."""
    target = Path(path)
    folder = target.parent
    if target.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"{path} cannot be written: name a file in a folder one can write to")
