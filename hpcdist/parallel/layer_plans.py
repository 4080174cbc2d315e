"""The plans of `parallelize`: what shall become of a layer on the axes of a mesh. Pure.

They only describe; `hpcdist.torch.tensor_parallel` applies those of the axis ``"mp"``, and
`hpcdist.torch.context_parallel` those of the axis ``"sep"``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, final

from hpcdist.errors import UsageError


class LayerPlan:
    """Base of the plans of layers that `parallelize` takes."""

    __slots__ = ()


@final
@dataclass(frozen=True)
class ColWiseParallel(LayerPlan):
    """Cut a linear layer by its outputs, an embedding by its features.

    Args:
        gather_output: whether every rank gets the whole output; otherwise each has its part, which
            a `RowWiseParallel` layer takes.

    Example:
        >>> import hpcdist as dist
        >>> plan = {"blocks.*.up": dist.ColWiseParallel(), "blocks.*.down": dist.RowWiseParallel()}

    """

    gather_output: bool = False


@final
@dataclass(frozen=True)
class RowWiseParallel(LayerPlan):
    """Cut a linear layer by its inputs, an embedding by its rows. The output is whole.

    Args:
        is_input_parallel: whether the input comes in parts, as from a `ColWiseParallel` layer;
            False if it is whole, and is cut here.

    Example:
        >>> import hpcdist as dist
        >>> plan = {"blocks.*.up": dist.ColWiseParallel(), "blocks.*.down": dist.RowWiseParallel()}

    """

    is_input_parallel: bool = True


@final
@dataclass(frozen=True)
class PrepareLayerInput(LayerPlan):
    """Change what a layer gets.

    Args:
        fn: ``fn(process_mesh)`` returns a forward pre-hook of torch's for the layer.

    Example:
        >>> import hpcdist as dist
        >>> def halve(mesh):
        ...     return lambda layer, inputs: (inputs[0] / 2,)
        >>> plan = {"head": dist.PrepareLayerInput(halve)}

    """

    fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        _check_hook(self, self.fn)


@final
@dataclass(frozen=True)
class PrepareLayerOutput(LayerPlan):
    """Change what a layer returns.

    Args:
        fn: ``fn(process_mesh)`` returns a forward hook of torch's for the layer.

    Example:
        >>> import hpcdist as dist
        >>> def halve(mesh):
        ...     return lambda layer, inputs, output: output / 2
        >>> plan = {"head": dist.PrepareLayerOutput(halve)}

    """

    fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        _check_hook(self, self.fn)


@final
@dataclass(frozen=True)
class SequenceParallelBegin(LayerPlan):
    """Cut the output of this layer by the sequence: the layers after it get this rank's part.

    Args:
        need_transpose: whether the output is ``[batch, sequence, hidden]`` and has to become
            ``[sequence, batch, hidden]``; otherwise it already is.

    Example:
        >>> import hpcdist as dist
        >>> plan = {"words": dist.SequenceParallelBegin(), "head": dist.SequenceParallelEnd()}

    """

    need_transpose: bool = True


@final
@dataclass(frozen=True)
class SequenceParallelEnd(LayerPlan):
    """Gather the sequence before this layer; the layers before it had parts.

    Args:
        need_transpose: whether the layer takes ``[batch, sequence, hidden]``; otherwise it gets
            ``[sequence, batch, hidden]``.

    Example:
        >>> import hpcdist as dist
        >>> plan = {"words": dist.SequenceParallelBegin(), "head": dist.SequenceParallelEnd()}

    """

    need_transpose: bool = True


@final
@dataclass(frozen=True)
class SequenceParallelEnable(LayerPlan):
    """Cut the input of this one layer by the sequence, and make its output whole again.

    The input is ``[batch, sequence, hidden]``, the layer sees ``[sequence, batch, hidden]``.

    Example:
        >>> import hpcdist as dist
        >>> plan = {"blocks.*.norm": dist.SequenceParallelEnable()}

    """


@final
@dataclass(frozen=True)
class SequenceParallelDisable(LayerPlan):
    """Gather the sequence before this layer alone, and cut it again after it.

    Args:
        need_transpose: whether the layer takes and returns ``[batch, sequence, hidden]``;
            otherwise ``[sequence, batch, hidden]``.

    Example:
        >>> import hpcdist as dist
        >>> plan = {"blocks.*.attention": dist.SequenceParallelDisable()}

    """

    need_transpose: bool = True


@final
@dataclass(frozen=True)
class ConvParallel(LayerPlan):
    """Cut a convolution; refused by `parallelize`, which says what to use.

    Example:
        >>> import hpcdist as dist
        >>> plan = {"conv": dist.ConvParallel()}

    """


@final
@dataclass(frozen=True)
class ContextParallel(LayerPlan):
    """Give this attention layer the whole sequence and a part of the heads.

    Along the axis ``"sep"`` of a mesh, where the layers around it have parts of the sequence. The
    layer takes query, key and value of shape (..., heads, sequence, length of a head), and may
    take more; it returns an array of that shape, or one with all heads in the last dimension.

    Args:
        backend: ``"all2all"``: ranks exchange parts of the sequence for heads (Ulysses). ``"p2p"``,
            a ring, is refused by `parallelize`.

    Example:
        >>> import hpcdist as dist
        >>> plan = {"blocks.*.attention.core": dist.ContextParallel("all2all")}

    """

    backend: str = "p2p"

    def __post_init__(self) -> None:
        _check_backend(self, self.backend)


@final
@dataclass(frozen=True)
class PrepareContextParallel(LayerPlan):
    """Give this layer, and all in it, a part of each sequence along the axis ``"sep"`` of a mesh.

    The tensors that it takes are cut along their second dimension, ``[batch, sequence, ...]``;
    those of one dimension stay whole. What it returns is of its part of the sequence.

    Args:
        backend: ``"all2all"``; ``"p2p"`` is refused by `parallelize`.

    Example:
        >>> import hpcdist as dist
        >>> plan = {"blocks": dist.PrepareContextParallel("all2all")}

    """

    backend: str = "p2p"

    def __post_init__(self) -> None:
        _check_backend(self, self.backend)


class SplitPoint(Enum):
    """Where a pipeline is cut: before or after a layer.

    Example:
        >>> import hpcdist as dist
        >>> config = {"pp_config": {"split_spec": {"blocks.3": dist.SplitPoint.END}}}

    """

    BEGINNING = 0
    END = 1


_NO_RING = (
    'a ring of attention (backend="p2p") needs a kernel that returns the sums of its softmax, '
    'which torch does not have on all devices: use backend="all2all", for which the ranks must '
    "divide the heads"
)
_NO_CONVOLUTION = (
    "convolutions are not cut here; write it with halo and map_overlap on arrays, or cut the batch "
    "with dp_config"
)


def refusal_of(plan: LayerPlan) -> str | None:
    """Return why a plan cannot be kept, and what to do in its place; None if it can."""
    if isinstance(plan, ConvParallel):
        return _NO_CONVOLUTION
    if isinstance(plan, (ContextParallel, PrepareContextParallel)) and plan.backend == "p2p":
        return _NO_RING
    return None


def _check_backend(plan: LayerPlan, backend: str) -> None:
    if backend not in ("p2p", "all2all"):
        raise UsageError(
            f"backend of {type(plan).__name__} must be 'p2p' or 'all2all', got {backend!r}"
        )


def _check_hook(plan: LayerPlan, fn: Any) -> None:
    if not callable(fn):
        raise UsageError(
            f"{type(plan).__name__} takes a function that gets the mesh and returns a hook, "
            f"got {fn!r}"
        )
