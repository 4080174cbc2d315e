"""Tensors on GPUs: handed over to torch's own NCCL backend, where there is one."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import torch
import torch.distributed as c10d

from hpcdist.comm.collectives import all_reduce
from hpcdist.comm.objects import broadcast_object_list
from hpcdist.transport.recipes import ReduceOp


def register_devices(process_group: Any) -> list[torch.device]:
    """Give `process_group` torch's backends for this node's accelerators; collective.

    Returns the devices it can serve from now on, besides the CPU: CUDA if every rank has a GPU
    and a torch with NCCL.
    """
    group = process_group.group
    able = np.array([torch.cuda.is_available() and c10d.is_nccl_available()])
    all_reduce(able, ReduceOp.MIN, group)
    if not able[0]:
        return []
    device = torch.device("cuda")
    options = c10d.ProcessGroupNCCL.Options()
    options.global_ranks_in_group = group.ranks
    backend = c10d.ProcessGroupNCCL(_common_store(group), group.rank, group.nranks, options)
    process_group._register_backend(device, c10d.ProcessGroup.BackendType.NCCL, backend)
    return [device]


def _common_store(group: Any) -> Any:
    """Open a store on the group's first rank, over which NCCL's ranks find each other."""
    place: list[Any] = [None]
    if group.rank == 0:
        host = socket.gethostname() if not group.transport.one_node else "127.0.0.1"
        store = c10d.TCPStore(host, 0, group.nranks, is_master=True, wait_for_workers=False)
        place = [(host, store.port)]
    broadcast_object_list(place, group.ranks[0], group)
    if group.rank == 0:
        return store
    host, port = place[0]
    return c10d.TCPStore(host, port, group.nranks, is_master=False, wait_for_workers=False)
