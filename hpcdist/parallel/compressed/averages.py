"""`CompressedAverages`: the buckets of one model, averaged one after the other by a `Scheme`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, TypeAlias, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm.collectives import broadcast, reduce
from hpcdist.comm.group import Group
from hpcdist.parallel.compressed.lanes import lane_of
from hpcdist.parallel.compressed.scheme import Kept, Scheme
from hpcdist.parallel.compressed.steps import Steps
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.waiting.work import DONE, Work

Parts: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""The gradients of a bucket, in their order: the name of each, and its shape."""


@final
class CompressedAverages:
    """Collective over `group` to create.

    What a scheme keeps of a bucket belongs to this rank and to this run: it is in no checkpoint,
    and a model that has been loaded begins with none.
    """

    def __init__(self, group: Group, scheme: Scheme) -> None:
        self._scheme = scheme
        self._lane = lane_of(group)
        self._forget()

    def _forget(self) -> None:
        self._kept: dict[Parts, Kept] = {}
        self._room = np.empty(0, np.float32)

    def afresh(self) -> CompressedAverages:
        """Return those of another model on the same ranks, which have kept nothing. Local."""
        twin = copy.copy(self)
        twin._forget()
        return twin

    def dispatch(
        self,
        flat: Any,
        parts: Parts,
        error: Exception | None,
        sync_op: bool,
        ended: Callable[[int, BaseException | None], None],
    ) -> Work:
        """Replace `flat` by its mean over the ranks, on a thread unless `sync_op`. Collective.

        Args:
            flat: a NumPy array, of real floating-point numbers of any kind; it is not looked at if
                there is an `error`.
            parts: what is in it.
            error: why this rank cannot take part; all ranks raise.
            sync_op: whether the average has ended when this returns, or raises what went wrong.
            ended: called with the number of bytes sent and with what went wrong, if something did.

        """
        job = partial(self._average, flat, parts, error, ended)
        if not sync_op:
            return self._lane.queue.start(job, "compressed average", detached=True)
        self._lane.queue.run(job)
        return DONE

    def _average(
        self,
        flat: Any,
        parts: Parts,
        error: Exception | None,
        ended: Callable[[int, BaseException | None], None],
    ) -> None:
        failure: BaseException | None = None
        try:
            steps = Steps(error)
            self._do(flat, parts, steps)
            if steps.error is not None:
                raise steps.error
        except BaseException as caught:
            failure = caught
            raise
        finally:
            ended(self._scheme.nbytes([shape for _, shape in parts]), failure)

    def _do(self, flat: Any, parts: Parts, steps: Steps) -> None:
        node, across, ranks, _ = self._lane
        size = sum(prod(shape) for _, shape in parts)
        padded = self._scheme.padded(size, 1 if across is None else across.nranks)
        values = steps.compute(self._share, flat, size, padded, ranks)
        values = np.empty(0, np.float32) if values is None else values
        if node is not None:
            steps.communicate(Kind.REDUCE, node, reduce, values[:size], node.ranks[0])
        if across is not None:
            shapes = [shape for _, shape in parts]
            self._scheme.add_up(values, shapes, self._kept_of(parts), across, steps)
        if node is not None:
            steps.communicate(Kind.BROADCAST, node, broadcast, values[:size], node.ranks[0])
        steps.compute(_assign, flat, values[:size])

    def _share(self, flat: Any, size: int, padded: int, ranks: int) -> NumpyArray:
        """Return what this rank adds to the mean, in float32."""
        if self._room.size < padded:
            self._room = np.empty(padded, np.float32)
        values = self._room[:padded]
        _assign(values[:size], flat)
        values[:size] *= np.float32(1 / ranks)
        values[size:] = 0
        return values

    def _kept_of(self, parts: Parts) -> Kept:
        """Return what is kept of a bucket; buckets that have been laid out anew keep nothing."""
        if parts not in self._kept:
            self._kept = {each: kept for each, kept in self._kept.items() if not {*each} & {*parts}}
            self._kept[parts] = {}
        return self._kept[parts]


def _assign(to: Any, values: Any) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        to[...] = values
