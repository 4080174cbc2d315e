"""Paddle's ``fleet.meta_parallel``: what torch modules on a grid need, imported when used."""

from typing import TYPE_CHECKING

from hpcdist.fleet.lazy import lazily

_LAYERS = "hpcdist.torch.model_parallel.layers"
_RANDOM = "hpcdist.torch.model_parallel.random"
_SEQUENCE = "hpcdist.torch.model_parallel.sequence"
_PIPELINE = "hpcdist.torch.pipeline"
_HYBRID = "hpcdist.torch.hybrid"
_SCHEDULES = "hpcdist.fleet.meta_parallel.pipeline_parallel"
_PP_LAYERS = "hpcdist.fleet.meta_parallel.parallel_layers.pp_layers"

ROWS = {
    "ColumnParallelLinear": _LAYERS,
    "RowParallelLinear": _LAYERS,
    "VocabParallelEmbedding": _LAYERS,
    "ParallelCrossEntropy": _LAYERS,
    "ColumnSequenceParallelLinear": _SEQUENCE,
    "RowSequenceParallelLinear": _SEQUENCE,
    "RNGStatesTracker": _RANDOM,
    "get_rng_state_tracker": _RANDOM,
    "model_parallel_random_seed": _RANDOM,
    "LayerDesc": _PIPELINE,
    "SharedLayerDesc": _PIPELINE,
    "PipelineLayer": _PIPELINE,
    "PipelineParallel": _PIPELINE,
    "PipelineParallelWithInterleave": _SCHEDULES,
    "PipelineParallelWithInterleaveFthenB": _SCHEDULES,
    "LocalSharedLayerDesc": _PP_LAYERS,
    "parallel_layers": "hpcdist.fleet.meta_parallel.parallel_layers",
    "pp_utils": "hpcdist.fleet.meta_parallel.pp_utils",
    "pipeline_parallel": _SCHEDULES,
    "TensorParallel": _HYBRID,
    "SegmentParallel": _HYBRID,
    "ShardingParallel": _HYBRID,
    "HybridParallelOptimizer": _HYBRID,
}
"""For each name the module that has it."""

if TYPE_CHECKING:  # by their names: models are subclasses of these
    from hpcdist.fleet.meta_parallel import (
        parallel_layers as parallel_layers,
        pipeline_parallel as pipeline_parallel,
        pp_utils as pp_utils,
    )
    from hpcdist.fleet.meta_parallel.parallel_layers.pp_layers import (
        LocalSharedLayerDesc as LocalSharedLayerDesc,
    )
    from hpcdist.fleet.meta_parallel.pipeline_parallel import (
        PipelineParallelWithInterleave as PipelineParallelWithInterleave,
        PipelineParallelWithInterleaveFthenB as PipelineParallelWithInterleaveFthenB,
    )
    from hpcdist.torch.hybrid import (
        HybridParallelOptimizer as HybridParallelOptimizer,
        SegmentParallel as SegmentParallel,
        ShardingParallel as ShardingParallel,
        TensorParallel as TensorParallel,
    )
    from hpcdist.torch.model_parallel.layers import (
        ColumnParallelLinear as ColumnParallelLinear,
        ParallelCrossEntropy as ParallelCrossEntropy,
        RowParallelLinear as RowParallelLinear,
        VocabParallelEmbedding as VocabParallelEmbedding,
    )
    from hpcdist.torch.model_parallel.random import (
        RNGStatesTracker as RNGStatesTracker,
        get_rng_state_tracker as get_rng_state_tracker,
        model_parallel_random_seed as model_parallel_random_seed,
    )
    from hpcdist.torch.model_parallel.sequence import (
        ColumnSequenceParallelLinear as ColumnSequenceParallelLinear,
        RowSequenceParallelLinear as RowSequenceParallelLinear,
    )
    from hpcdist.torch.pipeline import (
        LayerDesc as LayerDesc,
        PipelineLayer as PipelineLayer,
        PipelineParallel as PipelineParallel,
        SharedLayerDesc as SharedLayerDesc,
    )
else:
    __getattr__, __dir__ = lazily(globals(), ROWS)
