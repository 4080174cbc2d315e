"""Paddle's ``fleet.utils.sequence_parallel_utils``: sequences cut over ranks."""

from hpcdist.fleet.lazy import lazily

ROWS = dict.fromkeys(
    (
        "ColumnSequenceParallelLinear",
        "RowSequenceParallelLinear",
        "ScatterOp",
        "GatherOp",
        "AllGatherOp",
        "ReduceScatterOp",
        "mark_as_sequence_parallel_parameter",
        "register_sequence_parallel_allreduce_hooks",
    ),
    "hpcdist.torch.model_parallel.sequence",
)
"""For each name the module that has it."""

__getattr__, __dir__ = lazily(globals(), ROWS)
