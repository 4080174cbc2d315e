"""Paddle's ``fleet.layers.mpu``: layers that are cut over the axis mp, each imported when used."""

from hpcdist.fleet.lazy import lazily
from hpcdist.fleet.meta_parallel import ROWS as _ALL

ROWS = {
    name: _ALL[name]
    for name in (
        "ColumnParallelLinear",
        "RowParallelLinear",
        "VocabParallelEmbedding",
        "ParallelCrossEntropy",
        "RNGStatesTracker",
        "get_rng_state_tracker",
        "model_parallel_random_seed",
    )
}
"""For each name the module that has it."""

__getattr__, __dir__ = lazily(globals(), ROWS)
