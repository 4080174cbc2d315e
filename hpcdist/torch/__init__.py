"""torch at home on MPI: ``import hpcdist.torch`` registers the backend ``"hpcdist"``.

After it, ``torch.distributed.init_process_group("hpcdist")`` under ``srun`` or ``mpiexec`` needs no
address, and all of torch's own engines run over MPI.

Read in this order: `backend` (registration), `stores` (where other backends meet), `process_group`
and `verbs` (torch's collectives in terms of hpcdist's), `descriptions` (what has no counterpart
there), `works` (what is under way), `onlookers`, `behind` and `amendments` (what torch's tools look
for), `devices` (tensors on GPUs), `states` and `data_parallel`, `virtual_ranks`, `batch_norm`,
`embedding` (rows of tables).

Modules on a mesh: `mesh` (meshes and placements as torch's), `on_mesh` (where ordinary tensors meet
DTensors), `layers` (`shard_layer`), `tensor_parallel` and `parallelized` (`parallelize`),
`mesh_optimizer`, `loader`, `losses`, `local_layer`, `split`, `experts`; `dist_model` and `sections`
use them all.

Layers of fleet: `model_parallel` (layers cut over the axis "mp"; a package with an order of its
own), `recompute`, `pipeline` (stages of the axis "pp"; so is this one).
"""

import os

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "hpcdist.torch needs torch, which is not installed: pip install 'hpcdist[torch]'",
        name="torch",
    ) from None

from hpcdist.torch.backend import init as init, process_group_of as process_group_of, register
from hpcdist.torch.batch_norm import SyncBatchNorm as SyncBatchNorm
from hpcdist.torch.data_parallel import TorchDataParallel as DataParallel
from hpcdist.torch.embedding import (
    SparseEmbedding as SparseEmbedding,
    sparse_embedding as sparse_embedding,
)
from hpcdist.torch.lamb import LAMB as LAMB
from hpcdist.torch.lars import LARS as LARS
from hpcdist.torch.process_group import HpcdistProcessGroup as HpcdistProcessGroup
from hpcdist.transport.flight.call_site import pass_over

__all__ = [
    "DataParallel",
    "HpcdistProcessGroup",
    "LAMB",
    "LARS",
    "SparseEmbedding",
    "SyncBatchNorm",
    "init",
    "process_group_of",
    "sparse_embedding",
]

pass_over(os.path.dirname(torch.__file__) + os.sep)  # a program's line is not one of torch's own
register()
