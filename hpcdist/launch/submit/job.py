"""`submit` hands a script to sbatch, a `Follower` shows the logs of its job to the end."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple

_UNDER_WAY = {
    "PENDING",
    "RUNNING",
    "COMPLETING",
    "CONFIGURING",
    "SUSPENDED",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "RESIZING",
    "REVOKED",
    "SIGNALING",
    "SPECIAL_EXIT",
    "STAGE_OUT",
    "STOPPED",
}
_LOOK_S, _ASK_S, _ASK_AT_MOST_S = 0.2, 0.5, 10.0
_LATE_S = 3.0
"""Seconds that the last lines of a log may need through a network file system."""


class Task(NamedTuple):
    """A job, or one task of an array, as Slurm tells it.

    Attributes:
        job: its number.
        state: in Slurm's words.
        code: its exit code as a shell counts.
        log: the file its output goes to.
        array: its number in the array, "" for a job that is none.
        reason: why it waits.

    """

    job: str
    state: str
    code: int
    log: str
    array: str
    reason: str

    @property
    def ended(self) -> bool:
        """Whether nothing more will come of it."""
        return self.state not in _UNDER_WAY


# ---- what Slurm tells; pure


def read_tasks(text: str) -> list[Task]:
    """Return what ``scontrol --oneliner show job`` tells.

    Example:
        >>> read_tasks("JobId=3 JobState=FAILED Reason=None ExitCode=2:0 StdOut=/a b/3.out")[0].code
        2

    """
    return [_task(line) for line in text.splitlines() if line.startswith("JobId=")]


def _task(line: str) -> Task:
    found = dict(re.findall(r"(?:^| )([A-Z][\w/]*)=(.*?)(?= [A-Z][\w/]*=|\s*$)", line))
    return Task(
        found["JobId"],
        found.get("JobState", ""),
        exit_code(found.get("ExitCode", "0:0"), found.get("JobState", "")),
        found.get("StdOut", ""),
        found.get("ArrayTaskId", ""),
        found.get("Reason", ""),
    )


def exit_code(text: str, state: str) -> int:
    """Return what Slurm's ``CODE:SIGNAL`` is to a shell; of a job that failed never 0.

    Example:
        >>> exit_code("0:15", "CANCELLED"), exit_code("0:0", "TIMEOUT")
        (143, 1)

    """
    code, _, number = text.partition(":")
    told = 128 + int(number) if number not in ("", "0") else int(code)
    return told or (0 if state in ("COMPLETED", *_UNDER_WAY) else 1)


# ---- submitting


def submit(script: str, name: str, folder: Path | None, environ: Mapping[str, str]) -> str:
    """Hand the script to sbatch, and return the number of the job.

    The script is kept as ``NAME-JOB.sbatch`` in `folder`, by default the one at hand.

    Raises:
        UsageError: there is no sbatch, or it refuses the script; then no file is left.

    """
    folder = folder or Path.cwd()
    folder.mkdir(parents=True, exist_ok=True)  # Slurm itself would write no log there
    with tempfile.NamedTemporaryFile(
        "w", dir=folder, prefix="submitting-", suffix=".sbatch", delete=False
    ) as file:
        file.write(script)
    written = Path(file.name)
    try:
        job = _ask(["sbatch", "--parsable", str(written)], environ).strip().partition(";")[0]
        written.rename(kept_script(folder, name, job))
    except BaseException:
        written.unlink(missing_ok=True)
        raise
    return job


def kept_script(folder: Path, name: str, job: str) -> Path:
    """Return where the script of a job is kept."""
    return folder / f"{re.sub('[^A-Za-z0-9_.-]', '_', name)}-{job}.sbatch"


def _ask(command: list[str], environ: Mapping[str, str]) -> str:
    program = shutil.which(command[0], path=environ.get("PATH"))
    if program is None:
        raise UsageError(
            f"{command[0]} was not found on PATH: log in to a node of a cluster with Slurm; "
            "--dry-run prints the script here"
        )
    done = subprocess.run(
        [program, *command[1:]],
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise UsageError(f"{command[0]} says: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


# ---- following


@dataclass
class Log:
    """A log that grows, and how much of it has been read; it may not be there yet."""

    path: str
    label: str = ""
    offset: int = 0
    rest: bytes = field(default=b"", repr=False)

    def news(self, *, last: bool = False) -> str:
        """Return what has come since the last time; with a label whole lines only, until `last`."""
        try:
            with open(self.path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self.offset:
                    self.offset = 0  # begun anew
                file.seek(self.offset)
                text = file.read()
        except OSError:
            text = b""
        self.offset += len(text)
        whole, newline, rest = (self.rest + text).rpartition(b"\n")
        self.rest = b"" if last else rest
        shown = whole + newline + (rest if last else b"")
        lines = shown.decode(errors="replace").splitlines(keepends=True)
        return "".join(self.label + line for line in lines)


class Follower:
    """Shows the logs of a job while it runs.

    Args:
        ask: returns what Slurm knows of the job; nothing once it has forgotten it.
        show: is handed new text of a log.
        tell: is handed a line on the job's state.

    """

    def __init__(
        self,
        ask: Callable[[], list[Task]],
        show: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        self._ask, self._show, self._tell = ask, show, tell
        self._logs: dict[str, Log] = {}
        self._told = ""
        self._tasks: list[Task] = []

    def follow(self) -> int:
        """Return the exit code of the job, of an array the largest, once it has ended."""
        pause_s, ask_at = _ASK_S, 0.0
        while True:
            if time.monotonic() >= ask_at:
                self._look()
                if not self._tasks or all(task.ended for task in self._tasks):
                    break
                ask_at = time.monotonic() + pause_s
                pause_s = min(1.5 * pause_s, _ASK_AT_MOST_S)
            self._read()
            time.sleep(_LOOK_S)
        self._wait_for_the_rest()
        return max((task.code for task in self._tasks), default=1)

    def _look(self) -> None:
        self._tasks = self._ask() or [task for task in self._tasks if task.ended]
        for task in self._tasks:
            if task.log and task.state != "PENDING":
                label = f"[{task.array}] " if task.array else ""
                self._logs.setdefault(task.log, Log(task.log, label))
        pending = [task for task in self._tasks if task.state == "PENDING"]
        waiting = {f"waits ({task.reason})" for task in pending if task.reason != "None"}
        running = any(task.state == "RUNNING" for task in self._tasks)
        told = "runs" if running else ", ".join(sorted(waiting))
        if told and told != self._told:
            self._tell(told)
        self._told = told

    def _read(self, *, last: bool = False) -> bool:
        news = [log.news(last=last) for log in self._logs.values()]
        for text in filter(None, news):
            self._show(text)
        return any(news)

    def _wait_for_the_rest(self) -> None:
        deadline = time.monotonic() + _LATE_S
        while time.monotonic() < deadline:
            came = self._read()
            there = all(os.path.exists(log.path) for log in self._logs.values())
            if not came and there:
                break
            time.sleep(_LOOK_S)
        self._read(last=True)


def ask_slurm(job: str, environ: Mapping[str, str]) -> list[Task]:
    """Return what Slurm knows of a job; nothing if it has forgotten it."""
    try:
        return read_tasks(_ask(["scontrol", "--oneliner", "show", "job", job], environ))
    except UsageError as error:
        if "Invalid job id" in str(error):
            return []
        raise
