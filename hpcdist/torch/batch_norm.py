"""`SyncBatchNorm`: batch normalization over the batches of all ranks, on CPU and GPU."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.nn.functional as F  # noqa: N812 (torch's habit)
from torch.nn.modules.batchnorm import _BatchNorm

from hpcdist.comm.collectives import all_gather, all_reduce
from hpcdist.comm.group import Group
from hpcdist.comm.session import resolve_group


@final
class SyncBatchNorm(_BatchNorm):  # type: ignore[misc] # torch is untyped
    """Normalize each channel by mean and variance over the batches of all ranks of `group`.

    What `torch.nn.BatchNorm1d` to ``3d`` would do with the whole batch on one rank; ranks may
    have different numbers of samples. Torch's own class refuses CPU tensors. The forward in
    training mode, and its backward, are collective over the group.

    Args:
        num_features: channels C of an input of shape (N, C, ...).
        eps: added to the variance.
        momentum: as in `torch.nn.BatchNorm1d`.
        affine: learn a weight and a bias per channel.
        track_running_stats: keep running mean and variance for evaluation.
        group: the ranks whose batches count; None for all.

    Reference: Ioffe and Szegedy, Batch Normalization, ICML 2015; moments are combined as in Chan,
    Golub and LeVeque, Updating Formulae, 1979.

    Example:
        >>> import torch, hpcdist as dist, hpcdist.torch
        >>> _ = dist.init_parallel_env()
        >>> norm = hpcdist.torch.SyncBatchNorm(3)
        >>> norm(torch.rand(16, 3)).shape
        torch.Size([16, 3])

    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        group: Group | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.group = group

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Normalize `given`, of shape (N, C, ...).

        Args:
            given: a batch, of any size on each rank.

        """
        self._check_input_dim(given)
        group = resolve_group(self.group)
        if not self.training and self.running_mean is not None:
            return F.batch_norm(
                given, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        normalized, mean, var, count = _Normalize.apply(given, self.eps, group)
        if self.training and self.running_mean is not None:
            self._track(mean, var, count)
        if self.weight is None:
            return normalized
        shape = _per_channel(given)
        return normalized * self.weight.view(shape) + self.bias.view(shape)

    def _track(self, mean: torch.Tensor, var: torch.Tensor, count: float) -> None:
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:
            share = 1.0 / float(self.num_batches_tracked)
        unbiased = var * (count / max(count - 1.0, 1.0))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)

    def _check_input_dim(self, given: torch.Tensor) -> None:
        if given.dim() < 2 or given.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm expects shape (N, {self.num_features}, ...), got "
                f"{tuple(given.shape)}"
            )

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, group: Group | None = None
    ) -> torch.nn.Module:
        """Replace every batch normalization in `module` by one over all ranks. Local.

        Args:
            module: what is searched; its sub-modules are replaced in place.
            group: the ranks; None for all.

        Example:
            >>> import torch, hpcdist.torch
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
            >>> model = hpcdist.torch.SyncBatchNorm.convert_sync_batchnorm(model)
            >>> type(model[1]).__name__
            'SyncBatchNorm'

        """
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            return cls._like(module, group)
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, group))
        return module

    @classmethod
    def _like(cls, norm: Any, group: Group | None) -> SyncBatchNorm:
        """Make one with the settings, parameters and statistics of `norm`."""
        settings = norm.eps, norm.momentum, norm.affine, norm.track_running_stats
        made = cls(norm.num_features, *settings, group)
        made.weight, made.bias = norm.weight, norm.bias
        made.running_mean, made.running_var = norm.running_mean, norm.running_var
        made.num_batches_tracked = norm.num_batches_tracked
        made.training = norm.training
        return made


class _Normalize(torch.autograd.Function):  # type: ignore[misc] # torch is untyped
    """(x - mean) / sqrt(var + eps), over the batches of all ranks."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, eps: float, group: Group) -> Any:
        """Return the normalized batch, and mean, variance and count over all ranks."""
        mean, var, count = _moments(given, group)
        shape = _per_channel(given)
        factor = torch.rsqrt(var + eps)
        work = given.to(mean.dtype)
        normalized = (work - mean.view(shape)) * factor.view(shape)
        ctx.save_for_backward(normalized, factor)
        ctx.group, ctx.count = group, count
        ctx.mark_non_differentiable(mean, var)
        return normalized.to(given.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor, *_: Any) -> Any:
        """Return the gradient of the input; the two sums run over all ranks."""
        normalized, factor = ctx.saved_tensors
        dims, shape = _over(slope), _per_channel(slope)
        wide = slope.to(normalized.dtype)
        sums = torch.stack([wide.sum(dims), (wide * normalized).sum(dims)])
        all_reduce(sums, group=ctx.group)
        mean, along = (sums / ctx.count).unbind()
        inner = wide - mean.view(shape) - normalized * along.view(shape)
        return (inner * factor.view(shape)).to(slope.dtype), None, None


def _moments(given: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return mean, biased variance and count per channel over all ranks; collective."""
    wide = given.detach().to(torch.promote_types(given.dtype, torch.float32))
    dims, channels = _over(given), given.shape[1]
    count = given.numel() // max(channels, 1)
    mean = wide.sum(dims) / max(count, 1)
    spread = (wide - mean.view(_per_channel(given))).square().sum(dims)
    own = torch.cat([mean.new_full((1,), count), mean, spread])
    told = own.new_empty(group.nranks, own.numel())
    all_gather(told, own, group)
    counts, means, spreads = told[:, :1], told[:, 1 : channels + 1], told[:, channels + 1 :]
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    var = (spreads + counts * (means - mean).square()).sum(0) / total
    return mean, var, float(total)


def _over(given: torch.Tensor) -> list[int]:
    return [dim for dim in range(given.dim()) if dim != 1]


def _per_channel(given: torch.Tensor) -> list[int]:
    return [-1 if dim == 1 else 1 for dim in range(given.dim())]
