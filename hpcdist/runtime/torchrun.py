"""The variables that programs written for torchrun read, from the place the launcher gave.

`torchrun_variables` computes them, `set_torchrun_variables` sets those that nobody has set. Which
ones hpcdist has set it notes in a variable, too: a job started from within this one must not
inherit them, and what the user has set comes first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from hpcdist.runtime.place import Place, world_place
from hpcdist.runtime.process import stat_of
from hpcdist.runtime.slurm import in_slurm_step

NOTE = "HPCDIST_TORCHRUN"
"""The variable with the names, separated by commas, of those that hpcdist has set."""

_NO_MPI = ("none", "torchrun", "paddle")
_LAUNCHERS_OF_MPICH = ("hydra_pmi_proxy", "pmi_proxy", "mpiexec", "mpiexec.hydra", "mpirun")

# Below the ports that Linux hands out by itself.
_FIRST_PORT, _PORTS = 20_000, 12_000
_SPREAD = 31  # leaves room for several steps of a job; has no divisor in common with _PORTS


def torchrun_variables(environ: Mapping[str, str], launcher: int | None = None) -> dict[str, str]:
    """Return those of torchrun's variables that are still to be set; none without MPI.

    All ranks of a job get one port, and jobs whose numbers are near each other different ones.
    Address and port are left out where the ranks cannot know them by themselves: on several nodes
    without `srun`.

    Args:
        environ: the environment of the process.
        launcher: the process number of what started all ranks of this node.

    Raises:
        UsageError: a variable of the launcher is not a number.

    Example:
        >>> environ = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
        >>> torchrun_variables(environ)["RANK"]
        '1'

    """
    place = world_place(environ)
    if place.launcher in _NO_MPI:
        return {}
    kept = environ.keys() - set_by_hpcdist(environ)  # a job around this one has another place
    found = {name: value for name, value in _of_place(place).items() if name not in kept}
    address, job = _first_node(environ, place), _job_number(environ, place, launcher)
    if address is not None and job is not None:
        port = str(_FIRST_PORT + job % _PORTS)
        meeting_point = {"MASTER_ADDR": address, "MASTER_PORT": port}
        found |= {name: value for name, value in meeting_point.items() if name not in environ}
    return found


def _of_place(place: Place) -> dict[str, str]:
    numbers = {
        "RANK": place.rank,
        "WORLD_SIZE": place.size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
        "GROUP_RANK": place.node_rank,
        "GROUP_WORLD_SIZE": place.nnodes,
    }
    return {name: str(value) for name, value in numbers.items()}


def renew_torchrun_variables(place: Place) -> None:
    """Change those of torchrun's variables that hpcdist has set, for a place that is new."""
    known = set_by_hpcdist(os.environ)
    os.environ.update({name: each for name, each in _of_place(place).items() if name in known})


def set_torchrun_variables() -> None:
    """Set torchrun's variables in this process, those that are not set, where MPI started it."""
    found = torchrun_variables(os.environ, _find_launcher())
    if found:
        note(found)


def note(found: Mapping[str, str]) -> None:
    """Set variables of torchrun in this process, and note that it was hpcdist."""
    names = {*set_by_hpcdist(os.environ), *found}
    os.environ.update(found, **{NOTE: ",".join(sorted(names))})


def set_by_hpcdist(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the variables in `environ` that hpcdist has set.

    Example:
        >>> set_by_hpcdist({"HPCDIST_TORCHRUN": "LOCAL_RANK,RANK", "RANK": "0"})
        ('LOCAL_RANK', 'RANK')

    """
    return tuple(name for name in environ.get(NOTE, "").split(",") if name)


def _first_node(environ: Mapping[str, str], place: Place) -> str | None:
    """Return the address of the first rank's node, for the ranks of the job."""
    if place.nnodes == 1:
        return "127.0.0.1"
    if environ.get("SLURM_PROCID") != str(place.rank):
        return None
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?(?:,|$)", nodes)
    return None if match is None else match[1] + (match[2] or "")


def _job_number(environ: Mapping[str, str], place: Place, launcher: int | None) -> int | None:
    """Return a number that all ranks of this job know, and jobs beside it do not have."""
    # The process number of Open MPI's launcher, or Slurm's job; and which one of it.
    told = re.findall(r"\d+", environ.get("PMIX_NAMESPACE", ""))[-2:]
    if not told and in_slurm_step(environ):
        told = [environ["SLURM_JOB_ID"], environ.get("SLURM_STEP_ID", "0")]
    if told:
        first, *rest = map(int, told)
        return first * _SPREAD + sum(rest)
    return launcher * _SPREAD if launcher is not None and place.nnodes == 1 else None


def _find_launcher() -> int | None:
    """Return the number of the nearest process above this one that starts ranks of MPICH."""
    pid = os.getpid()
    while pid > 1:
        name, fields = stat_of(pid)
        if name in _LAUNCHERS_OF_MPICH:
            return pid
        pid = int(fields[1]) if fields else 0
    return None
