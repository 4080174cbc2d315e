"""`Gradients`: those of an optimizer's parameters on a grid, from the backward passes to a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch.utils.weak import TensorWeakRef

from hpcdist.arrays.buffer import as_buffer
from hpcdist.comm.collectives import all_reduce
from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.parallel.averages import fused_allreduce_gradients
from hpcdist.parallel.fused import fused
from hpcdist.parallel.hybrid import HybridCommunicateGroup
from hpcdist.parallel.hybrid_options import HybridOptions
from hpcdist.torch.hybrid.model import axes_of_gradients
from hpcdist.torch.on_grid import Role, is_sequence_parallel, left_to_average, local_of
from hpcdist.transport.call.reduction import ReduceOp


@final
class Gradients:
    """Makes gradients those of the whole batch, once for each step.

    All methods take the parameters, of which there may be others after each pass.

    Attributes:
        passes: how many backward passes have been counted that gradient merge gathers.

    """

    def __init__(self, grid: HybridCommunicateGroup, options: HybridOptions) -> None:
        self._grid, self._options = grid, options
        self.passes = 0
        self._settled: list[TensorWeakRef | None] | None = None

    def begin_again(self) -> None:
        """Begin the next step: what there is now belongs to none."""
        self.passes, self._settled = 0, None

    def are_merging(self, parameters: Sequence[Any]) -> bool:
        """Return whether gradient merge wants more backward passes than this one."""
        merge = self._options.gradient_merge
        return (
            merge is not None
            and not self.are_settled(parameters)
            and self.passes + 1 < merge.k_steps
        )

    def are_settled(self, parameters: Sequence[Any]) -> bool:
        """Return whether the gradients are those that have been settled.

        Others were made since, where a step was left out and the model cleared its gradients.
        """
        settled = self._settled
        if settled is not None and (
            len(settled) != len(parameters)  # a group of parameters was added
            or any(
                each.grad is not (None if one is None else one())
                for each, one in zip(parameters, settled, strict=True)
            )
        ):
            self.begin_again()
        return self._settled is not None

    def settle(self, parameters: Sequence[Any], roles: Sequence[Role]) -> None:
        """Average gradients over the axes over which the backward pass has not. Collective.

        Raises:
            UsageError: gradient merge is gathering them.

        """
        if self.are_merging(parameters):
            raise UsageError(
                f"gradients of {self.passes + 1} backward passes are there, and strategy."
                f"gradient_merge wants {self._options.gradient_merge}; to clip their sum, set "
                "clip_norm of the optimizer"
            )
        wanted = axes_of_gradients(self._options)
        left: dict[tuple[str, ...], list[Any]] = {}
        for role, parameter in zip(roles, parameters, strict=True):
            axes = (axis for axis in left_to_average(role) if axis in wanted)
            left.setdefault(tuple(axes), []).append(parameter)
        for over, several in left.items():
            if over:
                group = self._grid.fused(*over)
                if self._options.find_unused_parameters:
                    _give_zeros(several, group)
                fused_allreduce_gradients(several, group=group)
        if self._grid.degree("mp") > 1:
            seen_in_parts = [each for each in parameters if is_sequence_parallel(each)]
            reduce_all(_local(seen_in_parts), self._grid["mp"], ReduceOp.SUM)
        factor = self._factor()
        if factor != 1:
            with torch.no_grad():
                for gradient in _local(parameters):
                    gradient.mul_(factor)
        self._settled = [
            None if each.grad is None else TensorWeakRef(each.grad) for each in parameters
        ]

    def _factor(self) -> float:
        """Return what averaged gradients of some passes must be multiplied with."""
        factor, merge = 1.0, self._options.gradient_merge
        if merge is not None and merge.avg:
            factor /= merge.k_steps
        if self._options.gradient_scale == "sum":
            factor *= self._grid.fused(*axes_of_gradients(self._options)).nranks
        return factor

    def unscale(self, parameters: Sequence[Any], scale: float) -> bool:
        """Divide all gradients by `scale`; return whether they are finite on all ranks. Collective.

        They have been settled.
        """
        finite = True
        with torch.no_grad():
            for gradient in _local(parameters):
                gradient.mul_(1 / scale)
                finite = finite and bool(gradient.isfinite().all())
        flags = np.array([finite], np.uint8)
        all_reduce(flags, ReduceOp.MIN, self._grid.mesh.group)
        return bool(flags[0])


def reduce_all(tensors: Iterable[torch.Tensor], group: Group, op: ReduceOp) -> None:
    """Reduce tensors in place, in few operations. Collective."""
    buffers = [as_buffer(each, f"tensor {index}") for index, each in enumerate(tensors)]
    fused(buffers, group, partial(all_reduce, op=op, group=group))


def _local(parameters: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Return what this rank has of the gradients."""
    for each in parameters:
        if each.grad is not None:
            yield local_of(each.grad)


def _give_zeros(parameters: Sequence[Any], group: Group) -> None:
    """Fill in zero gradients where another rank has one of the same parameter. Collective."""
    used = np.array([each.grad is not None for each in parameters], np.uint8)
    all_reduce(used, ReduceOp.MAX, group)
    for each, somewhere in zip(parameters, used, strict=True):
        if somewhere and each.grad is None:
            each.grad = torch.zeros_like(each)
