"""The recordings of a job on all its nodes: Slurm starts a reader on each of them.

A node that has vanished does not answer, and Slurm waits for it. So each reader says when it has
told all, and the others are not waited for much longer; they are named.
"""

from __future__ import annotations

import base64
import json
import selectors
import shutil
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from hpcdist.diagnostics.flight.jobs import Snapshot
from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime.slurm import expand_nodes

_LIMIT_S = 60.0
_LATER_S = 10.0
"""So much longer than the last reader that answers another one may take."""
_MARK = "hpcdist-flight "
_END = "hpcdist-flight-end "
_SHORT = 800
_END_S = 2.0


class Gathered(NamedTuple):
    """The snapshots of all nodes that answer, and the names of those that do not."""

    snapshots: Sequence[Snapshot]
    silent: Sequence[str]


def packed(found: Iterable[Snapshot], node: str = "") -> Iterator[str]:
    """Yield lines with the snapshots of a node, and its name, for `unpacked` on another node.

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
    yield _END + node


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


def nodes_command(job: str) -> list[str]:
    """Return what tells the nodes of a job of Slurm, in Slurm's short form."""
    return ["squeue", "--noheader", f"--jobs={_number(job)}", "--format=%N"]


def reader_command(job: str, nodes: int) -> list[str]:
    """Return what reads the rings of a job of Slurm on each of its nodes, beside its steps."""
    return [
        "srun", f"--jobid={_number(job)}", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}",
        "--ntasks-per-node=1", "--quiet", "--input=none", "--no-kill", "--kill-on-bad-exit=0",
        sys.executable, "-m", "hpcdist", "ps", "--gather",
    ]  # fmt: skip


def _number(job: str) -> str:
    """Return the number of a job, of which a step may be named."""
    return job.split(".")[0]


def gather(job: str) -> Gathered:
    """Read the rings on all nodes of a job of Slurm; nothing where there is no such job."""
    named = _nodes_of(job) if shutil.which("srun") else ""
    if not named:
        return Gathered([], [])
    nodes = expand_nodes(named)
    text = output_of(reader_command(job, len(nodes)), len(nodes))
    answered = {line.removeprefix(_END) for line in text.splitlines() if line.startswith(_END)}
    silent = [node for node in nodes if node not in answered] if answered else []
    return Gathered(unpacked(text), silent)


def _nodes_of(job: str) -> str:
    try:
        done = subprocess.run(
            nodes_command(job), capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def output_of(command: list[str], readers: int, later_s: float = _LATER_S) -> str:
    """Return what a command writes until so many readers have told all.

    Once one of them has, the others have `later_s` seconds for each next one.
    """
    pieces, until = [b""], time.monotonic() + _LIMIT_S
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return ""
    assert process.stdout is not None
    with process, selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        ended = 0
        while ended < readers and ready.select(max(0.0, until - time.monotonic())):
            pieces.append(process.stdout.read1(1 << 20))  # type: ignore[attr-defined]
            if not pieces[-1]:
                break
            before, ended = ended, b"".join(pieces).count(_END.encode())
            if ended > before:
                until = min(until, time.monotonic() + later_s)
        _end(process)
    return b"".join(pieces).decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what starts readers, which mostly ends by itself."""
    for act in (process.poll, process.terminate, process.kill):
        act()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
            return
