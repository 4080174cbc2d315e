"""Paddle's ``fleet.meta_parallel``: what torch modules on a grid need."""

from hpcdist.fleet.meta_parallel import (
    parallel_layers as parallel_layers,
    pipeline_parallel as pipeline_parallel,
    pp_utils as pp_utils,
)
from hpcdist.fleet.meta_parallel.parallel_layers import (
    ColumnParallelLinear as ColumnParallelLinear,
    LayerDesc as LayerDesc,
    LocalSharedLayerDesc as LocalSharedLayerDesc,
    ParallelCrossEntropy as ParallelCrossEntropy,
    PipelineLayer as PipelineLayer,
    RNGStatesTracker as RNGStatesTracker,
    RowParallelLinear as RowParallelLinear,
    SharedLayerDesc as SharedLayerDesc,
    VocabParallelEmbedding as VocabParallelEmbedding,
    get_rng_state_tracker as get_rng_state_tracker,
    model_parallel_random_seed as model_parallel_random_seed,
)
from hpcdist.fleet.meta_parallel.pipeline_parallel import (
    PipelineParallel as PipelineParallel,
    PipelineParallelWithInterleave as PipelineParallelWithInterleave,
    PipelineParallelWithInterleaveFthenB as PipelineParallelWithInterleaveFthenB,
)
from hpcdist.torch.hybrid import (
    HybridParallelOptimizer as HybridParallelOptimizer,
    SegmentParallel as SegmentParallel,
    ShardingParallel as ShardingParallel,
    TensorParallel as TensorParallel,
)
from hpcdist.torch.model_parallel import (
    ColumnSequenceParallelLinear as ColumnSequenceParallelLinear,
    RowSequenceParallelLinear as RowSequenceParallelLinear,
)
