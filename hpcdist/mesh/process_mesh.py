"""`ProcessMesh`: ranks on a grid with named axes, and the groups along its axes.

A mesh tells nothing of the rank that looks at it: meshes of equal ranks, shape and names are equal
on all ranks. What a rank has, its groups and its current mesh, is kept by its `Session`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex, cast, final

import numpy as np
import numpy.typing as npt
import xxhash

from hpcdist.boxes import position_of, strides_of
from hpcdist.comm.environment import begun_session
from hpcdist.comm.group import Group, world_of
from hpcdist.comm.making import group_of
from hpcdist.comm.session import Session, Slot, current_session
from hpcdist.errors import UsageError
from hpcdist.integers import as_integer

Coordinate = tuple[int, ...]
Index = slice | tuple[slice | int, ...] | SupportsIndex


@final
class ProcessMesh:
    """Ranks on a grid.

    Meshes are values: equal if their ranks, shape and names are. Making one is local.

    Args:
        mesh: the ranks, as nested lists or an array.
        dim_names: a name for each axis; ``d0``, ``d1`` ... if not given.
        shape: the shape of the grid, in place of `mesh`, together with `process_ids`.
        process_ids: the ranks in C order.

    Attributes:
        sizes: how many ranks there are along each axis; `shape` is the same as a list.
        ranks: the ranks in C order; `process_ids` is the same as a list.
        names: the names of the axes; `dim_names` is the same as a list.
        size: how many ranks there are.

    Example:
        >>> import hpcdist as dist
        >>> mesh = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])
        >>> mesh.get_dim_size("y"), mesh.coordinate_of(2)
        (2, (1, 0))

    """

    __slots__ = (
        "_hash",
        "_places",
        "names",
        "ndim",
        "ranks",
        "size",
        "sizes",
        "strides",
    )

    def __init__(
        self,
        mesh: Any = None,
        dim_names: Sequence[str] | None = None,
        shape: Sequence[int] | None = None,
        process_ids: Iterable[Any] | None = None,
    ) -> None:
        self.sizes, self.ranks = (
            _ranks_of(mesh) if mesh is not None else _ranks_in(shape, process_ids)
        )
        self.ndim, self.size = len(self.sizes), len(self.ranks)
        self.names = _names(dim_names, self.ndim)
        self.strides = strides_of(self.sizes)
        """How far apart in `process_ids` neighbours along each axis are."""
        self._places = dict(zip(self.ranks, np.ndindex(self.sizes), strict=True))
        self._hash = hash((self.ranks, self.sizes, self.names))

    # ---- what it is

    @property
    def shape(self) -> list[int]:
        """How many ranks there are along each axis."""
        return [*self.sizes]

    @property
    def process_ids(self) -> list[int]:
        """The ranks in C order."""
        return [*self.ranks]

    @property
    def dim_names(self) -> list[str]:
        """The names of the axes."""
        return [*self.names]

    @property
    def mesh(self) -> npt.NDArray[np.int64]:
        """The ranks as an array."""
        return np.array(self.ranks, dtype=np.int64).reshape(self.sizes)

    @property
    def unique_id(self) -> int:
        """A hash of the mesh: equal meshes have the same one on all ranks."""
        told = repr((self.ranks, self.sizes, self.names)).encode()
        return xxhash.xxh3_64_intdigest(told) >> 1

    @property
    def coordinate(self) -> Coordinate | None:
        """Where this rank is; None if it is not part of the mesh."""
        return self._places.get(begun_session().world.rank)

    def coordinate_of(self, rank: int) -> Coordinate | None:
        """Return where world rank `rank` is; None if it is not part of the mesh.

        Args:
            rank: a world rank.

        """
        return self._places.get(rank)

    def rank_at(self, coordinate: Coordinate) -> int:
        """Return the world rank at a coordinate.

        Args:
            coordinate: one integer per axis, from 0.

        """
        return self.ranks[position_of(coordinate, self.strides)]

    def coordinates(self) -> Iterable[Coordinate]:
        """Return the coordinates of the ranks, in C order."""
        return self._places.values()

    def axis(self, dim: str | int) -> int:
        """Return the number of an axis, given by name or number.

        Args:
            dim: a name, or a number; negative ones count from the end.

        """
        if isinstance(dim, str):
            if dim in self.names:
                return self.names.index(dim)
        elif not isinstance(dim, bool) and hasattr(dim, "__index__"):
            number: int = operator.index(dim)
            if -self.ndim <= number < self.ndim:
                return number % self.ndim
        raise UsageError(f"{self!r} has no axis {dim!r}; its axes are {', '.join(self.names)}")

    def get_dim_size(self, dim: str | int) -> int:
        """Return how many ranks there are along an axis.

        Args:
            dim: the axis, by name or number.

        """
        return self.sizes[self.axis(dim)]

    def get_rank_by_dim_and_process_id(self, dim: str | int, process_id: int) -> int:
        """Return where along an axis the rank `process_id` is; -1 if it is not in the mesh.

        Args:
            dim: the axis, by name or number.
            process_id: a world rank.

        """
        axis, place = self.axis(dim), self._places.get(process_id)
        return -1 if place is None else place[axis]

    # ---- parts of it

    def get_mesh_with_dim(self, dim_name: str, index: Index | None = None) -> ProcessMesh:
        """Return the mesh with one axis moved to the front, or the part of that at `index`.

        Args:
            dim_name: the axis that becomes the first one.
            index: a coordinate along it, a slice, or a tuple of these for several axes; None for
                all.

        """
        first = self.axis(dim_name)
        order = [first, *(axis for axis in range(self.ndim) if axis != first)]
        turned = ProcessMesh(self.mesh.transpose(order), [self.names[axis] for axis in order])
        return turned if index is None else turned[index]

    def get_submesh_with_dim(self, dim_name: str) -> ProcessMesh:
        """Return the mesh of the ranks along one axis through this rank.

        Args:
            dim_name: the axis.

        Raises:
            UsageError: this rank is not part of the mesh.

        """
        axis = self.axis(dim_name)
        place = self._own_place(f"get_submesh_with_dim({dim_name!r})")
        return ProcessMesh(self._line(axis, place), [self.names[axis]])

    def __getitem__(self, index: Index) -> ProcessMesh:
        items = index if isinstance(index, tuple) else (index,)
        if len(items) > self.ndim or not all(
            isinstance(each, slice) or (hasattr(each, "__index__") and not isinstance(each, bool))
            for each in items
        ):
            raise UsageError(
                f"{self!r} is indexed by at most {self.ndim} integers and slices, got {index!r}"
            )
        kept = [
            axis
            for axis in range(self.ndim)
            if axis >= len(items) or isinstance(items[axis], slice)
        ]
        try:
            part = self.mesh[items]
        except IndexError as error:
            raise UsageError(f"{self!r} has no part {index!r}: {error}") from None
        if not kept:  # a mesh has an axis: that of the last index
            return ProcessMesh([int(part)], self.names[-1:])
        return ProcessMesh(part, [self.names[axis] for axis in kept])

    # ---- groups

    def get_group(self, dim_name: str | int | None = None) -> Group:
        """Return the group of the ranks along an axis through this rank, ascending.

        Made by the first call, collective over these ranks; meshes with equal ranks along an axis
        share it, and all ranks in order are the world. It lives until `destroy_process_group`.

        Args:
            dim_name: the axis, by name or number; None where there is only one.

        Raises:
            UsageError: this rank is not part of the mesh, or the mesh has several axes and no name
                is given.

        """
        if dim_name is None:
            if self.ndim > 1:
                raise UsageError(
                    "You should specify the dim_name when the ProcessMesh has more than one "
                    f"dimensions. {self!r} has {', '.join(self.names)}"
                )
            dim_name = 0
        return self._group(self.axis(dim_name))

    @property
    def group(self) -> Group:
        """The group of all ranks of the mesh, ascending; made like those of `get_group`."""
        return self._group(None)

    def _group(self, axis: int | None) -> Group:
        session = begun_session()
        found: Group | None = session[_GROUPS].get((self, axis))
        if found is None or found.is_closed:
            self._check_ranks(session)
            place = self._own_place("a group")
            ranks = tuple(sorted(self._line(axis, place)))
            found = session[_GROUPS][self, axis] = _group_of(session, ranks)
        return found

    @property
    def crosses_nodes(self) -> tuple[bool, ...]:
        """For each axis, whether any ranks along it are on different nodes.

        The same on all ranks.
        """
        session = begun_session()
        found = session[_CROSSING].get(self)
        if found is None:
            self._check_ranks(session)
            hosts = [each.rpartition(":")[0] for each in session.whereabouts.endpoints]
            nodes = np.unique(hosts, return_inverse=True)[1][self.mesh]
            found = session[_CROSSING][self] = tuple(
                bool((np.ptp(nodes, axis=axis) > 0).any()) for axis in range(self.ndim)
            )
        return found

    def _check_ranks(self, session: Session) -> None:
        size = session.world.nranks
        if max(self.ranks) >= size:
            raise UsageError(
                f"{self!r} has rank {max(self.ranks)}, but the world has ranks 0 to "
                f"{size - 1}; start as many ranks as the mesh has, or make a smaller mesh"
            )

    def _line(self, axis: int | None, place: Coordinate) -> tuple[int, ...]:
        """Return the ranks along an axis (None: all ranks) through a place."""
        if axis is None:
            return self.ranks
        ahead, behind = place[:axis], place[axis + 1 :]
        return tuple(self.rank_at((*ahead, step, *behind)) for step in range(self.sizes[axis]))

    def _own_place(self, what: str) -> Coordinate:
        place = self.coordinate
        if place is None:
            raise UsageError(
                f"{what} was asked of {self!r}, which rank {begun_session().world.rank} is not "
                "part of; let the ranks of the mesh alone do it"
            )
        return place

    # ---- the current mesh

    def __enter__(self) -> ProcessMesh:
        begun_session()[_CURRENT].append(self)
        return self

    def __exit__(self, *_: object) -> None:
        session = current_session()
        if session is not None and session[_CURRENT]:
            session[_CURRENT].pop()

    # ---- a value

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, ProcessMesh):
            return NotImplemented
        return (
            self._hash == other._hash
            and self.ranks == other.ranks
            and self.sizes == other.sizes
            and self.names == other.names
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcessMesh, (None, self.names, self.sizes, self.ranks)

    def __copy__(self) -> ProcessMesh:
        return self

    def __deepcopy__(self, memo: Any) -> ProcessMesh:
        return self

    def __repr__(self) -> str:
        axes = [f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True)]
        if self.ranks != tuple(range(self.size)):
            axes.append(f"ranks [{shortened(self.ranks)}]")
        return f"ProcessMesh({', '.join(axes)})"


def shortened(numbers: Sequence[int]) -> str:
    """Return numbers as words; of many, the first ones and the last."""
    shown = [*map(str, numbers[:_SHOWN])]
    if len(numbers) > _SHOWN:
        shown[-2:] = ["...", str(numbers[-1])]
    return ", ".join(shown)


_CURRENT: Slot[list[ProcessMesh]] = Slot(list)
"""The current mesh, last, and those of the blocks around."""
_GROUPS: Slot[dict[tuple[ProcessMesh, int | None], Group]] = Slot(dict)
"""Of a mesh along an axis; None: of all its ranks."""
_GROUPS_OF_RANKS: Slot[dict[tuple[int, ...], Group]] = Slot(dict)
_CROSSING: Slot[dict[ProcessMesh, tuple[bool, ...]]] = Slot(dict)
"""What `crosses_nodes` returns."""

_SHOWN = 16
"""Numbers that are written out."""


def get_mesh() -> ProcessMesh | None:
    """Return the mesh of the innermost ``with mesh:``, or what `set_mesh` has set, or None.

    Example:
        >>> import hpcdist as dist
        >>> def current():
        ...     with dist.ProcessMesh([0, 1], dim_names=["x"]):
        ...         return dist.get_mesh().dim_names
        >>> dist.simulate(2, current)
        [['x'], ['x']]

    """
    session = current_session()
    meshes = [] if session is None else session[_CURRENT]
    return meshes[-1] if meshes else None


def set_mesh(mesh: ProcessMesh) -> None:
    """Make `mesh` what `get_mesh` returns on this rank, until `destroy_process_group`.

    Inside ``with mesh:`` it is so until the end of the block. Local.

    Args:
        mesh: the mesh.

    Example:
        >>> import hpcdist as dist
        >>> def current():
        ...     mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
        ...     dist.set_mesh(mesh)
        ...     return dist.get_mesh() == mesh
        >>> dist.simulate(2, current)
        [True, True]

    """
    if not isinstance(mesh, ProcessMesh):
        raise UsageError(f"set_mesh takes a ProcessMesh, got {mesh!r}")
    begun_session()[_CURRENT][-1:] = [mesh]


def create_mesh(mesh_dims: Sequence[tuple[str, int]]) -> ProcessMesh:
    """Make a mesh of the ranks 0, 1, 2 ... in C order, `set_mesh` it and return it. Local.

    Args:
        mesh_dims: a name and a size for each axis.

    Example:
        >>> import hpcdist as dist
        >>> def middle():
        ...     return dist.create_mesh([("dp", 2), ("mp", 2)]).shape
        >>> dist.simulate(4, middle)[0]
        [2, 2]

    """
    try:
        names, sizes = [name for name, _ in mesh_dims], [size for _, size in mesh_dims]
    except (TypeError, ValueError):
        raise UsageError(
            f"mesh_dims must be a list such as [('x', 2), ('y', 4)], got {mesh_dims!r}"
        ) from None
    mesh = ProcessMesh(dim_names=names, shape=sizes)
    set_mesh(mesh)
    return mesh


# ---- arguments


def _ranks_of(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    try:
        ranks = np.asarray(mesh)
    except ValueError:  # lists of different lengths
        ranks = np.asarray(None)
    if ranks.dtype.kind not in "iu" or not ranks.ndim or not ranks.size:
        raise UsageError(
            "The mesh must be an instance of list or np.ndarray, of at least one rank and with "
            f"rows of equal length, got {mesh!r}"
        )
    return ranks.shape, _distinct(ranks.reshape(-1).tolist())


def _ranks_in(shape: Any, process_ids: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sizes = () if shape is None else _integers(shape, "shape")
    if not sizes or min(sizes) < 1:
        raise UsageError(
            f"a mesh needs its ranks, or a shape of positive integers, got shape={shape!r}"
        )
    count = math.prod(sizes)
    ids = tuple(range(count)) if process_ids is None else _integers(process_ids, "process_ids")
    if len(ids) != count:
        raise UsageError(f"process_ids {list(ids)} do not fill a mesh of shape {list(sizes)}")
    return sizes, _distinct(ids)


def _integers(values: Any, what: str) -> tuple[int, ...]:
    try:
        values = [*values]
        return tuple(map(as_integer, values))
    except TypeError:
        raise UsageError(f"{what} must be integers such as [2, 4], got {values!r}") from None


def _distinct(ranks: Sequence[int]) -> tuple[int, ...]:
    if min(ranks) < 0:
        raise UsageError(f"the ranks of a mesh are at least 0, got {min(ranks)}")
    if len(set(ranks)) < len(ranks):
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        raise UsageError(f"a mesh has each rank once, got more of {twice}")
    return tuple(ranks)


def _names(names: Any, count: int) -> tuple[str, ...]:
    if names is None:
        return tuple(f"d{axis}" for axis in range(count))
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise UsageError(f"dim_names must be a list of strings, got {names!r}")
    if len(names) != count or not all(isinstance(each, str) and each for each in names):
        raise UsageError(
            f"dim_names must be {count} strings, one for each axis of the mesh, got {names!r}"
        )
    if len(set(names)) < count:
        raise UsageError(f"all dim_names must be different, got {names!r}")
    return tuple(names)


def _group_of(session: Session, ranks: tuple[int, ...]) -> Group:
    """Return the group of ascending world ranks; it is made if there is none yet."""
    world = world_of(session)
    if len(ranks) == world.nranks:
        return world
    found = session[_GROUPS_OF_RANKS].get(ranks)
    if found is None or found.is_closed:
        found = session[_GROUPS_OF_RANKS][ranks] = cast(Group, group_of([*ranks]))
    return found
