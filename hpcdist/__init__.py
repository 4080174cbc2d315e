"""MPI collectives and distributed training for NumPy, JAX and torch.

``import hpcdist as dist``, then ``srun -n 8 python train.py``.

Read in this order: `arrays` (what is sent), `runtime` (where am I), `transport` (how it
travels), `comm` (what users call), `mesh` (arrays across ranks), `checkpoint` (what is saved),
`data` (whose samples), `optim` (how weights change), `parallel` (training), `torch` (torch at
home on MPI), `launch` (how ranks are started). A module imports only from earlier ones.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "hpcdist relies on the global interpreter lock, but this free-threaded Python runs without "
        "it; start it with PYTHON_GIL=1 in the environment, or use an ordinary Python"
    )

from hpcdist import optim as optim
from hpcdist.comm import stream as stream
from hpcdist.comm.collectives import (
    all_gather as all_gather,
    all_gather_into_tensor as all_gather_into_tensor,
    all_reduce as all_reduce,
    all_to_all as all_to_all,
    all_to_all_single as all_to_all_single,
    alltoall as alltoall,
    alltoall_single as alltoall_single,
    barrier as barrier,
    broadcast as broadcast,
    exscan as exscan,
    gather as gather,
    reduce as reduce,
    reduce_scatter as reduce_scatter,
    reduce_scatter_tensor as reduce_scatter_tensor,
    scan as scan,
    scatter as scatter,
    wait as wait,
)
from hpcdist.comm.environment import (
    get_backend as get_backend,
    get_rank as get_rank,
    get_world_size as get_world_size,
    gloo_barrier as gloo_barrier,
    gloo_init_parallel_env as gloo_init_parallel_env,
    gloo_release as gloo_release,
    init_parallel_env as init_parallel_env,
    is_available as is_available,
    is_initialized as is_initialized,
)
from hpcdist.comm.grid import Grid as Grid
from hpcdist.comm.group import Group as Group
from hpcdist.comm.groups import (
    destroy_process_group as destroy_process_group,
    get_group as get_group,
    new_group as new_group,
    restart_process_group as restart_process_group,
    shutdown_process_group as shutdown_process_group,
)
from hpcdist.comm.memory import empty as empty, empty_like as empty_like, zeros as zeros
from hpcdist.comm.messages import (
    P2POp as P2POp,
    batch_isend_irecv as batch_isend_irecv,
    irecv as irecv,
    isend as isend,
    recv as recv,
    recv_object_list as recv_object_list,
    send as send,
    send_object_list as send_object_list,
)
from hpcdist.comm.objects import (
    all_gather_object as all_gather_object,
    all_to_all_object as all_to_all_object,
    broadcast_object_list as broadcast_object_list,
    gather_object as gather_object,
    scatter_object_list as scatter_object_list,
)
from hpcdist.comm.parallel_env import ParallelEnv as ParallelEnv
from hpcdist.comm.plans import (
    plan_all_gather as plan_all_gather,
    plan_all_reduce as plan_all_reduce,
    plan_alltoall as plan_alltoall,
    plan_alltoall_single as plan_alltoall_single,
    plan_barrier as plan_barrier,
    plan_broadcast as plan_broadcast,
    plan_exscan as plan_exscan,
    plan_gather as plan_gather,
    plan_reduce as plan_reduce,
    plan_reduce_scatter as plan_reduce_scatter,
    plan_scan as plan_scan,
    plan_scatter as plan_scatter,
)
from hpcdist.comm.preemption import on_preempt as on_preempt, should_stop as should_stop
from hpcdist.comm.reduced import all_reduced as all_reduced
from hpcdist.comm.simulate import simulate as simulate
from hpcdist.comm.together import together as together
from hpcdist.data.sampler import DistributedSampler as DistributedSampler
from hpcdist.data.sharded import (
    ShardedDataset as ShardedDataset,
    shard_dataset as shard_dataset,
)
from hpcdist.errors import (
    CheckpointError as CheckpointError,
    CheckpointWarning as CheckpointWarning,
    CollectiveTimeout as CollectiveTimeout,
    HpcdistError as HpcdistError,
    MismatchError as MismatchError,
    NotInGroupWarning as NotInGroupWarning,
    RemoteError as RemoteError,
    TransportError as TransportError,
    UsageError as UsageError,
)
from hpcdist.events import Event as Event, subscribe as subscribe
from hpcdist.parallel.averages import (
    average_gradients as average_gradients,
    fused_allreduce_gradients as fused_allreduce_gradients,
)
from hpcdist.parallel.clipping import clip_grad_norm_ as clip_grad_norm_
from hpcdist.parallel.fused import build_groups as build_groups
from hpcdist.parallel.model import DataParallel as DataParallel
from hpcdist.parallel.module_state import sync_params_buffers as sync_params_buffers
from hpcdist.parallel.parameter import Parameter as Parameter
from hpcdist.parallel.scaler import GradScaler as GradScaler
from hpcdist.parallel.sharding.group_sharded import (
    group_sharded_parallel as group_sharded_parallel,
)
from hpcdist.transport.base import Plan as Plan, Work as Work
from hpcdist.transport.call import PROC_NULL as PROC_NULL
from hpcdist.transport.reduction import ReduceOp as ReduceOp
from hpcdist.transport.waiting import wait_all as wait_all, wait_any as wait_any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hpcdist import checkpoint as checkpoint, sharding as sharding
    from hpcdist.checkpoint.array_files import (
        open_array as open_array,
        save_array as save_array,
    )
    from hpcdist.checkpoint.paddle import (
        load_merged_state_dict as load_merged_state_dict,
        load_state_dict as load_state_dict,
        save_group_sharded_model as save_group_sharded_model,
        save_state_dict as save_state_dict,
    )
    from hpcdist.launch import MultiprocessContext
    from hpcdist.mesh.api import (
        dtensor_from_fn as dtensor_from_fn,
        dtensor_from_local as dtensor_from_local,
        dtensor_to_local as dtensor_to_local,
        reshard as reshard,
        shard_tensor as shard_tensor,
        unshard_dtensor as unshard_dtensor,
    )
    from hpcdist.mesh.dist_array import DistArray as DistArray
    from hpcdist.mesh.picture import visualize_sharding as visualize_sharding
    from hpcdist.mesh.placements import (
        DistAttr as DistAttr,
        Partial as Partial,
        Placement as Placement,
        ReduceType as ReduceType,
        Replicate as Replicate,
        Shard as Shard,
    )
    from hpcdist.mesh.process_mesh import (
        ProcessMesh as ProcessMesh,
        create_mesh as create_mesh,
        get_mesh as get_mesh,
        set_mesh as set_mesh,
    )

__version__ = "0.1.0"

_LAZY = {
    "DistArray": "hpcdist.mesh.dist_array",
    "DistAttr": "hpcdist.mesh.placements",
    "Partial": "hpcdist.mesh.placements",
    "Placement": "hpcdist.mesh.placements",
    "ProcessMesh": "hpcdist.mesh.process_mesh",
    "ReduceType": "hpcdist.mesh.placements",
    "Replicate": "hpcdist.mesh.placements",
    "Shard": "hpcdist.mesh.placements",
    "checkpoint": "hpcdist.checkpoint",
    "create_mesh": "hpcdist.mesh.process_mesh",
    "dtensor_from_fn": "hpcdist.mesh.api",
    "dtensor_from_local": "hpcdist.mesh.api",
    "dtensor_to_local": "hpcdist.mesh.api",
    "get_mesh": "hpcdist.mesh.process_mesh",
    "load_merged_state_dict": "hpcdist.checkpoint.paddle",
    "load_state_dict": "hpcdist.checkpoint.paddle",
    "open_array": "hpcdist.checkpoint.array_files",
    "reshard": "hpcdist.mesh.api",
    "save_array": "hpcdist.checkpoint.array_files",
    "save_group_sharded_model": "hpcdist.checkpoint.paddle",
    "save_state_dict": "hpcdist.checkpoint.paddle",
    "set_mesh": "hpcdist.mesh.process_mesh",
    "shard_tensor": "hpcdist.mesh.api",
    "sharding": "hpcdist.sharding",
    "unshard_dtensor": "hpcdist.mesh.api",
    "visualize_sharding": "hpcdist.mesh.picture",
}
"""Names that not every program needs: the module that each is, or is in, is imported when used."""


def _lazy(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    value = globals()[name] = getattr(module, name, module)
    return value


if not TYPE_CHECKING:  # or no checker would find a misspelt name
    __getattr__ = _lazy


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def spawn(
    func: Callable[..., Any],
    args: Iterable[Any] = (),
    nprocs: int = -1,
    join: bool = True,
    daemon: bool = False,
    **options: Any,
) -> MultiprocessContext:
    """Start a function on new ranks; see `hpcdist.launch.spawn`."""
    from hpcdist.launch import spawn as start

    return start(func, args, nprocs, join, daemon, **options)


def launch() -> Any:
    """Run ``hpcdist run`` on this process's command line; see `hpcdist.launch`."""
    from hpcdist.launch import launch as start

    return start()


__all__ = sorted(  # what a star import gets: no modules that happen to be imported above
    {
        "PROC_NULL",
        "optim",
        "stream",
        *_LAZY,
        *(
            name
            for name, value in globals().items()
            if name[0] != "_" and getattr(value, "__module__", "").startswith(__name__)
        ),
    }
)
