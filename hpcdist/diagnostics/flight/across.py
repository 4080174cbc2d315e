"""The recordings of a job on all its nodes: Slurm starts a reader on each of them."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator

from hpcdist.diagnostics.flight.jobs import Snapshot

_LIMIT_S = 60.0
_MARK = "hpcdist-flight "


def packed(found: Iterable[Snapshot]) -> Iterator[str]:
    """Yield a line for each snapshot, for `unpacked` on another node."""
    for raw, offset_ns, condition in found:
        told = {
            "raw": base64.b64encode(zlib.compress(raw, 1)).decode(),
            "offset_ns": offset_ns,
            "condition": condition,
        }
        yield _MARK + json.dumps(told)


def unpacked(text: str) -> list[Snapshot]:
    """Return the snapshots of the lines that are some; others may stand in between."""
    found = []
    for line in text.splitlines():
        if line.startswith(_MARK):
            told = json.loads(line.removeprefix(_MARK))
            raw = zlib.decompress(base64.b64decode(told["raw"]))
            found.append(Snapshot(raw, told["offset_ns"], told["condition"]))
    return found


def reader_command(job: str) -> list[str]:
    """Return what reads the rings of a job of Slurm on each of its nodes, beside its steps."""
    return [
        "srun", f"--jobid={job.split('.')[0]}", "--overlap", "--ntasks-per-node=1", "--quiet",
        "--input=none", sys.executable, "-m", "hpcdist", "ps", "--gather",
    ]  # fmt: skip


def gather(job: str) -> list[Snapshot]:
    """Read the rings on all nodes of a job of Slurm; nothing where there is no such job."""
    if shutil.which("srun") is None:
        return []
    try:
        done = subprocess.run(
            reader_command(job), capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return []
    return unpacked(done.stdout)
