"""Paddle's ``fleet.utils.sequence_parallel_utils``: sequences cut over ranks."""

from hpcdist.torch.model_parallel import (
    AllGatherOp as AllGatherOp,
    ColumnSequenceParallelLinear as ColumnSequenceParallelLinear,
    GatherOp as GatherOp,
    ReduceScatterOp as ReduceScatterOp,
    RowSequenceParallelLinear as RowSequenceParallelLinear,
    ScatterOp as ScatterOp,
    mark_as_sequence_parallel_parameter as mark_as_sequence_parallel_parameter,
    register_sequence_parallel_allreduce_hooks as register_sequence_parallel_allreduce_hooks,
)
