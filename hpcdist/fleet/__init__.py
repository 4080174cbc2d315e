"""Hybrid training: one strategy, one grid of ranks. ``from hpcdist import fleet``.

Read in this order: `fields` and `strategy` (what a user asks for; `prototxt`: as a file), `roles`
and `placement` (who is who), `workers` (what they do together), `plan` and `job` (`init`, `Fleet`),
`functions` (its methods as functions), `servers` (tables). `meta_parallel`, `utils`, `layers` and
`base` are Paddle's import paths. The grid itself is `parallel.topology` and `parallel.hybrid`.
"""

from typing import TYPE_CHECKING, Any

from hpcdist.data.generators import (
    MultiSlotDataGenerator as MultiSlotDataGenerator,
    MultiSlotStringDataGenerator as MultiSlotStringDataGenerator,
)
from hpcdist.fleet.functions import (
    all_reduce as all_reduce,
    amp_init as amp_init,
    barrier_worker as barrier_worker,
    check_memory_usage as check_memory_usage,
    distributed_model as distributed_model,
    distributed_optimizer as distributed_optimizer,
    distributed_scaler as distributed_scaler,
    get_hybrid_communicate_group as get_hybrid_communicate_group,
    get_hybrid_parallel_topology as get_hybrid_parallel_topology,
    get_loss_scaling as get_loss_scaling,
    is_coordinator as is_coordinator,
    is_first_worker as is_first_worker,
    is_server as is_server,
    is_worker as is_worker,
    local_device_ids as local_device_ids,
    local_rank as local_rank,
    minimize as minimize,
    node_num as node_num,
    qat_init as qat_init,
    save as save,
    save_inference_model as save_inference_model,
    save_persistables as save_persistables,
    server_endpoints as server_endpoints,
    server_num as server_num,
    set_log_level as set_log_level,
    worker_endpoints as worker_endpoints,
    worker_index as worker_index,
    worker_num as worker_num,
    world_device_ids as world_device_ids,
)
from hpcdist.fleet.job import Fleet as Fleet, init as init
from hpcdist.fleet.roles import (
    PaddleCloudRoleMaker as PaddleCloudRoleMaker,
    Role as Role,
    UserDefinedRoleMaker as UserDefinedRoleMaker,
)
from hpcdist.fleet.servers import (
    check_save_pre_patch_done as check_save_pre_patch_done,
    init_server as init_server,
    init_worker as init_worker,
    load_inference_model as load_inference_model,
    load_model as load_model,
    load_one_table as load_one_table,
    print_table_stat as print_table_stat,
    run_server as run_server,
    save_cache_model as save_cache_model,
    save_cache_table as save_cache_table,
    save_dense_params as save_dense_params,
    save_one_table as save_one_table,
    server_index as server_index,
    set_date as set_date,
    shrink as shrink,
    stop_worker as stop_worker,
)
from hpcdist.fleet.strategy import DistributedStrategy as DistributedStrategy
from hpcdist.fleet.workers import UtilBase as UtilBase
from hpcdist.lazy import lazily
from hpcdist.parallel.hybrid import HybridCommunicateGroup as HybridCommunicateGroup
from hpcdist.parallel.topology import (
    CommunicateTopology as CommunicateTopology,
    ParallelMode as ParallelMode,
)

util = UtilBase()
"""What the workers do together."""

_PERF = "hpcdist.bench.collective_perf"  # which stands above, and is imported when it is used

ROWS = {
    "DatasetBase": "hpcdist.data.dataset",
    "InMemoryDataset": "hpcdist.data.in_memory",
    "QueueDataset": "hpcdist.data.queue_dataset",
    "base": "hpcdist.fleet.base",
    "data_generator": "hpcdist.fleet.data_generator",
    "layers": "hpcdist.fleet.layers",
    "meta_parallel": "hpcdist.fleet.meta_parallel",
    "utils": "hpcdist.fleet.utils",
    "recompute": "hpcdist.fleet.recompute",
    "recompute_sequential": "hpcdist.torch.recompute",
    "recompute_hybrid": "hpcdist.torch.recompute",
    "collective_perf": _PERF,
    "allreduce_perf": _PERF,
    "reduce_perf": _PERF,
    "broadcast_perf": _PERF,
    "allgather_perf": _PERF,
    "reduce_scatter_perf": _PERF,
}
"""For each name that is imported when it is used, the module that has it, or is it."""

if TYPE_CHECKING:  # by their names, or no checker would find a misspelt one
    from collections.abc import Callable

    from hpcdist.data.dataset import DatasetBase as DatasetBase
    from hpcdist.data.in_memory import InMemoryDataset as InMemoryDataset
    from hpcdist.data.queue_dataset import QueueDataset as QueueDataset
    from hpcdist.fleet import (
        base as base,
        data_generator as data_generator,
        layers as layers,
        meta_parallel as meta_parallel,
        utils as utils,
    )

    recompute: Callable[..., Any]
    recompute_sequential: Callable[..., Any]
    recompute_hybrid: Callable[..., Any]
    collective_perf: Callable[..., None]
    allreduce_perf: Callable[..., None]
    reduce_perf: Callable[..., None]
    broadcast_perf: Callable[..., None]
    allgather_perf: Callable[..., None]
    reduce_scatter_perf: Callable[..., None]
else:
    __getattr__, __dir__ = lazily(globals(), ROWS)
