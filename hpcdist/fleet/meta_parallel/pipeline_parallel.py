"""Paddle's ``fleet.meta_parallel.pipeline_parallel``: one class for all schedules.

`PipelineParallel` takes its schedule from the strategy, or from `train_batch`; Paddle's classes for
some of them are other names of it.
"""

from typing import TYPE_CHECKING

from hpcdist.fleet.absent import refusing
from hpcdist.torch.pipeline import PipelineParallel as PipelineParallel

PipelineParallelWithInterleave = PipelineParallel
PipelineParallelWithInterleaveFthenB = PipelineParallel
VPPFhenBInBalancedMemory = PipelineParallel

if not TYPE_CHECKING:  # checkers and editors see what there is
    __getattr__ = refusing(__name__)
