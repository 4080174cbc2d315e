"""The batch script of `hpcdist submit`: `build_script(batch) -> text`; pure.

What it says is all there is: the script alone, handed to sbatch again, is the same job.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcdist.errors import UsageError
from hpcdist.launch.command import one_program
from hpcdist.launch.survival import Survive

_TASKS = ("ntasks", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-socket", "ntasks-per-core")
# Options that ask for GPUs, and the number of tasks that means one rank for each.
_GPUS = (("gpus-per-node", "ntasks-per-node"), ("gres", "ntasks-per-node"), ("gpus", "ntasks"))
_COUNT = re.compile(r"(?:gpu:|[\w.-]+:)*(\d+)")
_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9-]*")


@dataclass(frozen=True)
class Batch:
    """What to write.

    Attributes:
        options: long names and values of sbatch's options, as they were given.
        program: the argv of every rank.
        name: what the job and its log are called, unless the options say so.
        folder: where the job runs.
        mpi: the ``--mpi=`` of srun; None leaves it to Slurm.
        said: the words of the command line, for the reader.
        modules: what `module list` shows, for the reader.
        survive: for a job that goes on when a rank dies; `hpcdist run` starts its ranks.
        restarts: how often the job is started again, at most, when it fails.
        python: the Python that `hpcdist run` belongs to.

    """

    options: tuple[tuple[str, str | None], ...]
    program: tuple[str, ...]
    name: str
    folder: str
    mpi: str | None = None
    said: tuple[str, ...] = ()
    modules: str = ""
    survive: Survive | None = None
    restarts: int = 0
    python: str = "python"


def build_script(batch: Batch) -> str:
    """Return the batch script.

    Args:
        batch: what to write. The program's arguments may hold anything, newlines too.

    Raises:
        UsageError: something else holds a character that cannot be seen: a newline would begin a
            line of the script, and what stands there would be run.

    Example:
        >>> batch = Batch((("nodes", "2"),), ("python", "x.py"), "x", "/home/me", "pmix")
        >>> build_script(batch).splitlines()[-1]
        'exec srun --mpi=pmix --kill-on-bad-exit=1 python x.py'

    """
    _check_lines(batch)
    options = full_options(batch)
    given = {name for name, _ in options}
    lines = ["#!/bin/bash", *(_line(name, value) for name, value in options), ""]
    lines += [f"# Written by: {_join(batch.said)}"] if batch.said else []
    lines += [f"# Modules then: {batch.modules}"] if batch.modules else []
    lines += ["export PYTHONUNBUFFERED=1  # lines come when they are written"]
    if "cpus-per-task" in given:
        lines += ["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # else srun takes one"]
    start = _start_again if batch.survive or batch.restarts else _start_once
    return "\n".join([*lines, "", *start(batch), ""])


def _start_once(batch: Batch) -> list[str]:
    mpi = [f"--mpi={batch.mpi}"] if batch.mpi else []
    srun = _join(["srun", *mpi, "--kill-on-bad-exit=1", *one_program(batch.program)])
    return [f"exec {srun}"]


def _start_again(batch: Batch) -> list[str]:
    """Return the lines for `hpcdist run`, which outlives its ranks; srun would end them all."""
    words = [batch.python, "-m", "hpcdist", "run", "--no-label"]
    lines: list[str] = []
    if batch.survive:
        spares, fewest = str(batch.survive.spares), str(batch.survive.min_ranks)
        words += ["--survive", "--spares", spares, "--min-ranks", fewest]
    elif batch.mpi:
        words += ["--mpi", batch.mpi]
    if batch.restarts:
        lines += [
            "again=${SLURM_RESTART_COUNT:-0}  # Slurm starts the job again where a node is lost",
            f"[ $again -le {batch.restarts} ] || exit 1",
        ]
        words += ["--restarts"]
    left = [f"$(({batch.restarts} - again))"] if batch.restarts else []
    return [*lines, " ".join(["exec", _join(words), *left, "--", _join(batch.program)])]


def full_options(batch: Batch) -> list[tuple[str, str | None]]:
    """Return sbatch's options, with those that were not given but matter here.

    Without a number of tasks there is one rank for each GPU; else what sbatch does, one for each
    node.
    """
    given = dict(batch.options)
    name = given.get("job-name") or batch.name
    task = "%A_%a" if "array" in given else "%j"
    added: dict[str, str | None] = {"job-name": name}
    if not any(option in given for option in _TASKS):
        added |= _one_for_each_gpu(given)
    added |= {"chdir": batch.folder, "output": f"{name}-{task}.out"}
    if batch.restarts and "no-requeue" not in given:
        added |= {"requeue": None}
    added |= {"open-mode": "append"} if "requeue" in {**given, **added} else {}
    return [
        *((option, value) for option, value in added.items() if option not in given),
        *batch.options,
    ]


def _one_for_each_gpu(given: Mapping[str, str | None]) -> dict[str, str | None]:
    for option, tasks in _GPUS:
        value = given.get(option) or ""
        found = _COUNT.fullmatch(value)
        if found and (option != "gres" or value.startswith("gpu")):
            return {tasks: found[1]}
    return {}


def log_folder(batch: Batch) -> Path | None:
    """Return the folder of the log, None where only Slurm knows its name."""
    folder = Path(batch.folder, dict(full_options(batch))["output"] or "").parent
    return None if "%" in str(folder) else folder


def _check_lines(batch: Batch) -> None:
    """Refuse text that is more than one line of the script, or has invisible characters."""
    texts = [
        ("the folder", batch.folder),
        ("the name of the program", batch.name),
        ("--mpi", batch.mpi or ""),
        ("LOADEDMODULES", batch.modules),
    ]
    for name, value in batch.options:
        if not _OPTION.fullmatch(name):
            raise UsageError(f"{'--' + name!r} is not the name of an option of sbatch")
        texts.append((f"--{name}", value or ""))
    for what, text in texts:
        if not text.isprintable():
            raise UsageError(
                f"{what} is {text!r}, which holds a character that cannot be seen (a newline, an "
                "escape, ...) and would not mean the same in a batch script: leave it out or "
                "rename it"
            )


def _join(words: Iterable[str]) -> str:
    return " ".join(map(_quote, words))


def _quote(word: str) -> str:
    """Quote a word for bash, on one line whatever it holds."""
    if word.isprintable():
        return shlex.quote(word)
    escaped = {each: f"\\x{each:02x}" for each in (*range(32), *range(127, 256))}
    escaped |= {ord("\\"): "\\\\", ord("'"): "\\'"}
    return f"$'{os.fsencode(word).decode('latin-1').translate(escaped)}'"


def _line(name: str, value: str | None) -> str:
    if value is None:
        return f"#SBATCH --{name}"
    # sbatch reads quotes as a shell does, but a backslash escapes inside of them, too.
    return f"#SBATCH --{name}={shlex.quote(value.replace(chr(92), chr(92) * 2))}"
