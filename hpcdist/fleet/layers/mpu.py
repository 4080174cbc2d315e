"""Paddle's ``fleet.layers.mpu``: layers that are cut over the axis mp."""

from hpcdist.torch.model_parallel import (
    ColumnParallelLinear as ColumnParallelLinear,
    ParallelCrossEntropy as ParallelCrossEntropy,
    RNGStatesTracker as RNGStatesTracker,
    RowParallelLinear as RowParallelLinear,
    VocabParallelEmbedding as VocabParallelEmbedding,
    get_rng_state_tracker as get_rng_state_tracker,
    model_parallel_random_seed as model_parallel_random_seed,
)
