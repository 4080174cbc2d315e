"""`Save`: one of the saves of tables at a path, and how they follow each other.

A save names itself by a token, and says after which one it has what has changed. So a delta is
never laid over rows that it does not go on from.
"""

from __future__ import annotations

from typing import Any

from hpcdist.checkpoint.manifest import Manifest
from hpcdist.checkpoint.nodes import build, children
from hpcdist.checkpoint.storage import read_manifest, step_folder, steps_of
from hpcdist.errors import CheckpointError
from hpcdist.named_tuple import NamedTuple

PARTS = ("ids", "rows", "state", "counters")
WAITING = ("waiting", "pushes")
"""Ids that have no row yet, and how often they were pushed."""

REMOVED = ("removed",)
"""Ids that a delta takes away: evicted, shrunk or removed since the save before."""

_TOLD = ("token", "after", "last")


class Save(NamedTuple):
    """What a save tells of itself.

    `after` is the token of the save that it goes on from; None: it has all rows. `last` has, by
    table, the token of the last save with that table in it.
    """

    step: int
    manifest: Manifest
    token: str
    after: str | None
    last: dict[str, str]

    @property
    def names(self) -> list[str]:
        """Names of the tables that are in it."""
        return sorted(each[7:-4] for each in self.manifest.arrays if each.endswith(".dim"))

    def has(self, name: str) -> bool:
        """Return whether a table is in it."""
        return f"tables.{name}.dim" in self.manifest.arrays


def content_of(tables: dict[str, Any], token: str, before: Save | None) -> dict[str, Any]:
    """Return what is saved: arrays by table, and what the save tells of itself.

    Args:
        tables: arrays by name, by table.
        token: of the save.
        before: the save that it goes on from; None: it has all rows.

    """
    last = {**({} if before is None else before.last), **dict.fromkeys(tables, token)}
    after = None if before is None else before.token
    return {"tables": tables, **dict(zip(_TOLD, (token, after, last), strict=True))}


def read_save(path: str, step: int) -> Save:
    """Return a save at a path.

    Raises:
        CheckpointError: it cannot be read, or is not of tables.

    """
    folder = step_folder(path, step)
    manifest = read_manifest(folder)
    nodes = dict(children(manifest.structure))
    if not {*_TOLD} <= {*nodes}:
        raise CheckpointError(f"{folder} is a checkpoint, but not a save of tables")
    return Save(step, manifest, *(build(nodes[each], lambda kind, name: name) for each in _TOLD))


def last_save(path: str) -> Save | None:
    """Return the last save at a path; None where there is none that can be gone on from."""
    steps = steps_of(path)
    try:
        return read_save(path, steps[-1]) if steps else None
    except CheckpointError:
        return None


def series_of(path: str) -> list[Save]:
    """Return the saves to be read, oldest first: the last whole one and the deltas after it.

    Raises:
        CheckpointError: there is none, or one between two others is missing.

    """
    found: list[Save] = []
    for step in reversed(steps_of(path)):
        save = read_save(path, step)
        if found and found[0].after != save.token:
            raise _missing(path, found[0], f"the one before it is {step_folder(path, step)}")
        found.insert(0, save)
        if save.after is None:
            return found
    if found:
        raise _missing(path, found[0], "it is the first one there")
    raise CheckpointError(f"there is no whole save of tables in {path}")


def _missing(path: str, save: Save, told: str) -> CheckpointError:
    return CheckpointError(
        f"the save {step_folder(path, save.step)} has only the changes since one that is "
        f"missing: {told}. Bring the missing one back; or move this one and those after it away, "
        "to load what was saved before"
    )
