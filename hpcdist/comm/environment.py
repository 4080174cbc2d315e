"""Start and end: `init_parallel_env`, ranks, and the gloo names of Paddle's API."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import warnings
from typing import Any, cast

from hpcdist.comm.announcement import end_all
from hpcdist.comm.closed import Closed
from hpcdist.comm.group import Group, world_group, world_of
from hpcdist.comm.making import check_timeout
from hpcdist.comm.nccl_config import create_nccl_config
from hpcdist.comm.session import (
    OneThread,
    Session,
    Whereabouts,
    current_session,
    here,
    is_simulated,
    require_session,
    resolve_group,
    set_session,
)
from hpcdist.config import Config, read_config, unknown_settings
from hpcdist.errors import HpcdistError, TransportError, UsageAssertionError, UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime import gpu, reports
from hpcdist.runtime.ending import survives
from hpcdist.runtime.failure import tell_in_short, wait_for_output, wait_for_output_at_exit
from hpcdist.runtime.mpi import FINALIZED, check_not_finalized, is_alone
from hpcdist.runtime.place import read_place, world_place
from hpcdist.runtime.process import snapshot
from hpcdist.text import in_short
from hpcdist.transport.base import Transport, WorldRequest
from hpcdist.transport.flight import recorder, rings
from hpcdist.transport.flight.layout import INIT
from hpcdist.transport.registry import installed_transports, load_start, transport_name
from hpcdist.transport.waiting.queue import await_lingering
from hpcdist.transport.waiting.unheard import tell_all
from hpcdist.transport.waiting.watchdog import watch


def init_parallel_env(
    nccl_config: Any = None,
    *,
    backend: str | None = "auto",
    device: str | None = "auto",
    timeout: Any = None,
    comm: Any = None,
) -> Group:
    """Start hpcdist and return the group of all ranks. Every rank calls this first; collective.

    Works under ``srun``, ``mpirun``, ``hpcdist run``, `spawn` and alone (a world of one rank,
    also where there is no MPI library). A second call returns the same group.

    A spare of ``hpcdist run --survive --spares`` waits here, asleep, to take the place of a rank
    that has died; the others are in `recover` then. If none is left it ends: `SystemExit`, code 0.

    Args:
        nccl_config: checked, and a warning says what to set in its place; see
            `create_nccl_config`.
        backend: ``"auto"`` or ``"mpi"`` (``"gloo"`` means the same: host memory); ``"local"``
            for this process alone, without MPI; or the name of a transport that another package
            has installed (see the reference, "Transports").
        device: ``"cpu"``; ``"gpu"`` makes the GPU for this rank's place on its node the current
            one (of CuPy and torch), ``"gpu:1"`` that one; ``"auto"`` does it where there are GPUs
            and CuPy is installed. ``HPCDIST_DEVICE`` comes first.
        timeout: seconds (or a timedelta) after which an operation that not all ranks have
            joined is a `CollectiveTimeout`; default 1800, or ``HPCDIST_TIMEOUT_S``.
        comm: an mpi4py communicator to use instead of ``MPI.COMM_WORLD``; hpcdist talks on its
            own duplicates of it.

    Raises:
        UsageError: the launcher started several ranks but MPI sees one (launcher and MPI
            library do not match), or an argument is wrong.
        TransportError: there is no MPI library, but the launcher started several ranks.
        RankFailure: a process died while the others started; the job has to end.

    Example:
        >>> import hpcdist as dist
        >>> dist.init_parallel_env().nranks >= 1
        True

    """
    session = current_session()
    if session is not None:
        if not is_simulated():
            check_not_finalized()
        session.ends_with_gloo = False
        return world_of(session)
    if here.restart is not None:
        set_session(session := here.restart())
        return world_of(session)
    taken: list[bool] = []
    try:
        _starts.take(taken, "init_parallel_env", patient=True)
        create_nccl_config(nccl_config)
        return _start(backend, device, timeout, comm)
    except HpcdistError:
        tell_in_short()
        wait_for_output_at_exit()
        raise
    finally:
        if taken and taken[-1]:
            _starts.lock.release()


def begun_session() -> Session:
    """Return the current session; begin the world if there is none, which is collective.

    As functions of meshes do: in Paddle's programs nothing else begins it.
    """
    if current_session() is None:
        init_parallel_env()
    return require_session()


_starts = OneThread()
"""MPI starts once in a process."""


def _start(backend: str | None, device: str | None, timeout: Any, comm: Any) -> Group:
    if (session := current_session()) is not None:  # another thread has just started
        return world_of(session)
    name = transport_name(backend)
    config = read_config()
    mark = _open_recorder(config)
    try:
        wanted = _wanted_device(device, config)
        timeout_s = check_timeout(timeout, config.timeout_s)
        world = _started(name, WorldRequest(config, timeout_s, comm, _leave_at_finalize))
        number = None
        if wanted is not None:
            number = gpu.choose(gpu.count(), world.place.local_rank, *wanted)
            gpu.bind(number)
        if world.join is None:
            group = world_group(world.connect())
            reports.note_world(group.generation, group.nranks)
        else:
            from hpcdist.comm.joining import join

            world, group = join(world.join)
            mark = _open_recorder(config)
    except BaseException:
        recorder.fail(mark)
        raise
    place, transport = world.place, cast(Transport, group.transport)
    if place.rank == 0:
        for sentence in unknown_settings(snapshot()):
            warnings.warn(sentence, stacklevel=4)
    if config.share_arrays:
        from hpcdist.comm.memory import share_arrays

        share_arrays()
    set_session(session := Session(group, whereabouts_of(world, number), timeout_s))
    mine = [rank for rank, host in enumerate(world.hosts) if host == world.hosts[place.rank]]
    job = transport.job or recorder.job_name()
    recorder.end(mark)
    recorder.settle(place.rank, place.size, job=job, here=in_short(mine))
    session.record(session.world)
    if place.local_rank == 0:
        rings.sweep()
    watch(config.stall_s)
    _end_with_program()
    return world_of(session)


def _started(name: str, request: WorldRequest) -> Any:
    """Return the world that a transport starts; where there is no MPI, that of a rank alone."""
    try:
        return load_start(name)(request)  # before anything that imports mpi4py.MPI
    except TransportError as error:
        if name != "mpi" or request.comm is not None or not is_alone(snapshot(), request.config):
            raise
        from hpcdist.transport.threads.transport import ThreadTransport

        return ThreadTransport.alone(request.timeout_s, str(error))


def whereabouts_of(world: Any, gpu: int | None) -> Whereabouts:
    """Return where this rank of a started world is.

    Args:
        world: has this rank's `place`, and the `hosts` and `local_ranks` of all.
        gpu: the number of this rank's GPU, if it has one.

    """
    place = world.place
    endpoints = tuple(
        f"{host}:{_FIRST_PORT + local}"
        for host, local in zip(world.hosts, world.local_ranks, strict=True)
    )
    return Whereabouts(
        place.local_rank, place.local_size, place.node_rank, place.nnodes, endpoints, gpu
    )


def _open_recorder(config: Config) -> int:
    """Begin to record, and record that this rank starts; return the mark of that."""
    if config.recorder == "off":
        return 0
    environ = snapshot()
    step = [environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    place = read_place(environ)
    job = ".".join(filter(None, step))
    launch = environ.get("PMIX_NAMESPACE", "")  # Open MPI's name for what it has started together
    recorder.open_ring({"slurm": job, "launch": launch, "rank": place.rank, "size": place.size})
    everybody = recorder.enter_group(range(place.size), -1, "init_parallel_env")
    return recorder.note(INIT, everybody, 1, 0, 0, 0)


class _Wanted(NamedTuple):
    """A GPU that is asked for, and where; any, if it has no number."""

    number: int | None = None
    setting: str = "device"


def _wanted_device(device: Any, config: Config) -> _Wanted | None:
    """Return which GPU is asked for, or None for none."""
    text, setting = device, "device"
    if config.device is not None:
        text, setting = config.device, "HPCDIST_DEVICE"
    if text is None or text == "auto":
        return _Wanted() if gpu.has_nodes() and gpu.count() else None
    if text == "cpu":
        return None
    if not isinstance(text, str):
        raise UsageError(f"device={text!r} is unknown; use 'auto', 'cpu', 'gpu' or 'gpu:0'")
    return _Wanted(gpu.read_device(text, setting), setting)


_FIRST_PORT = 6170
"""Paddle's first port: endpoints name ranks; nobody listens there."""


def _end_with_program() -> None:
    atexit.unregister(_leave_at_exit)
    atexit.register(_leave_at_exit)


@atexit.register  # imported before any world begins, and so called after it has ended
def _tell_unheard() -> None:
    """Tell of errors that nobody has waited for; the program fails, so its words come first."""
    if tell_all():
        wait_for_output()


def _leave_at_exit() -> None:
    """End the session before MPI ends; tell whoever still waits that this rank is gone.

    Then wait for what the others may still come to, while `hpcdist ps` can show it.
    """
    session = current_session()
    if session is not None:
        try:
            _leave(session)  # meanwhile it serves the calls of others
        finally:
            set_session(None)
    await_lingering()


def _leave_at_finalize() -> None:
    """End all operations before the program ends MPI; later ones get an error with the reason."""
    session = current_session()
    if session is None:
        return
    groups = [group for group in session.groups.values() if group.transport is not None]
    for group in groups:
        with contextlib.suppress(HpcdistError):  # its owner hears of it in wait()
            if group.transport is not None:
                group.transport.synchronize(on_device=False)
    _leave(session)
    for group in groups:
        group.transport = Closed(FINALIZED)


def _leave(session: Session) -> None:
    groups = [group for group in reversed(session.groups.values()) if group.transport is not None]
    transport = session.world.transport
    all_here = False
    with _whoever_is_dead():
        all_here = transport is not None and transport.together_at_end()
    session.end(f"rank {session.world.rank} has ended")
    for group in groups:
        if group.transport is not None:
            with _whoever_is_dead():
                if all_here:
                    group.transport.close()
                else:
                    group.transport.leave("has ended")
    for group in groups:
        end_all(group)


def _whoever_is_dead() -> contextlib.AbstractContextManager[None]:
    """In a job that survives, let be what a death prevents at the end: MPI tells of our end."""
    return contextlib.suppress(Exception) if survives() else contextlib.nullcontext()


def is_available() -> bool:
    """Return whether hpcdist can communicate here: mpi4py or another transport is installed.

    Example:
        >>> import hpcdist as dist
        >>> dist.is_available()
        True

    """
    return importlib.util.find_spec("mpi4py") is not None or bool(installed_transports())


def is_initialized() -> bool:
    """Return whether `init_parallel_env` has been called (and not undone).

    Example:
        >>> import hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> dist.is_initialized()
        True

    """
    return current_session() is not None


def get_rank(group: Group | None = None) -> int:
    """Return this process's rank in `group`; -1 if it is not a member. Local.

    Before `init_parallel_env` the launcher's environment answers.

    Args:
        group: None for the world.

    Example:
        >>> import hpcdist as dist
        >>> dist.simulate(3, dist.get_rank)
        [0, 1, 2]

    """
    if group is None and not is_initialized():
        return world_place(snapshot()).rank
    return resolve_group(group).rank


def get_world_size(group: Group | None = None) -> int:
    """Return how many ranks `group` has; -1 if this process is not a member. Local.

    Before `init_parallel_env` the launcher's environment answers.

    Args:
        group: None for the world.

    Example:
        >>> import hpcdist as dist
        >>> dist.simulate(3, dist.get_world_size)
        [3, 3, 3]

    """
    if group is None and not is_initialized():
        return world_place(snapshot()).size
    return resolve_group(group).world_size


def get_backend(group: Group | None = None) -> str:
    """Return the name of the transport of `group`, for example ``"MPI"``. Local.

    Args:
        group: None for the world.

    Raises:
        UsageError: this process is not a member.

    Example:
        >>> import hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> dist.get_backend()
        'MPI'

    """
    return resolve_group(group).backend


# ---- Paddle's gloo names: the host transport


def gloo_init_parallel_env(rank_id: int, rank_num: int, server_endpoint: str = "") -> None:
    """Start hpcdist on host memory (Paddle's name). Collective.

    Args:
        rank_id: this process's rank.
        rank_num: how many ranks there are.
        server_endpoint: not needed: MPI has connected the ranks.

    Raises:
        UsageError: MPI has another rank or number of ranks.

    Example:
        >>> import hpcdist as dist
        >>> dist.gloo_init_parallel_env(0, 1)
        >>> dist.gloo_barrier()
        >>> dist.gloo_release()

    """
    session = current_session()
    is_alone_in_asking = session is None or session.ends_with_gloo
    world = init_parallel_env(backend="gloo")
    require_session().ends_with_gloo = is_alone_in_asking
    if (rank_id, rank_num) != (world.rank, world.nranks):
        raise UsageError(
            f"gloo_init_parallel_env got rank {rank_id} of {rank_num}, but this process is rank "
            f"{world.rank} of {world.nranks}; start it with mpiexec or srun and pass get_rank() "
            "and get_world_size()"
        )


def gloo_barrier() -> None:
    """Wait until every rank has called this. Collective.

    Example:
        >>> import hpcdist as dist
        >>> dist.gloo_init_parallel_env(0, 1)
        >>> dist.gloo_barrier()
        >>> dist.gloo_release()

    """
    if not is_initialized():
        raise UsageAssertionError(
            "gloo context is not initialized; call gloo_init_parallel_env first"
        )
    from hpcdist.comm.collectives import barrier

    barrier()


def gloo_release() -> None:
    """Undo `gloo_init_parallel_env`. Collective; does nothing if nothing was started.

    What `init_parallel_env` started goes on.

    Example:
        >>> import hpcdist as dist
        >>> dist.gloo_init_parallel_env(0, 1)
        >>> dist.gloo_release()

    """
    session = current_session()
    if session is not None and session.ends_with_gloo and not is_simulated():
        from hpcdist.comm.groups import destroy_process_group

        destroy_process_group()
