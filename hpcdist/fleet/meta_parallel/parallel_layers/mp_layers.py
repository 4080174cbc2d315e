"""Paddle's ``fleet.meta_parallel.parallel_layers.mp_layers``: layers that are cut over mp."""

from hpcdist.torch.model_parallel.layers import (
    ColumnParallelLinear as ColumnParallelLinear,
    ParallelCrossEntropy as ParallelCrossEntropy,
    RowParallelLinear as RowParallelLinear,
    VocabParallelEmbedding as VocabParallelEmbedding,
)
