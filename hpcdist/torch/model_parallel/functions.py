"""Functions that take tensors into a part of the model that ranks share, and out of it.

Each function here is a pair of moves: what happens to a tensor in the forward pass, and to its
gradient in the backward pass. The backward of one pair is the forward of another, so gradients of
gradients are right, too.

| | forward | backward |
|---|---|---|
| `copy_to` | as it is | sum over the ranks |
| `reduce_from` | sum over the ranks | as it is |
| `scatter_to` | this rank's part | all parts together |
| `gather_from` | all parts together | this rank's part |
| `all_gather` | all parts together | this rank's part of the sum |
| `reduce_scatter` | this rank's part of the sum | all parts together |
| `all_to_all` | cut along one dimension, joined along another | the other way round |

References: Shoeybi et al., Megatron-LM, 2019 (the first two are its f and g); Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models, 2022 (parts of the sequence); Jacobs
et al., DeepSpeed Ulysses, 2023 (the last).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, final

import torch

from hpcdist.comm import collectives
from hpcdist.comm.dispatch import decline
from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.transport.call.kinds import Kind

Move = Callable[[torch.Tensor], torch.Tensor]


def copy_to(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return `x`, which all ranks have alike; its gradient is the sum over the ranks.

    Collective in the backward pass.

    Args:
        x: the same on all ranks.
        group: the ranks that share this part of the model.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch.model_parallel import functions
        >>> x = torch.ones(2, requires_grad=True)
        >>> functions.copy_to(x, dist.init_parallel_env()).sum().backward()
        >>> x.grad  # summed over the ranks
        tensor([1., 1.])

    """
    return _through(x, group, _same, partial(summed, group=group))


def reduce_from(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of `x` over the ranks; each gets the gradient as it is. Collective.

    Args:
        x: of the same shape on all ranks; it stays as it is.
        group: the ranks that share this part of the model.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch.model_parallel import functions
        >>> functions.reduce_from(torch.ones(2), dist.init_parallel_env())  # n on each of n ranks
        tensor([1., 1.])

    """
    return _through(x, group, partial(summed, group=group), _same)


def scatter_to(x: torch.Tensor, group: Group, dim: int = -1) -> torch.Tensor:
    """Return this rank's part of `x`, which all ranks have alike; the gradient is gathered.

    Collective in the backward pass.

    Args:
        x: the same on all ranks.
        group: the ranks that share this part of the model.
        dim: the dimension that is cut, whose length is a multiple of their number.

    Raises:
        UsageError: there are no equal parts.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch.model_parallel import functions
        >>> functions.scatter_to(torch.ones(2, 6), dist.init_parallel_env()).shape  # 6 / n columns
        torch.Size([2, 6])

    """
    dim = _dim_of(x, dim)
    check_parts(x, dim, group)
    return _through(x, group, partial(own_part, **_by(group, dim)), _gathering(group, dim))


def gather_from(x: torch.Tensor, group: Group, dim: int = -1) -> torch.Tensor:
    """Return the parts of all ranks together; each has its part of the gradient. Collective.

    The gradient must be the same on all ranks, as it is where they go on computing the same.

    Args:
        x: this rank's part.
        group: the ranks that share this part of the model.
        dim: the dimension along which the parts are joined, in the order of the ranks.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch.model_parallel import functions
        >>> functions.gather_from(torch.ones(2, 3), dist.init_parallel_env()).shape  # 3 n columns
        torch.Size([2, 3])

    """
    dim = _dim_of(x, dim)
    return _through(x, group, _gathering(group, dim), partial(own_part, **_by(group, dim)))


def all_gather(x: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """Return the parts of all ranks together; their gradients are summed. Collective.

    For what follows differs between the ranks, as in a `ColumnParallelLinear`.

    Args:
        x: this rank's part.
        group: the ranks that share this part of the model.
        dim: the dimension along which the parts are joined, in the order of the ranks.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch.model_parallel import functions
        >>> functions.all_gather(torch.ones(2, 3), dist.init_parallel_env()).shape  # 2 n rows
        torch.Size([2, 3])

    """
    dim = _dim_of(x, dim)
    return _through(x, group, _gathering(group, dim), partial(summed_part, **_by(group, dim)))


def reduce_scatter(x: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """Return this rank's part of the sum over the ranks; the gradient is gathered. Collective.

    Args:
        x: of the same shape on all ranks.
        group: the ranks that share this part of the model.
        dim: the dimension that is cut, whose length is a multiple of their number.

    Raises:
        UsageError: there are no equal parts.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch.model_parallel import functions
        >>> functions.reduce_scatter(torch.ones(4, 3), dist.init_parallel_env()).shape  # 4 / n rows
        torch.Size([4, 3])

    """
    dim = _dim_of(x, dim)
    check_parts(x, dim, group)
    return _through(x, group, partial(summed_part, **_by(group, dim)), _gathering(group, dim))


def all_to_all(x: torch.Tensor, group: Group, cut: int, join: int) -> torch.Tensor:
    """Cut `x` along dimension `cut`, a part for each rank, and join what comes along `join`.

    Collective. The parts are equal, and joined in the order of the ranks.

    Args:
        x: of the same shape on all ranks.
        group: the ranks that share this part of the model.
        cut: the dimension that is cut, whose length is a multiple of their number.
        join: the dimension along which the parts are joined.

    Raises:
        UsageError: there are no equal parts.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch.model_parallel import functions
        >>> functions.all_to_all(torch.ones(4, 6), dist.init_parallel_env(), cut=0, join=1).shape
        torch.Size([4, 6])

    """
    cut, join = _dim_of(x, cut), _dim_of(x, join)
    check_parts(x, cut, group)
    there = partial(exchanged, group=group, cut=cut, join=join)
    return _through(x, group, there, partial(exchanged, group=group, cut=join, join=cut))


def refuse(kind: Kind, group: Group, error: UsageError) -> NoReturn:
    """Raise `error` here, and on all ranks that are about to do a `kind` of collective, too."""
    decline(group, kind, error)
    raise error  # a group that has no transport any more


def check_parts(x: torch.Tensor, dim: int, group: Group) -> None:
    """Refuse a tensor of which the ranks cannot have equal parts."""
    if x.shape[dim] % group.nranks:
        raise UsageError(
            f"dimension {dim} of a tensor of shape {tuple(x.shape)} has no equal parts for "
            f"{group.nranks} ranks; pad it to a multiple of {group.nranks}"
        )


# ---- pairs


@final
class _Pair(torch.autograd.Function):  # type: ignore[misc] # torch is untyped
    """A move, and that of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Move, back: Move) -> torch.Tensor:
        """Move a tensor."""
        ctx.moves = there, back
        return there(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Move its gradient."""
        there, back = ctx.moves
        return _Pair.apply(gradient, back, there), None, None


def _through(x: torch.Tensor, group: Group, there: Move, back: Move) -> torch.Tensor:
    if group.rank < 0:
        raise UsageError(
            f"rank {group.world_rank} is not in group {group.name} (ranks {group.ranks}), so it "
            "has no part of this tensor; let only the members call this"
        )
    if group.nranks == 1:
        return x
    moved: torch.Tensor = _Pair.apply(x, there, back)
    return moved


def _dim_of(x: torch.Tensor, dim: int) -> int:
    """Return a dimension counted from the front."""
    if not -x.ndim <= dim < x.ndim:
        raise UsageError(f"a tensor of shape {tuple(x.shape)} has no dimension {dim}")
    return dim % int(x.ndim)


def _by(group: Group, dim: int) -> dict[str, Any]:
    return {"group": group, "dim": dim}


def _gathering(group: Group, dim: int) -> Move:
    return partial(gathered, group=group, dim=dim)


# ---- moves, without a gradient; what they return is new memory


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def summed(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum over the ranks. Collective."""
    total = x.clone(memory_format=torch.contiguous_format)
    collectives.all_reduce(total, group=group)
    return total


def own_part(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Return this rank's part along a dimension. Local."""
    length = x.shape[dim] // group.nranks
    part = x.narrow(dim, group.rank * length, length)
    return part.clone(memory_format=torch.contiguous_format)


def gathered(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Return the parts of all ranks along a dimension. Collective."""
    if dim == 0:
        whole = x.new_empty((group.nranks * x.shape[0], *x.shape[1:]))
        collectives.all_gather(whole, x.contiguous(), group)
        return whole
    parts = x.new_empty((group.nranks, *x.shape))
    collectives.all_gather(parts, x.contiguous(), group)
    return torch.cat(parts.unbind(), dim)


def summed_part(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Return this rank's part along a dimension of the sum over the ranks. Collective."""
    parts = _in_parts(x, group, dim)
    part = x.new_empty(parts.shape[1:])
    collectives.reduce_scatter(part, parts, group=group)
    return part


def exchanged(x: torch.Tensor, group: Group, cut: int, join: int) -> torch.Tensor:
    """Return the parts that all ranks have for this one, joined along a dimension. Collective."""
    sent = _in_parts(x, group, cut)
    received = torch.empty_like(sent)
    collectives.alltoall_single(received, sent, group)
    return torch.cat(received.unbind(), join)


def _in_parts(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Return the parts of a tensor along a dimension, one after the other in memory."""
    return x.unflatten(dim, (group.nranks, -1)).movedim(dim, 0).contiguous()
