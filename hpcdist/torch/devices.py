"""Tensors on GPUs: by CuPy on hpcdist's own ways, or handed over to torch's NCCL backend."""

from __future__ import annotations

import importlib.util
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.distributed as c10d

from hpcdist.comm.collectives import all_reduce
from hpcdist.torch.stores import shared_store
from hpcdist.transport.call.reduction import ReduceOp


class Reach(IntEnum):
    """How tensors on GPUs are reached; a larger number is better."""

    NOT = 0
    TORCH = 1
    OWN = 2


def agree_on_reach(process_group: Any) -> Reach:
    """Find out what all ranks can do with tensors on GPUs, and prepare it. Collective.

    hpcdist's own ways need CuPy on all ranks. Without it, torch's own NCCL backend is registered
    if every rank has a GPU and a torch with NCCL.
    """
    group = process_group.group
    found = np.array([_own_reach()])
    all_reduce(found, ReduceOp.MIN, group)
    reach = Reach(int(found[0]))
    if reach is Reach.TORCH:
        options = c10d.ProcessGroupNCCL.Options()
        options.global_ranks_in_group = group.ranks
        backend = c10d.ProcessGroupNCCL(shared_store(group), group.rank, group.nranks, options)
        kind = c10d.ProcessGroup.BackendType.NCCL
        process_group._register_backend(torch.device("cuda"), kind, backend)
    return reach


def _own_reach() -> Reach:
    if not torch.cuda.is_available():
        return Reach.NOT
    if importlib.util.find_spec("cupy") is not None:
        return Reach.OWN
    return Reach.TORCH if c10d.is_nccl_available() else Reach.NOT
