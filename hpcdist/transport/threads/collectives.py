"""What each collective computes, when all ranks' calls lie side by side.

One function per kind, from the calls of all ranks (in rank order) to their results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.transport.call.call import (
    Block,
    Collective,
    Distribution,
    Exchange,
    Gathering,
    Objects,
    Reduction,
    Shape,
)
from hpcdist.transport.call.kinds import COLLECTIVES, OPTIONAL, Kind, table_for
from hpcdist.transport.call.reduction import ReductionRule, local_result
from hpcdist.transport.call.runs import (
    FITTING,
    expected_counts,
    from_each,
    misfit,
    new_blocks,
    shapes_to_each,
    to_each,
    unfitting,
    with_room,
    wrong_counts,
)
from hpcdist.transport.shm.boxes import fill, view_of


def _nothing(calls: Sequence[Collective]) -> list[Any]:
    return [None] * len(calls)


def _wires(calls: list[Reduction]) -> list[NumpyArray]:
    return [_wire(call.rule, call.recv.reshape(-1)) for call in calls]


def _wire(rule: ReductionRule, flat: NumpyArray) -> NumpyArray:
    return flat.copy() if rule.encode is None else rule.encode(flat)


def _store(call: Reduction, total: NumpyArray, ranks: int) -> None:
    out = call.recv.reshape(-1)
    if call.rule.decode is None:
        out[...] = total
    else:
        call.rule.decode(total.copy(), out, ranks)


def _all_reduce(calls: list[Reduction]) -> list[Any]:
    total = local_result(calls[0].rule, _wires(calls))
    for call in calls:
        _store(call, total, len(calls))
    return _nothing(calls)


def _reduce(calls: list[Reduction]) -> list[Any]:
    total = local_result(calls[0].rule, _wires(calls))
    _store(calls[calls[0].root], total, len(calls))
    return _nothing(calls)


def _reduce_scatter(calls: list[Reduction]) -> list[Any]:
    rule = calls[0].rule
    blocks = [to_each(call, len(calls)) for call in calls]
    totals = [
        local_result(rule, [_wire(rule, each[rank]) for each in blocks])
        for rank in range(len(calls))
    ]
    for call, total in zip(calls, totals, strict=True):
        _store(call, total, len(calls))
    return _nothing(calls)


def _scan(calls: list[Reduction]) -> list[Any]:
    return _running(calls, inclusive=True)


def _exscan(calls: list[Reduction]) -> list[Any]:
    return _running(calls, inclusive=False)


def _running(calls: list[Reduction], *, inclusive: bool) -> list[Any]:
    wires = _wires(calls)
    for rank, call in enumerate(calls):
        count = rank + inclusive
        if count:
            _store(call, local_result(calls[0].rule, wires[:count]), count)
    return _nothing(calls)


def _broadcast(calls: list[Distribution]) -> list[Any]:
    source = calls[calls[0].root].recv
    for rank, call in enumerate(calls):
        if rank != call.root:
            call.recv.reshape(-1)[...] = source.reshape(-1)
    return _nothing(calls)


def _all_gather(calls: list[Gathering]) -> list[Any]:
    return _gathered(calls, range(len(calls)))


def _gather(calls: list[Gathering]) -> list[Any]:
    return _gathered(calls, [calls[0].root])


def _gathered(calls: list[Gathering], receivers: Iterable[int]) -> list[Any]:
    sends = [call.send.reshape(-1).copy() for call in calls]
    shapes = [call.shape for call in calls]
    results: list[Any] = _nothing(calls)
    for rank in receivers:
        results[rank] = _written(calls[rank], shapes, sends)
    return results


def _written(call: Gathering, shapes: list[Shape], sends: list[NumpyArray]) -> list[Block]:
    """Write what all ranks send to where `call` wants it; return the blocks that are new."""
    filled = with_room(call, [send.size for send in sends])
    for run, send in zip(from_each(filled, len(shapes)), sends, strict=True):
        run[...] = send
    return new_blocks(call, filled, shapes)


def _scatter(calls: list[Distribution]) -> list[Any]:
    parts = [part.copy() for part in to_each(calls[calls[0].root], len(calls))]
    for call, part in zip(calls, parts, strict=True):
        call.recv.reshape(-1)[...] = part
    return _nothing(calls)


def _alltoall(calls: list[Gathering]) -> list[Any]:
    size = len(calls)
    sent = [[part.copy() for part in to_each(call, size)] for call in calls]
    shapes = [shapes_to_each(call, size) for call in calls]
    return [
        _written(call, [each[rank] for each in shapes], [each[rank] for each in sent])
        for rank, call in enumerate(calls)
    ]


def _exchange(calls: list[Exchange]) -> list[Any]:
    sends = [
        call.send.copy()
        if any(np.may_share_memory(call.send, each.recv) for each in calls)
        else call.send
        for call in calls
    ]
    for call in calls:
        fill(call, [view_of(sends[read.rank], read.source) for read in call.reads])
    return _nothing(calls)


# ---- what does not fit


def check_fit(calls: Any, ranks: Sequence[int]) -> None:
    """Raise `MismatchError` if a rank (named as in `ranks`) has no room for what it gets."""
    kind = calls[0].kind
    lines: list[str] = []
    if kind is Kind.ALLTOALL:
        sent = [[part.size for part in to_each(call, len(calls))] for call in calls]
        for rank, call in enumerate(calls):
            incoming = [counts[rank] for counts in sent]
            lines += wrong_counts(ranks, rank, expected_counts(call, len(calls)), incoming)
    elif kind in FITTING:
        shapes = [call.shape for call in calls]
        for rank, call in enumerate(calls):
            lines += unfitting(call, ranks, rank, shapes)
    if lines:
        raise misfit(kind, lines)


def _broadcast_object(calls: list[Objects]) -> list[Any]:
    pickled = calls[calls[0].root].pickles[0]
    return [[pickled.copy()] for _ in calls]


def _all_gather_object(calls: list[Objects]) -> list[Any]:
    return [[each.pickles[0].copy() for each in calls] for _ in calls]


def _gather_object(calls: list[Objects]) -> list[Any]:
    root = calls[0].root
    return [
        [each.pickles[0].copy() for each in calls] if rank == root else None
        for rank in range(len(calls))
    ]


def _scatter_object(calls: list[Objects]) -> list[Any]:
    return [[pickled.copy()] for pickled in calls[calls[0].root].pickles]


def _all_to_all_object(calls: list[Objects]) -> list[Any]:
    return [[each.pickles[rank].copy() for each in calls] for rank in range(len(calls))]


_ROWS: dict[Kind, Callable[[Any], list[Any]]] = {
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
    Kind.EXCHANGE: _exchange,
    Kind.BROADCAST_OBJECT_LIST: _broadcast_object,
    Kind.ALL_GATHER_OBJECT: _all_gather_object,
    Kind.GATHER_OBJECT: _gather_object,
    Kind.SCATTER_OBJECT_LIST: _scatter_object,
    Kind.ALL_TO_ALL_OBJECT: _all_to_all_object,
}
VERBS = table_for("VERBS", COLLECTIVES | OPTIONAL, _ROWS)
