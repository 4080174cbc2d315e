"""The recordings of a job on all its nodes: Slurm starts a reader on each of them."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator

from hpcdist.diagnostics.flight.jobs import Snapshot

_LIMIT_S = 60.0
_MARK = "hpcdist-flight "
_SHORT = 800


def packed(found: Iterable[Snapshot]) -> Iterator[str]:
    """Yield lines with the snapshots, for `unpacked` on another node.

    They are short, for Slurm mixes what comes of several nodes after so many bytes.
    """
    host = socket.gethostname()
    for number, (raw, offset_ns, condition) in enumerate(found):
        told = {
            "raw": base64.b64encode(zlib.compress(raw, 6)).decode(),
            "offset_ns": offset_ns,
            "condition": condition,
        }
        words = json.dumps(told)
        for start in range(0, len(words), _SHORT):
            yield f"{_MARK}{host}:{number}|{words[start : start + _SHORT]}"


def unpacked(text: str) -> list[Snapshot]:
    """Return the snapshots of the lines that are some; others may stand in between."""
    parts: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith(_MARK):
            key, _, part = line.removeprefix(_MARK).partition("|")
            parts.setdefault(key, []).append(part)
    found = []
    for each in parts.values():
        told = json.loads("".join(each))
        raw = zlib.decompress(base64.b64decode(told["raw"]))
        found.append(Snapshot(raw, told["offset_ns"], told["condition"]))
    return found


def count_command(job: str) -> list[str]:
    """Return what tells how many nodes a job of Slurm has."""
    return ["squeue", "--noheader", f"--jobs={_number(job)}", "--format=%D"]


def reader_command(job: str, nodes: int) -> list[str]:
    """Return what reads the rings of a job of Slurm on each of its nodes, beside its steps."""
    return [
        "srun", f"--jobid={_number(job)}", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}",
        "--ntasks-per-node=1", "--quiet", "--input=none",
        sys.executable, "-m", "hpcdist", "ps", "--gather",
    ]  # fmt: skip


def _number(job: str) -> str:
    """Return the number of a job, of which a step may be named."""
    return job.split(".")[0]


def gather(job: str) -> list[Snapshot]:
    """Read the rings on all nodes of a job of Slurm; nothing where there is no such job."""
    nodes = _output_of(count_command(job)).strip() if shutil.which("srun") else ""
    return unpacked(_output_of(reader_command(job, int(nodes)))) if nodes.isdigit() else []


def _output_of(command: list[str]) -> str:
    """Return what a command writes; nothing if it does not end, or is not there."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
