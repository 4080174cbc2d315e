"""Several processes as one JAX: `initialize` tells `jax.distributed` what the launcher knows.

The ranks tell each other by MPI where JAX's coordinator listens, so the same line works under
``srun``, ``mpiexec`` and ``hpcdist run``.
"""

from __future__ import annotations

import socket
from typing import Any

import jax

from hpcdist.comm.environment import init_parallel_env
from hpcdist.comm.objects import broadcast_object_list, tell_all
from hpcdist.comm.session import is_simulated, require_session
from hpcdist.errors import UsageError

_LOOPBACK = "127.0.0.1"


def initialize(**options: Any) -> None:
    """Make all ranks the processes of one JAX: `jax.distributed.initialize`. Collective.

    To be called before JAX has looked for devices. Afterwards `jax.devices` are those of all ranks,
    and `jax.process_index` is the rank. A rank that has a GPU of its own, as `init_parallel_env`
    gives it, takes that one.

    Args:
        options: of `jax.distributed.initialize`, in place of what is found here.

    Raises:
        UsageError: JAX refused on some rank; on all ranks.

    Example:
        >>> import hpcdist.jax as hj
        >>> hj.initialize()  # doctest: +SKIP

    """
    if is_simulated():
        raise UsageError(
            "hpcdist.jax.initialize joins processes, and ranks of hpcdist.simulate are threads of "
            "one; start the program under mpiexec"
        )
    world = init_parallel_env()
    gpu = require_session().whereabouts.gpu
    address = [_free_address(world.one_node) if world.rank == 0 else None]
    broadcast_object_list(address, 0)
    found = {
        "coordinator_address": address[0],
        "num_processes": world.nranks,
        "process_id": world.rank,
        "local_device_ids": None if gpu is None else [gpu],
    }
    failure = None
    try:
        jax.distributed.initialize(**{**found, **options})
    except (RuntimeError, ValueError) as error:
        failure = f"rank {world.rank}: {error}"
    for each in tell_all("the start of jax.distributed", failure, world):
        if each is not None:
            raise UsageError(
                f"jax.distributed did not start: {each}. Call hpcdist.jax.initialize once, before "
                "anything that asks JAX for devices"
            )


def _free_address(one_node: bool) -> str:
    """Return where the coordinator of JAX can listen, which JAX opens itself."""
    host = _LOOPBACK if one_node else socket.gethostname()
    with socket.create_server((_LOOPBACK if one_node else "", 0)) as listener:
        return f"{host}:{listener.getsockname()[1]}"
