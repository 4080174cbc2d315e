"""Which rank of hybrid training stands where: degrees, order, and ranks along axes. Pure.

`AXES` is the table of the axes, each with a short name (Paddle's degrees) and a long one (Paddle's
topologies). `infer_degrees` fills in what is left open, `plan_axes` puts the degrees in order, and
`CommunicateTopology` is Paddle's name for a `ProcessMesh` of them.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, final

from hpcdist.errors import UsageAssertionError, UsageError
from hpcdist.integers import as_integer
from hpcdist.mesh.process_mesh import ProcessMesh, shortened
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.vocabulary import known


class ParallelMode(IntEnum):
    """How a model is wrapped on a grid: the axis that decides it.

    Example:
        >>> import hpcdist as dist
        >>> dist.ParallelMode(2).name
        'PIPELINE_PARALLEL'

    """

    DATA_PARALLEL = 0
    TENSOR_PARALLEL = 1
    PIPELINE_PARALLEL = 2
    SHARDING_PARALLEL = 3
    SEGMENT_PARALLEL = 4


class Axis(NamedTuple):
    """An axis of the grid: its two names, and the mode of a model that is spread over it."""

    short: str
    long: str
    mode: ParallelMode


AXES = (
    Axis("dp", "data", ParallelMode.DATA_PARALLEL),
    Axis("pp", "pipe", ParallelMode.PIPELINE_PARALLEL),
    Axis("sharding", "sharding", ParallelMode.SHARDING_PARALLEL),
    Axis("sep", "sep", ParallelMode.SEGMENT_PARALLEL),
    Axis("cp", "context", ParallelMode.SEGMENT_PARALLEL),
    Axis("mp", "model", ParallelMode.TENSOR_PARALLEL),
)
"""In the order in which they are laid out, unless another one is told: mp on neighbours."""

SHORT = {name: axis.short for axis in AXES for name in (axis.short, axis.long)}
LONG = {name: axis.long for axis in AXES for name in (axis.short, axis.long)}

_LONG_NAMES = tuple(axis.long for axis in AXES)

_MAY_BE_LEFT_OUT = ("sep", "cp")
"""Axes that older programs do not name in their order."""

_DECIDING = ("pp", "mp", "sep", "cp", "sharding", "dp")
"""The axes in the order in which they decide the mode."""


def short_name(axis: Any) -> str:
    """Return the short name of an axis that is told by either of its names."""
    return SHORT[known(axis, SHORT, "a grid has no axis")]


def mode_of(degrees: Mapping[str, int]) -> ParallelMode:
    """Return how a grid of these degrees trains; what is not named is 1."""
    modes = {axis.short: axis.mode for axis in AXES}
    return next(
        (modes[axis] for axis in _DECIDING if degrees.get(axis, 1) > 1), ParallelMode.DATA_PARALLEL
    )


def infer_degrees(size: int, degrees: Mapping[str, int | None]) -> dict[str, int]:
    """Return the degree of each axis on `size` ranks, by short names.

    One degree may be -1: it takes the ranks that all the others leave. That is dp's where dp is not
    told and no other axis is -1; other axes that are not told are 1.

    Args:
        size: how many ranks there are.
        degrees: degrees by either name of their axis; None for one that is not told.

    Raises:
        UsageError: a degree is not an integer of at least 1, two are -1, or their product is not
            `size`: the message has degrees that fit.

    Example:
        >>> infer_degrees(8, {"mp": 2, "pp": 2})
        {'dp': 2, 'pp': 2, 'sharding': 1, 'sep': 1, 'cp': 1, 'mp': 2}

    """
    told = {short_name(axis): _degree(axis, value) for axis, value in degrees.items()}
    open_axes = [axis for axis, value in told.items() if value == -1]
    if len(open_axes) > 1:
        raise UsageError(
            f"the degrees of {' and '.join(open_axes)} are both -1, so neither can be computed; "
            "give all but one of them"
        )
    if told.get("dp") is None and not open_axes:
        open_axes = ["dp"]
    found = {axis.short: told.get(axis.short) or 1 for axis in AXES}
    found.update(dict.fromkeys(open_axes, 1))
    taken = math.prod(found.values())
    if open_axes and size % taken == 0:
        found[open_axes[0]] = size // taken
    elif taken != size:
        raise UsageAssertionError(_misfit(size, found, open_axes))
    return found


def _degree(axis: Any, value: Any) -> int | None:
    if value is None:
        return None
    try:
        degree = as_integer(value)
    except TypeError:
        degree = 0
    if degree < 1 and degree != -1:
        raise UsageError(
            f"the degree of {short_name(axis)} must be an integer of at least 1, or -1 for the "
            f"ranks that the other axes leave, got {value!r}"
        )
    return degree


def _misfit(size: int, found: Mapping[str, int], open_axes: Sequence[str]) -> str:
    chosen = {axis: degree for axis, degree in found.items() if degree > 1}
    taken = math.prod(chosen.values())
    told = f"{describe_degrees(chosen)} {'take' if len(chosen) > 1 else 'takes'} {taken}"
    what = (
        f"{told} ranks, so {open_axes[0]}=-1 is {size} / {taken}, which is not a whole number"
        if open_axes
        else f"{told} ranks"
    )
    return (
        f"{what}, but there are {size} ranks; {describe_degrees(_fitting(size, chosen))} would "
        "fit, or start another number of ranks"
    )


def _fitting(size: int, chosen: Mapping[str, int]) -> dict[str, int]:
    """Return degrees near those chosen whose product is `size`, with dp taking what is left."""
    rest, fitting = size, {}
    for axis in reversed([each.short for each in AXES if each.short != "dp"]):
        if axis in chosen:
            most = min(chosen[axis], rest)
            fitting[axis] = next(each for each in range(most, 0, -1) if rest % each == 0)
            rest //= fitting[axis]
    return {"dp": rest, **dict(reversed(fitting.items()))}


def describe_degrees(degrees: Mapping[str, int]) -> str:
    """Return degrees as words: ``dp=2 x mp=4``."""
    return " x ".join(f"{axis}={degree}" for axis, degree in degrees.items())


def plan_axes(degrees: Mapping[str, int], order: Any = None) -> dict[str, int]:
    """Return the degrees in the order in which their axes are laid out, the last one fastest.

    Args:
        degrees: as `infer_degrees` returns them.
        order: the axes, by either name; None for that of `AXES`. "sep" and "cp" may be left out
            where their degree is 1.

    Raises:
        UsageError: `order` is not a list of axes, or has one twice, or lacks one.

    Example:
        >>> plan_axes({"dp": 2, "mp": 4}, ["mp", "dp"])
        Traceback (most recent call last):
        ...
        hpcdist.errors.UsageError: the order ['mp', 'dp'] lacks pp, sharding; name each axis once

    """
    usual = [axis.short for axis in AXES]
    if order is None:
        names = usual
    elif isinstance(order, str) or not isinstance(order, Sequence):
        raise UsageError(f"order must be a list of axes such as {usual}, got {order!r}")
    else:
        names = [short_name(axis) for axis in order]
    twice = [name for name in usual if names.count(name) > 1]
    if twice:
        raise UsageError(f"the order {order!r} has {', '.join(twice)} twice; name each axis once")
    left_out = [name for name in usual if name not in names]
    lacking = [
        name for name in left_out if name not in _MAY_BE_LEFT_OUT or degrees.get(name, 1) > 1
    ]
    if lacking:
        raise UsageError(f"the order {order!r} lacks {', '.join(lacking)}; name each axis once")
    return {name: degrees.get(name, 1) for name in [*left_out, *names]}


def by_node(ranks: Iterable[int], hosts: Sequence[str]) -> tuple[int, ...]:
    """Return ranks with those of a node next to each other, nodes in the order of their first rank.

    Args:
        ranks: world ranks.
        hosts: the node of each world rank.

    Example:
        >>> by_node(range(4), ["a", "b", "a", "b"])
        (0, 2, 1, 3)

    """
    nodes: dict[str, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(hosts[rank], []).append(rank)
    return tuple(rank for members in nodes.values() for rank in members)


@final
class CommunicateTopology:
    """Ranks on a grid of named axes, the last one fastest. Pure.

    Args:
        hybrid_group_names: the names of the axes.
        dims: how many ranks there are along each.
        ranks: the rank at each place, in C order; 0, 1, 2 ... if not given.

    Attributes:
        coordinate: the type of a coordinate: a named tuple.
        mesh: the grid, whose arithmetic it is.
        ranks: the rank at each place, in C order.

    Example:
        >>> grid = CommunicateTopology(["data", "model"], [2, 2])
        >>> grid.get_coord(2), grid.get_comm_list("data")
        (Coordinate(data=1, model=0), [[0, 2], [1, 3]])

    """

    def __init__(
        self,
        hybrid_group_names: Sequence[str] = _LONG_NAMES,
        dims: Sequence[int] = (1,) * len(_LONG_NAMES),
        *,
        ranks: Sequence[int] | None = None,
    ) -> None:
        names, sizes = _names(hybrid_group_names), _sizes(dims)
        if len(names) != len(sizes):
            raise UsageError(
                f"a grid has a size for each axis, got {len(names)} axes {names} and {len(sizes)} "
                f"sizes {sizes}"
            )
        size = math.prod(sizes)
        filling = range(size) if ranks is None else [*map(int, ranks)]
        if len(filling) != size or len(set(filling)) < size:
            told = describe_degrees(dict(zip(names, sizes, strict=True)))
            raise UsageError(
                f"{told} make {size} places, which {len(filling)} ranks do not fill, each once: "
                f"{list(filling)}"
            )
        self.mesh = ProcessMesh(dim_names=names, shape=sizes, process_ids=filling)
        self.ranks = self.mesh.ranks
        self.coordinate: Any = namedtuple("Coordinate", names)  # type: ignore[misc] # told at run time

    @property
    def degrees(self) -> dict[str, int]:
        """How many ranks there are along each axis, by its name."""
        return dict(zip(self.mesh.names, self.mesh.sizes, strict=True))

    def get_hybrid_group_names(self) -> list[str]:
        """Return the names of the axes."""
        return self.mesh.dim_names

    def get_dim(self, axis_name: str) -> int:
        """Return how many ranks there are along an axis.

        Args:
            axis_name: of the axis.

        """
        return self.mesh.sizes[self._axis(axis_name)]

    def get_dim_size(self, axis_name: str) -> int:
        """Return how many ranks there are along an axis.

        Args:
            axis_name: of the axis.

        """
        return self.get_dim(axis_name)

    def world_size(self) -> int:
        """Return how many ranks the grid has."""
        return self.mesh.size

    def get_rank(self, **args: int) -> int:
        """Return the rank at a coordinate.

        Args:
            args: the coordinate along each axis, by its name.

        """
        for name in args:
            self._axis(name)
        missing = [name for name in self.mesh.names if name not in args]
        if missing:
            raise UsageAssertionError(f"a coordinate needs {', '.join(missing)} too, got {args}")
        return self.mesh.rank_at(tuple(self._along(name, args[name]) for name in self.mesh.names))

    def get_coord(self, rank: int) -> Any:
        """Return the coordinate of a rank: a named tuple.

        Args:
            rank: one of the grid's ranks.

        """
        place = self.mesh.coordinate_of(rank)
        if place is None:
            raise UsageError(
                f"rank {rank!r} is not part of the grid {describe_degrees(self.degrees)}, whose "
                f"ranks are {shortened(self.ranks)}"
            )
        return self.coordinate(*place)

    def get_axis_list(self, axis_name: str, index: int) -> list[int]:
        """Return all ranks whose coordinate along an axis is `index`, ascending.

        Args:
            axis_name: of the axis.
            index: a coordinate along it.

        """
        at = self._along(axis_name, index)
        return sorted(self.mesh.mesh.take(at, axis=self._axis(axis_name)).reshape(-1).tolist())

    def get_comm_list(self, axis_name: str) -> list[list[int]]:
        """Return the groups along an axis, each in the order of the coordinates.

        Args:
            axis_name: of the axis.

        """
        return self.get_fused_ranks([axis_name])

    def get_fused_ranks(self, fused_axis: Sequence[str]) -> list[list[int]]:
        """Return the groups over several axes together, the last named one fastest.

        Args:
            fused_axis: names of axes, each once.

        """
        if isinstance(fused_axis, str) or not fused_axis:
            raise UsageError(f"fused axes are a list of names, got {fused_axis!r}")
        inside = [self._axis(name) for name in fused_axis]
        if len(set(inside)) < len(inside):
            raise UsageError(f"fused axes are named once each, got {list(fused_axis)}")
        outside = [axis for axis in range(self.mesh.ndim) if axis not in inside]
        size = math.prod(self.mesh.sizes[axis] for axis in inside)
        turned = self.mesh.mesh.transpose(outside + inside)
        groups: list[list[int]] = turned.reshape(-1, size).tolist()
        return groups

    def get_rank_from_stage(self, global_rank: int, **kwargs: int) -> int:
        """Return the rank at the coordinates of `global_rank`, with some of them replaced.

        Args:
            global_rank: one of the grid's ranks.
            kwargs: coordinates along other axes, by their names.

        """
        return self.get_rank(**{**self.get_coord(global_rank)._asdict(), **kwargs})

    def _axis(self, name: Any) -> int:
        return self.mesh.axis(known(name, self.mesh.names, "the grid has no axis"))

    def _along(self, name: str, index: Any) -> int:
        size = self.get_dim(name)
        try:
            at = as_integer(index)
        except TypeError:
            at = -1
        if not 0 <= at < size:
            raise UsageError(f"{name}={index!r} is not a coordinate: {name} has 0 to {size - 1}")
        return at

    def __repr__(self) -> str:
        return f"CommunicateTopology({describe_degrees(self.degrees)})"


def _names(names: Any) -> tuple[str, ...]:
    found = () if isinstance(names, str) or not isinstance(names, Sequence) else tuple(names)
    if not found or not all(isinstance(each, str) and each.isidentifier() for each in found):
        raise UsageError(f"the axes of a grid are a list of names such as ['data'], got {names!r}")
    if len(set(found)) < len(found):
        raise UsageError(f"the axes of a grid have different names, got {list(found)}")
    return found


def _sizes(dims: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(map(as_integer, dims))
    except TypeError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise UsageError(f"dims must be integers of at least 1 such as [2, 4], got {dims!r}")
    return sizes
