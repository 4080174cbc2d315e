"""Which ranks a layer is cut over: a group that is given, or that along an axis of the grid."""

from __future__ import annotations

from hpcdist.comm.group import Group
from hpcdist.comm.session import resolve_group
from hpcdist.errors import UsageError
from hpcdist.parallel.hybrid import current_grid


def axis_group(axis: str, given: Group | None) -> Group:
    """Return `given`, or for None the group along an axis of the current grid.

    Collective over that axis where its group is asked for the first time.

    Raises:
        UsageError: there is no grid, or this rank is not in the group.

    """
    grid = current_grid()
    if given is None and grid is None:
        raise UsageError(
            f"there is no grid whose axis {axis!r} this layer could be cut over; call "
            f"fleet.init({axis}=...) before it is made, or give {axis}_group="
        )
    group = resolve_group(given) if grid is None or given is not None else grid[axis]
    if not group.is_member():
        raise UsageError(
            f"rank {group.world_rank} is not in group {group.name} (ranks {group.ranks}); let only "
            "its members do this"
        )
    return group


def check_even(size: int, group: Group, what: str, axis: str = "mp") -> None:
    """Refuse a size that the ranks of a group cannot have equal parts of."""
    check_size(size, what)
    ranks = group.nranks
    if size % ranks:
        fitting = -(-size // ranks) * ranks
        raise UsageError(
            f"{what} ({size}) must be divisible by the {ranks} ranks of {axis}; make it {fitting}, "
            f"or choose a degree of {axis} that divides {size}"
        )


def check_size(size: int, what: str) -> None:
    """Refuse what is no size."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UsageError(f"{what} must be a positive integer, got {size!r}")
