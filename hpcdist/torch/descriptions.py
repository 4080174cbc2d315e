"""What torch asks for beyond hpcdist's own operations, in terms of them.

Each function describes one call, like those of `comm.describe`: operators with torch's names,
lists of tensors of different sizes, sparse tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from hpcdist.comm import describe
from hpcdist.comm.describe_objects import all_gather_object, part_of
from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.transport.call.call import Call
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import ReduceOp

_OPS: dict[str, ReduceOp] = {
    "SUM": ReduceOp.SUM,
    "AVG": ReduceOp.AVG,
    "PRODUCT": ReduceOp.PROD,
    "MIN": ReduceOp.MIN,
    "MAX": ReduceOp.MAX,
    "BAND": ReduceOp.BAND,
    "BOR": ReduceOp.BOR,
    "BXOR": ReduceOp.BXOR,
    "PREMUL_SUM": ReduceOp.SUM,
}


def operator_of(options: Any) -> tuple[ReduceOp, Any]:
    """Return the operator, and the factor of a PREMUL_SUM (None for others)."""
    if options is None:
        return ReduceOp.SUM, None
    given = options.reduceOp
    name = getattr(given, "op", given).name
    if name != "PREMUL_SUM":
        return _OPS[name], None
    factor = given.__getstate__()[1]
    return _OPS[name], factor.reshape(()) if isinstance(factor, torch.Tensor) else factor


def all_reduce(group: Group, tensor: torch.Tensor, options: Any) -> Call:
    """Describe an all-reduce of a dense or sparse tensor."""
    op, factor = operator_of(options)
    if tensor.is_sparse:
        return _sparse_all_reduce(group, tensor, op)
    if _is_average_of_integers(op, tensor):
        call = describe.all_reduce(group, tensor, ReduceOp.SUM)
        return _then(call, lambda: _divide(tensor, group.nranks))
    if factor is None:
        return describe.all_reduce(group, tensor, op)
    scaled, scale = _scaled(tensor, factor)
    call = describe.all_reduce(group, scaled, op)._replace(begin=scale)
    return _then(call, lambda: tensor.detach().copy_(scaled))


def mean(group: Group, tensor: torch.Tensor) -> Call:
    """Describe the averaging of a dense or sparse tensor."""
    if tensor.is_sparse:
        return _sparse_all_reduce(group, tensor, ReduceOp.AVG)
    return describe.all_reduce(group, tensor, ReduceOp.AVG)


def reduce(group: Group, tensor: torch.Tensor, dst: int, options: Any) -> Call:
    """Describe a reduction to world rank `dst`."""
    op, factor = operator_of(options)
    if _is_average_of_integers(op, tensor):
        call = describe.reduce(group, tensor, dst, ReduceOp.SUM)
        at_root = group.root_of(dst, "dst") == group.rank
        return _then(call, lambda: _divide(tensor, group.nranks)) if at_root else call
    if factor is None:
        return describe.reduce(group, tensor, dst, op)
    scaled, scale = _scaled(tensor, factor)
    call = describe.reduce(group, scaled, dst, op)._replace(begin=scale)
    at_root = group.root_of(dst, "dst") == group.rank
    return _then(call, lambda: tensor.detach().copy_(scaled)) if at_root else call


def _scaled(tensor: torch.Tensor, factor: Any) -> tuple[torch.Tensor, Callable[[], Any]]:
    """Return memory for `factor` times `tensor`, which stays as it is, and what computes it."""
    scaled = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return scaled, lambda: torch.mul(tensor.detach(), factor, out=scaled)


def reduce_scatter(group: Group, out: torch.Tensor, given: Any, options: Any) -> Call:
    """Describe a reduce-scatter of one tensor, or of one per rank, of any sizes."""
    op, factor = operator_of(options)
    if _is_average_of_integers(op, out):
        call = _reduce_scatter(group, out, given, ReduceOp.SUM, None)
        return _then(call, lambda: _divide(out, group.nranks))
    return _reduce_scatter(group, out, given, op, factor)


def _reduce_scatter(group: Group, out: torch.Tensor, given: Any, op: ReduceOp, factor: Any) -> Call:
    blocks = given if isinstance(given, (list, tuple)) else None
    if blocks is not None and len({block.shape for block in blocks}) > 1:
        return _uneven_reduce_scatter(group, out, blocks, op, factor)
    if factor is None:
        return describe.reduce_scatter(group, out, given, op)
    parts = blocks if blocks is not None else [given]
    scaled = torch.empty((len(parts), *parts[0].shape), dtype=out.dtype, device=out.device)

    def scale() -> None:
        for part, place in zip(parts, scaled, strict=True):
            torch.mul(part.detach(), factor, out=place)

    return describe.reduce_scatter(group, out, scaled, op)._replace(begin=scale)


@partial(describe.or_cannot, Kind.REDUCE_SCATTER)
def _uneven_reduce_scatter(
    group: Group, out: torch.Tensor, blocks: Sequence[torch.Tensor], op: ReduceOp, factor: Any
) -> Call:
    whole = torch.cat([block.detach().reshape(-1) for block in blocks])
    if factor is not None:
        whole.mul_(factor)
    start = sum(block.numel() for block in blocks[: group.rank])
    mine = whole[start : start + blocks[group.rank].numel()]
    if mine.numel() != out.numel():
        raise UsageError(
            f"reduce_scatter: the output has {out.numel()} elements, but this rank's block of the "
            f"input has {mine.numel()}; give both one size"
        )
    return _then(
        describe.all_reduce(group, whole, op), lambda: out.detach().copy_(mine.view(out.shape))
    )


def all_gather(group: Group, outs: Any, own: torch.Tensor) -> Call:
    """Describe an all-gather into one tensor, or into one per rank, of any sizes."""
    if not isinstance(outs, (list, tuple)) or all(out.shape == own.shape for out in outs):
        return describe.all_gather(group, outs, own)
    blocks: list[torch.Tensor] = []
    return _then(describe.all_gather(group, blocks, own), lambda: _place(blocks, outs))


def gather(group: Group, outs: Any, own: torch.Tensor, dst: int) -> Call:
    """Describe a gather to world rank `dst`, into one tensor per rank, of any sizes."""
    if not outs or all(out.shape == own.shape for out in outs):
        return describe.gather(group, own, outs, dst)
    blocks: list[torch.Tensor] = []
    return _then(describe.gather(group, own, blocks, dst), lambda: _place(blocks, outs))


def _place(blocks: list[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
    for rank, (block, out) in enumerate(zip(blocks, outs, strict=True)):
        if block.numel() != out.numel():
            raise UsageError(
                f"the output for rank {rank} has shape {tuple(out.shape)}, but that rank sent "
                f"{tuple(block.shape)}; let them agree"
            )
        out.detach().copy_(block.view(out.shape))


def _is_average_of_integers(op: ReduceOp, tensor: torch.Tensor) -> bool:
    """Return whether hpcdist itself refuses this average, which torch's backends round."""
    kind = tensor.dtype
    whole = not (kind.is_floating_point or kind.is_complex or kind is torch.bool)
    return op is ReduceOp.AVG and whole


def _divide(total: torch.Tensor, size: int) -> None:
    """Divide in place, towards zero."""
    total = total.detach()
    if total.dtype in _WITHOUT_DIVISION and not total.is_cuda:
        array = total.numpy()
        np.floor_divide(array, size, out=array)
    else:
        total.div_(size, rounding_mode="trunc")


_WITHOUT_DIVISION = (torch.uint16, torch.uint32, torch.uint64)
"""Integers without a sign that torch cannot divide on the CPU."""


@partial(describe.or_cannot, Kind.ALL_REDUCE)
def _sparse_all_reduce(group: Group, tensor: torch.Tensor, op: ReduceOp) -> Call:
    """Exchange the nonzero elements; every rank adds them in rank order."""
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise UsageError(f"{op.name} of sparse tensors is not defined; use SUM, or to_dense()")
    own = tensor.detach().coalesce().cpu()
    parts: list[tuple[Any, Any]] = []

    def combine() -> None:
        indices = torch.cat([torch.from_numpy(each) for each, _ in parts], dim=1)
        values = torch.cat([each for _, each in parts])
        with torch.sparse.check_sparse_tensor_invariants(False):
            total = torch.sparse_coo_tensor(indices, values, tensor.shape).coalesce()
        with torch.no_grad():  # a detached sparse tensor would get new elements of its own
            total = total / group.nranks if op is ReduceOp.AVG else total
            tensor.copy_(total.to(tensor.device))
            if tensor.is_cuda:  # on the stream of this thread, which the caller's knows nothing of
                torch.cuda.current_stream(tensor.device).synchronize()

    words = f"all_reduce(sparse tensor of {tuple(tensor.shape)}, {op.name})"
    exchange = part_of(words, all_gather_object)
    return _then(exchange(group, parts, (own.indices().numpy(), own.values())), combine)


def _then(call: Call, after: Callable[[], Any]) -> Call:
    """Return `call` with `after` at its end."""
    first = call.finish

    def finish(result: Any) -> None:
        if first is not None:
            first(result)
        after()

    return call._replace(finish=finish)
