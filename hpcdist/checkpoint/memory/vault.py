"""`Vault`: what a rank keeps in memory, of the last two steps that were committed.

[Note: two generations] What is kept of one step is a generation. While one is in the making, the
one before it stays. That is dropped only when all ranks have begun to make the next, so that at
every moment one generation is whole, whoever dies. Generations have serial numbers, because a step
can be committed twice: before a failure, and again after it, when other ranks have other parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.checkpoint.boxes import Box
from hpcdist.checkpoint.memory.keeping import Kept
from hpcdist.checkpoint.nodes import Node
from hpcdist.checkpoint.plan import Held
from hpcdist.named_tuple import NamedTuple


class Header(NamedTuple):
    """The description of a rank's state besides its arrays."""

    structure: Node
    random: Node


class Block(NamedTuple):
    """Parts of arrays, one behind the other in memory."""

    parts: list[Kept]
    memory: NumpyArray

    def located(self) -> Iterator[tuple[Kept, NumpyArray]]:
        """Give the parts and their bytes."""
        begin = 0
        for each in self.parts:
            yield each, self.memory[begin : begin + each.nbytes]
            begin += each.nbytes


class Generation(NamedTuple):
    """The parts that a rank keeps of one step.

    Attributes:
        run: counts the trainings of a job that used one name, one after the other.
        serial: counts what has been committed.
        step: how many steps had been done.
        size: how many ranks have committed it together.
        rank: which of them this one was.
        headers: by rank, its own one and those of whom it is a buddy.
        blocks: its own parts, and copies.

    """

    run: int
    serial: int
    step: int
    size: int
    rank: int
    headers: dict[int, Header]
    blocks: list[Block]


class Catalog(NamedTuple):
    """The description of a generation for other ranks; `rank` was the rank at that time."""

    run: int
    serial: int
    step: int
    size: int
    rank: int
    headers: dict[int, Header]
    held: list[Held]


@final
class Vault:
    """The generations that a rank keeps, the latest one last."""

    def __init__(self, run: int = 0) -> None:
        self.run = run
        self.serial = 0
        """The latest one that was begun."""
        self.world_generation = 0
        """How many recoveries there had been when it was used last."""
        self.generations: list[Generation] = []
        self.plan: Any = None
        """How the last generation was divided; see `committing`."""
        self._spare: list[NumpyArray] = []

    @property
    def nbytes(self) -> int:
        """Bytes that are kept of arrays."""
        blocks = (block for each in self.generations for block in each.blocks)
        return sum(block.memory.nbytes for block in blocks)

    def begin(self, run: int, serial: int) -> None:
        """Note that all ranks begin a generation: only the one before it is needed any more."""
        self.run, self.serial = run, serial
        for each in self.generations[:-1]:
            self._spare += [block.memory for block in each.blocks]
        del self.generations[:-1]

    def take(self, nbytes: int) -> NumpyArray:
        """Return memory for so many bytes, if possible what was dropped."""
        for index, memory in enumerate(self._spare):
            if memory.nbytes == nbytes:
                return self._spare.pop(index)
        return np.empty(nbytes, np.uint8)

    def add(self, made: Generation) -> None:
        """Keep what has been made."""
        self.generations.append(made)
        self._spare.clear()

    def keep_only(self, serial: int) -> None:
        """Forget generations that are not the one all ranks go back to."""
        self.generations = [each for each in self.generations if each.serial == serial]

    def catalogs(self) -> list[Catalog]:
        """Return what is here."""
        return [
            Catalog(*each[:-1], [_held(kept) for block in each.blocks for kept in block.parts])
            for each in self.generations
        ]

    def bytes_of(self, serial: int) -> dict[tuple[str, Box], NumpyArray]:
        """Return the parts of a generation by name and box; none if it is not here."""
        return {
            (kept.share.name, kept.share.box): memory
            for each in self.generations
            if each.serial == serial
            for block in each.blocks
            for kept, memory in block.located()
        }


def _held(kept: Kept) -> Held:
    return Held(kept.share.name, kept.array.dtype, kept.array.shape, kept.share.box)
