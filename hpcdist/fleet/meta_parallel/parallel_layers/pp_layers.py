"""Paddle's ``fleet.meta_parallel.parallel_layers.pp_layers``: layers of a pipeline.

`LocalSharedLayerDesc` is `SharedLayerDesc`, which communicates only where layers with the same
weight are on several ranks.
"""

from typing import TYPE_CHECKING

from hpcdist.fleet.absent import refusing
from hpcdist.torch.pipeline import (
    LayerDesc as LayerDesc,
    PipelineLayer as PipelineLayer,
    SharedLayerDesc as SharedLayerDesc,
)

LocalSharedLayerDesc = SharedLayerDesc

if not TYPE_CHECKING:  # checkers and editors see what there is
    __getattr__ = refusing(__name__)
