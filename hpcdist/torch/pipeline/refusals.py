"""What a pipeline refuses: models and strategies when it is made, optimizers in a step. Local."""

from __future__ import annotations

from typing import Any

import torch

from hpcdist.errors import UsageError
from hpcdist.parallel.hybrid import HybridCommunicateGroup
from hpcdist.parallel.hybrid_options import HybridOptions
from hpcdist.text import an
from hpcdist.torch.on_grid import check_no_own_groups
from hpcdist.torch.pipeline.layers import PipelineLayer
from hpcdist.torch.pipeline.schedule import rule_of
from hpcdist.torch.scaler import AgreeingScaler


def check_layers(layers: Any) -> None:
    """Refuse a model that is not described as layers."""
    if not isinstance(layers, PipelineLayer):
        raise UsageError(
            f"a pipeline needs a PipelineLayer, which says how the model is cut into stages, "
            f"got {an(type(layers).__name__)}"
        )


def check_fit(layers: PipelineLayer, grid: HybridCommunicateGroup, options: HybridOptions) -> None:
    """Refuse layers of another grid, and settings of a strategy that stages cannot have."""
    check_no_own_groups(layers.parameters())
    along = grid.ranks("pp")
    if tuple(layers.group.ranks) != along:
        raise UsageError(
            f"the PipelineLayer was made on ranks {layers.group.ranks}, but the axis pp of the "
            f"grid has {[*along]}; make it after fleet.init, without a group"
        )
    rule_of(options.pipeline.schedule)
    steps = options.pipeline.accumulate_steps
    if steps < layers.num_stages:
        raise UsageError(
            f"The accumulate_steps({steps}) should be greater than or equal to "
            f"pp_degree({layers.num_stages}): with fewer micro-batches some stages never work "
            "at once; set strategy.pipeline_configs"
        )
    if grid.degree("sharding") > 1 and options.sharding.stage > 1:
        raise UsageError(
            f"stage {options.sharding.stage} of sharding gathers parameters in the forward "
            "pass of each micro-batch; with a pipeline set strategy.sharding_configs = "
            "{'stage': 1}, and a larger pp_degree or mp_degree if that takes too much memory"
        )
    if options.sync_batch_norm:
        raise UsageError(
            "sync_batch_norm cannot replace layers of a pipeline; describe them as "
            "LayerDesc(hpcdist.torch.SyncBatchNorm, ...)"
        )


def check_training(
    layers: PipelineLayer, optimizer: Any, scaler: Any, ranks: int, device: torch.device
) -> None:
    """Refuse an optimizer and a scaler that cannot step this model on so many ranks."""
    check_loss(layers)
    for name in ("step", "zero_grad"):
        if optimizer is not None and not callable(getattr(optimizer, name, None)):
            raise UsageError(f"train_batch needs an optimizer of torch, got {optimizer!r}")
    plain = isinstance(scaler, torch.amp.GradScaler) and not isinstance(scaler, AgreeingScaler)
    if plain and ranks > 1:
        raise UsageError(
            "this GradScaler knows of its own rank alone, and stages would skip different "
            "steps; pass the one that fleet.distributed_scaler or shard_scaler returns"
        )
    if scaler is not None:
        scaler.scale(torch.zeros((), device=device))  # it has a scale only from then on


def check_loss(layers: PipelineLayer, index: int = 0) -> None:
    """Refuse to compute a loss where there is none, or none of this index."""
    if not layers.losses:
        raise UsageError("the PipelineLayer has no loss; make it with loss_fn=")
    if isinstance(index, bool) or index not in range(len(layers.losses)):
        raise UsageError(
            f"loss_fn_idx must be the index, from 0, of one of the {len(layers.losses)} functions "
            f"in loss_fn, got {index!r}"
        )
