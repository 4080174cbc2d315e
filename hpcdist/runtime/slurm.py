"""What Slurm's variables mean: which processes are ranks, and numbers per node in short form."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpcdist.errors import UsageError

# Step ids above this are no steps of ranks: the batch script, `salloc`'s own shell, pending.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Tell whether this process is a task of `srun`, not a batch script or a shell of `salloc`.

    Args:
        environ: The environment of the process.

    Example:
        >>> in_slurm_step({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
        False

    """
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < _FIRST_SPECIAL_STEP


def parse_counts(text: str) -> list[int]:
    """Return the numbers per node that Slurm writes in short, one for each node.

    Args:
        text: For example `2(x2),1`.

    Raises:
        UsageError: The text has another form.

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
