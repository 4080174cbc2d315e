"""`agree`: whether all ranks of a mesh mean the same, and what each says if they do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from hpcdist.comm import describe
from hpcdist.comm.dispatch import dispatch
from hpcdist.comm.group import Group
from hpcdist.comm.objects import all_gather_object
from hpcdist.comm.tensor_lists import cannot
from hpcdist.errors import MismatchError, UsageError
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.transport.call import Call, Kind
from hpcdist.transport.reduction import ReduceOp


def agree(mesh: ProcessMesh, words: str) -> None:
    """Make sure that all ranks of a mesh say the same words. Collective over the mesh.

    A rank outside it goes on.

    Raises:
        MismatchError: two ranks differ; on every rank, with the words of both.
        RemoteError: another rank has called `refuse`.

    """
    if mesh.coordinate is None or mesh.size == 1:
        return
    group, mark = mesh.group, key_of(f"{words} {mesh.process_ids}")
    extremes = np.array([mark, -mark])
    dispatch(group, True, describe.all_reduce, extremes, ReduceOp.MIN)
    if extremes[0] != -extremes[1]:
        everyone: list[str] = []
        all_gather_object(everyone, words, group)
        raise MismatchError(difference(everyone, group))


def refuse(mesh: ProcessMesh, error: UsageError) -> UsageError:
    """Raise `RemoteError` on the ranks of the mesh that are in `agree`; return what to raise here.

    Collective like `agree`.
    """
    if mesh.coordinate is not None and mesh.size > 1:
        dispatch(mesh.group, True, _describe_refusal, error)
    return error


def _describe_refusal(group: Group, error: UsageError) -> Call:
    return cannot(Kind.ALL_REDUCE, group, error)


def key_of(words: str) -> int:
    """Return a number from 0 to 2^62 that is equal on all ranks that say the same words."""
    return xxhash.xxh3_64_intdigest(words.encode()) >> 2


def difference(everyone: list[Any], group: Group) -> str:
    """Return in words where what the ranks of a group say first differs."""
    rank, other = next(
        (rank, said)
        for rank, said in zip(group.ranks, everyone, strict=True)
        if said != everyone[0]
    )
    return (
        f"the ranks of the mesh do not mean the same array: rank {group.ranks[0]} has "
        f"{everyone[0]}, but rank {rank} has {other}. Give the same shape, dtype, mesh and "
        "placements on every rank"
    )
