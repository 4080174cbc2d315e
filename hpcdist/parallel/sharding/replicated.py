"""`ReplicatedParameters`: every rank has all weights, updates its own and gathers the rest.

This is the part of levels ``os`` and ``os_g`` that concerns parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from hpcdist.arrays.buffer import is_writeable
from hpcdist.arrays.libraries import NumpyArray, library_of, view_of
from hpcdist.comm.collectives import all_gather
from hpcdist.comm.group import Group
from hpcdist.comm.memory import empty_near
from hpcdist.parallel.parameter import Parameter
from hpcdist.parallel.sharding.partition import Unit


@final
class ReplicatedParameters:
    """The weights of some units, which are moved into flat memory. Local to create.

    Parameters of NumPy, CuPy and torch are views of that memory from then on; those of JAX, which
    never change, are replaced, and flat memory is there only while it is gathered.
    """

    def __init__(
        self, parameters: Sequence[Parameter], units: Sequence[Unit], group: Group
    ) -> None:
        self._parameters, self._units, self._group = parameters, units, group
        self._flats: list[NumpyArray | None] = []
        self._owned: list[NumpyArray] = []
        for unit in units:
            self._move(unit)

    def _move(self, unit: Unit) -> None:
        flat = flatten(self._parameters, unit, self._group)
        first = self._group.rank * unit.share
        owned = flat[first : first + unit.share]
        stays = self._is_shown(unit)
        self._flats.append(flat if stays else None)
        self._owned.append(owned if stays else owned.copy())
        if stays:
            for index, view in cut(self._parameters, unit, flat):
                parameter = self._parameters[index]
                parameter.data = library_of(parameter.data).wrap(view)

    def _is_shown(self, unit: Unit) -> bool:
        """Return whether the parameters can be views of flat memory: whether they are writable."""
        arrays = [self._parameters[index].data for index in unit.indices]
        return all(is_writeable(view_of(array)) for array in arrays)

    def owned(self, position: int) -> NumpyArray:
        """Return what this rank owns of a unit, for the optimizer to change."""
        return self._owned[position]

    def publish(self, position: int) -> None:
        """Give all ranks what their owners have made of a unit. Collective."""
        unit, flat = self._units[position], self._flats[position]
        if flat is not None:
            all_gather(flat, self._owned[position], self._group)
            return
        flat = gathered_whole(self._owned[position], self._group)
        for index, view in cut(self._parameters, unit, flat):
            parameter = self._parameters[index]
            parameter.data = library_of(parameter.data).wrap(view)

    def adopt(self, position: int) -> None:
        """Copy the parameters of a unit to the weights that this rank owns. Local."""
        if self._flats[position] is None:
            flat = flatten(self._parameters, self._units[position], self._group)
            share = self._units[position].share
            first = self._group.rank * share
            self._owned[position][...] = flat[first : first + share]


def flatten(parameters: Sequence[Parameter], unit: Unit, group: Group) -> NumpyArray:
    """Return new memory with the weights of a unit and zeros after them, where the weights are."""
    views = [_view(parameters[index]) for index in unit.indices]
    flat = empty_near(views[0], unit.share * group.nranks, group)
    for view, start, size in zip(views, unit.starts, unit.sizes, strict=True):
        flat[start : start + size] = view.reshape(-1)
    flat[sum(unit.sizes) :] = 0
    return flat


def _view(parameter: Parameter) -> NumpyArray:
    return view_of(parameter.data)


def cut(
    parameters: Sequence[Parameter], unit: Unit, flat: NumpyArray
) -> list[tuple[int, NumpyArray]]:
    """Return index and view of each parameter of a unit in its flat memory."""
    return [
        (index, flat[start : start + size].reshape(parameters[index].shape))
        for index, start, size in zip(unit.indices, unit.starts, unit.sizes, strict=True)
    ]


def gathered_whole(owned: NumpyArray, group: Group) -> NumpyArray:
    """Return what all ranks own of a unit, one after the other. Collective."""
    flat = empty_near(owned, owned.size * group.nranks, group)
    all_gather(flat, owned, group)
    return flat
