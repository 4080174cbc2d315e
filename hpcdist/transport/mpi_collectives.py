"""Array collectives over MPI: one function per operation, one row of `VERBS` each.

Every function gets the host transport, the call, and the range of `Call.detail` over the
ranks, on which all ranks have agreed before. Reductions follow the call's `Recipe`, in pieces:
MPI maps its scratch memory anew at every large call, so a few MiB at a time are faster.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.errors import MismatchError
from hpcdist.transport.call import UNEVEN, Block, Call, Kind, even_blocks, label
from hpcdist.transport.mpi_agreement import mismatch
from hpcdist.transport.mpi_types import INT_MAX, OPS, block, numbers
from hpcdist.transport.recipes import UFUNCS, Recipe

if TYPE_CHECKING:
    from hpcdist.transport.mpi_host import MpiHost

Range = tuple[int, int]


def barrier(host: MpiHost, call: Call, _: Range) -> None:
    """Nothing to do: agreeing on the call was the barrier."""


# ---- reductions


def all_reduce(host: MpiHost, call: Call, _: Range) -> None:
    if host.size == 1:
        return
    data, recipe = call.recv, call.recipe
    assert data is not None
    assert recipe is not None
    combine, _wire, encode, decode = recipe
    if encode is None and data.nbytes <= host.piece_bytes:
        host.comm.Allreduce(MPI.IN_PLACE, numbers(data), OPS[combine])
        if decode is not None:
            decode(data, data, host.size)
        return
    for part in pieces(data, host.piece_bytes):
        wire = part if encode is None else encode(part)
        host.comm.Allreduce(MPI.IN_PLACE, numbers(wire), OPS[combine])
        if decode is not None:
            decode(wire, part, host.size)


def reduce(host: MpiHost, call: Call, _: Range) -> None:
    at_root = host.rank == call.root
    data = call.recv if at_root else call.send
    assert data is not None
    for part in pieces(data, host.piece_bytes):
        _reduce_part(host, call, part, call.root, part if at_root else None)


def _reduce_part(
    host: MpiHost, call: Call, part: NumpyArray, root: int, out: NumpyArray | None
) -> None:
    """Reduce `part` of every rank to `root`, which gives `out` for the result."""
    recipe = call.recipe
    assert recipe is not None
    wire = part if recipe.encode is None else recipe.encode(part)
    op = OPS[recipe.combine]
    if out is None:
        host.comm.Reduce(numbers(wire), None, op, root)
        return
    if wire is out or recipe.encode is not None:
        host.comm.Reduce(MPI.IN_PLACE, numbers(wire), op, root)
    else:
        host.comm.Reduce(numbers(wire), numbers(out), op, root)
        wire = out
    if recipe.decode is not None:
        recipe.decode(wire, out, host.size)


def reduce_scatter(host: MpiHost, call: Call, _: Range) -> None:
    recipe, send, recv = call.recipe, call.send, call.recv
    assert recipe is not None
    assert send is not None
    assert recv is not None
    flat, out = send.reshape(-1), recv.reshape(-1)
    if np.may_share_memory(flat, out):
        flat = flat.copy()
    if out.size * recipe.wire.itemsize <= _PAIRS_FROM_BYTES or not host.one_node:
        wire = flat if recipe.encode is None else recipe.encode(flat)
        wire_out = out if recipe.encode is None else np.empty_like(out, recipe.wire)
        count = out.size
        own, result = numbers(wire), numbers(wire_out)
        own[1] = result[1] = count
        host.comm.Reduce_scatter_block(own, result, OPS[recipe.combine])
        if recipe.decode is not None:
            recipe.decode(wire_out, out, host.size)
        return
    _reduce_scatter_in_pairs(host, recipe, flat, out)


def _reduce_scatter_in_pairs(
    host: MpiHost, recipe: Recipe, send: NumpyArray, out: NumpyArray
) -> None:
    """Exchange blocks rank by rank and combine them here, piece by piece.

    The pairwise-exchange algorithm (Thakur, Rabenseifner, Gropp 2005, section 4.3); NumPy's
    loops and pieces that stay in the cache make it several times faster than MPI's own.
    """
    size, ufunc, encode = host.size, UFUNCS[recipe.combine], recipe.encode
    blocks = send.reshape(size, out.size)
    step_items = max(1, _PAIR_BYTES // recipe.wire.itemsize)
    for start in range(0, out.size, step_items):
        part = slice(start, start + step_items)
        mine = blocks[host.rank, part]
        total = mine.copy() if encode is None else encode(mine)
        received = np.empty_like(total)
        for step in range(1, size):
            to, source = (host.rank + step) % size, (host.rank - step) % size
            given = blocks[to, part]
            wire = given if encode is None else encode(given)
            host.comm.Sendrecv(numbers(wire), to, _PART, numbers(received), source, _PART)
            ufunc(total, received, out=total)
        if recipe.decode is not None:
            recipe.decode(total, out[part], size)
        else:
            out[part] = total


def scan(host: MpiHost, call: Call, _: Range) -> None:
    _scan(host, call, host.comm.Scan, host.rank + 1)


def exscan(host: MpiHost, call: Call, _: Range) -> None:
    _scan(host, call, host.comm.Exscan, host.rank)


def _scan(host: MpiHost, call: Call, verb: Callable[..., None], ranks: int) -> None:
    recipe, data = call.recipe, call.recv
    assert recipe is not None
    assert data is not None
    for part in pieces(data, host.piece_bytes):
        wire = part.copy() if recipe.encode is None else recipe.encode(part)
        verb(MPI.IN_PLACE, numbers(wire), OPS[recipe.combine])
        if ranks == 0:
            continue  # the first rank of an exscan keeps what it has
        if recipe.decode is not None:
            recipe.decode(wire, part, ranks)
        else:
            part[...] = wire


def pieces(data: NumpyArray, nbytes: int) -> Iterator[NumpyArray]:
    """Cut `data` into flat runs of at most `nbytes` bytes; one empty run if it is empty."""
    flat = data.reshape(-1)
    step = max(1, nbytes // max(1, flat.itemsize))
    for start in range(0, max(1, flat.size), step):
        yield flat[start : start + step]


# ---- moving data


def broadcast(host: MpiHost, call: Call, _: Range) -> None:
    assert call.recv is not None
    host.comm.Bcast(block(call.recv, call.recv.nbytes), call.root)


def all_gather(host: MpiHost, call: Call, detail: Range) -> list[Block]:
    send = call.send
    assert send is not None
    if detail[0] != detail[1]:
        return _all_gather_uneven(host, call, send)
    recv = call.recv
    if recv is None:
        recv = np.empty_like(send, shape=(host.size * send.size,))
    into = block(recv, send.nbytes)
    if not np.may_share_memory(send, recv):
        host.comm.Allgather(block(send, send.nbytes), into)
    else:
        own = recv.reshape(-1)[host.rank * send.size : (host.rank + 1) * send.size]
        if type(own) is not np.ndarray or own.ctypes.data != send.ctypes.data:
            own[...] = send.reshape(-1)
        host.comm.Allgather(MPI.IN_PLACE, into)
    return even_blocks(recv, call, host.size)


def _all_gather_uneven(host: MpiHost, call: Call, send: NumpyArray) -> list[Block]:
    shapes = exchange_shapes(host, call, bound=call.recv is not None)
    blocks = room_for(call, shapes)
    counts = [each.data.nbytes for each in blocks]
    if sum(counts) <= INT_MAX:
        whole = blocks[0].data.base
        host.comm.Allgatherv(
            [send, send.nbytes, MPI.BYTE], [whole, counts, _starts(counts), MPI.BYTE]
        )
    else:
        blocks[host.rank].data[...] = send.reshape(-1)
        for root, each in enumerate(blocks):
            host.comm.Bcast(block(each.data, each.data.nbytes), root)
    return blocks


def gather(host: MpiHost, call: Call, detail: Range) -> list[Block] | None:
    send, recv, at_root = call.send, call.recv, host.rank == call.root
    assert send is not None
    if detail[0] != detail[1]:
        return _gather_uneven(host, call, send)
    if not at_root:
        host.comm.Gather(block(send, send.nbytes), None, call.root)
        return None
    if recv is None:
        recv = np.empty_like(send, shape=(host.size * send.size,))
    if np.may_share_memory(send, recv):
        send = send.copy()
    host.comm.Gather(block(send, send.nbytes), block(recv, send.nbytes), call.root)
    return even_blocks(recv, call, host.size)


def _gather_uneven(host: MpiHost, call: Call, send: NumpyArray) -> list[Block] | None:
    shapes = exchange_shapes(host, call, bound=call.recv is not None)
    if host.rank != call.root:
        host.comm.Send(block(send, send.nbytes), call.root, _PART)
        return None
    blocks = room_for(call, shapes)
    for rank, each in enumerate(blocks):
        if rank == host.rank:
            each.data[...] = send.reshape(-1)
        else:
            host.comm.Recv(block(each.data, each.data.nbytes), rank, _PART)
    return blocks


def exchange_shapes(host: MpiHost, call: Call, *, bound: bool) -> list[tuple[int, ...]]:
    """Tell all shapes to all ranks; a rank with `bound` memory cannot take different ones."""
    told = host.comm.allgather((call.shape, bound))
    if any(is_bound for _, is_bound in told):
        raise mismatch(
            f"{call.kind.name.lower()} into given arrays (an empty list takes any shapes)",
            {
                host.ranks[rank]: label(call._replace(shape=shape), host.ranks)
                for rank, (shape, _) in enumerate(told)
            },
        )
    return [shape for shape, _ in told]


def room_for(call: Call, shapes: list[tuple[int, ...]]) -> list[Block]:
    """Make new memory with one block per shape, one after the other."""
    assert call.send is not None
    assert call.dtype is not None
    per_element = call.dtype.numpy.itemsize // call.send.itemsize
    sizes = [math.prod(shape) * per_element for shape in shapes]
    recv = np.empty_like(call.send, shape=(sum(sizes),))
    ends = np.cumsum(sizes)
    return [
        Block(recv[end - size : end], shape)
        for size, end, shape in zip(sizes, ends, shapes, strict=True)
    ]


def scatter(host: MpiHost, call: Call, _: Range) -> None:
    send, recv = call.send, call.recv
    assert recv is not None
    if send is not None and np.may_share_memory(send, recv):
        send = send.copy()
    own = None if send is None else block(send, recv.nbytes)
    host.comm.Scatter(own, block(recv, recv.nbytes), call.root)


def alltoall(host: MpiHost, call: Call, detail: Range) -> None:
    send, recv = call.send, call.recv
    assert send is not None
    assert recv is not None
    if np.may_share_memory(send, recv):
        send = send.copy()
    if detail[0] == detail[1] != UNEVEN:
        nbytes = recv.nbytes // host.size
        host.comm.Alltoall(block(send, nbytes), block(recv, nbytes))
        return
    _alltoall_uneven(host, call, send.reshape(-1), recv.reshape(-1))


def _alltoall_uneven(host: MpiHost, call: Call, send: NumpyArray, recv: NumpyArray) -> None:
    even = [send.size // host.size] * host.size, [recv.size // host.size] * host.size
    large = max(send.nbytes, recv.nbytes) > INT_MAX
    sent, received, any_large = agree_on_counts(host, call, call.counts or even, large=large)
    out = [int(count) * send.itemsize for count in sent]
    into = [int(count) * send.itemsize for count in received]
    if any_large:
        _alltoall_in_pairs(host, send, recv, out, into)
        return
    host.comm.Alltoallv([send, out, _starts(out), MPI.BYTE], [recv, into, _starts(into), MPI.BYTE])


def agree_on_counts(
    host: MpiHost, call: Call, counts: Sequence[Sequence[int]], *, large: bool
) -> tuple[NumpyArray, NumpyArray, bool]:
    """Make sure that every rank expects what the others send; say whether any of them is `large`.

    Returns the elements sent to and received from each rank. Collective.
    """
    sent, received = (np.array(each, np.int64) for each in counts)
    incoming = np.empty(host.size, np.int64)
    host.comm.Alltoall([sent, 1, MPI.INT64_T], [incoming, 1, MPI.INT64_T])
    wrong = [peer for peer in range(host.size) if incoming[peer] != received[peer]]
    _, worst = host.agree(call._replace(detail=_WRONG if wrong else int(large)))
    if worst == _WRONG:
        raise _wrong_sizes(host, incoming, received, wrong)
    return sent, received, bool(worst)


def _wrong_sizes(
    host: MpiHost, incoming: NumpyArray, received: NumpyArray, wrong: list[int]
) -> MismatchError:
    """Collect on all ranks whose split sizes do not fit together."""
    own = [
        f"  rank {host.ranks[host.rank]} expects {received[peer]} elements from rank "
        f"{host.ranks[peer]}, which sends {incoming[peer]}"
        for peer in wrong
    ]
    lines = [line for lines in host.comm.allgather(own) for line in lines]
    return MismatchError(
        "the ranks disagree in alltoall; nothing was sent:\n"
        + "\n".join(lines)
        + "\nLet the split sizes (or list entries) of sender and receiver agree"
    )


_WRONG = 2


def _alltoall_in_pairs(
    host: MpiHost, send: NumpyArray, recv: NumpyArray, out: list[int], into: list[int]
) -> None:
    from_bytes, to_bytes = send.view(np.uint8), recv.view(np.uint8)
    out_starts, into_starts = _starts(out), _starts(into)
    for step in range(host.size):
        to, source = (host.rank + step) % host.size, (host.rank - step) % host.size
        first, start = out_starts[to], into_starts[source]
        host.comm.Sendrecv(
            block(from_bytes[first : first + out[to]], out[to]),
            to,
            _PART,
            block(to_bytes[start : start + into[source]], into[source]),
            source,
            _PART,
        )


def _starts(counts: list[int]) -> list[int]:
    return [0, *itertools.accumulate(counts[:-1])]


_PART = 5
_PAIRS_FROM_BYTES = 64 << 10
_PAIR_BYTES = 1 << 20

Verb = Callable[["MpiHost", Call, Range], Any]

VERBS: dict[Kind, Verb] = {
    Kind.BARRIER: barrier,
    Kind.ALL_REDUCE: all_reduce,
    Kind.REDUCE: reduce,
    Kind.REDUCE_SCATTER: reduce_scatter,
    Kind.SCAN: scan,
    Kind.EXSCAN: exscan,
    Kind.BROADCAST: broadcast,
    Kind.ALL_GATHER: all_gather,
    Kind.GATHER: gather,
    Kind.SCATTER: scatter,
    Kind.ALLTOALL: alltoall,
}
