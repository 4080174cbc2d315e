"""What Slurm's variables mean: which processes are ranks, which job this is, and on which nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple

# Step ids above this are no steps of ranks: the batch script, `salloc`'s own shell, pending.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_LIMIT_S = 5.0


class SlurmJob(NamedTuple):
    """A job, or a step of it.

    Attributes:
        job_id: the number of the job; each task of an array has its own.
        step_id: the number of the step of `srun` this process is in; None outside, in a batch
            script for example.
        array: the number of the job array and of this task in it; None if this is no array.
        restarts: how many times the job has been requeued.
        nodes: the nodes of the step, or of the job outside a step, as Slurm writes them in short.
        tasks_per_node: the number of tasks on each of `nodes`; empty where none was said.

    """

    job_id: int
    step_id: int | None
    array: tuple[int, int] | None
    restarts: int
    nodes: str
    tasks_per_node: tuple[int, ...]


def read_job(environ: Mapping[str, str]) -> SlurmJob | None:
    """Return the job that Slurm's variables tell of, None where there is none.

    Args:
        environ: the environment of the process.

    Raises:
        UsageError: a variable is not what Slurm writes.

    Example:
        >>> read_job({"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "2(x2)"}).tasks_per_node
        (2, 2)

    """
    if "SLURM_JOB_ID" not in environ:
        return None
    step = in_slurm_step(environ)
    names = ("SLURM_STEP_TASKS_PER_NODE",) if step else ()
    counts = _first(environ, *names, "SLURM_TASKS_PER_NODE")
    names = ("SLURM_STEP_NODELIST",) if step else ()
    in_array = "SLURM_ARRAY_JOB_ID" in environ and "SLURM_ARRAY_TASK_ID" in environ
    return SlurmJob(
        _integer(environ, "SLURM_JOB_ID"),
        int(_first(environ, "SLURM_STEP_ID", "SLURM_STEPID")) if step else None,
        (_integer(environ, "SLURM_ARRAY_JOB_ID"), _integer(environ, "SLURM_ARRAY_TASK_ID"))
        if in_array
        else None,
        _integer(environ, "SLURM_RESTART_COUNT") if "SLURM_RESTART_COUNT" in environ else 0,
        _first(environ, *names, "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
        tuple(parse_counts(counts)) if counts else (),
    )


def expand_nodes(nodes: str) -> list[str]:
    """Return the names of nodes that Slurm writes in short, by asking `scontrol`.

    Args:
        nodes: for example `n[1-3,7]`.

    Raises:
        UsageError: scontrol is not here, or does not understand them.

    Example:
        >>> expand_nodes("n[1-3,7]")  # doctest: +SKIP
        ['n1', 'n2', 'n3', 'n7']

    """
    import subprocess  # which most programs never need

    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"the nodes {nodes!r} are written in Slurm's short form, and scontrol, which reads it, "
            f"does not answer ({error}): put Slurm's commands on PATH"
        ) from error
    if done.returncode or not done.stdout.strip():
        raise UsageError(
            f"scontrol does not understand the nodes {nodes!r} ({done.stderr.strip()}): names like "
            "n[1-3,7] were expected, as in SLURM_JOB_NODELIST"
        )
    return done.stdout.split()


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a task of `srun`, not a batch script or a shell of `salloc`.

    Args:
        environ: the environment of the process.

    Example:
        >>> in_slurm_step({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
        False

    """
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < _FIRST_SPECIAL_STEP


def parse_counts(text: str) -> list[int]:
    """Return the numbers per node that Slurm writes in short, one for each node.

    Args:
        text: for example `2(x2),1`.

    Raises:
        UsageError: the text has another form.

    Example:
        >>> parse_counts("2(x2),1")
        [2, 2, 1]

    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise UsageError(
                f"numbers per node were expected, like '2(x2),1', not {text!r}: start the job"
                " by srun or mpiexec and leave Slurm's variables as they are"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first(environ: Mapping[str, str], *names: str) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def _integer(environ: Mapping[str, str], name: str) -> int:
    value = environ[name].strip()
    if not value.isdigit():
        raise UsageError(
            f"{name}={value!r} is not a number of 0 or above: Slurm sets this variable; unset it "
            "if it is left of another job"
        )
    return int(value)
