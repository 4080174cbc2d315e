"""Pipelines: a model cut into stages, one or several on each rank, trained in micro-batches.

Read in this order: `schedule` (who does what when, pure), `segments` (which layers a stage has,
pure), `descriptions` and `layers` (`PipelineLayer`), `ties` (weights that stages share), `wire`
(messages), `split_backward` and `stage` (what a rank computes), `runner` (a step of a rank),
`batches` and `steps` (a step of all ranks), `copies` (gradients of the same weights), `refusals`,
`parallel` (`PipelineParallel`), `timeline` and `observed` (bubbles and pictures).
"""

from hpcdist.torch.pipeline.descriptions import (
    LayerDesc as LayerDesc,
    SharedLayerDesc as SharedLayerDesc,
)
from hpcdist.torch.pipeline.layers import LayerCosts as LayerCosts, PipelineLayer as PipelineLayer
from hpcdist.torch.pipeline.parallel import PipelineParallel as PipelineParallel
from hpcdist.torch.pipeline.schedule import (
    plan_pipeline as plan_pipeline,
    predict_bubble as predict_bubble,
)
from hpcdist.torch.pipeline.segments import plan_segments as plan_segments

__all__ = [
    "LayerCosts",
    "LayerDesc",
    "PipelineLayer",
    "PipelineParallel",
    "SharedLayerDesc",
    "plan_pipeline",
    "plan_segments",
    "predict_bubble",
]
