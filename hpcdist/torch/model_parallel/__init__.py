"""Tensor parallelism: layers cut over the axis "mp" of a grid, and attention over "sep".

Read in this order: `functions` (tensors on their way in and out), `axes` (over which ranks),
`states` (what a layer that is cut saves and loads), `losses`, `layers`, `sequence` (parts of the
sequence), `ulysses` (attention of parts of the sequence), `random` (random states that differ
between ranks).
"""

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
    AllGatherOp as AllGatherOp,
    ColumnSequenceParallelLinear as ColumnSequenceParallelLinear,
    GatherOp as GatherOp,
    ReduceScatterOp as ReduceScatterOp,
    RowSequenceParallelLinear as RowSequenceParallelLinear,
    ScatterOp as ScatterOp,
    is_sequence_parallel_parameter as is_sequence_parallel_parameter,
    mark_as_sequence_parallel_parameter as mark_as_sequence_parallel_parameter,
    register_sequence_parallel_allreduce_hooks as register_sequence_parallel_allreduce_hooks,
)
from hpcdist.torch.model_parallel.ulysses import (
    UlyssesAttention as UlyssesAttention,
    sep_attention as sep_attention,
)
