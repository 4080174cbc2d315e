"""The store of a process group: a TCPStore of torch whose address the ranks tell each other by MPI.

torch's other backends find each other over it, and so do programs. The first rank listens, on the
loopback address alone where all ranks are on its node.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as c10d

from hpcdist.comm.group import Group
from hpcdist.comm.objects import broadcast_object_list, tell_all
from hpcdist.errors import UsageError

_CONNECT_LIMIT = timedelta(seconds=60)
_LOOPBACK = "127.0.0.1"


def shared_store(group: Group) -> Any:
    """Open a new store, the same for all ranks of `group`. Collective.

    Raises:
        UsageError: a rank could not listen, or not reach the first one; on all ranks.

    """
    if len(group.ranks) == 1:
        return c10d.HashStore()  # in this process: nothing to listen at, no open files
    # A rank that fails takes all the steps nevertheless: the last one tells everybody.
    store, failure, place = None, None, [None]
    try:
        if group.rank == 0:
            store, place = _listen(group)
    except (OSError, RuntimeError) as error:
        failure = f"rank {group.ranks[0]} could not listen: {error}"
    broadcast_object_list(place, group.ranks[0], group)
    try:
        if group.rank != 0 and place[0] is not None:
            store = _connect(*place[0])
    except (OSError, RuntimeError) as error:
        failure = f"rank {group.world_rank} could not reach {place[0]}: {error}"
    for each in tell_all("the store of torch.distributed", failure, group):
        if each is not None:
            raise UsageError(
                f"no store for torch.distributed: {each}. The ranks of one job must be able to "
                "open connections to the node of the first one; or give init_process_group a "
                "store=, rank= and world_size= of yours"
            )
    return store


def _listen(group: Group) -> tuple[Any, list[Any]]:
    alone = group.one_node
    host = _LOOPBACK if alone else socket.gethostname()
    # Bound before torch has it, so that the port cannot be lost in between; the store owns the
    # descriptor then. All ranks connect at once, which the backlog must bear; none of them knows
    # the address yet, so the store must not wait for them.
    listener = socket.create_server((_LOOPBACK if alone else "", 0), backlog=2048)
    port = listener.getsockname()[1]
    store = c10d.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, [(host, port)]


def _connect(host: str, port: int) -> Any:
    return c10d.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=_CONNECT_LIMIT
    )
