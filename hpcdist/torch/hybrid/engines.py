"""What `fleet.distributed_model`, `distributed_optimizer`, `distributed_scaler` make for torch."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import Any

import torch

from hpcdist.comm.states import verifying
from hpcdist.errors import UsageError
from hpcdist.lazy import load
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.hybrid import HybridCommunicateGroup
from hpcdist.parallel.hybrid_options import Amp, HybridOptions, Recompute
from hpcdist.parallel.scaler import GradScaler
from hpcdist.text import an
from hpcdist.torch.hybrid.model import HybridModel, gathers, replicate
from hpcdist.torch.hybrid.optimizer import HybridParallelOptimizer
from hpcdist.torch.on_grid import DATA_AXES, check_no_own_groups, give_roles, role_of
from hpcdist.torch.recompute import recompute
from hpcdist.torch.scaler import AgreeingScaler

Make = Callable[[Any, HybridCommunicateGroup, HybridOptions], Any]


class _Row(NamedTuple):
    """An engine: the grids it is for, and its factory."""

    axes: tuple[str, ...]
    make: Make


def distribute_model(
    model: Any, hcg: HybridCommunicateGroup, options: HybridOptions | None = None
) -> Any:
    """Return the module that trains `model` on a grid. Collective over the grid.

    The first engine of the table that serves an axis of the grid is taken: a pipeline has a
    tensor-parallel model in each stage, and all of them are replicated.

    Raises:
        UsageError: it is no module, it has been distributed already, or the grid has a pipeline and
            the model none; the other ranks get a `RemoteError`.
        MismatchError: ranks have other strategies or other parameters.

    """
    options = options or HybridOptions()
    with verifying(hcg.mesh.group, "value") as alike:
        alike += [("strategy", (), repr(options))]
        _check_supported(model, hcg, options)
    if options.recompute is not None:
        recompute_layers(model, options.recompute)
    wanted = {axis for axis, degree in hcg.degrees.items() if degree > 1}
    if _is_pipeline(model):
        wanted.add("pp")
    make = next((row.make for row in _ENGINES if wanted.intersection(row.axes)), _data_parallel)
    return make(model, hcg, options)


def distribute_optimizer(
    optimizer: Any,
    hcg: HybridCommunicateGroup,
    options: HybridOptions | None = None,
    *,
    clip_norm: Any = None,
) -> HybridParallelOptimizer:
    """Return the optimizer that steps what `distribute_model` returns, in either order. Local."""
    return HybridParallelOptimizer(optimizer, hcg, options, clip_norm=clip_norm)


def distribute_scaler(
    scaler: Any, hcg: HybridCommunicateGroup, options: HybridOptions | None = None
) -> Any:
    """Return a scaler of losses that skips a step on all ranks of the grid, if on any. Local.

    Args:
        scaler: one of torch or of hpcdist; None for what `options.amp` says.
        hcg: the grid.
        options: see `scaler`.

    Raises:
        UsageError: it is neither `hpcdist.GradScaler` nor `torch.amp.GradScaler`.

    """
    if scaler is None and options is not None and options.amp is not None:
        return scaler_of(options.amp)
    if isinstance(scaler, torch.amp.GradScaler):
        return AgreeingScaler(scaler, hcg.mesh.group)
    if isinstance(scaler, GradScaler):
        return scaler  # a HybridParallelOptimizer tells it of all ranks
    raise UsageError(
        f"distributed_scaler needs a torch.amp.GradScaler or an hpcdist.GradScaler, got {scaler!r}"
    )


def scaler_of(amp: Amp) -> GradScaler:
    """Return the scaler that mixed precision asks for; one of bfloat16 lets everything pass."""
    return GradScaler(
        amp.dtype == "float16",
        amp.init_loss_scaling,
        amp.incr_ratio,
        amp.decr_ratio,
        amp.incr_every_n_steps,
        amp.decr_every_n_nan_or_inf,
        amp.dynamic,
    )


# ---- the engines


def _pipeline(model: Any, hcg: HybridCommunicateGroup, options: HybridOptions) -> Any:
    return load(_PIPELINE)(model, hcg, options)


_PIPELINE = "hpcdist.torch.pipeline:PipelineParallel"


def _data_parallel(model: Any, hcg: HybridCommunicateGroup, options: HybridOptions) -> Any:
    if _asks_more(options):
        return HybridModel(model, hcg, options)
    made = replicate(model, hcg.fused(*DATA_AXES), options)
    give_roles(made.named_parameters(), hcg, settled=DATA_AXES)
    return made


_ENGINES = (
    _Row(("pp",), _pipeline),
    _Row(("mp", "sep", "cp", "sharding"), HybridModel),
    _Row(("dp",), _data_parallel),
)


def recompute_layers(model: torch.nn.Module, asked: Recompute) -> None:
    """Make the named layers recompute their activations in the backward pass."""
    layers = dict(model.named_modules())
    for name in asked.checkpoints:
        if name in layers:  # else it is in another stage of the pipeline
            layers[name].forward = _recomputing(layers[name].forward, asked.offload)


def _recomputing(forward: Callable[..., Any], offload: bool) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        kept = range(len(args)) if offload else ()
        return recompute(forward, *args, offload_indices=kept, **kwargs)

    return run


def _asks_more(options: HybridOptions) -> bool:
    """Return whether there is something to do that plain `DataParallel` does not."""
    special = options.sync_batch_norm, options.amp is not None, options.localsgd is not None
    return gathers(options) or any(special)


def _is_pipeline(model: Any) -> bool:
    return any(cls.__name__ == "PipelineLayer" for cls in type(model).__mro__)


def _check_supported(model: Any, hcg: HybridCommunicateGroup, options: HybridOptions) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"distributed_model needs a torch.nn.Module, got {model!r}")
    if any(role_of(each) is not None for each in model.parameters()):
        raise UsageError(
            "the model has been given to distributed_model already; use what that returned"
        )
    check_no_own_groups(model.parameters())
    if hcg.degree("pp") > 1 and not _is_pipeline(model):
        raise UsageError(
            f"the grid has {hcg.degree('pp')} stages of a pipeline, so the model must be a "
            f"PipelineLayer, got {an(type(model).__name__)}; give PipelineLayer its layers"
        )
    on_device = any(each.device.type != "cpu" for each in model.parameters())
    sharding = options.sharding
    if hcg.degree("sharding") > 1 and sharding.offload and sharding.stage == 1 and on_device:
        raise UsageError(
            "stage 1 of sharding cannot keep the optimizer's state in host memory; use stage 2 or "
            "3, or offload=False"
        )
    layers = dict(model.named_modules())
    for name in () if options.recompute is None else options.recompute.checkpoints:
        if name not in layers and hcg.degree("pp") == 1:
            close = get_close_matches(name, layers, 1)
            hint = (
                f"did you mean {close[0]!r}?" if close else f"it has {', '.join(list(layers)[1:9])}"
            )
            raise UsageError(
                f"strategy.recompute names {name!r}, which is no layer of the model; {hint}"
            )
