"""What an exchange copies and combines: boxes of arrays, where they lie or packed.

`fill` writes what a rank takes, however the pieces came to it. What a piece is combined with has
the same target, so pieces of one target are a chain: their sum is accumulated in the dtype of the
call's rule, in the order of the reads, and rounded once, as that of an all_reduce.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hpcdist.arrays.device import align_streams
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.boxes import Box, Slices, bounds, extents, meet, volume_of
from hpcdist.transport.call.call import (
    UNEVEN,
    Exchange,
    Gathering,
    Give,
    Read,
    Shape,
)
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import ReduceOp
from hpcdist.transport.shm.kernel import (
    BLOCK_ITEMS,
    MOST,
    accumulate,
    address_of,
    code_of,
    compiled,
    write_out,
)


def view_of(array: Any, box: Slices) -> Any:
    """Return a box of an array as a view; that of an array without an axis is the array."""
    index: Any = *box, ...
    return array[index]


# ---- what is taken


def fill(call: Exchange, pieces: Sequence[NumpyArray]) -> None:
    """Write `pieces`, one for each read of `call`, to where they belong."""
    if call.rule is None:
        for read, piece in zip(call.reads, pieces, strict=True):
            copy(view_of(call.recv, read.target), piece)
        return
    for chain in chains_of(call.reads):
        first = call.reads[chain[0]]
        target = view_of(call.recv, first.target)
        sources = [pieces[number] for number in chain]
        if first.combine:
            sources.insert(0, target)
        if len(sources) == 1:
            copy(target, sources[0])
        else:
            _combine(call, sources, target)


def copy(target: Any, source: Any) -> None:
    """Copy a box to another one, in host memory or in that of a device."""
    if type(target) is np.ndarray:
        copy_box(target, source)
    else:
        target[...] = source


def copy_box(to: NumpyArray, data: NumpyArray) -> None:
    """Copy a box; past the caches if it is large, as far as it is made of long runs of bytes."""
    if to.nbytes < _STREAMED_FROM or _stream_box is None:
        np.copyto(to, data)
        return
    run, axis = to.itemsize, to.ndim
    while axis and _follow(to, axis - 1, run) and _follow(data, axis - 1, run):
        axis -= 1
        run *= to.shape[axis]
    if run < _LONG_RUN:
        np.copyto(to, data)
        return
    ends = to.ctypes.data, data.ctypes.data
    _stream_box(*ends, run, to.shape[:axis], to.strides[:axis], data.strides[:axis])


def _follow(box: NumpyArray, axis: int, nbytes: int) -> bool:
    """Return whether what is `nbytes` long follows each other along `axis`, without gaps."""
    return box.shape[axis] == 1 or box.strides[axis] == nbytes


_STREAMED_FROM = 1 << 20
_LONG_RUN = 256
_stream_box = getattr(compiled, "copy_box", None)


def chains_of(reads: Sequence[Read]) -> list[list[int]]:
    """Return the numbers of the reads that belong together, as they are combined in one target.

    The chains may be done one after the other. Where targets partly overlap, a later read begins a
    chain of its own, which combines with what is there.
    """
    chains: list[list[int]] = []
    under_way: dict[Box, list[int]] = {}
    for number, read in enumerate(reads):
        box = bounds(read.target)
        chain = under_way.get(box)
        if chain is not None and read.combine:
            chain.append(number)
            continue
        for other in [other for other in under_way if other == box or meet(other, box) is not None]:
            del under_way[other]
        under_way[box] = [number]
        chains.append(under_way[box])
    return chains


def _combine(call: Exchange, sources: Sequence[Any], target: Any) -> None:
    """Combine boxes of one shape, in their order, into `target`, which may be one of them."""
    if target.ndim == 0:  # NumPy makes numbers of the results of arrays without an axis
        sources, target = [each.reshape(1) for each in sources], target.reshape(1)
    if type(target) is not np.ndarray:
        _combine_part(call, sources, target)
        return
    if all(each.flags.c_contiguous for each in (*sources, target)) and len(sources) <= MOST:
        code = code_of(call)
        if code is not None:
            addresses = tuple(map(address_of, sources))
            divisor = float(len(sources)) if call.op is ReduceOp.AVG else 1.0
            compiled.combine(code.number, addresses, target, target.size * code.per_item, divisor)
            return
    for part in slabs(target.shape, BLOCK_ITEMS):
        _combine_part(call, [each[part] for each in sources], target[part])


def _combine_part(call: Exchange, sources: Sequence[Any], out: Any) -> None:
    rule = call.rule
    assert rule is not None
    total = accumulate(rule, sources)
    if rule.decode is None or out.flags.c_contiguous:
        write_out(rule, total, out, len(sources))
        return
    result = np.empty_like(out, shape=out.shape)
    write_out(rule, total, result, len(sources))
    out[...] = result


def slabs(shape: Shape, most: int) -> Iterator[tuple[int | slice, ...]]:
    """Cut an array of at least one axis into parts of at most `most` elements, in their order."""
    axis = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= most)
    rows = max(1, most // max(1, math.prod(shape[axis + 1 :])))
    for index in np.ndindex(shape[:axis]):
        for start in range(0, shape[axis], rows):
            yield (*index, slice(start, start + rows))


# ---- what travels packed


def packed(call: Exchange, gives: Sequence[Give]) -> NumpyArray:
    """Return a flat copy of what is given: that for the first rank, for the second, and so on."""
    send, per_element = call.send, elements_of(call)
    ordered = sorted(gives, key=lambda give: give.rank)
    out = np.empty_like(send, shape=(sum(volume_of(give.source) for give in gives) * per_element,))
    at = 0
    for give in ordered:
        part = view_of(send, give.source)
        copy(out[at : at + part.size].reshape(part.shape), part)
        at += part.size
    return out


def unpacked(call: Exchange, reads: Sequence[Read], flat: NumpyArray) -> list[NumpyArray]:
    """Return the pieces that `reads` have taken, in their order, from what came `packed`."""
    trail = call.send.shape[len(call.shape) :]
    pieces: dict[int, NumpyArray] = {}
    at = 0
    for number in sorted(range(len(reads)), key=lambda number: reads[number].rank):
        shape = (*extents(reads[number].source), *trail)
        count = math.prod(shape)
        pieces[number] = flat[at : at + count].reshape(shape)
        at += count
    return [pieces[number] for number in range(len(reads))]


def counts_per_rank(call: Exchange, boxes: Sequence[Read | Give], size: int) -> list[int]:
    """Return how many elements of memory are read from, or given to, each of `size` ranks."""
    counts, per_element = [0] * size, elements_of(call)
    for each in boxes:
        counts[each.rank] += volume_of(each.source) * per_element
    return counts


def elements_of(call: Exchange) -> int:
    """Return how many elements of its memory an element of an array is."""
    return math.prod(call.send.shape[len(call.shape) :])


def as_alltoall(call: Exchange, size: int) -> Gathering:
    """Return the alltoall of `size` ranks that does the same: packed here, filled at its end.

    It is for transports that take no exchanges, and for what is in the memory of a device.
    """
    align_streams(call.send)
    send = packed(call, call.gives)
    sent, received = (counts_per_rank(call, each, size) for each in (call.gives, call.reads))
    recv = np.empty_like(call.recv, shape=(sum(received),))

    def finish(_: Any) -> None:
        fill(call, unpacked(call, call.reads, recv))
        if call.finish is not None:
            call.finish(None)

    return Gathering(
        Kind.ALLTOALL,
        send=send,
        recv=recv,
        dtype=call.dtype,
        shape=call.shape,
        root=call.key,
        detail=UNEVEN,
        counts=(sent, received),
        finish=finish,
        shapes=[(count,) for count in sent],
        words=call.words,
    )
