"""MPI collectives and distributed training for NumPy, torch and JAX: errors, not hangs.

``import hpcdist as dist``, then ``srun -n 8 python train.py``.

Read in this order: `arrays` (what is sent), `fs` (file systems), `runtime` (where am I),
`transport` (how it travels), `comm` (what users call), `rpc` (functions on other ranks), `mesh`
(arrays across ranks), `checkpoint` (what is saved), `data` (whose samples), `optim` (how weights
change), `ps` (rows by ids), `parallel` (training), `torch` (torch at home on MPI), `fleet` (hybrid
training), `launch` (how ranks are started). A module imports only from earlier ones.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "hpcdist relies on the global interpreter lock, but this free-threaded Python runs without "
        "it; start it with PYTHON_GIL=1 in the environment, or use an ordinary Python"
    )

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
from hpcdist.comm.group import Group as Group
from hpcdist.errors import (
    CheckpointError as CheckpointError,
    CheckpointWarning as CheckpointWarning,
    CollectiveTimeout as CollectiveTimeout,
    DatasetError as DatasetError,
    DatasetWarning as DatasetWarning,
    HpcdistError as HpcdistError,
    MismatchError as MismatchError,
    NotInGroupWarning as NotInGroupWarning,
    RankFailure as RankFailure,
    RemoteError as RemoteError,
    TransportError as TransportError,
    UsageError as UsageError,
)
from hpcdist.events import Event as Event, subscribe as subscribe
from hpcdist.lazy import lazily as _lazily
from hpcdist.runtime.late_imports import leave_to_python, when_imported
from hpcdist.transport.base import Plan as Plan
from hpcdist.transport.call.call import PROC_NULL as PROC_NULL
from hpcdist.transport.call.reduction import ReduceOp as ReduceOp
from hpcdist.transport.waiting.work import Work as Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hpcdist import (
        array as array,
        auto_parallel as auto_parallel,
        checkpoint as checkpoint,
        fleet as fleet,
        fs as fs,
        fsdp as fsdp,
        io as io,
        optim as optim,
        ps as ps,
        rpc as rpc,
        sharding as sharding,
        utils as utils,
    )
    from hpcdist.checkpoint.array_files import (
        open_array as open_array,
        save_array as save_array,
    )
    from hpcdist.checkpoint.memory.keeper import Memory as Memory
    from hpcdist.checkpoint.paddle import (
        load_merged_state_dict as load_merged_state_dict,
        load_state_dict as load_state_dict,
        save_group_sharded_model as save_group_sharded_model,
        save_state_dict as save_state_dict,
    )
    from hpcdist.checkpoint.sharded_weight import (
        ShardedStateDict as ShardedStateDict,
        ShardedWeight as ShardedWeight,
        build_sharded_state_dict as build_sharded_state_dict,
        shard_weight as shard_weight,
    )
    from hpcdist.comm import stream as stream
    from hpcdist.comm.grid import Grid as Grid
    from hpcdist.comm.groups import (
        destroy_process_group as destroy_process_group,
        get_group as get_group,
        new_group as new_group,
        restart_process_group as restart_process_group,
        shutdown_process_group as shutdown_process_group,
    )
    from hpcdist.comm.memory import (
        empty as empty,
        empty_like as empty_like,
        share_arrays as share_arrays,
        shared_memory as shared_memory,
        zeros as zeros,
    )
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
    from hpcdist.comm.nccl_config import create_nccl_config as create_nccl_config
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
    from hpcdist.comm.recovery import recover as recover
    from hpcdist.comm.reduced import all_reduced as all_reduced
    from hpcdist.comm.simulate import simulate as simulate
    from hpcdist.comm.surviving import survive as survive
    from hpcdist.comm.together import together as together
    from hpcdist.data.in_memory import InMemoryDataset as InMemoryDataset
    from hpcdist.data.queue_dataset import QueueDataset as QueueDataset
    from hpcdist.data.sampler import DistributedSampler as DistributedSampler
    from hpcdist.data.shard_loader import (
        ShardDataloader as ShardDataloader,
        shard_dataloader as shard_dataloader,
    )
    from hpcdist.data.sharded import (
        ShardedDataset as ShardedDataset,
        shard_dataset as shard_dataset,
    )
    from hpcdist.launch import MultiprocessContext
    from hpcdist.mesh import random as random
    from hpcdist.mesh.api import (
        dtensor_from_fn as dtensor_from_fn,
        dtensor_from_local as dtensor_from_local,
        dtensor_to_local as dtensor_to_local,
        reshard as reshard,
        shard_tensor as shard_tensor,
        unshard_dtensor as unshard_dtensor,
    )
    from hpcdist.mesh.dist_array import DistArray as DistArray
    from hpcdist.mesh.local_map import local_map as local_map
    from hpcdist.mesh.picture import visualize_sharding as visualize_sharding
    from hpcdist.mesh.placements import (
        DistAttr as DistAttr,
        Partial as Partial,
        Placement as Placement,
        ReduceType as ReduceType,
        Replicate as Replicate,
        Shard as Shard,
    )
    from hpcdist.mesh.policy import array_policy as array_policy
    from hpcdist.mesh.process_mesh import (
        ProcessMesh as ProcessMesh,
        create_mesh as create_mesh,
        get_mesh as get_mesh,
        set_mesh as set_mesh,
    )
    from hpcdist.mesh.stencil import map_overlap as map_overlap
    from hpcdist.mesh.torchs import (
        from_dtensor as from_dtensor,
        to_dtensor as to_dtensor,
    )
    from hpcdist.parallel.automatic import to_distributed as to_distributed
    from hpcdist.parallel.averages import (
        average_gradients as average_gradients,
        fused_allreduce_gradients as fused_allreduce_gradients,
    )
    from hpcdist.parallel.clipping import clip_grad_norm_ as clip_grad_norm_
    from hpcdist.parallel.compressed.low_rank import PowerSGD as PowerSGD
    from hpcdist.parallel.fused import build_groups as build_groups
    from hpcdist.parallel.layer_plans import (
        ColWiseParallel as ColWiseParallel,
        ContextParallel as ContextParallel,
        ConvParallel as ConvParallel,
        PrepareContextParallel as PrepareContextParallel,
        PrepareLayerInput as PrepareLayerInput,
        PrepareLayerOutput as PrepareLayerOutput,
        RowWiseParallel as RowWiseParallel,
        SequenceParallelBegin as SequenceParallelBegin,
        SequenceParallelDisable as SequenceParallelDisable,
        SequenceParallelEnable as SequenceParallelEnable,
        SequenceParallelEnd as SequenceParallelEnd,
        SplitPoint as SplitPoint,
    )
    from hpcdist.parallel.layers import (
        fully_shard as fully_shard,
        parallelize as parallelize,
        shard_layer as shard_layer,
        to_static as to_static,
    )
    from hpcdist.parallel.model import DataParallel as DataParallel
    from hpcdist.parallel.module_state import sync_params_buffers as sync_params_buffers
    from hpcdist.parallel.parameter import Parameter as Parameter
    from hpcdist.parallel.scaler import GradScaler as GradScaler
    from hpcdist.parallel.sharding.group_sharded import (
        group_sharded_parallel as group_sharded_parallel,
    )
    from hpcdist.parallel.split import split as split
    from hpcdist.parallel.stages import (
        ShardingStage1 as ShardingStage1,
        ShardingStage2 as ShardingStage2,
        ShardingStage3 as ShardingStage3,
        shard_optimizer as shard_optimizer,
        shard_scaler as shard_scaler,
    )
    from hpcdist.parallel.strategy import Strategy as Strategy
    from hpcdist.parallel.topology import ParallelMode as ParallelMode
    from hpcdist.ps.entries import (
        CountFilterEntry as CountFilterEntry,
        ProbabilityEntry as ProbabilityEntry,
        ShowClickEntry as ShowClickEntry,
    )
    from hpcdist.torch.dist_model import DistModel as DistModel
    from hpcdist.torch.local_layer import LocalLayer as LocalLayer
    from hpcdist.transport.waiting.works import wait_all as wait_all, wait_any as wait_any

__version__ = "0.1.0"

_LAZY = {
    "ColWiseParallel": "hpcdist.parallel.layer_plans",
    "ContextParallel": "hpcdist.parallel.layer_plans",
    "ConvParallel": "hpcdist.parallel.layer_plans",
    "CountFilterEntry": "hpcdist.ps.entries",
    "DataParallel": "hpcdist.parallel.model",
    "DistArray": "hpcdist.mesh.dist_array",
    "DistAttr": "hpcdist.mesh.placements",
    "DistModel": "hpcdist.torch.dist_model",
    "DistributedSampler": "hpcdist.data.sampler",
    "GradScaler": "hpcdist.parallel.scaler",
    "Grid": "hpcdist.comm.grid",
    "InMemoryDataset": "hpcdist.data.in_memory",
    "LocalLayer": "hpcdist.torch.local_layer",
    "Memory": "hpcdist.checkpoint.memory.keeper",
    "P2POp": "hpcdist.comm.messages",
    "ParallelEnv": "hpcdist.comm.parallel_env",
    "ParallelMode": "hpcdist.parallel.topology",
    "Parameter": "hpcdist.parallel.parameter",
    "Partial": "hpcdist.mesh.placements",
    "Placement": "hpcdist.mesh.placements",
    "PowerSGD": "hpcdist.parallel.compressed.low_rank",
    "PrepareContextParallel": "hpcdist.parallel.layer_plans",
    "PrepareLayerInput": "hpcdist.parallel.layer_plans",
    "PrepareLayerOutput": "hpcdist.parallel.layer_plans",
    "ProbabilityEntry": "hpcdist.ps.entries",
    "ProcessMesh": "hpcdist.mesh.process_mesh",
    "QueueDataset": "hpcdist.data.queue_dataset",
    "ReduceType": "hpcdist.mesh.placements",
    "Replicate": "hpcdist.mesh.placements",
    "RowWiseParallel": "hpcdist.parallel.layer_plans",
    "SequenceParallelBegin": "hpcdist.parallel.layer_plans",
    "SequenceParallelDisable": "hpcdist.parallel.layer_plans",
    "SequenceParallelEnable": "hpcdist.parallel.layer_plans",
    "SequenceParallelEnd": "hpcdist.parallel.layer_plans",
    "Shard": "hpcdist.mesh.placements",
    "ShardDataloader": "hpcdist.data.shard_loader",
    "ShardedDataset": "hpcdist.data.sharded",
    "ShardedStateDict": "hpcdist.checkpoint.sharded_weight",
    "ShardedWeight": "hpcdist.checkpoint.sharded_weight",
    "ShardingStage1": "hpcdist.parallel.stages",
    "ShardingStage2": "hpcdist.parallel.stages",
    "ShardingStage3": "hpcdist.parallel.stages",
    "ShowClickEntry": "hpcdist.ps.entries",
    "SplitPoint": "hpcdist.parallel.layer_plans",
    "Strategy": "hpcdist.parallel.strategy",
    "all_gather_object": "hpcdist.comm.objects",
    "all_reduced": "hpcdist.comm.reduced",
    "all_to_all_object": "hpcdist.comm.objects",
    "array": "hpcdist.array",
    "array_policy": "hpcdist.mesh.policy",
    "auto_parallel": "hpcdist.auto_parallel",
    "average_gradients": "hpcdist.parallel.averages",
    "batch_isend_irecv": "hpcdist.comm.messages",
    "broadcast_object_list": "hpcdist.comm.objects",
    "build_groups": "hpcdist.parallel.fused",
    "build_sharded_state_dict": "hpcdist.checkpoint.sharded_weight",
    "checkpoint": "hpcdist.checkpoint",
    "clip_grad_norm_": "hpcdist.parallel.clipping",
    "create_mesh": "hpcdist.mesh.process_mesh",
    "create_nccl_config": "hpcdist.comm.nccl_config",
    "data": "hpcdist.data",
    "destroy_process_group": "hpcdist.comm.groups",
    "dtensor_from_fn": "hpcdist.mesh.api",
    "dtensor_from_local": "hpcdist.mesh.api",
    "dtensor_to_local": "hpcdist.mesh.api",
    "empty": "hpcdist.comm.memory",
    "empty_like": "hpcdist.comm.memory",
    "fleet": "hpcdist.fleet",
    "from_dtensor": "hpcdist.mesh.torchs",
    "fs": "hpcdist.fs",
    "fsdp": "hpcdist.fsdp",
    "fully_shard": "hpcdist.parallel.layers",
    "fused_allreduce_gradients": "hpcdist.parallel.averages",
    "gather_object": "hpcdist.comm.objects",
    "get_group": "hpcdist.comm.groups",
    "get_mesh": "hpcdist.mesh.process_mesh",
    "group_sharded_parallel": "hpcdist.parallel.sharding.group_sharded",
    "io": "hpcdist.io",
    "irecv": "hpcdist.comm.messages",
    "isend": "hpcdist.comm.messages",
    "load_merged_state_dict": "hpcdist.checkpoint.paddle",
    "load_state_dict": "hpcdist.checkpoint.paddle",
    "local_map": "hpcdist.mesh.local_map",
    "map_overlap": "hpcdist.mesh.stencil",
    "new_group": "hpcdist.comm.groups",
    "on_preempt": "hpcdist.comm.preemption",
    "open_array": "hpcdist.checkpoint.array_files",
    "optim": "hpcdist.optim",
    "parallel": "hpcdist.parallel",
    "parallelize": "hpcdist.parallel.layers",
    "plan_all_gather": "hpcdist.comm.plans",
    "plan_all_reduce": "hpcdist.comm.plans",
    "plan_alltoall": "hpcdist.comm.plans",
    "plan_alltoall_single": "hpcdist.comm.plans",
    "plan_barrier": "hpcdist.comm.plans",
    "plan_broadcast": "hpcdist.comm.plans",
    "plan_exscan": "hpcdist.comm.plans",
    "plan_gather": "hpcdist.comm.plans",
    "plan_reduce": "hpcdist.comm.plans",
    "plan_reduce_scatter": "hpcdist.comm.plans",
    "plan_scan": "hpcdist.comm.plans",
    "plan_scatter": "hpcdist.comm.plans",
    "ps": "hpcdist.ps",
    "random": "hpcdist.mesh.random",
    "recover": "hpcdist.comm.recovery",
    "recv": "hpcdist.comm.messages",
    "recv_object_list": "hpcdist.comm.messages",
    "reshard": "hpcdist.mesh.api",
    "restart_process_group": "hpcdist.comm.groups",
    "rpc": "hpcdist.rpc",
    "save_array": "hpcdist.checkpoint.array_files",
    "save_group_sharded_model": "hpcdist.checkpoint.paddle",
    "save_state_dict": "hpcdist.checkpoint.paddle",
    "scatter_object_list": "hpcdist.comm.objects",
    "send": "hpcdist.comm.messages",
    "send_object_list": "hpcdist.comm.messages",
    "set_mesh": "hpcdist.mesh.process_mesh",
    "shard_dataloader": "hpcdist.data.shard_loader",
    "shard_dataset": "hpcdist.data.sharded",
    "shard_layer": "hpcdist.parallel.layers",
    "shard_optimizer": "hpcdist.parallel.stages",
    "shard_scaler": "hpcdist.parallel.stages",
    "shard_tensor": "hpcdist.mesh.api",
    "shard_weight": "hpcdist.checkpoint.sharded_weight",
    "sharding": "hpcdist.sharding",
    "share_arrays": "hpcdist.comm.memory",
    "shared_memory": "hpcdist.comm.memory",
    "should_stop": "hpcdist.comm.preemption",
    "shutdown_process_group": "hpcdist.comm.groups",
    "simulate": "hpcdist.comm.simulate",
    "split": "hpcdist.parallel.split",
    "stream": "hpcdist.comm.stream",
    "survive": "hpcdist.comm.surviving",
    "sync_params_buffers": "hpcdist.parallel.module_state",
    "to_distributed": "hpcdist.parallel.automatic",
    "to_dtensor": "hpcdist.mesh.torchs",
    "to_static": "hpcdist.parallel.layers",
    "together": "hpcdist.comm.together",
    "unshard_dtensor": "hpcdist.mesh.api",
    "utils": "hpcdist.utils",
    "visualize_sharding": "hpcdist.mesh.picture",
    "wait_all": "hpcdist.transport.waiting.works",
    "wait_any": "hpcdist.transport.waiting.works",
    "zeros": "hpcdist.comm.memory",
}
"""Names that not every program needs: the module that each is, or is in, is imported when used."""

_ELSEWHERE = {
    "Backend": "get_backend()",
    "DTensor": "shard_tensor, which makes a DistArray, or to_dtensor for torch's own",
    "DeviceMesh": "ProcessMesh(shape=..., dim_names=...)",
    "DistributedDataParallel": "hpcdist.DataParallel(model)",
    "DistributedOptimizer": "DataParallel(model) with any optimizer, or average_gradients",
    "all_gather_coalesced": "all_gather, of each",
    "all_reduce_coalesced": "all_reduce, of each, with sync_op=False",
    "bcast": "broadcast(x, src)",
    "broadcast_parameters": "sync_params_buffers(model)",
    "clip_grad_value_": "torch.nn.utils.clip_grad_value_: it needs no other rank",
    "distribute_tensor": "shard_tensor(x, mesh, placements)",
    "get_global_rank": "group.get_global_rank(rank)",
    "get_group_rank": "group.get_group_rank(rank)",
    "get_local_rank": "ParallelEnv().local_rank",
    "get_node_local_rank": "ParallelEnv().local_rank",
    "get_process_group_ranks": "group.ranks",
    "init": "init_parallel_env()",
    "init_device_mesh": "ProcessMesh(shape=..., dim_names=...)",
    "init_process_group": "init_parallel_env()",
    "is_torchelastic_launched": "init_parallel_env(), whatever the launcher",
    "monitored_barrier": "barrier(), which names the ranks that are missing",
    "new_subgroups": "new_group(ranks), or a ProcessMesh",
    "new_subgroups_by_enumeration": "new_group(ranks), or a ProcessMesh",
    "rank": "get_rank()",
    "reduce_op": "ReduceOp",
    "reduce_scatter_tensor_coalesced": "reduce_scatter, of each",
    "shard_op": "reshard(x, mesh, placements), of what goes into it and comes out",
    "size": "get_world_size()",
    "split_group": "group.split(color)",
    "world_size": "get_world_size()",
}
"""Names that users of torch.distributed, Horovod, mpi4py and Paddle look for."""

if not TYPE_CHECKING:  # or no checker would find a misspelt name
    __getattr__, __dir__ = _lazily(globals(), _LAZY, _ELSEWHERE)


def spawn(
    func: Callable[..., Any],
    args: Iterable[Any] = (),
    nprocs: int = -1,
    join: bool = True,
    daemon: bool = False,
    **options: Any,
) -> MultiprocessContext:
    """Start a function on new ranks; see `hpcdist.launch.spawn`, which has an example.

    Args:
        func: what every rank calls.
        args: its arguments, pickled once.
        nprocs: the number of ranks; -1 for one per device in `gpus`, else per usable CPU.
        join: whether to wait for them, and to raise what they raise.
        daemon: whether they end with this process.
        **options: those of `hpcdist.launch.spawn`.

    """
    from hpcdist.launch import spawn as start

    return start(func, args, nprocs, join, daemon, **options)


def launch() -> Any:
    """Run ``hpcdist run`` on this process's command line; see `hpcdist.launch`."""
    from hpcdist.launch import launch as start

    return start()


when_imported("torch._dynamo.trace_rules", leave_to_python)
del leave_to_python, when_imported

__all__ = sorted(  # what a star import gets: no modules that happen to be imported above
    {
        "PROC_NULL",
        *(
            name
            for name, module in _LAZY.items()
            if not module.startswith("hpcdist.torch") and name not in ("data", "parallel")
        ),
        *(
            name
            for name, value in globals().items()
            if name[0] != "_" and getattr(value, "__module__", "").startswith(__name__)
        ),
    }
)
