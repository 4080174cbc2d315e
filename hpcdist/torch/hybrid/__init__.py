"""Training on a grid: what fleet hands out for torch.

Read in this order: `engines` (which engine a model gets), `model` (a module on a grid), `optimizer`
(its optimizer), `gradients` (what it does before a step), `given` (what it refuses), `replacements`
(LARS and LAMB in the place of others), `states` (model and optimizer in checkpoints). What a
parameter tells of its place on the grid is in `hpcdist.torch.on_grid`.
"""

from hpcdist.torch.hybrid.engines import (
    distribute_model as distribute_model,
    distribute_optimizer as distribute_optimizer,
    distribute_scaler as distribute_scaler,
)
from hpcdist.torch.hybrid.model import HybridModel as HybridModel
from hpcdist.torch.hybrid.optimizer import HybridParallelOptimizer as HybridParallelOptimizer
from hpcdist.torch.lamb import LAMB as LAMB
from hpcdist.torch.lars import LARS as LARS

TensorParallel = SegmentParallel = ShardingParallel = HybridModel

__all__ = [
    "LAMB",
    "LARS",
    "HybridModel",
    "HybridParallelOptimizer",
    "SegmentParallel",
    "ShardingParallel",
    "TensorParallel",
    "distribute_model",
    "distribute_optimizer",
    "distribute_scaler",
]
