"""`Engine`: torch's DistributedDataParallel (DDP), as `TorchDataParallel` runs it.

What DDP has no public way to tell or to do is asked of its reducer here, and only here: how many
buckets it has, which parameters are in them, and which of those got no gradient.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch.nn.parallel import DistributedDataParallel

from hpcdist.torch.process_group import HpcdistProcessGroup
from hpcdist.torch.works import TorchWork

_MiB = 1 << 20

Layout = list[list[int]]
"""The parameters of each bucket, by their places among those that are trained."""


@final
class Engine(DistributedDataParallel):  # type: ignore[misc]
    """DDP whose buckets a hook averages.

    Args:
        layers: the module.
        process_group: the ranks that train together.
        hook: a method that takes a bucket, and returns a future of the averaged tensor.
        bucket_nbytes: the bytes of a bucket.
        find_unused_parameters: as of DDP.

    """

    def __init__(
        self,
        layers: torch.nn.Module,
        process_group: HpcdistProcessGroup,
        hook: Callable[[Any], torch.futures.Future[torch.Tensor]],
        bucket_nbytes: int,
        find_unused_parameters: bool,
    ) -> None:
        super().__init__(
            layers,
            process_group=process_group,
            init_sync=False,
            bucket_cap_mb=max(bucket_nbytes, 1) / _MiB,  # torch 2.11 takes no 0
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=True,
        )
        kept = weakref.WeakMethod(hook)  # C++ has the hook, where no collector sees who has whom

        def average(bucket: Any) -> Any:
            method = kept()
            assert method is not None
            return method(bucket)

        self.register_comm_hook(None, lambda _, bucket: average(bucket))

    def retire(self) -> None:
        """Never run again: the traceback of an error may keep it, and its hooks would run."""
        self.reducer._remove_autograd_hooks()

    def buckets(self) -> list[Any]:
        """Return the buckets that it has now."""
        return list(self.reducer._get_zeros_like_grad_buckets())  # torch tells it in no other way

    def rearrange(self) -> bool:
        """Arrange the buckets in the order in which gradients come; once, as rank 0 tells it.

        Collective. Return whether it has done so.
        """
        return bool(self.reducer._rebuild_buckets())

    def layout(self, parameters: list[torch.nn.Parameter]) -> Layout:
        """Return which of `parameters` are in each bucket."""
        places = {id(each): place for place, each in enumerate(parameters)}
        return [[places[id(each)] for each in bucket.parameters()] for bucket in self.buckets()]

    def lay_out(self, layout: Layout) -> None:
        """Take the buckets of an older engine, once and for all. Local.

        DDP arranges buckets once, as the first rank tells it in two broadcasts; they are answered
        here.
        """
        process_group = self.process_group
        places = [place for bucket in layout for place in bucket]
        answers = iter([[*places, len(layout)], [len(bucket) for bucket in layout]])

        def answer(tensors: list[torch.Tensor], _: Any) -> TorchWork:
            tensors[0].copy_(tensors[0].new_tensor(next(answers)))
            return TorchWork(process_group.group, tensors, 0)

        self.reducer._push_all_rebuilt_params()
        process_group.broadcast = answer
        try:
            self.rearrange()
        finally:
            del process_group.broadcast

    def without_gradient(self) -> list[int] | None:
        """Return which parameters got none in this backward pass; None if it has seen no pass."""
        # torch tells it in no other way: rebuilding after an incomplete pass is an error, and its
        # text has the indices.
        try:
            self.rearrange()
        except RuntimeError as error:
            indices = re.search(
                r"indices which did not receive grad for rank \d+: ([\d ]+)", f"{error}"
            )
            if indices is None:
                raise
            return [int(index) for index in indices[1].split()]
        return None

    def match_unused(self) -> None:
        """Take part in the exchange of which parameters were used. Collective."""
        self._match_unused_params_allreduce()

    def follow_forward(self) -> bool:
        """Do what the others do in a forward; return whether a backward pass of theirs comes.

        Collective, of a rank that has no batches in `join`.
        """
        self.rearrange()
        self._check_and_sync_module_buffers()
        return bool(self._check_global_requires_backward_grad_sync(is_joined_rank=True))
