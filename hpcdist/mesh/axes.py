"""`model_line`: the ranks that share one model, as far as a program has said which they are."""

from __future__ import annotations

from hpcdist.comm.environment import begun_session
from hpcdist.errors import UsageError
from hpcdist.mesh.process_mesh import ProcessMesh, get_mesh

MODEL = "mp"
"""The axis along which layers are cut."""


def model_line(caller: str) -> ProcessMesh:
    """Return the mesh of the ranks along ``"mp"`` through this rank, or along the only axis.

    It is that of the current mesh (`set_mesh`), of the grid of hybrid training, or else of all
    ranks in a row. Local.

    Raises:
        UsageError: this rank is not part of it, or which axis is meant is not clear.

    """
    session = begun_session()
    grid = getattr(session, "grid", None)
    mesh = get_mesh() or (ProcessMesh(session.world.ranks, [MODEL]) if grid is None else grid.mesh)
    return mesh.get_submesh_with_dim(mesh.names[model_axis(mesh, caller)])


def whole_line(parts: int) -> ProcessMesh | None:
    """Return all ranks of the grid in a row, if they are `parts` and only dp divides them. Local.

    So it is after a bare ``fleet.init``, which says nothing of layers that are cut.
    """
    grid = getattr(begun_session(), "grid", None)
    if get_mesh() is not None or grid is None or grid.degree("dp") != parts:
        return None
    ranks = grid.mesh.group.ranks
    return ProcessMesh(ranks, [MODEL]) if len(ranks) == parts else None


def model_axis(mesh: ProcessMesh, caller: str) -> int:
    """Return the number of the axis ``"mp"`` of a mesh, or of its only one."""
    if MODEL in mesh.names:
        return mesh.names.index(MODEL)
    if mesh.ndim > 1:
        raise UsageError(
            f"{caller} cuts over the axis {MODEL!r}, but {mesh!r} has {', '.join(mesh.names)}; "
            f"name one of them {MODEL!r}, or set_mesh a part of it"
        )
    return 0
