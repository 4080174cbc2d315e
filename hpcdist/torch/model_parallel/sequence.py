"""Sequence parallelism: between the layers of tensor parallelism, ranks have parts of the sequence.

The sequence is the first dimension, ``[sequence, batch, hidden]``. A sum over the ranks becomes a
reduce-scatter and an all-gather, which move as much together, and what stands between is computed
and kept once, not by every rank. Parameters that are used on parts of the sequence get parts of
their gradient, which have to be summed: they are marked.

Reference: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F  # noqa: N812 (torch's habit)

from hpcdist.comm.collectives import all_reduce
from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.integers import integer
from hpcdist.torch.model_parallel.axes import axis_group, check_even
from hpcdist.torch.model_parallel.functions import (
    all_gather,
    gather_from,
    reduce_scatter,
    scatter_to,
)
from hpcdist.torch.model_parallel.layers import WeightAttr, describe_layer, whole_linear
from hpcdist.torch.model_parallel.states import CutLayer, is_cut


@final
class ScatterOp:
    """Cuts a sequence that all ranks have, and keeps this rank's part; gathers gradients.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch.model_parallel import ScatterOp
        >>> ScatterOp.apply(torch.ones(6, 2, 8), mp_group=dist.init_parallel_env()).shape
        torch.Size([6, 2, 8])

    """

    @staticmethod
    def apply(input: torch.Tensor, axis: int = 0, *, mp_group: Group | None = None) -> torch.Tensor:
        """Return this rank's part of `input` along `axis`.

        Args:
            input: the same on all ranks.
            axis: the dimension of the sequence.
            mp_group: the ranks; None for those along mp.

        """
        return scatter_to(input, axis_group("mp", mp_group), axis)


@final
class GatherOp:
    """Gathers the sequence for ranks that all compute the same with it; cuts gradients.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch.model_parallel import GatherOp
        >>> GatherOp.apply(torch.ones(6, 2, 8), mp_group=dist.init_parallel_env()).shape
        torch.Size([6, 2, 8])

    """

    @staticmethod
    def apply(input: torch.Tensor, axis: int = 0, *, mp_group: Group | None = None) -> torch.Tensor:
        """Return the parts of all ranks together along `axis`. Collective.

        Args:
            input: this rank's part.
            axis: the dimension of the sequence.
            mp_group: the ranks; None for those along mp.

        """
        return gather_from(input, axis_group("mp", mp_group), axis)


@final
class AllGatherOp:
    """Gathers the sequence for ranks that compute different things with it; sums gradients.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch.model_parallel import AllGatherOp
        >>> AllGatherOp.apply(torch.ones(6, 2, 8), mp_group=dist.init_parallel_env()).shape
        torch.Size([6, 2, 8])

    """

    @staticmethod
    def apply(input: torch.Tensor, *, mp_group: Group | None = None) -> torch.Tensor:
        """Return the parts of all ranks together. Collective.

        Args:
            input: this rank's part, along dimension 0.
            mp_group: the ranks; None for those along mp.

        """
        return all_gather(input, axis_group("mp", mp_group))


@final
class ReduceScatterOp:
    """Sums over the ranks and keeps this rank's part of the sum; gathers gradients.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch.model_parallel import ReduceScatterOp
        >>> ReduceScatterOp.apply(torch.ones(6, 2, 8), mp_group=dist.init_parallel_env()).shape
        torch.Size([6, 2, 8])

    """

    @staticmethod
    def apply(input: torch.Tensor, *, mp_group: Group | None = None) -> torch.Tensor:
        """Return this rank's part of the sum. Collective.

        Args:
            input: what is summed; it is cut along dimension 0.
            mp_group: the ranks; None for those along mp.

        """
        return reduce_scatter(input, axis_group("mp", mp_group))


@final
class ColumnSequenceParallelLinear(CutLayer):
    """A `ColumnParallelLinear` whose input is this rank's part of the sequence.

    Arguments as of `ColumnParallelLinear`; the output has the whole sequence, and is never gathered
    along its features: ``gather_output=False`` must be said.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch.model_parallel import ColumnSequenceParallelLinear
        >>> group = dist.init_parallel_env()
        >>> layer = ColumnSequenceParallelLinear(8, 4, gather_output=False, mp_group=group)
        >>> layer(torch.ones(6, 2, 8)).shape  # on one rank, all of the sequence
        torch.Size([6, 2, 4])

    """

    cuts: ClassVar = {"weight": 0, "bias": 0}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_attr: WeightAttr = None,
        has_bias: bool | None = None,
        gather_output: bool = True,
        fuse_matmul_bias: bool = False,
        mp_group: Group | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(axis_group("mp", mp_group))
        if gather_output:
            raise UsageError(
                "If sequence_parallel is True, gather_output is False: the ranks have parts of "
                "the features when they have the whole sequence; give gather_output=False, and let "
                "a RowSequenceParallelLinear follow"
            )
        check_even(out_features, self.group, "out_features")
        self.in_features, self.out_features = in_features, out_features
        self.take(whole_linear(in_features, out_features, bool(has_bias), weight_attr))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's outputs for the whole sequence. Collective, and backward, too.

        Args:
            x: this rank's part of the sequence, which is dimension 0; (..., in_features).

        """
        return F.linear(all_gather(x, self.group), self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return the settings that `repr` shows."""
        return describe_layer(self)


@final
class RowSequenceParallelLinear(CutLayer):
    """A `RowParallelLinear` whose output is this rank's part of the sequence.

    Arguments as of `RowParallelLinear`; the input has the whole sequence, and this rank's features:
    ``input_is_parallel=True`` must be said. Its bias, which is added to parts of the sequence, is
    marked as by `mark_as_sequence_parallel_parameter`.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch.model_parallel import RowSequenceParallelLinear
        >>> group = dist.init_parallel_env()
        >>> layer = RowSequenceParallelLinear(8, 4, input_is_parallel=True, mp_group=group)
        >>> layer(torch.ones(6, 2, 8)).shape
        torch.Size([6, 2, 4])

    """

    cuts: ClassVar = {"weight": 1}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_attr: WeightAttr = None,
        has_bias: bool = True,
        input_is_parallel: bool = False,
        fuse_matmul_bias: bool = False,
        mp_group: Group | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(axis_group("mp", mp_group))
        if not input_is_parallel:
            raise UsageError(
                "If sequence_parallel is True, input_is_parallel should be true: the ranks have "
                "parts of the features when they have the whole sequence; give "
                "input_is_parallel=True, and let it follow a ColumnSequenceParallelLinear"
            )
        check_even(in_features, self.group, "in_features")
        self.in_features, self.out_features = in_features, out_features
        self.take(whole_linear(in_features, out_features, has_bias, weight_attr))

    def mark(self) -> None:
        """Mark the bias as well."""
        super().mark()
        if self.bias is not None and not hasattr(self.bias, "sequence_parallel"):
            self.bias.sequence_parallel = self.group.nranks > 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs for this rank's part of the sequence. Collective, and backward.

        Args:
            x: the whole sequence, which is dimension 0, and this rank's part of the features, the
                last one.

        """
        part = reduce_scatter(F.linear(x, self.weight), self.group)
        return part if self.bias is None else part + self.bias

    def extra_repr(self) -> str:
        """Return the settings that `repr` shows."""
        return describe_layer(self)


# ---- parameters that are used on parts of the sequence


def mark_as_sequence_parallel_parameter(parameter: torch.Tensor) -> None:
    """Mark a parameter that every rank has, and uses on its part of the sequence.

    Its gradient is summed over the ranks before it is used: by the optimizer of
    `fleet.distributed_optimizer`, or by `register_sequence_parallel_allreduce_hooks`. Local.

    Args:
        parameter: the parameter; the mark is an attribute of it.

    Example:
        >>> import torch
        >>> from hpcdist.torch import model_parallel as mp
        >>> norm = torch.nn.LayerNorm(8)
        >>> mp.mark_as_sequence_parallel_parameter(norm.weight)
        >>> mp.is_sequence_parallel_parameter(norm.weight)
        True

    """
    if is_cut(parameter):
        raise UsageError(
            "this parameter is cut over the ranks, so each has a gradient of its own part; mark "
            "those that all have whole, such as of a LayerNorm"
        )
    parameter.sequence_parallel = True


def is_sequence_parallel_parameter(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is marked, and its gradient is still to be summed. Local.

    Args:
        parameter: any parameter.

    Example:
        >>> import torch
        >>> from hpcdist.torch.model_parallel import is_sequence_parallel_parameter
        >>> is_sequence_parallel_parameter(torch.nn.LayerNorm(8).weight)
        False

    """
    return bool(getattr(parameter, "sequence_parallel", False))


def register_sequence_parallel_allreduce_hooks(
    model: torch.nn.Module,
    accumulation_steps: int = 1,
    fuse_sequence_parallel_allreduce: bool = False,
    *,
    mp_group: Group | None = None,
) -> None:
    """Sum the gradients of marked parameters over the ranks in the backward pass.

    Each as soon as it is complete. The marks are taken off, so that nobody sums them again.

    Args:
        model: whose parameters are looked through.
        accumulation_steps: backward passes that make one gradient; it is summed in the last.
        fuse_sequence_parallel_allreduce: accepted for Paddle's sake; nothing is joined.
        mp_group: the ranks; None for the axis "mp" of the grid.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch import model_parallel as mp
        >>> norm = torch.nn.LayerNorm(8)
        >>> mp.mark_as_sequence_parallel_parameter(norm.weight)
        >>> mp.register_sequence_parallel_allreduce_hooks(norm, mp_group=dist.init_parallel_env())

    """
    integer(accumulation_steps, "accumulation_steps")
    group = axis_group("mp", mp_group)
    if accumulation_steps < 1 or group.nranks == 1:
        return
    summing = _Summing(group, accumulation_steps)
    for parameter in model.parameters():
        if is_sequence_parallel_parameter(parameter) and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(summing)
            parameter.sequence_parallel = False


@final
class _Summing:
    """Sums a gradient after every so many backward passes."""

    def __init__(self, group: Group, every: int) -> None:
        self._group, self._every = group, every
        self._passes: defaultdict[int, int] = defaultdict(int)

    def __call__(self, parameter: Any) -> None:
        """Count a pass, and sum the gradient after the last. Collective then."""
        self._passes[id(parameter)] += 1
        if self._passes[id(parameter)] % self._every == 0:
            all_reduce(parameter.grad, group=self._group)
