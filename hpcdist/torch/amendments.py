"""Functions of torch that serve only the backends they know by name, amended to serve hpcdist, too.

Each is replaced by one that does hpcdist's own for process groups of hpcdist, and for all others
what it did.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.distributed as c10d
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from hpcdist.runtime.late_imports import when_imported
from hpcdist.torch.batch_norm import SyncBatchNorm
from hpcdist.torch.behind import PYTHON_MAKES_BACKENDS
from hpcdist.torch.process_group import HpcdistProcessGroup
from hpcdist.torch.verbs import FORMER_NAMES

_Function = Callable[..., Any]


def amend() -> None:
    """Amend torch; once per process."""
    for module in (c10d, distributed_c10d):
        _replace(module, "monitored_barrier", _monitored_barrier)
    _replace(distributed_c10d, "_set_pg_timeout", _set_pg_timeout)
    if not PYTHON_MAKES_BACKENDS:
        _serve_out_variants()
    for row in _LATER:
        _amend_later(*row)
    when_imported("torch._dynamo.trace_rules", _leave_verbs_to_python)


def _replace(module: ModuleType, name: str, make: Callable[[_Function], _Function]) -> None:
    setattr(module, name, make(getattr(module, name)))


def _amend_later(
    defining: str, importing: str, name: str, make: Callable[[_Function], _Function]
) -> None:
    when_imported(defining, lambda module: _replace(module, name, make))
    if importing in sys.modules:  # it has a reference of its own to the function
        _replace(sys.modules[importing], name, make)


def _ours(group: Any) -> Any:
    """Return `group`, or the world for None, if it is one of hpcdist; None if not."""
    group = c10d.group.WORLD if group is None else group
    return group if isinstance(group, HpcdistProcessGroup) else None


def _monitored_barrier(torchs: _Function) -> _Function:
    @wraps(torchs)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        ours = _ours(group)
        if ours is None:
            torchs(group, timeout, wait_all_ranks)
        else:
            ours.monitored_barrier(timeout, wait_all_ranks)

    return monitored_barrier


def _set_pg_timeout(torchs: _Function) -> _Function:
    @wraps(torchs)
    def _set_pg_timeout(timeout: Any, group: Any = None) -> None:
        ours = _ours(group)
        if ours is None:
            torchs(timeout, group)
        else:
            ours.set_timeout(timeout)

    return _set_pg_timeout


# ---- DTensor: from sharded by one dimension to sharded by another


def _shard_dim_alltoall(torchs: _Function) -> _Function:
    """Exchange shards; torch gathers whole tensors on the CPU, as gloo had no all-to-all."""

    @wraps(torchs)
    def shard_dim_alltoall(
        input: torch.Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int
    ) -> Any:
        group = mesh.get_group(mesh_dim)
        if mesh.device_type != "cpu" or not isinstance(group, HpcdistProcessGroup):
            return torchs(input, gather_dim, shard_dim, mesh, mesh_dim)
        exchange = torch.ops._dtensor.shard_dim_alltoall
        return exchange(input, gather_dim, shard_dim, group.group_name)

    return shard_dim_alltoall


# ---- ignite


def _auto_model(ignites: _Function) -> _Function:
    """Wrap models on hpcdist, too; ignite would silently leave the ranks to train apart."""

    @wraps(ignites)
    def auto_model(model: Any, sync_bn: bool = False, **kwargs: Any) -> Any:
        model = ignites(model, sync_bn, **kwargs)
        group = _ours(None)
        if group is None or group.size() == 1 or isinstance(model, DistributedDataParallel):
            return model
        if sync_bn:
            model = SyncBatchNorm.convert_sync_batchnorm(model)
        if torch.cuda.is_available():
            kwargs["device_ids"] = [torch.cuda.current_device()]
        return DistributedDataParallel(model, **kwargs)

    return auto_model


# ---- torch.compile


def _leave_verbs_to_python(rules: ModuleType) -> None:
    """Let Dynamo run process groups as they are, as `leave_to_python` does all but the layers."""
    for name in ("descriptions", "onlookers", "process_group", "verbs", "works"):
        rules.add(f"hpcdist.torch.{name}")


# ---- modules that may be imported later

_LATER = [
    (
        "torch.distributed.tensor._collective_utils",
        "torch.distributed.tensor.placement_types",
        "shard_dim_alltoall",
        _shard_dim_alltoall,
    ),
    ("ignite.distributed.auto", "ignite.distributed", "auto_model", _auto_model),
]
"""The module that defines a function, one that imports it by name, the name, and the change."""


# ---- functional collectives into a given tensor


def _serve_out_variants() -> None:
    """Bring the ``_out`` variants to Python: before torch 2.14 their C++ wants a backend of it."""
    for name, function in _OUT_VARIANTS.items():
        _library.impl(name, function, "CPU")


_library = torch.library.Library("_c10d_functional", "IMPL")  # goes with this object


def _all_gather_into(
    input: torch.Tensor, group_size: int, group_name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    gather = _verb_of(group_name, "all_gather_single")
    return _register(out, gather(out, input, AllgatherOptions()))


def _reduce_scatter_into(
    input: torch.Tensor, reduce_op: str, group_size: int, group_name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    options = ReduceScatterOptions()
    options.reduceOp = getattr(c10d.ReduceOp, _OPERATORS.get(reduce_op, reduce_op.upper()))
    reduce_scatter = _verb_of(group_name, "reduce_scatter_single")
    return _register(out, reduce_scatter(out, input, options))


def _verb_of(group: Any, name: str) -> Any:
    group = distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
    return getattr(group, name if hasattr(group, name) else FORMER_NAMES[name])


def _register(out: torch.Tensor, work: Any) -> torch.Tensor:
    torch._C._distributed_c10d._register_work(out, work)
    return out


_OPERATORS = {"avg": "AVG", "sum": "SUM", "product": "PRODUCT"}
_OUT_VARIANTS = {
    "all_gather_into_tensor_out": _all_gather_into,
    "reduce_scatter_tensor_out": _reduce_scatter_into,
}
