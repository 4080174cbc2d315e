"""`shard_layer` for models of arrays: trees whose arrays become arrays across ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcdist.arrays.dtypes import dtype_row
from hpcdist.arrays.libraries import view_of
from hpcdist.arrays.trees import leaves, with_leaves
from hpcdist.comm.states import verifying
from hpcdist.errors import UsageError
from hpcdist.mesh.agreement import refuse
from hpcdist.mesh.api import shard_tensor
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.placements import Placement
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.parallel.module_state import broadcast_states
from hpcdist.parallel.parameter import Parameter

NUMBERS = (bool, int, float, complex, str, bytes)


def shard_tree(
    tree: Any, mesh: ProcessMesh, shard_fn: Callable[[str, Any, ProcessMesh], Any] | None
) -> Any:
    """Return a tree of arrays as one of arrays across ranks; see `shard_layer`. Collective."""
    found = leaves(tree)
    values: dict[str, Any] = {}
    with verifying(mesh.group, "array") as alike:
        for path, leaf in found:
            if _is_ordinary(leaf):
                values[path] = copied = _data(leaf).copy()
                alike.append((path, copied.shape, dtype_row(copied.dtype).name))
    broadcast_states([*values.values()], mesh.group, mesh.group.ranks[0])
    return with_leaves(
        tree,
        [
            _spread(path, leaf, values[path], mesh, shard_fn) if path in values else leaf
            for path, leaf in found
        ],
    )


def _is_ordinary(leaf: Any) -> bool:
    """Return whether a leaf is an array that every rank has, or what may be one."""
    return not isinstance(leaf, (*NUMBERS, DistArray))


def _data(leaf: Any) -> Any:
    return view_of(leaf.data if isinstance(leaf, Parameter) else leaf)


def _spread(path: str, leaf: Any, value: Any, mesh: ProcessMesh, shard_fn: Any) -> DistArray:
    """Return a leaf as an array across ranks, as `shard_fn` says."""
    told: Any = None
    if shard_fn is not None:
        given = Parameter(value, leaf.requires_grad) if isinstance(leaf, Parameter) else value
        told = shard_fn(path, given, mesh)
    if isinstance(told, DistArray):
        return told
    if told is None or _are_placements(told):
        return shard_tensor(value, mesh, told or [])
    wrong = UsageError(
        f"shard_fn must return the placements of {path}, a DistArray or None, got {told!r}"
    )
    raise refuse(mesh, wrong)


def _are_placements(told: Any) -> bool:
    return isinstance(told, (list, tuple)) and all(isinstance(each, Placement) for each in told)
