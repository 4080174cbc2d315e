"""`GatheredParameters`: weights that no rank has as a whole, gathered layer by layer for use.

This is the part of level ``p_g_os`` that concerns parameters. Reading ``p.data`` gathers the unit
of ``p``; it goes when another unit is read. The memory is given back when no array of it is in
use any more, so what a program holds on to is never taken from it.

[Note: prefetching] The order in which a program reads units is learned in its first pass. From
then on the next unit is gathered while the current one computes, if ranks have cores to spare for
that (as in [Note: overlap]). All ranks must read in the same order; whoever reads another unit than
the others gets a `MismatchError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray, library_of
from hpcdist.comm import describe
from hpcdist.comm.dispatch import dispatch
from hpcdist.comm.group import Group
from hpcdist.comm.memory import empty_near
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.parameter import Parameter
from hpcdist.parallel.sharding.partition import Unit
from hpcdist.parallel.sharding.replicated import cut, flatten
from hpcdist.transport.call.call import Call, Gathering, shape_detail
from hpcdist.transport.waiting.work import Work

Phase = Literal["forward", "backward"]


class _Coming(NamedTuple):
    """A unit that is being gathered ahead of its use."""

    position: int
    flat: NumpyArray
    work: Work


@final
class GatheredParameters:
    """The weights of some units, of which this rank keeps its own part. Local to create.

    Attributes:
        ahead: whether the next unit is gathered while the current one is used; equal on all ranks.
        gathers: how many units have been gathered.

    """

    def __init__(
        self, parameters: Sequence[Parameter], units: Sequence[Unit], group: Group
    ) -> None:
        self._parameters, self._units, self._group = parameters, units, group
        self.ahead = False
        self.gathers = 0
        self._libraries = {
            index: library_of(parameters[index].data) for unit in units for index in unit.indices
        }
        self._owned = [self._keep_own(unit) for unit in units]
        self._shown: dict[int, Any] = {}
        self._current: int | None = None
        self._coming: _Coming | None = None
        self._phase: Phase = "forward"
        self._order: dict[Phase, list[int]] = {"forward": [], "backward": []}
        self._expected: dict[Phase, list[int]] = {"forward": [], "backward": []}
        for position, unit in enumerate(units):
            for index in unit.indices:
                parameters[index].shard(partial(self._unshard, position, index))

    def _keep_own(self, unit: Unit) -> NumpyArray:
        flat = flatten(self._parameters, unit, self._group)
        own = empty_near(flat, unit.share, self._group)
        own[...] = flat[self._group.rank * unit.share :][: unit.share]
        return own

    # ---- what the optimizer needs

    def owned(self, position: int) -> NumpyArray:
        """Return what this rank owns of a unit, for the optimizer to change."""
        return self._owned[position]

    def publish(self, position: int) -> None:
        """No-op: what has changed is gathered when it is used."""

    # ---- what the model says

    def begin(self, phase: Phase) -> None:
        """Note that a forward or a backward pass begins; gives back what is gathered."""
        self.reshard()
        self._settle()
        self._phase = phase
        self._order[phase] = []

    def reshard(self) -> None:
        """Free the gathered weights; waits for those under way."""
        if self._coming is not None:
            self._coming.work.wait()
        self._coming, self._current = None, None
        self._shown.clear()

    def _settle(self) -> None:
        """Expect next time the order of this time."""
        if self._order[self._phase]:
            self._expected[self._phase] = self._order[self._phase]

    # ---- what the parameters say

    def _unshard(self, position: int, index: int) -> Any:
        if position != self._current:
            self._fetch(position)
        return self._shown[index]

    def _fetch(self, position: int) -> None:
        """Gather a unit, unless it is coming; give back the one before. Collective."""
        self._shown.clear()  # first: frees the last unit before memory is taken for this one
        self._current = None
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.work.wait()
        if coming is None or coming.position != position:
            coming = self._gather(position, wait=True)
        for index, view in cut(self._parameters, self._units[position], coming.flat):
            self._shown[index] = self._show(index, view)
        self._current = position
        self._order[self._phase].append(position)
        self._prefetch()

    def _prefetch(self) -> None:
        """Begin to gather what is expected next."""
        order, expected = self._order[self._phase], self._expected[self._phase]
        count = len(order)
        if self.ahead and count < len(expected) and order == expected[:count]:
            self._coming = self._gather(expected[count], wait=False)

    def _show(self, index: int, view: NumpyArray) -> Any:
        """Show a parameter in its library; arrays of torch and CuPy cannot be read-only."""
        wrap = self._libraries[index].wrap
        if type(view) is not np.ndarray:
            return wrap(view)
        view.flags.writeable = False
        return view if wrap is np.asarray else wrap(view.copy())

    def _gather(self, position: int, *, wait: bool) -> _Coming:
        own = self._owned[position]
        flat = empty_near(own, own.size * self._group.nranks, self._group)
        self.gathers += 1
        return _Coming(
            position, flat, dispatch(self._group, wait, _describe_gather, flat, own, position)
        )


def _describe_gather(group: Group, flat: NumpyArray, own: NumpyArray, position: int) -> Call:
    """Describe the gathering of a unit so that ranks that gather another one notice."""
    shape = position, own.size
    call = describe.all_gather(group, flat, own)
    if isinstance(call, Gathering):
        return call._replace(shape=shape, detail=shape_detail(shape))
    return call
