"""`ABSENT`: names of Paddle's modules that have no counterpart, and what to use in their place.

The modules are there, with the names that they share with Paddle's; whoever imports one of these
learns what does the same here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_AMP = (
    "strategy.amp = True, or torch.autocast, computes in 16 bits; sharding of a model that has 16 "
    "bits keeps master weights of 32"
)
_TIMERS = "torch.profiler and hpcdist.subscribe show what took how long"
_FUSED = (
    "DataParallel and fleet's engines put gradients together themselves; "
    "strategy.fuse_grad_size_in_MB is the size of a bucket"
)
_P2P = (
    "PipelineParallel sends what stages need; hpcdist.isend, irecv and batch_isend_irecv are free"
)
_SCHEDULES = "torch.profiler, and timeline() and draw() of PipelineParallel, show what stages did"

ABSENT: Mapping[str, Mapping[str, str]] = {
    "hpcdist.fleet.utils.mix_precision_utils": dict.fromkeys(
        ("MixPrecisionLayer", "MixPrecisionOptimizer", "MixPrecisionScaler", "unscale_method"), _AMP
    ),
    "hpcdist.fleet.utils.timer_helper": dict.fromkeys(
        ("Timers", "get_timers", "is_timer_initialized", "set_timers"), _TIMERS
    ),
    "hpcdist.fleet.utils.tensor_fusion_helper": dict.fromkeys(
        (
            "FusedCommBuffer",
            "HOOK_ACTION",
            "ShardingGradView",
            "assign_group_by_size",
            "build_reduce_scatter_buffer",
            "flatten_dense_tensors",
            "fused_parameters",
            "get_group_size",
            "obtain_storage",
        ),
        _FUSED,
    ),
    "hpcdist.fleet.utils.hybrid_parallel_util": {
        "broadcast_input_data": (
            "ranks along mp read the same samples, which they compare; give their sampler the rank "
            "along dp"
        ),
        "obtain_optimizer_parameters_list": (
            "[each for group in optimizer.param_groups for each in group['params']]"
        ),
        "unwrap_optimizer": "optimizer.inner is the optimizer that was given",
    },
    "hpcdist.fleet.meta_parallel.parallel_layers.pp_layers": {
        "PipelineLayerChunk": "stages are the attribute stages of a PipelineLayer",
        "SegmentLayers": "PipelineLayer(seg_method=...) says how layers are dealt out",
    },
    "hpcdist.fleet.meta_parallel.pp_utils": dict.fromkeys(
        (
            "P2pHelper",
            "get_tensor_bytes",
            "initialize_p2p_groups",
            "p2p_communication",
            "profiler_helper",
            "utils",
        ),
        _P2P,
    ),
    "hpcdist.fleet.meta_parallel.pipeline_parallel": dict.fromkeys(
        ("PipelineParallelMicroStepLocations", "profile_pipeline_memory"), _SCHEDULES
    ),
}
"""By module, for each name what does the same here."""


def refusing(module: str) -> Callable[[str], Any]:
    """Return a module's ``__getattr__``, which says what to use in place of `ABSENT` names."""

    def find(name: str) -> Any:
        remedy = ABSENT[module].get(name)
        if remedy is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise ImportError(f"{module} has no {name}, which is Paddle's alone: {remedy}")

    return find
