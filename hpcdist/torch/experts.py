"""`global_scatter` and `global_gather` of tensors: the gradient of each goes the other way."""

from __future__ import annotations

from typing import Any, final

import torch

from hpcdist.comm.group import Group
from hpcdist.parallel.experts import Route, exchanged


def moved(verb: str, x: torch.Tensor, route: Route, group: Group) -> Any:
    """Return the rows that come to this rank, in their order. Collective, and so is backward."""
    return _Moved.apply(x, verb, route, group)


@final
class _Moved(torch.autograd.Function):  # type: ignore[misc] # torch is untyped
    """Rows on their way to experts, or back."""

    @staticmethod
    def forward(context: Any, x: Any, verb: str, route: Route, group: Group) -> Any:
        """Return the rows that come."""
        context.verb, context.route, context.group = verb, route, group
        order = torch.from_numpy(route.by_expert()).to(x.device)
        if verb == "gather":
            by_rank = torch.empty_like(x)
            by_rank[order] = x
            room = x.new_empty((int(route.sent.sum()), *x.shape[1:]))
            return exchanged(by_rank, room, route.received, route.sent, group)
        room = x.new_empty((len(order), *x.shape[1:]))
        return exchanged(x.contiguous(), room, route.sent, route.received, group)[order]

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        """Return the gradients of the rows, on the ranks that they came from."""
        other = "scatter" if context.verb == "gather" else "gather"
        back = _Moved.apply(gradient.contiguous(), other, context.route, context.group)
        return back, None, None, None
