"""Where a process stands in its job, as the launcher told it: pure functions of the environment.

`Place` is the answer, `read_place` reads it from the variables of whichever launcher started the
process, and `check_size` notices that a launcher started several ranks while MPI sees one. The
launchers are the rows of `_LAUNCHERS`, in the order in which they are believed: Slurm's variables
come after those of mpiexec, for an mpiexec inside an allocation starts its daemons by `srun`, and
its ranks inherit the numbers of those daemons.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime.remedy import not_together, remedy
from hpcdist.runtime.slurm import in_slurm_step, parse_counts

Environ = Mapping[str, str]
SPARES = "HPCDIST_SPARES"
"""The variable that tells how many processes wait as spares, the last ones."""


class Place(NamedTuple):
    """Where this process stands: its rank in the job, on its node, and its node's number."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    nnodes: int
    launcher: str


class _Row(NamedTuple):
    """A launcher and the names under which it tells each number, the first that is set counts."""

    launcher: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    nnodes: tuple[str, ...] = ()


# A row holds when one of its rank names and one of its size names are set. "@" marks the numbers
# of the Slurm step, which `_slurm_step` prepares; OMPI_COMM_WORLD_NODE_RANK is not the number of a
# node, so Open MPI has none.
_LAUNCHERS = (
    _Row(
        "openmpi",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Row(
        "mpich",
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "@local_rank"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE", "@local_size"),
        ("PALS_NODEID", "@node_rank"),
        ("@nnodes",),
    ),
    _Row(
        "pals",
        ("PALS_RANKID",),
        ("PMI_SIZE", "PALS_SIZE"),
        ("PALS_LOCAL_RANKID",),
        ("PALS_LOCAL_SIZE",),
        ("PALS_NODEID",),
    ),
    _Row(
        "pmix",
        ("PMIX_RANK",),
        ("PMIX_SIZE", "@size"),
        ("PMIX_LOCAL_RANK", "@local_rank"),
        ("PMIX_LOCAL_SIZE", "@local_size"),
        ("@node_rank",),
        ("@nnodes",),
    ),
    _Row(
        "flux",
        ("FLUX_TASK_RANK",),
        ("FLUX_JOB_SIZE",),
        ("FLUX_TASK_LOCAL_ID",),
        nnodes=("FLUX_JOB_NNODES",),
    ),
    _Row(
        "slurm",
        ("@rank",),
        ("@size",),
        ("@local_rank",),
        ("@local_size",),
        ("@node_rank",),
        ("@nnodes",),
    ),
    _Row(
        "torchrun",
        ("RANK",),
        ("WORLD_SIZE",),
        ("LOCAL_RANK",),
        ("LOCAL_WORLD_SIZE",),
        ("GROUP_RANK",),
        ("GROUP_WORLD_SIZE",),
    ),
    _Row(
        "paddle",
        ("PADDLE_TRAINER_ID",),
        ("PADDLE_TRAINERS_NUM",),
        ("PADDLE_RANK_IN_NODE", "PADDLE_LOCAL_RANK"),
        ("PADDLE_LOCAL_SIZE",),
        nnodes=("PADDLE_NNODES",),
    ),
)


def read_place(environ: Environ) -> Place:
    """Return the place that the launcher's variables give; local, no communication.

    A number that the launcher does not tell is filled in: a missing `local_size` comes from the
    number of nodes (all ranks on one node where that is missing too), and nodes are taken to hold
    consecutive ranks. MPI knows better once it runs.

    Args:
        environ: the environment of the process.

    Returns:
        The place; rank 0 of 1 with launcher "none" where no launcher left a word.

    Raises:
        UsageError: a variable is not a number, or the rank is not below the size.

    Example:
        >>> read_place({"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}).rank
        2

    """
    for row in _LAUNCHERS:
        known = {**environ, **_slurm_step(environ, row)}
        rank, size = _number(known, row.rank), _number(known, row.size)
        if rank is not None and size is not None:
            return _complete(row, rank, size, known)
    return Place(0, 1, 0, 1, 0, 1, "none")


def count_spares(environ: Environ) -> int:
    """Return how many processes of this job, the last ones, wait to take the place of a dead rank.

    Args:
        environ: the environment of the process.

    Raises:
        UsageError: the variable is not a number.

    Example:
        >>> count_spares({"HPCDIST_SPARES": "2"}), count_spares({})
        (2, 0)

    """
    return _number(environ, (SPARES,)) or 0


def world_place(environ: Environ) -> Place:
    """Return what `read_place` does, of the world: spares are not counted among its ranks.

    The number of a process that is a spare is not below the size.

    Args:
        environ: the environment of the process.

    Raises:
        UsageError: a variable is not a number.

    Example:
        >>> world_place({"PMI_RANK": "3", "PMI_SIZE": "4", "HPCDIST_SPARES": "1"})[:2]
        (3, 3)

    """
    place = read_place(environ)
    return place._replace(size=max(1, place.size - count_spares(environ)))


def expected_size(environ: Environ) -> tuple[int, str] | None:
    """Return how many ranks the launcher meant to start, and the variable that says so.

    Unlike `read_place` this also believes `SLURM_NTASKS` outside a step, where it means that an
    allocation is there for that many ranks.

    Args:
        environ: the environment of the process.

    Returns:
        The number and the name, or None where nothing says.

    Raises:
        UsageError: the variable is not a number.

    Example:
        >>> expected_size({"OMPI_COMM_WORLD_SIZE": "4"})
        (4, 'OMPI_COMM_WORLD_SIZE')

    """
    for name in _size_names(environ):
        size = _number(environ, (name,))
        if size is not None:
            return size, name
    return None


def check_size(environ: Environ, mpi_size: int, mpi_library: str) -> None:
    """Raise where a launcher started several ranks and MPI sees only this one.

    That happens when the launcher and the MPI library do not know each other: every rank then
    believes to be alone and computes everything, without an error.

    Args:
        environ: the environment as it was when the process started.
        mpi_size: the size of `MPI.COMM_WORLD`.
        mpi_library: the text of `MPI.Get_library_version()`.

    Raises:
        UsageError: more than one rank was meant; the message names the remedy for this launcher
            and this library.

    Example:
        >>> check_size({"OMPI_COMM_WORLD_SIZE": "4"}, 4, "Open MPI v5.0.11")

    """
    expected = expected_size(environ)
    if mpi_size != 1 or expected is None or expected[0] <= 1:
        return
    size, name = expected
    library = " ".join(mpi_library.split(",")[0].split()[:4]) or "the MPI library"
    raise not_together(
        f"{name}={size} says that this job has {size} ranks, but MPI ({library}) sees only one",
        f"{remedy(environ, name, mpi_library)}; HPCDIST_ALLOW_SINGLETON=1 runs it on this one"
        " rank all the same",
    )


def _slurm_step(environ: Environ, row: _Row) -> dict[str, str]:
    """Return the numbers of the Slurm step under "@" names, as far as they are this rank's own.

    Under mpiexec the step is that of its daemons: where another launcher tells another rank,
    Slurm's numbers are not for us.
    """
    if not in_slurm_step(environ) or "SLURM_PROCID" not in environ:
        return {}
    rank = environ["SLURM_PROCID"]
    size = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
    told = [environ[name] for name in row.rank if name in environ]
    told_size = [environ[name] for name in row.size if name in environ]
    if (told and told[0] != rank) or (told_size and told_size[0] != size):
        return {}
    step = {
        "@rank": rank,
        "@size": size,
        "@local_rank": environ.get("SLURM_LOCALID", ""),
        "@node_rank": environ.get("SLURM_NODEID", ""),
        "@nnodes": environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES", "")),
    }
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    node = step["@node_rank"]
    if counts and node.isdigit():
        per_node = parse_counts(counts)
        if int(node) < len(per_node):
            step["@local_size"] = str(per_node[int(node)])
    return {name: value for name, value in step.items() if value}


def _complete(row: _Row, rank: int, size: int, known: Environ) -> Place:
    """Fill in what the launcher does not tell; see `read_place` for how."""
    if rank >= size:
        raise UsageError(
            f"the variables of {row.launcher} say rank {rank} of {size} ranks"
            f" ({_told(row.rank, known)}, {_told(row.size, known)}): a rank is below the size;"
            " unset what is left of another job"
        )
    local_rank = _number(known, row.local_rank)
    local_size = _number(known, row.local_size)
    nnodes = _number(known, row.nnodes)
    node_rank = _number(known, row.node_rank)
    if not local_size:
        local_size = -(-size // nnodes) if nnodes else size
    if local_rank is None:
        local_rank = rank % local_size
    local_size = max(local_size, local_rank + 1)
    if node_rank is None:
        node_rank = rank // local_size
    nnodes = max(nnodes or -(-size // local_size), node_rank + 1)
    return Place(rank, size, local_rank, local_size, node_rank, nnodes, row.launcher)


def _number(known: Environ, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = known.get(name)
        if value is None:
            continue
        if not value.strip().isdigit():
            shown = name.replace("@", "the Slurm step's ")
            raise UsageError(
                f"{shown}={value!r} is not a number of 0 or above: the launcher sets this"
                " variable; unset it if it is left of another job"
            )
        return int(value)
    return None


def _told(names: tuple[str, ...], known: Environ) -> str:
    name = next(name for name in names if name in known)
    return f"{name.replace('@', 'Slurm ')}={known[name]}"


def _size_names(environ: Environ) -> list[str]:
    """Return the variables that tell the size, most trusted first."""
    names = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]
    names += ["SLURM_STEP_NUM_TASKS"] if in_slurm_step(environ) else []
    names += ["SLURM_NTASKS"]
    names += ["FLUX_JOB_SIZE"] if "FLUX_TASK_RANK" in environ else []
    names += ["WORLD_SIZE"] if "RANK" in environ else []
    names += ["PADDLE_TRAINERS_NUM"] if "PADDLE_TRAINER_ID" in environ else []
    return names
