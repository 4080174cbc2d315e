"""The methods of `Fleet` as functions: each is that of the `Fleet` that `init` made."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from hpcdist.fleet.job import Fleet, current_fleet

P = ParamSpec("P")
T = TypeVar("T")


def _forwarded(method: Callable[Concatenate[Fleet, P], T]) -> Callable[P, T]:
    """Return a function that calls a method of the `Fleet` that `init` made."""
    signature = inspect.signature(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return method(current_fleet(method.__name__), *args, **kwargs)

    functools.update_wrapper(
        call, method, ("__name__", "__qualname__", "__doc__", "__annotations__")
    )
    del call.__wrapped__  # type: ignore[attr-defined] # it has another signature
    call.__qualname__ = method.__name__
    without_self = [*signature.parameters.values()][1:]
    call.__signature__ = signature.replace(parameters=without_self)  # type: ignore[attr-defined]
    return call


is_first_worker = _forwarded(Fleet.is_first_worker)
worker_index = _forwarded(Fleet.worker_index)
worker_num = _forwarded(Fleet.worker_num)
node_num = _forwarded(Fleet.node_num)
local_rank = _forwarded(Fleet.local_rank)
local_device_ids = _forwarded(Fleet.local_device_ids)
world_device_ids = _forwarded(Fleet.world_device_ids)
is_worker = _forwarded(Fleet.is_worker)
is_server = _forwarded(Fleet.is_server)
is_coordinator = _forwarded(Fleet.is_coordinator)
worker_endpoints = _forwarded(Fleet.worker_endpoints)
server_num = _forwarded(Fleet.server_num)
server_endpoints = _forwarded(Fleet.server_endpoints)
barrier_worker = _forwarded(Fleet.barrier_worker)
get_hybrid_communicate_group = _forwarded(Fleet.get_hybrid_communicate_group)
get_hybrid_parallel_topology = _forwarded(Fleet.get_hybrid_parallel_topology)
set_log_level = _forwarded(Fleet.set_log_level)
check_memory_usage = _forwarded(Fleet.check_memory_usage)
distributed_model = _forwarded(Fleet.distributed_model)
distributed_optimizer = _forwarded(Fleet.distributed_optimizer)
distributed_scaler = _forwarded(Fleet.distributed_scaler)
minimize = _forwarded(Fleet.minimize)
get_loss_scaling = _forwarded(Fleet.get_loss_scaling)
amp_init = _forwarded(Fleet.amp_init)
qat_init = _forwarded(Fleet.qat_init)
all_reduce = _forwarded(Fleet.all_reduce)
save_persistables = _forwarded(Fleet.save_persistables)
save_inference_model = _forwarded(Fleet.save_inference_model)
save = _forwarded(Fleet.save)
