"""Layers whose weights are cut over the ranks of the axis "mp" (tensor parallelism).

Between a `ColumnParallelLinear` that does not gather and a `RowParallelLinear` that takes its parts
nothing is communicated, so an MLP or an attention costs one sum over the ranks forward, and one
backward. Weights are torch's, of shape (out, in). The whole weight is drawn from torch's default
generator as `torch.nn.Linear` draws it, and each rank keeps its part: from one seed comes one
model, however many ranks it is cut over.

Reference: Shoeybi et al., Megatron-LM, 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F  # noqa: N812 (torch's habit)

from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.torch.model_parallel.axes import axis_group, check_even, check_size
from hpcdist.torch.model_parallel.functions import (
    copy_to,
    gather_from,
    reduce_from,
    refuse,
    scatter_to,
)
from hpcdist.torch.model_parallel.losses import out_of_range, parallel_cross_entropy
from hpcdist.torch.model_parallel.states import CutLayer
from hpcdist.transport.call.kinds import Kind

WeightAttr = Callable[[torch.Tensor], Any] | None
"""Fills a whole weight in place, as the functions of `torch.nn.init` do; None: as torch does."""


@final
class ColumnParallelLinear(CutLayer):
    """A linear layer cut by its outputs: each rank computes some of them.

    Args:
        in_features: length of an input, which all ranks have whole.
        out_features: length of an output; divisible by the number of ranks.
        weight_attr: fills the whole weight in place, such as `torch.nn.init.xavier_uniform_`; None
            for what `torch.nn.Linear` does.
        has_bias: whether there is a bias, which is cut as the weight is; None is no.
        gather_output: return the whole output on all ranks; False: this rank's part, for a
            `RowParallelLinear` with ``input_is_parallel=True``.
        fuse_matmul_bias: accepted for Paddle's sake; torch's kernels add the bias anyway.
        mp_group: the ranks; None for the axis "mp" of the grid of `fleet.init`.
        name: accepted for Paddle's sake.

    Raises:
        UsageError: `out_features` cannot be divided, or there is no grid.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch.model_parallel import ColumnParallelLinear
        >>> layer = ColumnParallelLinear(8, 4, has_bias=True, mp_group=dist.init_parallel_env())
        >>> layer(torch.ones(2, 8)).shape
        torch.Size([2, 4])

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
        check_even(out_features, self.group, "out_features")
        self.in_features, self.out_features = in_features, out_features
        self.gather_output = gather_output
        self.take(whole_linear(in_features, out_features, bool(has_bias), weight_attr))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs for `x`. Collective forward if they are gathered, and backward.

        Args:
            x: the same on all ranks, of shape (..., in_features).

        """
        part = F.linear(copy_to(x, self.group), self.weight, self.bias)
        return gather_from(part, self.group) if self.gather_output else part

    def extra_repr(self) -> str:
        """Return the settings that `repr` shows."""
        return describe_layer(self, gather_output=self.gather_output)


@final
class RowParallelLinear(CutLayer):
    """A linear layer cut by its inputs: each rank takes some, and the outputs are summed.

    Args:
        in_features: length of an input; divisible by the number of ranks.
        out_features: length of an output, which all ranks get whole.
        weight_attr: as of `ColumnParallelLinear`.
        has_bias: whether there is a bias, which all ranks have, and which is added once, to the
            sum.
        input_is_parallel: inputs are this rank's part already; False: they are whole, and cut here.
        fuse_matmul_bias: accepted for Paddle's sake; the bias is added after the sum.
        mp_group: as of `ColumnParallelLinear`.
        name: accepted for Paddle's sake.

    Raises:
        UsageError: `in_features` cannot be divided, or there is no grid.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch.model_parallel import RowParallelLinear
        >>> layer = RowParallelLinear(8, 4, mp_group=dist.init_parallel_env())
        >>> layer(torch.ones(2, 8)).shape
        torch.Size([2, 4])

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
        check_even(in_features, self.group, "in_features")
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel = input_is_parallel
        self.take(whole_linear(in_features, out_features, has_bias, weight_attr))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs for `x`. Collective; backward, too, if the inputs were whole.

        Args:
            x: of shape (..., in_features), or with `input_is_parallel` this rank's part of the last
                dimension.

        """
        if not self.input_is_parallel:
            x = scatter_to(x, self.group)
        if self.group.nranks == 1:
            return F.linear(x, self.weight, self.bias)
        total = reduce_from(F.linear(x, self.weight), self.group)
        return total if self.bias is None else total + self.bias

    def extra_repr(self) -> str:
        """Return the settings that `repr` shows."""
        return describe_layer(self, input_is_parallel=self.input_is_parallel)


@final
class VocabParallelEmbedding(CutLayer):
    """An embedding cut by words: each rank has the rows of some of them.

    Args:
        num_embeddings: how many words there are; divisible by the number of ranks.
        embedding_dim: length of a row.
        weight_attr: fills the whole table in place; None for what `torch.nn.Embedding` does.
        mp_group: as of `ColumnParallelLinear`.
        name: accepted for Paddle's sake.

    Raises:
        UsageError: `num_embeddings` cannot be divided, or there is no grid.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch.model_parallel import VocabParallelEmbedding
        >>> words = VocabParallelEmbedding(1000, 4, mp_group=dist.init_parallel_env())
        >>> words(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 4])

    """

    cuts: ClassVar = {"weight": 0}

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        weight_attr: WeightAttr = None,
        mp_group: Group | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(axis_group("mp", mp_group))
        check_even(num_embeddings, self.group, "num_embeddings")
        check_size(embedding_dim, "embedding_dim")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.take(_filled(torch.nn.Embedding(num_embeddings, embedding_dim), weight_attr))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of the words `x`, which are the same on all ranks. Collective.

        Args:
            x: integers, of any shape.

        Raises:
            UsageError: a word is not in the table; on every rank.

        """
        return reduce_from(self.own_rows(x), self.group)

    def own_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of this rank's words, and zeros for those of others.

        Args:
            x: integers, of any shape, the same on all ranks.

        """
        problem = out_of_range(x, self.num_embeddings, "word")
        if problem is not None:
            refuse(Kind.ALL_REDUCE, self.group, problem)
        if self.group.nranks == 1:
            return F.embedding(x, self.weight)
        count = self.num_embeddings // self.group.nranks
        own = x - self.group.rank * count
        others = (own < 0) | (own >= count)
        rows = F.embedding(own.masked_fill(others, 0), self.weight)
        return rows.masked_fill(others.unsqueeze(-1), 0.0)

    def extra_repr(self) -> str:
        """Return the settings that `repr` shows."""
        return f"{self.num_embeddings}, {self.embedding_dim}, mp={self.group.nranks}"


@final
class ParallelCrossEntropy(torch.nn.Module):  # type: ignore[misc] # torch is untyped
    """The cross entropy of logits cut by classes: each rank has those of some classes.

    No rank ever has all logits of a sample. 16-bit logits are added up in float32, and so is the
    loss.

    Args:
        mp_group: as of `ColumnParallelLinear`.
        name: accepted for Paddle's sake.
        ignore_index: a label whose loss is 0, and so is its gradient.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch.model_parallel import ParallelCrossEntropy
        >>> loss = ParallelCrossEntropy(mp_group=dist.init_parallel_env())
        >>> loss(torch.zeros(2, 10), torch.tensor([3, 7])).shape
        torch.Size([2])

    """

    def __init__(
        self, mp_group: Group | None = None, name: str | None = None, ignore_index: int = -100
    ) -> None:
        super().__init__()
        self.group = axis_group("mp", mp_group)
        self.ignore_index = ignore_index

    def forward(self, input: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Return the loss of each sample, in the shape of `label`. Collective.

        Args:
            input: this rank's logits, of shape (..., classes / ranks), as a `ColumnParallelLinear`
                that does not gather returns them.
            label: the right classes of all, counted over all ranks: of shape (...) or (..., 1), the
                same on all ranks.

        Raises:
            UsageError: a label is no class, or there is not one for each sample; on every rank.
            MismatchError: the ranks have not equally many classes.

        """
        return parallel_cross_entropy(input, label, self.group, self.ignore_index)

    def extra_repr(self) -> str:
        """Return the settings that `repr` shows."""
        return f"ignore_index={self.ignore_index}, mp={self.group.nranks}"


def whole_linear(
    in_features: int, out_features: int, has_bias: bool, weight_attr: WeightAttr
) -> torch.nn.Linear:
    """Return an ordinary layer, drawn as torch draws it. Local."""
    check_size(in_features, "in_features")
    check_size(out_features, "out_features")
    return _filled(torch.nn.Linear(in_features, out_features, bias=has_bias), weight_attr)


def _filled(layer: torch.nn.Module, weight_attr: WeightAttr) -> torch.nn.Module:
    if weight_attr is None:
        return layer
    if not callable(weight_attr):
        raise UsageError(
            f"weight_attr must be a function that fills a whole weight in place, such as "
            f"torch.nn.init.normal_, or None, got {weight_attr!r}"
        )
    with torch.no_grad():
        weight_attr(layer.weight)
    return layer


def describe_layer(layer: Any, **settings: Any) -> str:
    """Return what `repr` tells of a linear layer."""
    told = {
        "in_features": layer.in_features,
        "out_features": layer.out_features,
        "bias": layer.bias is not None,
        **settings,
        "mp": layer.group.nranks,
    }
    return ", ".join(f"{name}={value}" for name, value in told.items())
