"""Paddle's ``fleet.meta_parallel.parallel_layers``: layers of models that are cut over ranks."""

from hpcdist.fleet.meta_parallel.parallel_layers.mp_layers import (
    ColumnParallelLinear as ColumnParallelLinear,
    ParallelCrossEntropy as ParallelCrossEntropy,
    RowParallelLinear as RowParallelLinear,
    VocabParallelEmbedding as VocabParallelEmbedding,
)
from hpcdist.fleet.meta_parallel.parallel_layers.pp_layers import (
    LayerDesc as LayerDesc,
    LocalSharedLayerDesc as LocalSharedLayerDesc,
    PipelineLayer as PipelineLayer,
    SharedLayerDesc as SharedLayerDesc,
)
from hpcdist.fleet.meta_parallel.parallel_layers.random import (
    RNGStatesTracker as RNGStatesTracker,
    get_rng_state_tracker as get_rng_state_tracker,
    model_parallel_random_seed as model_parallel_random_seed,
)
