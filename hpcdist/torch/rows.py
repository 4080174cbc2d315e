"""`Rows`: the rows of a batch that a rank computes, and what all ranks made of all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hpcdist.named_tuple import NamedTuple
from hpcdist.torch.tensor_parallel import own_part, own_placements

_MEAN, _ROWS, _AS_IT_IS = range(3)
"""How a result becomes that of the whole batch."""


class Rows(NamedTuple):
    """What this rank has of a batch of `length` rows that is cut over a mesh."""

    mesh: DeviceMesh
    placements: Sequence[Any]
    length: int
    own: int

    def whole(self, results: Any) -> Any:
        """Return the results of all rows. Collective.

        Tensors that have a row for each of this rank's get those of all ranks, numbers are the
        mean over the rows, and everything else stays.

        """
        leaves, spec = tree_flatten(results)
        ways = self._agreed([self._way(each) for each in leaves])
        made = [_WAYS[way](self, each) for way, each in zip(ways, leaves, strict=True)]
        return tree_unflatten(made, spec)

    def _way(self, result: Any) -> int:
        if not isinstance(result, torch.Tensor) or isinstance(result, DTensor):
            return _AS_IT_IS
        if result.ndim == 0:
            return _MEAN if result.is_floating_point() else _AS_IT_IS
        return _ROWS if len(result) == self.own else _AS_IT_IS

    def _agreed(self, ways: list[int]) -> list[int]:
        """Return what holds on all ranks: a tensor may look like rows to some of them."""
        if all(way == _MEAN for way in ways):
            return ways
        told = torch.tensor(ways, device=self.mesh.device_type)
        return [int(each) for each in self._over_ranks(told, "max")]

    def _mean(self, number: torch.Tensor) -> torch.Tensor:
        # A mean over no rows is NaN.
        part = number.detach() * (self.own / self.length) if self.own else torch.zeros_like(number)
        return self._over_ranks(part, "sum")

    def _over_ranks(self, part: torch.Tensor, op: str) -> torch.Tensor:
        placements = [Partial(op) if each.is_shard() else Replicate() for each in self.placements]
        return DTensor.from_local(part, self.mesh, placements, run_check=False).full_tensor()

    def _from_local(self, part: torch.Tensor) -> torch.Tensor:
        whole = torch.empty((self.length, *part.shape[1:]), device="meta")
        return DTensor.from_local(
            part.detach().contiguous(),
            self.mesh,
            self.placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        ).full_tensor()


_WAYS: dict[int, Callable[[Rows, Any], Any]] = {
    _MEAN: Rows._mean,
    _ROWS: Rows._from_local,
    _AS_IT_IS: lambda _, result: result,
}


def rows_of(batch: Any) -> Rows | None:
    """Return this rank's rows of a batch; None if it has the whole of it. Local."""
    for each in tree_leaves(batch):
        if isinstance(each, DTensor) and Shard(0) in (placements := own_placements(each)):
            parts = [p if p == Shard(0) else Replicate() for p in placements]
            return Rows(each.device_mesh, parts, len(each), len(own_part(each)))
    return None
