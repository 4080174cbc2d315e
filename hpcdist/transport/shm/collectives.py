"""Collectives in shared memory: one row of `SHARED` per operation.

`Shared.offered` is what a rank contributes (None: nothing), `total` how many bytes the largest
contribution has, equal on all ranks; `take` gets the places of all contributions (of this rank's
`part` in them) and leaves the result where the call wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.call import (
    AnyArrays,
    Block,
    Distribution,
    Gathering,
    Reduction,
    even_blocks,
    is_even,
)
from hpcdist.transport.call.kinds import ARRAYS, LOOSE, Kind, table_for
from hpcdist.transport.call.runs import contribution
from hpcdist.transport.shm.attached import Attached, reduce_attached
from hpcdist.transport.shm.kernel import address_of, code_of, combine, compiled, divisor_of
from hpcdist.transport.shm.node import Place, SharedNode, slice_bytes

Places = Sequence[Any]
"""Of `Place`, and of `Attached` where data are moved; None from a rank that contributes nothing."""
Range = tuple[int, int]


class Ranks(Protocol):
    """Whose contributions are taken: the ranks of a node, or of a group that sends them."""

    @property
    def rank(self) -> int:
        """The number of the rank that takes."""

    @property
    def size(self) -> int:
        """How many ranks it has."""

    @property
    def can_pipeline(self) -> bool:
        """Whether there is the compiled kernel, for so many ranks."""


class Move(NamedTuple):
    """Copy `nbytes` from `first` on of what `source` contributes (negative: each rank) to `out`."""

    out: NumpyArray | None
    source: int
    first: int
    nbytes: int


class Shared(NamedTuple):
    """A row of the table; see the module. Its functions take calls of their family."""

    offered: Callable[[Any, int], Any]
    total: Callable[[Any, int], int]
    take: Callable[[Ranks, Any, Places], Any]
    take_direct: Callable[[SharedNode, Any, Places], Any] | None = None
    """Instead of `take` where all contributions are the callers' own arrays."""
    filled: bool = False
    """Whether others may fill the array of a rank that contributes nothing."""
    part: Callable[[Any, int, int], int] | None = None
    """Where in a contribution that has a part for each rank that of this one begins, in bytes."""
    in_place: bool = False
    """Whether `take` writes to what other ranks may still read, unless they read copies."""
    take_attached: Callable[[SharedNode, Any, Sequence[Attached]], Any] | None = None
    """Instead of `take` where all contributions are ordinary arrays, and are reduced."""
    move: Callable[[Any, int, int], Move] | None = None
    """What is copied, where contributions are small and nothing is computed."""


# ---- reductions


def reduce_places(
    node: Ranks,
    call: Reduction,
    places: Places,
    outs: Sequence[Any],
    first: int,
    count: int,
    ranks: int,
) -> None:
    """Combine `count` elements from `first` on of all places into `outs` (places or arrays)."""
    unit: np.dtype = call.recv.dtype
    start, nbytes = first * unit.itemsize, count * unit.itemsize
    sources = [each._replace(offset=each.offset + start) for each in places if each is not None]
    code = code_of(call) if node.can_pipeline else None
    if code is not None:
        to: Any = tuple(each.address for each in outs) if isinstance(outs[0], Place) else outs[0]
        compiled.combine(
            code.number,
            tuple(each.address for each in sources),
            to,
            count * code.per_item,
            divisor_of(call, ranks),
        )
        return
    combine(
        call.rule,
        [each.view(nbytes, unit) for each in sources],
        [each.view(nbytes, unit) if isinstance(each, Place) else each for each in outs],
        ranks,
    )


def _all_reduce(node: Ranks, call: Reduction, places: Places) -> None:
    """Combine all contributions, or the parts of them that are this rank's, here."""
    out = call.recv.reshape(-1)
    reduce_places(node, call, places, [out], 0, out.size, node.size)


def _all_reduce_direct(node: SharedNode, call: Reduction, places: Places) -> None:
    """Combine this rank's slice into everybody's array."""
    _reduce_slice(node, call, places, [place for place in places if place is not None])


def _reduce_slice(
    node: SharedNode, call: Reduction, places: Places, targets: Sequence[Place]
) -> None:
    data = call.recv
    code = code_of(call)  # a compiled loop cuts between its numbers, so ranks do it alike
    unit = 64 // (code.per_item if code is not None else 1)
    first, count = share_of(data.size, node.size, node.rank, unit)
    if count:
        start = first * data.itemsize
        outs = [place._replace(offset=place.offset + start) for place in targets]
        reduce_places(node, call, places, outs, first, count, node.size)


def share_of(items: int, size: int, rank: int, unit: int = 64) -> tuple[int, int]:
    """Return the first element and the length of a rank's slice; whole cache lines."""
    each = -(-items // (size * unit)) * unit
    first = min(items, rank * each)
    return first, min(items, first + each) - first


def _reduce(node: Ranks, call: Reduction, places: Places) -> None:
    if node.rank == call.root:
        _all_reduce(node, call, places)


def _reduce_direct(node: SharedNode, call: Reduction, places: Places) -> None:
    """Combine this rank's slice into the root's array."""
    target = places[call.root]
    assert target is not None
    _reduce_slice(node, call, places, [target])


def _reduce_attached(node: SharedNode, call: Reduction, places: Sequence[Attached]) -> None:
    """Combine this rank's slice, or its part, wherever the result is wanted, block by block."""
    code = code_of(call)
    assert code is not None
    first, count = 0, call.recv.size * code.per_item
    if call.kind is not Kind.REDUCE_SCATTER:
        first, count = share_of(count, node.size, node.rank)
    start = first * (call.recv.itemsize // code.per_item)
    sources = [place.at(start) for place in places]
    targets = [_target(node, call, rank, place) for rank, place in enumerate(sources)]
    divisor = divisor_of(call, node.size)
    reduce_attached(code.number, node.rank, sources, targets, count, divisor, node.pipe_memory)


def _target(node: SharedNode, call: Reduction, rank: int, place: Attached) -> int:
    """Return where what a rank wants of this rank's slice goes, in its memory; 0: it wants none."""
    if call.kind is Kind.REDUCE_SCATTER:
        return address_of(call.recv) if rank == node.rank else 0
    return place.address if call.kind is Kind.ALL_REDUCE or rank == call.root else 0


def reduce_pipelined(node: SharedNode, call: Reduction) -> None:
    """Reduce ordinary arrays through the staging memory, part by part."""
    data, recv, code = contribution(call), call.recv, code_of(call)
    assert code is not None
    if call.kind is Kind.REDUCE_SCATTER:
        if np.may_share_memory(data, recv):
            data = data.copy()
        length, stride = recv.size, recv.size
    else:
        length, stride = data.size, 0
    out: Any = 0 if call.kind is Kind.REDUCE and node.rank != call.root else recv
    node.control.begin(
        code.number,
        data,
        out,
        0 if stride else out,
        node.pipe_stages,
        slice_bytes(node.size) // (data.itemsize // code.per_item),
        length * code.per_item,
        stride * code.per_item,
        divisor_of(call, node.size),
    )
    node.run_pipe(call)


def _scan(node: Ranks, call: Reduction, places: Places) -> None:
    _first_ranks(node, call, places[: node.rank + 1])


def _exscan(node: Ranks, call: Reduction, places: Places) -> None:
    if node.rank > 0:  # the first rank keeps what it has
        _first_ranks(node, call, places[: node.rank])


def _first_ranks(node: Ranks, call: Reduction, places: Places) -> None:
    out = call.recv.reshape(-1)
    reduce_places(node, call, places, [out], 0, out.size, len(places))


# ---- moving data


def _broadcast(node: Ranks, call: Distribution, places: Places) -> None:
    if node.rank != call.root:
        _fetch(call.recv, places[call.root])


def _broadcast_direct(node: SharedNode, call: Distribution, places: Places) -> None:
    """Copy this rank's slice of the root's array into everybody's: the root's core helps, too."""
    source = places[call.root]
    assert source is not None
    first, count = share_of(call.recv.nbytes, node.size, node.rank)
    if not count:
        return
    mine = call.recv.reshape(-1).view(_BYTE)[first : first + count]
    if node.rank != call.root:
        source.at(first).read(mine)
    for rank, place in enumerate(places):
        if place is not None and rank not in (call.root, node.rank):
            place.at(first).write(mine)


def _all_gather(node: Ranks, call: Gathering, places: Places) -> list[Block]:
    return _collect(node, call, places, call.send.size, call.send)


def _gather(node: Ranks, call: Gathering, places: Places) -> list[Block] | None:
    return _all_gather(node, call, places) if node.rank == call.root else None


def _scatter(node: Ranks, call: Distribution, places: Places) -> None:
    _fetch(call.recv, places[call.root])


def _alltoall(node: Ranks, call: Gathering, places: Places) -> list[Block]:
    like = call.sends[0] if call.sends else call.send
    return _collect(node, call, places, like.size if call.sends else like.size // node.size, like)


def _collect(
    node: Ranks, call: Gathering, places: Places, count: int, like: NumpyArray
) -> list[Block]:
    """Copy `count` elements of every contribution to where `call` wants them."""
    given = [place for place in places if place is not None]
    if call.receives:
        for run, place in zip(call.receives, given, strict=True):
            _fetch(run, place)
        return []
    out = np.empty(node.size * count, like.dtype) if call.recv is None else call.recv
    nbytes = count * like.itemsize
    if node.can_pipeline and not any(type(place) is Attached for place in given):
        compiled.gather(out, tuple(place.address for place in given), nbytes)
    else:
        flat = out.reshape(-1).view(_BYTE)
        for rank, place in enumerate(given):
            place.read(flat[rank * nbytes : (rank + 1) * nbytes])
    return even_blocks(out, call, node.size)


def _fetch(out: NumpyArray, place: Place | None) -> None:
    """Copy a contribution into `out`, which may be its place."""
    assert place is not None
    place.read(out)


_BYTE = np.dtype(np.uint8)


# ---- moving a few bytes

_EACH = -1


def _move_from_root(call: Distribution, rank: int, size: int) -> Move:
    return Move(None if rank == call.root else call.recv, call.root, 0, call.recv.nbytes)


def _move_all(call: Gathering, rank: int, size: int) -> Move:
    send, out = call.send, call.recv
    out = np.empty(size * send.size, send.dtype) if out is None else out
    return Move(out, _EACH, 0, send.nbytes)


def _move_to_root(call: Gathering, rank: int, size: int) -> Move:
    return _move_all(call, rank, size) if rank == call.root else Move(None, _EACH, 0, 0)


def _move_part(call: Distribution, rank: int, size: int) -> Move:
    nbytes = call.recv.nbytes
    return Move(call.recv, call.root, rank * nbytes, nbytes)


def _move_parts(call: Gathering, rank: int, size: int) -> Move:
    send = call.send
    nbytes, out = send.nbytes // size, call.recv
    out = np.empty(send.size, send.dtype) if out is None else out
    return Move(out, _EACH, rank * nbytes, nbytes)


# ---- the table


def _in_place(call: Reduction, rank: int) -> Any:
    return call.recv


def _sent(call: AnyArrays, rank: int) -> Any:
    return call.sends or call.send


def _by_root(call: Distribution, rank: int) -> Any:
    return call.recv if rank == call.root else None


def _received(call: Reduction | Distribution, size: int) -> int:
    return call.recv.nbytes


def _offered_bytes(call: AnyArrays, size: int) -> int:
    return call.nbytes


def _per_rank(call: Distribution, size: int) -> int:
    """Return the bytes of the root; where it has others for each, they do not fit anyway."""
    return max(call.recv.nbytes * size, call.nbytes)


def own_block(call: Reduction | Distribution, rank: int, size: int) -> int:
    """Return where this rank's part begins, which it receives; those of other ranks may differ."""
    before = rank * call.recv.size if call.counts is None else sum(call.counts[0][:rank])
    return before * call.recv.itemsize


def _own_share(call: Gathering, rank: int, size: int) -> int:
    """Return the same where a rank sends as much as it receives."""
    return rank * (call.nbytes // size)


_ROWS: dict[Kind, Shared] = {
    Kind.ALL_REDUCE: Shared(
        _in_place,
        _received,
        _all_reduce,
        _all_reduce_direct,
        in_place=True,
        take_attached=_reduce_attached,
    ),
    Kind.REDUCE: Shared(
        _in_place,
        _received,
        _reduce,
        _reduce_direct,
        in_place=True,
        take_attached=_reduce_attached,
    ),
    Kind.REDUCE_SCATTER: Shared(
        _sent, _offered_bytes, _all_reduce, part=own_block, take_attached=_reduce_attached
    ),
    Kind.SCAN: Shared(_in_place, _received, _scan, in_place=True),
    Kind.EXSCAN: Shared(_in_place, _received, _exscan, in_place=True),
    Kind.BROADCAST: Shared(
        _by_root, _received, _broadcast, _broadcast_direct, filled=True, move=_move_from_root
    ),
    Kind.ALL_GATHER: Shared(_sent, _offered_bytes, _all_gather, move=_move_all),
    Kind.GATHER: Shared(_sent, _offered_bytes, _gather, move=_move_to_root),
    Kind.SCATTER: Shared(_sent, _per_rank, _scatter, part=own_block, move=_move_part),
    Kind.ALLTOALL: Shared(_sent, _offered_bytes, _alltoall, part=_own_share, move=_move_parts),
}
SHARED = table_for("SHARED", ARRAYS, _ROWS)


def take_copies(node: Ranks, call: AnyArrays, places: Places) -> Any:
    """Leave what `call` wants where it wants it; `places` hold copies of all contributions."""
    row = SHARED[call.kind]
    begin = row.part(call, node.rank, node.size) if row.part else 0
    return row.take(node, call, tuple(place.at(begin) for place in places) if begin else places)


def fits(call: AnyArrays, detail: Range) -> bool:
    """Return, after the agreement, whether the ranks' contributions are as large as each other."""
    return call.kind not in LOOSE or is_even(detail)
