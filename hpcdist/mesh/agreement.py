"""`agree`: whether all ranks of a mesh mean the same. An exchange of nothing, with words."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import xxhash

from hpcdist.comm.dispatch import decline
from hpcdist.comm.exchanges import exchange
from hpcdist.comm.group import Group, world_of
from hpcdist.comm.session import current_session
from hpcdist.errors import CollectiveTimeout, HpcdistError, UsageError
from hpcdist.mesh.process_mesh import ProcessMesh, get_mesh
from hpcdist.transport.call.kinds import Kind


def agree(mesh: ProcessMesh, words: str, dtype: Any, key: int | None = None) -> None:
    """Check that all ranks of a mesh call the same, with one dtype. Collective over the mesh.

    A rank outside it goes on. `key` is what is compared, if it is known.

    Raises:
        MismatchError: two ranks differ; on every rank, with the words of all.
        RemoteError: another rank has called `refuse`.

    """
    if mesh.coordinate is None or mesh.size == 1:
        return
    try:
        group = mesh.group
    except UsageError as error:
        raise refuse(mesh, error) from None
    key = key_of(words, mesh) if key is None else key
    given, taken = np.empty((2, 0), dtype)
    exchange(given, taken, (), (), rule_op=None, key=key, words=words, group=group)


def refuse(mesh: Any, error: UsageError) -> UsageError:
    """Raise `RemoteError` on the ranks of the mesh that are in `agree`; return what to raise here.

    Collective like `agree`. Where `mesh` is what is wrong, those of the current mesh are told, or
    all ranks if there is none.
    """
    group = _whom_to_tell(mesh)
    if group is not None and group.nranks > 1:
        try:
            decline(group, Kind.EXCHANGE, error)
        except CollectiveTimeout as nobody:
            raise error from nobody
    return error


def heard(mesh: Any, compute: Callable[[], Any]) -> Any:
    """Return what a user's function gives; if it fails, the others hear of it as by `refuse`.

    What an operation of hpcdist in it has raised is known to them.
    """
    try:
        return compute()
    except HpcdistError:
        raise
    except Exception as error:
        told = UsageError(f"the function failed, {type(error).__name__}: {error}")
        told.__cause__ = error
        with suppress(HpcdistError):
            refuse(mesh, told)
        raise


def _whom_to_tell(mesh: Any) -> Group | None:
    session = current_session()
    if session is None:
        return None
    if not isinstance(mesh, ProcessMesh) or max(mesh.ranks) >= session.world.nranks:
        mesh = get_mesh()
    if mesh is None:
        return world_of(session)
    return None if mesh.coordinate is None else mesh.group


def key_of(words: str, *meshes: ProcessMesh) -> int:
    """Return a number below 2^62 that ranks have in common which say the same words of meshes.

    Words may leave out some ranks of a large mesh.
    """
    ranks = " ".join(str(mesh.ranks) for mesh in meshes)
    return xxhash.xxh3_64_intdigest(f"{words} {ranks}".encode()) >> 2
