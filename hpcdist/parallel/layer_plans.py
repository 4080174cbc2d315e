"""The plans of `parallelize`: what shall become of a layer on the axis ``"mp"`` of a mesh. Pure.

They only describe; `hpcdist.torch.tensor_parallel` applies them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, final

from hpcdist.errors import UsageError


class LayerPlan:
    """Base of what `parallelize` takes as the plan of a layer."""

    __slots__ = ()


@final
@dataclass(frozen=True)
class ColWiseParallel(LayerPlan):
    """Cut a linear layer by its outputs, an embedding by its features.

    Args:
        gather_output: whether every rank gets the whole output; otherwise each has its part, which
            a `RowWiseParallel` layer takes.

    """

    gather_output: bool = False


@final
@dataclass(frozen=True)
class RowWiseParallel(LayerPlan):
    """Cut a linear layer by its inputs, an embedding by its rows. The output is whole.

    Args:
        is_input_parallel: whether the input comes in parts, as from a `ColWiseParallel` layer;
            False if it is whole, and is cut here.

    """

    is_input_parallel: bool = True


@final
@dataclass(frozen=True)
class PrepareLayerInput(LayerPlan):
    """Change what a layer gets: ``fn(process_mesh)`` returns a forward pre-hook for it."""

    fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        _check_hook(self, self.fn)


@final
@dataclass(frozen=True)
class PrepareLayerOutput(LayerPlan):
    """Change what a layer returns: ``fn(process_mesh)`` returns a forward hook for it."""

    fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        _check_hook(self, self.fn)


@final
@dataclass(frozen=True)
class SequenceParallelBegin(LayerPlan):
    """Cut the output of this layer by the sequence: the layers after it have a part of it each.

    Args:
        need_transpose: whether the output is ``[batch, sequence, hidden]``, and becomes
            ``[sequence, batch, hidden]``, which it otherwise is.

    """

    need_transpose: bool = True


@final
@dataclass(frozen=True)
class SequenceParallelEnd(LayerPlan):
    """Give this layer the whole sequence again, of which the layers before it had parts.

    Args:
        need_transpose: whether the layer takes ``[batch, sequence, hidden]``; otherwise it gets
            ``[sequence, batch, hidden]``.

    """

    need_transpose: bool = True


@final
@dataclass(frozen=True)
class SequenceParallelEnable(LayerPlan):
    """Cut the input of this one layer by the sequence, and make its output whole again.

    The input is ``[batch, sequence, hidden]``, the layer sees ``[sequence, batch, hidden]``.
    """


@final
@dataclass(frozen=True)
class SequenceParallelDisable(LayerPlan):
    """Give this one layer the whole sequence, among layers that have parts of it.

    Args:
        need_transpose: whether the layer takes and returns ``[batch, sequence, hidden]``;
            otherwise ``[sequence, batch, hidden]``.

    """

    need_transpose: bool = True


@final
@dataclass(frozen=True)
class ConvParallel(LayerPlan):
    """Cut a convolution; refused by `parallelize`, which says what to use."""


@final
@dataclass(frozen=True)
class ContextParallel(LayerPlan):
    """Cut attention by the sequence; refused by `parallelize`, which says what to use.

    Args:
        backend: ``"p2p"`` or ``"all2all"``.

    """

    backend: str = "p2p"


@final
@dataclass(frozen=True)
class PrepareContextParallel(LayerPlan):
    """Cut the inputs of attention; refused by `parallelize`, which says what to use.

    Args:
        backend: ``"p2p"`` or ``"all2all"``.

    """

    backend: str = "p2p"


class SplitPoint(Enum):
    """Where a pipeline is cut, seen from a layer: before it or after it."""

    BEGINNING = 0
    END = 1


REFUSED: dict[type[LayerPlan], str] = {
    ConvParallel: "convolutions are not cut here; write it with halo and map_overlap on arrays, "
    "or cut the batch with dp_config",
    ContextParallel: "attention is cut by torch itself: use "
    "torch.distributed.tensor.experimental.context_parallel on backend 'hpcdist'",
    PrepareContextParallel: "attention is cut by torch itself: use "
    "torch.distributed.tensor.experimental.context_parallel on backend 'hpcdist'",
}
"""Plans that have no counterpart in torch's modules, and what to use in their place."""


def _check_hook(plan: LayerPlan, fn: Any) -> None:
    if not callable(fn):
        raise UsageError(
            f"{type(plan).__name__} takes a function that gets the mesh and returns a hook, "
            f"got {fn!r}"
        )
