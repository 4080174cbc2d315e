"""`parallel_cross_entropy`: the loss of logits that are cut over the ranks by classes.

Two reductions of one number a sample: the largest logit, and the sum of the exponentials beside the
logit of the right class. What is kept for the gradient are the logits themselves.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch.autograd.function import once_differentiable

from hpcdist.comm.collectives import all_reduce
from hpcdist.comm.group import Group
from hpcdist.errors import MismatchError, UsageError
from hpcdist.torch.model_parallel.functions import refuse
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import ReduceOp


def parallel_cross_entropy(
    logits: torch.Tensor, label: torch.Tensor, group: Group, ignore_index: int
) -> torch.Tensor:
    """Return the loss of each sample, in the shape of `label`. Collective."""
    flat = label.squeeze(-1) if label.ndim == logits.ndim else label
    problem = _problem(logits, flat, group, ignore_index)
    if problem is not None:
        refuse(Kind.ALL_REDUCE, group, problem)
    loss: torch.Tensor = _CrossEntropy.apply(logits, flat, group, ignore_index)
    return loss.reshape(label.shape)


def _problem(
    logits: torch.Tensor, label: torch.Tensor, group: Group, ignore_index: int
) -> UsageError | None:
    if not logits.is_floating_point() or logits.ndim == 0:
        return UsageError(
            f"logits are floats, of shape (..., classes), got {logits.dtype} of shape "
            f"{tuple(logits.shape)}"
        )
    if label.shape != logits.shape[:-1]:
        return UsageError(
            f"labels of shape {tuple(label.shape)} are not one for each sample of logits of shape "
            f"{tuple(logits.shape)}; give labels of shape {tuple(logits.shape[:-1])}"
        )
    return out_of_range(label, logits.shape[-1] * group.nranks, "label", ignore_index)


def out_of_range(
    x: torch.Tensor, count: int, what: str, ignored: int | None = None
) -> UsageError | None:
    """Return what is wrong with numbers from 0 to before `count`; None if nothing is."""
    if x.dtype not in _INTEGERS:
        return UsageError(f"{what}s are integers, got {x.dtype}; convert them with .long()")
    wrong = (x < 0) | (x >= count)
    if ignored is not None:
        wrong &= x != ignored
    if not bool(wrong.any()):
        return None
    place = tuple(wrong.nonzero()[0].tolist())
    except_for = "" if ignored is None else f", or {ignored}, which is ignored"
    return UsageError(
        f"{what} {int(x[place])} at {list(place)} is out of range: {what}s are from 0 to "
        f"{count - 1}{except_for}"
    )


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@final
class _CrossEntropy(torch.autograd.Function):  # type: ignore[misc] # torch is untyped
    """log(sum(exp(logits))) - logits[label], over the classes of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, label: torch.Tensor, group: Group, ignore_index: int
    ) -> torch.Tensor:
        """Return the loss of each sample."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        largest = _largest(logits.amax(-1).to(wide), logits.shape[-1], group)
        column, is_here, ignored = _located(label, logits.shape[-1], group, ignore_index)
        shifted = logits.to(wide) - largest.unsqueeze(-1)
        right = shifted.gather(-1, column).squeeze(-1).masked_fill(~is_here, 0.0)
        sums = torch.stack([shifted.exp_().sum(-1), right])
        all_reduce(sums, ReduceOp.SUM, group)
        log_sum = sums[0].log()
        ctx.save_for_backward(logits, label, largest + log_sum)
        ctx.group, ctx.ignore_index = group, ignore_index
        return (log_sum - sums[1]).masked_fill(ignored, 0.0)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, slope: torch.Tensor) -> Any:
        """Return the gradient of this rank's logits. Local."""
        logits, label, log_sum = ctx.saved_tensors
        column, is_here, ignored = _located(label, logits.shape[-1], ctx.group, ctx.ignore_index)
        gradient = (logits.to(log_sum.dtype) - log_sum.unsqueeze(-1)).exp_()
        gradient.scatter_add_(-1, column, -is_here.to(gradient.dtype).unsqueeze(-1))
        gradient *= slope.to(gradient.dtype).masked_fill(ignored, 0.0).unsqueeze(-1)
        return gradient.to(logits.dtype), None, None, None


def _largest(own: torch.Tensor, count: int, group: Group) -> torch.Tensor:
    """Return the largest logits over all ranks, which have `count` classes each. Collective.

    Raises:
        MismatchError: they have not, so that nobody knows whose which class is; on every rank.

    """
    told = torch.cat([own.flatten(), own.new_tensor([count, -count])])
    all_reduce(told, ReduceOp.MAX, group)
    most, least = int(told[-2]), -int(told[-1])
    if most != least:
        raise MismatchError(
            f"the ranks have logits of {least} to {most} classes, but their parts must be equal; "
            "let the last layer be a ColumnParallelLinear"
        )
    return told[:-2].view(own.shape)


def _located(
    label: torch.Tensor, count: int, group: Group, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the column of each label in this rank's logits, which are here, which are ignored."""
    ignored = label == ignore_index
    own = label.long() - group.rank * count
    is_here = (own >= 0) & (own < count) & ~ignored
    return own.masked_fill(~is_here, 0).unsqueeze(-1), is_here, ignored
