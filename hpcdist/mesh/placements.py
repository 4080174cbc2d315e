"""`Shard`, `Replicate`, `Partial`: what one axis of a mesh does to an array. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import final

from hpcdist.errors import UsageError
from hpcdist.integers import integer
from hpcdist.mesh.process_mesh import ProcessMesh


class ReduceType(IntEnum):
    """How the contributions of a `Partial` become one value.

    Example:
        >>> import hpcdist as dist
        >>> dist.Partial(dist.ReduceType.kRedMax)
        Partial(kRedMax)

    """

    kRedSum = 0
    kRedMax = 1
    kRedMin = 2
    kRedProd = 3
    kRedAvg = 4
    kRedAny = 5
    kRedAll = 6


class Placement:
    """How one axis of a mesh spreads an array: `Shard`, `Replicate` or `Partial`."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Return whether the axis cuts the array (along dimension `dim`, if given).

        Args:
            dim: a dimension of the array; None for any.

        """
        return False

    def is_replicated(self) -> bool:
        """Return whether the ranks along the axis hold the same."""
        return False

    def is_partial(self) -> bool:
        """Return whether the ranks along the axis hold contributions to the value."""
        return False


@final
@dataclass(frozen=True, slots=True, init=False, repr=False)
class Shard(Placement):
    """The axis cuts the array along one dimension.

    Each part has ``ceil(length / ranks)`` elements, as long as there are enough: 5 elements
    over 4 ranks are 2, 2, 1 and 0. Where several axes cut the same dimension, the first axis of
    the mesh cuts first and the next one cuts its parts; the keywords change that.

    Args:
        dim: the dimension; negative ones count from the end.
        co_shard_order: a number: of the axes that cut this dimension those with smaller numbers
            cut first. None is 0; those with equal numbers cut in the order of the mesh.
        split_factor: into how many parts later axes of the mesh have cut the dimension before
            this one cuts it.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def part():
        ...     mesh = dist.ProcessMesh([0, 1, 2], dim_names=["x"])
        ...     return dist.shard_tensor(np.arange(7), mesh, [dist.Shard(0)]).local.tolist()
        >>> dist.simulate(3, part)
        [[0, 1, 2], [3, 4, 5], [6]]

    """

    dim: int
    co_shard_order: int | None
    split_factor: int | None

    def __init__(
        self, dim: int, *, co_shard_order: int | None = None, split_factor: int | None = None
    ) -> None:
        order = None if co_shard_order is None else integer(co_shard_order, "co_shard_order")
        factor = None if split_factor is None else integer(split_factor, "split_factor")
        if order is not None and order < 0:
            raise UsageError(f"co_shard_order must be at least 0, got {order}")
        if factor is not None and factor < 1:
            raise UsageError(f"split_factor must be at least 1, got {factor}")
        if order is not None and factor not in (None, 1):
            raise UsageError(
                "co_shard_order and split_factor both say when an axis cuts; give one of them, "
                f"got {order} and {factor}"
            )
        object.__setattr__(self, "dim", integer(dim, "dim"))
        object.__setattr__(self, "co_shard_order", order)
        object.__setattr__(self, "split_factor", factor)

    def is_shard(self, dim: int | None = None) -> bool:
        """Return whether the axis cuts the array (along dimension `dim`, if given).

        Args:
            dim: a dimension of the array; None for any.

        """
        return dim is None or dim == self.dim

    def get_dim(self) -> int:
        """Return the dimension."""
        return self.dim

    def get_co_shard_order(self) -> int:
        """Return the position of the axis among those that cut the same dimension."""
        return self.co_shard_order or 0

    def get_split_factor(self) -> int:
        """Return into how many parts later axes cut the dimension before this one does."""
        return self.split_factor or 1

    def __repr__(self) -> str:
        keywords = "".join(
            f", {name}={value}"
            for name in ("co_shard_order", "split_factor")
            if (value := getattr(self, name)) is not None
        )
        return f"Shard({self.dim}{keywords})"


@final
@dataclass(frozen=True, slots=True, repr=False)
class Replicate(Placement):
    """The ranks along the axis hold the same.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def part():
        ...     mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
        ...     return dist.shard_tensor(np.arange(3), mesh, [dist.Replicate()]).local.tolist()
        >>> dist.simulate(2, part)
        [[0, 1, 2], [0, 1, 2]]

    """

    def is_replicated(self) -> bool:
        """Return True."""
        return True

    def __repr__(self) -> str:
        return "Replicate()"


@final
@dataclass(frozen=True, slots=True, init=False, repr=False)
class Partial(Placement):
    """The ranks along the axis hold contributions, to be reduced by `reduce_type`.

    Args:
        reduce_type: a `ReduceType`; the sum if not given.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def total():
        ...     mesh = dist.ProcessMesh([0, 1, 2], dim_names=["x"])
        ...     mine = np.array([dist.get_rank() + 1])
        ...     a = dist.dtensor_from_local(mine, mesh, [dist.Partial()])
        ...     return dist.reshard(a, mesh, [dist.Replicate()]).local.tolist()
        >>> dist.simulate(3, total)
        [[6], [6], [6]]

    """

    reduce_type: ReduceType

    def __init__(self, reduce_type: ReduceType = ReduceType.kRedSum) -> None:
        try:
            kind = ReduceType(reduce_type)
        except ValueError:
            names = ", ".join(ReduceType.__members__)
            raise UsageError(
                f"reduce_type must be one of ReduceType's {names}, got {reduce_type!r}"
            ) from None
        object.__setattr__(self, "reduce_type", kind)

    def is_partial(self) -> bool:
        """Return True."""
        return True

    def __repr__(self) -> str:
        return f"Partial({self.reduce_type.name})"


@final
class DistAttr:
    """A mesh and, for each dimension of an array, the name of the axis that cuts it, or None.

    Args:
        mesh: the mesh.
        sharding_specs: for each dimension the name of an axis, or None.

    Attributes:
        process_mesh: the mesh.
        sharding_specs: the names.
        placements: the same, as a placement for each axis of the mesh.
        dims_mapping: the same, as the number of the axis for each dimension, or -1.

    Example:
        >>> import hpcdist as dist
        >>> mesh = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])
        >>> dist.DistAttr(mesh, ["y", None]).placements
        [Replicate(), Shard(0)]

    """

    __slots__ = ("dims_mapping", "placements", "process_mesh", "sharding_specs")

    def __init__(self, mesh: ProcessMesh, sharding_specs: Sequence[str | None]) -> None:
        if not isinstance(mesh, ProcessMesh):
            raise UsageError(f"The mesh must be an instance of ProcessMesh, got {mesh!r}")
        if isinstance(sharding_specs, str) or not isinstance(sharding_specs, Sequence):
            raise UsageError(
                "The sharding_specs must be a list with a name or None for each dimension, got "
                f"{sharding_specs!r}"
            )
        used: dict[str, int] = {}
        for dim, name in enumerate(sharding_specs):
            if name is None:
                continue
            if name not in mesh.names:
                raise UsageError(
                    f"Invalid sharding dimension {name!r}. Available dimensions in mesh are: "
                    f"{list(mesh.names)}"
                )
            if used.setdefault(name, dim) != dim:
                raise UsageError(
                    f"sharding_specs={list(sharding_specs)} names {name!r} twice: an axis of a "
                    "mesh cuts one dimension"
                )
        self.process_mesh = mesh
        self.sharding_specs = list(sharding_specs)
        self.dims_mapping = [
            -1 if name is None else mesh.names.index(name) for name in sharding_specs
        ]
        self.placements: list[Placement] = [
            Shard(used[name]) if name in used else Replicate() for name in mesh.names
        ]

    def __repr__(self) -> str:
        return f"DistAttr({self.process_mesh!r}, {self.sharding_specs})"
