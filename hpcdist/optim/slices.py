"""`Slice`: a flat run of weights with its optimizer state, updated in place.

[Note: blocks] A formula passes over its arrays a dozen times. NumPy does each pass over a block
that stays in the processor's cache, so main memory sees every array once. Other libraries get the
slice as a whole: on a GPU one block is one launch.

[Note: master weights] Weights of 16 bits are too coarse to add small steps to. Their slice keeps
them in float32 besides, and rounds after each step (Micikevicius et al., Mixed Precision Training,
2018).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from hpcdist.optim.rules import Block, Options, Rule

BLOCK = 1 << 14
"""Elements of a block: the six or seven arrays of a formula fit into a core's own cache."""

_NARROW = 2
"""Bytes of the floats that get master weights."""


@final
class Slice:
    """Weights and what an algorithm remembers of them.

    Args:
        weights: flat and writable; complex numbers are updated as pairs of real ones.
        rule: the algorithm.

    Attributes:
        master: the weights in float32, where they have 16 bits; else None.
        states: the arrays of `rule.states`, zero at first.
        step: how many steps have been taken.
        per: how many real numbers a weight is.

    Where a method takes `start` and `stop`, they count weights.

    """

    def __init__(self, weights: Any, rule: Rule) -> None:
        self.rule = rule
        self.step = 0
        self.per = 2 if weights.dtype.kind == "c" else 1
        self.weights = _real(weights)
        wide = np.float32 if self.weights.dtype.itemsize == _NARROW else self.weights.dtype
        self.master = self.weights.astype(wide) if wide != self.weights.dtype else None
        self.states = [np.zeros_like(self.weights, dtype=wide) for _ in rule.states]

    def named_states(self) -> Iterator[tuple[str, Any]]:
        """Give the names and arrays that a checkpoint must hold besides the weights."""
        yield from zip(self.rule.states, self.states, strict=True)
        if self.master is not None:
            yield "master", self.master

    def use(self, weights: Any) -> None:
        """Keep the weights in `weights`, which hold the same numbers, from now on."""
        self.weights = _real(weights)

    def adopt(self) -> None:
        """Take the weights as they are now for the master weights, unless these round to them.

        They do where both have been loaded: rounding would lose what the master weights know.
        """
        if self.master is None:
            return
        rounded = self.master.astype(self.weights.dtype)
        if not bool((rounded == self.weights).all()):
            np.copyto(self.master, self.weights, casting="unsafe")

    @property
    def size(self) -> int:
        """How many weights there are."""
        return int(self.weights.size) // self.per

    def settle(self) -> None:
        """Round the master weights to the weights, for example after loading them."""
        if self.master is not None:
            np.copyto(self.weights, self.master, casting="unsafe")

    def advance(
        self, gradient: Any, options: Options, start: int, stop: int, ratio: float = 1.0
    ) -> None:
        """Use `gradient`, that of the weights from `start` to `stop`, in step `step`."""
        for block, where in self._blocks(gradient, options, start, stop):
            self.rule.advance(block if ratio == 1.0 else block._replace(ratio=ratio))
            if self.rule.apply is None:
                self._round(where)

    def measure(
        self, options: Options, start: int, stop: int, gradient: Any = None
    ) -> tuple[Any, Any]:
        """Return the sums of squares that `Rule.measure` finds from `start` to `stop`.

        They are where the weights are: see `host_numbers`. `gradient` is as in `advance`, for rules
        that measure it.
        """
        assert self.rule.measure is not None
        sums: tuple[Any, Any] = (np.float64(0), np.float64(0))
        for block, _ in self._blocks(gradient, options, start, stop):
            found = self.rule.measure(block)
            sums = sums[0] + found[0], sums[1] + found[1]
        return sums

    def apply(self, options: Options, start: int, stop: int, ratio: float) -> None:
        """Change the weights from `start` to `stop` as `Rule.apply` says."""
        assert self.rule.apply is not None
        for block, where in self._blocks(None, options, start, stop):
            self.rule.apply(block, ratio)
            self._round(where)

    def _blocks(
        self, gradient: Any, options: Options, start: int, stop: int
    ) -> Iterator[tuple[Block, slice]]:
        start, stop = start * self.per, stop * self.per
        gradient = None if gradient is None else _real(gradient)
        weights = self.weights if self.master is None else self.master
        length = min(BLOCK, stop - start) if type(weights) is np.ndarray else stop - start
        rooms = [np.empty_like(weights[:length]) for _ in range(3)]
        for first in range(start, stop, max(1, length)):
            where = slice(first, min(first + length, stop))
            room = [each[: where.stop - first] for each in rooms]
            slope = None
            if gradient is not None:
                slope = gradient[first - start : where.stop - start]
                if slope.dtype != weights.dtype:
                    np.copyto(room[2], slope, casting="unsafe")
                    slope = room[2]
            states: Sequence[Any] = [each[where] for each in self.states]
            yield Block(weights[where], slope, states, room[:2], options, self.step), where

    def _round(self, where: slice) -> None:
        if self.master is not None:
            np.copyto(self.weights[where], self.master[where], casting="unsafe")


def _real(array: Any) -> Any:
    return array.view(array.real.dtype) if array.dtype.kind == "c" else array
