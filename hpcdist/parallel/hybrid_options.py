"""What a strategy of hybrid training says to the engines: frozen values, each with a default.

`HybridOptions()` asks for nothing special. `fleet.DistributedStrategy.freeze()` makes one of what
its user has set; engines read it, and know nothing of the strategy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Schedule = Literal[
    "1F1B",
    "FThenB",
    "F-then-B",
    "GPipe",
    "LoopedBFS",
    "Interleaved1F1B",
    "ZBH1",
    "ZBVPP",
    "InterleavedZeroBubble",
    "ZBV",
    "ZBVZeroBubble",
]
GradientScale = Literal["avg", "sum"]


@dataclass(frozen=True)
class Amp:
    """Mixed precision: `dtype` of the computing, and how losses are scaled."""

    init_loss_scaling: float = 32768.0
    incr_every_n_steps: int = 1000
    decr_every_n_nan_or_inf: int = 2
    incr_ratio: float = 2.0
    decr_ratio: float = 0.8
    dynamic: bool = True
    dtype: Literal["float16", "bfloat16"] = "float16"


@dataclass(frozen=True)
class Recompute:
    """Activations that are computed again in the backward pass: of the layers in `checkpoints`.

    With no names, those that the model itself leaves to be recomputed.
    """

    checkpoints: tuple[str, ...] = ()
    offload: bool = False


@dataclass(frozen=True)
class GradientMerge:
    """A step every `k_steps` backward passes, by the mean of their gradients (`avg`) or the sum."""

    k_steps: int = 1
    avg: bool = True


@dataclass(frozen=True)
class LocalSGD:
    """Weights are averaged every `k_steps` steps, in place of gradients.

    Up to step `begin_step` they are averaged after each one.
    """

    k_steps: int = 1
    begin_step: int = 1


@dataclass(frozen=True)
class Lars:
    """SGD with momentum and a rate for each layer; none that `exclude` has a word of decays."""

    coeff: float = 0.001
    weight_decay: float = 0.0005
    epsilon: float = 0.0
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lamb:
    """Adam with a rate for each layer; none that `exclude` has a word of decays."""

    weight_decay: float = 0.01
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sharding:
    """What is cut over "sharding": states of optimizers (1), gradients (2), parameters too (3)."""

    stage: Literal[1, 2, 3] = 1
    offload: bool = False
    accumulate_steps: int = 1


@dataclass(frozen=True)
class Pipeline:
    """A step of a pipeline: how many micro-batches of how many samples, and in which order."""

    micro_batch_size: int = 1
    accumulate_steps: int = 1
    schedule: Schedule = "1F1B"


@dataclass(frozen=True)
class TensorParallelOptions:
    """What is done along "mp".

    Attributes:
        seed: of random states that differ; -1: made of the default generator.
        compare_inputs: whether ranks compare the samples that they give to the model.

    """

    seed: int = -1
    compare_inputs: bool = True


@dataclass(frozen=True)
class HybridOptions:
    """All that engines of hybrid training are told. What is None is off."""

    amp: Amp | None = None
    recompute: Recompute | None = None
    gradient_merge: GradientMerge | None = None
    localsgd: LocalSGD | None = None
    lars: Lars | None = None
    lamb: Lamb | None = None
    sharding: Sharding = field(default_factory=Sharding)
    pipeline: Pipeline = field(default_factory=Pipeline)
    tensor_parallel: TensorParallelOptions = field(default_factory=TensorParallelOptions)
    find_unused_parameters: bool = False
    fuse_grad_size_MB: float = 32.0
    last_comm_group_size_MB: float = 1.0
    sync_batch_norm: bool = False
    gradient_scale: GradientScale = "avg"
