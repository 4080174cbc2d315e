"""What each collective computes, when all ranks' calls lie side by side.

One function per kind, from the calls of all ranks (in rank order) to their results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.errors import MismatchError
from hpcdist.transport.call import Block, Call, Kind
from hpcdist.transport.recipes import local_result


def _nothing(calls: list[Call]) -> list[Any]:
    return [None] * len(calls)


def _wires(calls: list[Call]) -> list[NumpyArray]:
    wires = []
    for call in calls:
        data = call.send if call.send is not None else call.recv
        assert data is not None
        assert call.recipe is not None
        flat = data.reshape(-1)
        wires.append(flat.copy() if call.recipe.encode is None else call.recipe.encode(flat))
    return wires


def _store(call: Call, total: NumpyArray, ranks: int) -> None:
    assert call.recv is not None
    assert call.recipe is not None
    out = call.recv.reshape(-1)
    if call.recipe.decode is None:
        out[...] = total
    else:
        call.recipe.decode(total.copy(), out, ranks)


def _all_reduce(calls: list[Call]) -> list[Any]:
    assert calls[0].recipe is not None
    total = local_result(calls[0].recipe, _wires(calls))
    for call in calls:
        _store(call, total, len(calls))
    return _nothing(calls)


def _reduce(calls: list[Call]) -> list[Any]:
    assert calls[0].recipe is not None
    total = local_result(calls[0].recipe, _wires(calls))
    _store(calls[calls[0].root], total, len(calls))
    return _nothing(calls)


def _reduce_scatter(calls: list[Call]) -> list[Any]:
    assert calls[0].recipe is not None
    total = local_result(calls[0].recipe, _wires(calls))
    for part, call in zip(np.split(total, len(calls)), calls, strict=True):
        _store(call, part, len(calls))
    return _nothing(calls)


def _scan(calls: list[Call]) -> list[Any]:
    return _running(calls, inclusive=True)


def _exscan(calls: list[Call]) -> list[Any]:
    return _running(calls, inclusive=False)


def _running(calls: list[Call], *, inclusive: bool) -> list[Any]:
    wires = _wires(calls)
    assert calls[0].recipe is not None
    for rank, call in enumerate(calls):
        count = rank + inclusive
        if count:
            _store(call, local_result(calls[0].recipe, wires[:count]), count)
    return _nothing(calls)


def _broadcast(calls: list[Call]) -> list[Any]:
    source = calls[calls[0].root].recv
    for rank, call in enumerate(calls):
        if rank != call.root:
            assert call.recv is not None
            assert source is not None
            call.recv.reshape(-1)[...] = source.reshape(-1)
    return _nothing(calls)


def _gathered(calls: list[Call], call: Call) -> list[Block]:
    sends = [each.send.reshape(-1).copy() for each in calls if each.send is not None]
    if call.recv is not None:
        call.recv.reshape(-1)[...] = np.concatenate(sends)
        sends = np.split(call.recv.reshape(-1), len(calls))
    return [Block(send, each.shape) for send, each in zip(sends, calls, strict=True)]


def _all_gather(calls: list[Call]) -> list[Any]:
    blocks = [_gathered(calls, call._replace(recv=None)) for call in calls]
    for call, own in zip(calls, blocks, strict=True):
        if call.recv is not None:
            call.recv.reshape(-1)[...] = np.concatenate([each.data for each in own])
    return blocks


def _gather(calls: list[Call]) -> list[Any]:
    root = calls[0].root
    results: list[Any] = _nothing(calls)
    results[root] = _gathered(calls, calls[root])
    return results


def _scatter(calls: list[Call]) -> list[Any]:
    send = calls[calls[0].root].send
    assert send is not None
    for part, call in zip(np.split(send.reshape(-1).copy(), len(calls)), calls, strict=True):
        assert call.recv is not None
        call.recv.reshape(-1)[...] = part
    return _nothing(calls)


def _alltoall(calls: list[Call]) -> list[Any]:
    size = len(calls)
    sent: list[list[NumpyArray]] = []
    for call in calls:
        assert call.send is not None
        counts = call.counts[0] if call.counts else [call.send.size // size] * size
        sent.append(np.split(call.send.reshape(-1).copy(), np.cumsum(counts)[:-1]))
    for rank, call in enumerate(calls):
        assert call.recv is not None
        counts = call.counts[1] if call.counts else [call.recv.size // size] * size
        for source, count in enumerate(counts):
            if sent[source][rank].size != count:
                raise MismatchError(
                    f"rank {rank} of the group expects {count} elements from rank {source}, "
                    f"which sends {sent[source][rank].size}; the split sizes of sender and "
                    "receiver must agree"
                )
    for rank, call in enumerate(calls):
        assert call.recv is not None
        call.recv.reshape(-1)[...] = np.concatenate([parts[rank] for parts in sent])
    return _nothing(calls)


def _broadcast_object(calls: list[Call]) -> list[Any]:
    parcel = calls[calls[0].root].parcels[0]
    return [[parcel.copy()] for _ in calls]


def _all_gather_object(calls: list[Call]) -> list[Any]:
    return [[each.parcels[0].copy() for each in calls] for _ in calls]


def _gather_object(calls: list[Call]) -> list[Any]:
    root = calls[0].root
    return [
        [each.parcels[0].copy() for each in calls] if rank == root else None
        for rank in range(len(calls))
    ]


def _scatter_object(calls: list[Call]) -> list[Any]:
    return [[parcel.copy()] for parcel in calls[calls[0].root].parcels]


def _all_to_all_object(calls: list[Call]) -> list[Any]:
    return [[each.parcels[rank].copy() for each in calls] for rank in range(len(calls))]


VERBS: dict[Kind, Callable[[list[Call]], list[Any]]] = {
    Kind.BARRIER: _nothing,
    Kind.ALL_REDUCE: _all_reduce,
    Kind.REDUCE: _reduce,
    Kind.REDUCE_SCATTER: _reduce_scatter,
    Kind.SCAN: _scan,
    Kind.EXSCAN: _exscan,
    Kind.BROADCAST: _broadcast,
    Kind.ALL_GATHER: _all_gather,
    Kind.GATHER: _gather,
    Kind.SCATTER: _scatter,
    Kind.ALLTOALL: _alltoall,
    Kind.BROADCAST_OBJECT_LIST: _broadcast_object,
    Kind.ALL_GATHER_OBJECT: _all_gather_object,
    Kind.GATHER_OBJECT: _gather_object,
    Kind.SCATTER_OBJECT_LIST: _scatter_object,
    Kind.ALL_TO_ALL_OBJECT: _all_to_all_object,
}
