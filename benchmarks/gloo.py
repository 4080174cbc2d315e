"""torch's gloo as an opponent, on the ranks MPI has started."""

from __future__ import annotations

import warnings
from typing import Any

from mpi4py import MPI


def start_gloo(comm: MPI.Intracomm) -> Any:
    """Return `torch.distributed`, started over the ranks of `comm`; None without torch.

    Collective. All ranks must be on one node: they meet at a port of the loopback.
    """
    try:
        import torch.distributed as torch_dist
    except ImportError:
        return None
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # renamed verbs
    store = None
    if comm.rank == 0:
        store = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = comm.bcast(store.port if store is not None else None)
    if store is None:
        store = torch_dist.TCPStore("127.0.0.1", port)
    torch_dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    return torch_dist


def tensor_of(array: Any) -> Any:
    """Return a torch tensor on the memory of a NumPy array, bfloat16 included."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("i2")).view(torch.bfloat16)
    return torch.from_numpy(array)


def stop_gloo(torch_dist: Any) -> None:
    """End what `start_gloo` began. Collective."""
    if torch_dist is not None:
        torch_dist.destroy_process_group()
