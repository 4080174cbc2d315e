"""`Scheme`: how a bucket of gradients travels in fewer bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm.group import Group
from hpcdist.parallel.compressed.steps import Steps

Shapes: TypeAlias = Sequence[tuple[int, ...]]
Kept: TypeAlias = dict[str, Any]


class Scheme(ABC):
    """One for a model; what it keeps of each bucket is handed to it."""

    @abstractmethod
    def padded(self, size: int, ranks: int) -> int:
        """Return how many numbers `add_up` takes for a bucket of `size`."""

    @abstractmethod
    def nbytes(self, shapes: Shapes) -> int:
        """Return in how many bytes gradients of `shapes` travel."""

    @abstractmethod
    def add_up(
        self, values: NumpyArray, shapes: Shapes, kept: Kept, group: Group, steps: Steps
    ) -> None:
        """Replace `values` by their sum over the ranks. Collective over `group`.

        Args:
            values: float32, flat: the gradients, one after the other, then zeros.
            shapes: those of the gradients.
            kept: what was kept of this bucket the last time; empty at first.
            group: the ranks.
            steps: what hears of errors.

        """
