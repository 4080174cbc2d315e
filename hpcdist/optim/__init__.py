"""Optimizers of plain arrays, as in-place updates of flat slices.

Alone, with `DataParallel`, or sharded by `group_sharded_parallel`: the same loops.

Read in this order: `rules` (the formulas), `slices` (weights with their state, a block at a time),
`optimizer` (what all have in common), `algorithms` (SGD, Momentum, Adam, AdamW, LAMB, LARS).
"""

from hpcdist.optim.algorithms import (
    LAMB as LAMB,
    LARS as LARS,
    SGD as SGD,
    Adam as Adam,
    AdamW as AdamW,
    Momentum as Momentum,
)
from hpcdist.optim.optimizer import Optimizer as Optimizer

__all__ = ["SGD", "Momentum", "Adam", "AdamW", "LAMB", "LARS", "Optimizer"]
