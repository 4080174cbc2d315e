"""What a rank wants of a checkpoint, read from its files into memory, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.checkpoint.blocks import BLOCK, Files, Piece
from hpcdist.checkpoint.boxes import run, whole
from hpcdist.checkpoint.copies import Copy, copies_between, in_blocks, in_bytes
from hpcdist.checkpoint.formats import dtype_of_name
from hpcdist.checkpoint.host_copies import Target, new_target, to_write
from hpcdist.checkpoint.manifest import Manifest
from hpcdist.checkpoint.matching import Wanted
from hpcdist.checkpoint.plan import Array
from hpcdist.named_tuple import NamedTuple

Buffer = memoryview | NumpyArray
"""Memory, as bytes."""


class Step(NamedTuple):
    """What to copy from a piece of `nbytes` bytes; elements have `itemsize`."""

    piece: Piece
    nbytes: int
    itemsize: int
    copy: Copy


class Wish(NamedTuple):
    """A part of an array that this rank wants, where to, and how it comes there."""

    name: str
    target: Target
    steps: Sequence[Step]


def take(files: Files, manifest: Manifest, wanted: Mapping[str, Sequence[Wanted]]) -> list[Wish]:
    """Take memory for what is wanted, if the files have as many bytes as they should."""
    steps = [
        (name, each, _steps(manifest, name, each))
        for name, parts in wanted.items()
        for each in parts
    ]
    files.measure(sorted({step.piece.file for _, _, found in steps for step in found}))
    return [
        Wish(name, target_of(each, name, manifest.arrays), found) for name, each, found in steps
    ]


def _steps(manifest: Manifest, name: str, wanted: Wanted) -> list[Step]:
    shape, itemsize = manifest.arrays[name].shape, manifest.itemsize(name)
    unit = itemsize if BLOCK % itemsize == 0 else 1  # or else an element can lie in two blocks
    return [
        Step(piece, piece.box.size * itemsize, unit, copy)
        for piece in manifest.pieces[name]
        for each in copies_between(piece.box, wanted.box, shape)
        for copy in (each if unit == itemsize else in_bytes(each, itemsize),)
    ]


def target_of(wanted: Wanted, name: str, arrays: Mapping[str, Array]) -> Target:
    """Return the memory that takes a part of the array of this name, of those that were saved."""
    if wanted.into is not None:
        return to_write(wanted.into, name)
    array = arrays[name]
    return new_target(dtype_of_name(array.dtype), array.shape)


def check(files: Files, wishes: Iterable[Wish]) -> None:
    """Compare what is wanted with its checksums."""
    for wish in wishes:
        for piece, nbytes, itemsize, copy in wish.steps:
            for number, _ in in_blocks(copy, BLOCK // itemsize):
                files.block(wish.name, piece, nbytes, number)


def read(files: Files, wishes: Iterable[Wish]) -> None:
    """Read all wanted boxes. A whole block of a file is read directly to its place."""
    for wish in wishes:
        memory = wish.target.memory
        for piece, nbytes, itemsize, copy in wish.steps:
            for number, parts in in_blocks(copy, BLOCK // itemsize):
                size = min(BLOCK, nbytes - number * BLOCK)
                part, *others = parts
                if part.is_run and part.size * itemsize == size:
                    start = part.target * itemsize
                    files.block(wish.name, piece, nbytes, number, memory[start : start + size])
                    continue
                block = files.block(wish.name, piece, nbytes, number)
                for each in (part, *others):
                    put(each, block, -number * BLOCK, memory, itemsize)


def put(copy: Copy, source: Buffer, before: int, target: Buffer, itemsize: int) -> None:
    """Copy elements; the source begins so many bytes before."""

    def view(memory: Buffer, start: int, strides: Sequence[int]) -> Any:
        steps = tuple(each * itemsize for each in strides)
        # Opaque elements: any dtype, bfloat16 too, at any alignment.
        return np.ndarray(copy.lengths, f"V{itemsize}", memory, start, steps)

    here = view(source, before + copy.source * itemsize, copy.source_strides)
    view(target, copy.target * itemsize, copy.target_strides)[...] = here


def finisher(wishes: Iterable[Wish]) -> Callable[[str], Any]:
    """Return what puts the parts of an array where they belong, and returns the last of them."""
    by_name: dict[str, list[Wish]] = {}
    for wish in wishes:
        by_name.setdefault(wish.name, []).append(wish)
    return lambda name: [wish.target.finish() for wish in by_name[name]][-1]


def read_rows(
    files: Files, manifest: Manifest, names: Sequence[str], start: int, stop: int
) -> list[NumpyArray]:
    """Return new arrays with a run of rows of a checkpoint."""
    found, wanted = [], {}
    for name in names:
        array = manifest.arrays[name]
        rows = np.empty((stop - start, *array.shape[1:]), dtype_of_name(array.dtype))
        width = array.size // array.shape[0] if array.shape[0] else 0
        wanted[name] = [Wanted(run(start * width, stop * width), rows)]
        found.append(rows)
    read(files, take(files, manifest, wanted))
    return found


def read_arrays(files: Files, manifest: Manifest, names: Iterable[str]) -> dict[str, Any]:
    """Return new arrays with what a checkpoint has under these names."""
    wanted = {name: [Wanted(whole(manifest.arrays[name].shape), None)] for name in names}
    wishes = take(files, manifest, wanted)
    read(files, wishes)
    return {wish.name: wish.target.finish() for wish in wishes}
