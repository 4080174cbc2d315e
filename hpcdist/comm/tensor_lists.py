"""Lists of arrays as arguments: checked, and turned into one run of memory per rank.

Arrays that lie one after the other are one run for all. Small ones are copied to lie so, and on
a device all; large ones in host memory stay where they are, each a run (`Given`, `Room`).

A wrong list is a `UsageError` on this rank; `cannot` makes of it the call that raises it on
every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from hpcdist.arrays.buffer import Buffer, as_buffer, as_output, wrap_like
from hpcdist.arrays.device import device_runtime_of
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.arrays.packing import (
    adjacent_view,
    join,
    overlap,
    overlap_each_other,
    same_memory,
    scatter_into,
)
from hpcdist.comm.members import Members
from hpcdist.errors import UsageError
from hpcdist.text import an, counted
from hpcdist.transport.call.call import Block, Distribution, Gathering, Reduction, Refusal, Shape
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.runs import APART_FROM, joined


def is_list(value: Any) -> bool:
    """Return whether `value` is a list of arrays rather than one array."""
    return isinstance(value, (list, tuple))


def as_buffers(group: Members, arrays: Any, what: str) -> list[Buffer]:
    """View one array per rank for reading."""
    _check_length(group, arrays, what)
    return [as_buffer(array, f"{what}[{rank}]") for rank, array in enumerate(arrays)]


def as_outputs(group: Members, arrays: Any, what: str) -> list[Buffer]:
    """View one array per rank for writing."""
    _check_length(group, arrays, what)
    return [as_output(array, f"{what}[{rank}]") for rank, array in enumerate(arrays)]


def _check_length(group: Members, arrays: Any, what: str) -> None:
    if not is_list(arrays) or len(arrays) != group.nranks:
        got = (
            counted(len(arrays), "entry", "entries")
            if is_list(arrays)
            else an(type(arrays).__name__)
        )
        raise UsageError(
            f"{what} must be a list of {group.nranks} arrays, one per rank of the group, got {got}"
        )


def one_dtype(buffers: Sequence[Buffer], what: str) -> Any:
    """Return the dtype that all `buffers` have."""
    names = {buffer.dtype.name for buffer in buffers}
    if len(names) > 1:
        raise UsageError(f"{what} mixes dtypes {sorted(names)}; give all arrays one dtype")
    for buffer in buffers[1:]:
        _check_place(buffer, buffers[0], what)
    return buffers[0].dtype


Given = tuple[NumpyArray | None, Sequence[NumpyArray], Sequence[Shape]]
"""What a rank sends to each: as one array, or as runs; and the shapes, where they differ."""

Room = tuple[NumpyArray | None, Sequence[NumpyArray], Sequence[Shape], Callable[[Any], None] | None]
"""Where a rank receives from each: an array or runs, else new memory; shapes; the `finish`."""


def blocks_to_send(group: Members, given: Any, out: Buffer, what: str) -> Given:
    """Return one block per rank, this rank's like `out`; `given` is a list or an array."""
    if given is None or (is_list(given) and not given):
        raise UsageError(f"The {what} should not be empty on the rank that sends it, got {given!r}")
    if not is_list(given):
        whole = as_buffer(given, what)
        _check_whole(group, whole, out, what)
        return whole.data, (), ()
    buffers = as_buffers(group, given, what)
    shapes = _check_entries(buffers, group.rank, out, what)
    return *memory_of(buffers), shapes


def _check_entries(buffers: Sequence[Buffer], own: int, like: Buffer, what: str) -> Sequence[Shape]:
    """Return the shapes of a list's arrays if they are not all that of `like`, else nothing.

    All must have its dtype, and the one that stands for this rank its shape, too.
    """
    even = True
    for rank, buffer in enumerate(buffers):
        _check_place(buffer, like, what)
        alike = buffer.shape == like.shape
        if buffer.dtype != like.dtype or (rank == own and not alike):
            raise UsageError(
                f"{what}[{rank}] is {buffer.dtype.name} of shape {buffer.shape}, but tensor is "
                f"{like.dtype.name} of shape {like.shape}; all must have one dtype, and this "
                f"rank's own entry, {what}[{own}], the shape of tensor"
            )
        even = even and alike
    return () if even else tuple(buffer.shape for buffer in buffers)


def memory_of(buffers: Sequence[Buffer]) -> tuple[NumpyArray | None, Sequence[NumpyArray]]:
    """Return what `buffers` hold as one array, or each as a run, where that would be a copy."""
    if not _are_large(buffers):
        return join(buffers), ()
    whole = adjacent_view(buffers)
    return (None, _runs(buffers)) if whole is None else (whole, ())


def room_in(buffers: Sequence[Buffer], shapes: Sequence[Shape] = ()) -> Room:
    """Return how `buffers` are written."""
    whole = adjacent_view(buffers)
    if whole is None and _are_large(buffers):
        runs = _runs(buffers)
        if not overlap_each_other(runs):
            packed = [buffer for buffer in buffers if buffer.home is not None]
            return None, runs, shapes, unpack_all(packed) if packed else None
    recv = empty_for(buffers) if whole is None else whole
    return recv, (), shapes, lambda _: scatter_into(recv, buffers)


def _runs(buffers: Sequence[Buffer]) -> list[NumpyArray]:
    return [buffer.data.reshape(-1) for buffer in buffers]


def _are_large(buffers: Sequence[Buffer]) -> bool:
    """Return whether arrays are large enough, and in host memory, to stay where they are."""
    return type(buffers[0].data) is np.ndarray and (
        max(buffer.data.nbytes for buffer in buffers) >= APART_FROM
    )


_C = TypeVar("_C", Reduction, Distribution, Gathering)


def disentangled(call: _C, rank: int) -> _C:
    """Return `call` such that nothing it receives is written to what it sends.

    But the own part of a gather may be where the gather puts it.
    """
    if not call.sends and not call.receives:
        return call
    received = list(call.receives) or ([] if call.recv is None else [call.recv])
    sent = call.sends or ([] if call.send is None else [call.send])
    if call.receives and call.send is not None and same_memory(call.send, received[rank]):
        del received[rank]
    if not sent or not overlap(sent, received):
        return call
    if call.sends:
        return joined(call)
    return call._replace(send=sent[0].copy())


def _check_place(buffer: Buffer, like: Buffer, what: str) -> None:
    """Refuse host memory beside that of a device, and that of two devices."""
    if type(buffer.data) is np.ndarray is type(like.data):
        return
    mine, other = device_runtime_of(buffer.data), device_runtime_of(like.data)
    if mine is not other:
        places = " and ".join("the host" if each is None else each.name for each in (mine, other))
        raise UsageError(f"{what}: arrays in the memory of {places}; move them to one place")


def _check_whole(group: Members, whole: Buffer, part: Buffer, what: str) -> None:
    _check_place(whole, part, what)
    if whole.dtype != part.dtype or whole.data.size != group.nranks * part.data.size:
        raise UsageError(
            f"{what} is {whole.dtype.name} of shape {whole.shape}, but must be {part.dtype.name} "
            f"with {group.nranks} times the elements of tensor (shape {part.shape})"
        )


def gathered_into(group: Members, target: Any, own: Buffer, like: Any, what: str) -> Room:
    """Return where gathered blocks go: one array, a list of n arrays, or an empty list to fill."""
    if target is None:
        raise UsageError(
            f"{what} is None on the rank that receives; pass an empty list (it is filled) or "
            f"{group.nranks} arrays"
        )
    if not is_list(target):
        whole = as_output(target, what)
        _check_whole(group, whole, own, what)
        return whole.data, (), (), whole.finish
    if not target:
        check_fillable(target, what)
        return None, (), (), fill(target, own, like)
    buffers = as_outputs(group, target, what)
    return room_in(buffers, _check_entries(buffers, group.rank, own, what))


def check_fillable(target: Any, what: str) -> None:
    """Refuse an empty tuple where an empty list would be filled."""
    if not isinstance(target, list):
        raise UsageError(f"{what} is an empty tuple, which cannot be filled; pass an empty list")


def empty_for(buffers: Sequence[Buffer]) -> NumpyArray:
    """Return new memory for the contents of all `buffers`."""
    count = sum(buffer.data.size for buffer in buffers)
    return np.empty_like(buffers[0].data, shape=(count,))


def fill(target: list[Any], own: Buffer, like: Any) -> Callable[[Any], None]:
    """Return the `finish` that appends the blocks to `target`, in the library of `like`."""

    def finish(blocks: list[Block]) -> None:
        for block in blocks:
            target.append(wrap_like(like, block.data, own.dtype, block.shape))

    return finish


def unpack_all(buffers: Sequence[Buffer]) -> Callable[[Any], None]:
    """Return the `finish` of a call that writes into `buffers`, all of them packed."""

    def finish(_: Any) -> None:
        for buffer in buffers:
            buffer.unpack()

    return finish


def keep(_: Any) -> None:
    """No-op `finish` of a call that reads a packed array, which a plan packs anew."""


def cannot(kind: Kind, group: Members, error: UsageError, root: int = 0) -> Refusal:
    """Describe a call in which this rank cannot take part: all ranks raise."""
    named = type(error)(f"rank {group.world_rank}: {error}")
    named.__cause__, named.told = error.__cause__, True
    return Refusal(kind, root, named)
