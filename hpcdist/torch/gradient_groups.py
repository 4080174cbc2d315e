"""`GroupedGradients`: those that are averaged over other ranks than the rest of a module's.

DDP has one group per module. The parameters that have another one, in their attribute
``hpcdist_group``, are left out there; their buckets travel when the backward pass has computed
everything, after those of DDP, in one order on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch.nn.parallel import DistributedDataParallel

from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.parallel.averager import Averager, first_failure
from hpcdist.parallel.gradient_groups import Bucket, agree, by_group, group_of, plan
from hpcdist.parallel.module_state import broadcast_states
from hpcdist.torch.module_state import states_of
from hpcdist.transport.waiting.work import DONE, Work


@final
class GroupedGradients:
    """Collective over `group` to create; gives the members of each other group equal parameters.

    Args:
        module: the module, whose groups have been checked.
        group: the ranks that train together.
        limit: bytes of a bucket.

    Attributes:
        trained: names and parameters that are trained.
        exist: whether any rank has such parameters.

    """

    def __init__(self, module: torch.nn.Module, group: Group, limit: int) -> None:
        named = [
            pair for pair in module.named_parameters() if group_of(pair[1], group) is not group
        ]
        shared = by_group(named, group)
        del shared[group]
        self.trained = [pair for pair in named if pair[1].requires_grad]
        self._parameters = [each for _, each in self.trained]
        states = {own: states_of(listed) for own, listed in shared.items()}
        buckets = plan(self._parameters, group, [limit])
        self._buckets, self.exist = agree(states, buckets, group)
        for own, listed in shared.items():
            broadcast_states([each.detach() for _, each in listed], own, own.ranks[0])
        if named:
            left_out = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                module, [*left_out, *(name for name, _ in named)]
            )

    def average(self, averager: Averager, error: UsageError | None) -> Exception | None:
        """Average all gradients, or call that off with `error`; return what went wrong.

        Collective. A parameter without a gradient contributes zeros, and gets one if another
        rank has one.
        """
        if not self.exist:
            return error
        flats = [None if error else self._flat(bucket) for bucket in self._buckets]
        works = [
            self._send(averager, bucket, flat, error)
            for bucket, flat in zip(self._buckets, flats, strict=True)
        ]
        failure = first_failure(works)
        if failure is not None and error is None:
            error = UsageError(f"a bucket of this backward pass has failed: {failure}")
        told = first_failure([averager.average(torch.zeros(1), error)])  # others may know nothing
        failure = failure or told
        if failure is None:
            for bucket, flat in zip(self._buckets, flats, strict=True):
                self._take(bucket, flat)
        return failure

    def _send(
        self, averager: Averager, bucket: Bucket, flat: Any, error: UsageError | None
    ) -> Work:
        if bucket.group.nranks == 1:
            return DONE
        return averager.average(flat, error, group=bucket.group)

    def _of(self, bucket: Bucket) -> Sequence[torch.nn.Parameter]:
        return [self._parameters[index] for index in bucket.indices]

    def _flat(self, bucket: Bucket) -> torch.Tensor:
        """Return the gradients of a bucket, and for each parameter whether it has one."""
        parameters = self._of(bucket)
        like = parameters[0].detach()
        parts = [
            torch.zeros_like(each).reshape(-1) if each.grad is None else each.grad.reshape(-1)
            for each in parameters
        ]
        used = [float(each.grad is not None) for each in parameters]
        return torch.cat([*(part.detach() for part in parts), like.new_tensor(used)])

    def _take(self, bucket: Bucket, flat: Any) -> None:
        parameters = self._of(bucket)
        used = flat[-len(parameters) :].tolist()
        start = 0
        for parameter, share in zip(parameters, used, strict=True):
            part = flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
            if parameter.grad is not None:
                parameter.grad.copy_(part)
            elif share:
                parameter.grad = part.clone()
