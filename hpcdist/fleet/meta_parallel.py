"""Paddle's ``fleet.meta_parallel``: what torch modules on a grid need, imported when used."""

from hpcdist.fleet.lazy import lazily

_LAYERS = "hpcdist.torch.model_parallel.layers"
_RANDOM = "hpcdist.torch.model_parallel.random"
_SEQUENCE = "hpcdist.torch.model_parallel.sequence"
_PIPELINE = "hpcdist.torch.pipeline"
_HYBRID = "hpcdist.torch.hybrid"

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
    "TensorParallel": _HYBRID,
    "SegmentParallel": _HYBRID,
    "ShardingParallel": _HYBRID,
    "HybridParallelOptimizer": _HYBRID,
}
"""For each name the module that has it."""

__getattr__, __dir__ = lazily(globals(), ROWS)
