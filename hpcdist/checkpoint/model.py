"""`save_group_sharded_model`: a sharded model and its optimizer as a checkpoint."""

from __future__ import annotations

import os
from typing import Any

from hpcdist.checkpoint.objects import is_object
from hpcdist.checkpoint.saving import save
from hpcdist.comm.group import Group
from hpcdist.errors import UsageError


def save_group_sharded_model(
    model: Any,
    output: str | os.PathLike[str],
    optimizer: Any = None,
    *,
    group: Group | None = None,
) -> None:
    """Write a sharded model, and its optimizer, to the folder `output`. Collective.

    Nothing is gathered: each rank writes what it owns. The checkpoint has the keys ``model`` and
    ``optimizer``; it can be loaded on any number of ranks, sharded at any level or not at all, by
    ``hpcdist.checkpoint.load({"model": model, "optimizer": optimizer}, output)``.

    Args:
        model: what `group_sharded_parallel` returned, or anything with ``state_dict()``.
        output: a folder; it is made, and an older checkpoint in it is replaced.
        optimizer: of the model; None to save the model alone.
        group: all ranks that train it; None for all of the job.

    Raises:
        UsageError: `model` or `optimizer` has no state.
        CheckpointError: it cannot be written; on every rank, and what was there is unchanged.

    """
    state = {"model": _checked(model, "model")}
    if optimizer is not None:
        state["optimizer"] = _checked(optimizer, "optimizer")
    save(state, output, group)


def _checked(thing: Any, what: str) -> Any:
    """Return an object whose state `save` takes, or its state."""
    if is_object(thing):
        return thing
    if hasattr(thing, "state_dict"):
        return thing.state_dict()
    raise UsageError(
        f"{what} is a {type(thing).__name__}, which has no state_dict(); pass what "
        "group_sharded_parallel returned"
    )
