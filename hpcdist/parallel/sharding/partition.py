"""Layout: which parameters form a unit, and which rank owns which part of it.

A unit is what travels as one: some parameters of one dtype, flattened one after the other, and
padded so that every rank owns an equal share. It computes with integers only.

[Note: units] Where parameters stay whole, units are the buckets of `plan_buckets`. Where they are
gathered before use, a unit is a layer: the parameters whose names are equal up to the last dot;
small layers join their successor until there is enough to gather.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.buckets import plan_buckets


class Item(NamedTuple):
    """A parameter, as the layout sees it; only those of equal `kind` share a unit."""

    name: str
    shape: tuple[int, ...]
    size: int
    nbytes: int
    kind: Hashable


class Segment(NamedTuple):
    """Elements `start` to `stop` of a slice: those of a parameter from `offset` on."""

    parameter: int
    start: int
    stop: int
    offset: int


class Unit(NamedTuple):
    """Parameters that travel as one: their indices, where each starts, and elements per rank."""

    indices: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    share: int

    def segments(self, rank: int) -> list[Segment]:
        """Return what `rank` owns: at most one segment of each parameter."""
        first, last = rank * self.share, (rank + 1) * self.share
        found = []
        for index, begin, size in zip(self.indices, self.starts, self.sizes, strict=True):
            start, stop = max(first, begin), min(last, begin + size)
            if start < stop:
                found.append(Segment(index, start - first, stop - first, start - begin))
        return found


def lay_out(indices: Sequence[int], items: Sequence[Item], ranks: int) -> Unit:
    """Return the unit of these parameters, in this order."""
    sizes = tuple(items[index].size for index in indices)
    starts = tuple(sum(sizes[:position]) for position in range(len(sizes)))
    return Unit(tuple(indices), starts, sizes, -(-sum(sizes) // ranks))


def plan_units(items: Sequence[Item], ranks: int, limit: int) -> list[Unit]:
    """Return the units in the order in which their gradients are sent; `limit` is in bytes.

    Example:
        >>> items = [Item(name, (4,), 4, 16, "float32") for name in ("a", "b", "c")]
        >>> [unit.indices for unit in plan_units(items, ranks=2, limit=32)]
        [(2,), (0, 1)]

    """
    nbytes, kinds = [item.nbytes for item in items], [item.kind for item in items]
    return [lay_out(bucket, items, ranks) for bucket in plan_buckets(nbytes, kinds, [limit])]


def plan_layers(items: Sequence[Item], ranks: int, least: int) -> list[Unit]:
    """Return a unit for each layer, last layer first; see [Note: units].

    Layers join their successor until they have `least` bytes.

    Example:
        >>> items = [Item(name, (4,), 4, 16, "float32") for name in ("a.w", "a.b", "b.w")]
        >>> [unit.indices for unit in plan_layers(items, ranks=2, least=1)]
        [(2,), (0, 1)]

    """
    runs: list[list[int]] = []
    open_run: dict[Hashable, list[int]] = {}
    for index, item in enumerate(items):
        run = open_run.get(item.kind)
        if run is None or _is_full(run, items, layer_of(item.name), least):
            run = open_run[item.kind] = []
            runs.append(run)
        run.append(index)
    return [lay_out(run, items, ranks) for run in sorted(runs, reverse=True)]


def _is_full(run: Sequence[int], items: Sequence[Item], layer: str, least: int) -> bool:
    filled = sum(items[index].nbytes for index in run)
    return filled >= least and layer_of(items[run[-1]].name) != layer


def layer_of(name: str) -> str:
    """Return the part of a parameter's name that says the layer; without a dot it is the name."""
    return name.rpartition(".")[0] or name
