"""Paddle's names: states by `save_state_dict` and `load_state_dict`, and sharded models."""

from __future__ import annotations

import os
from typing import Any

from hpcdist.checkpoint.loading import load_into, what_is_wanted
from hpcdist.checkpoint.objects import is_object
from hpcdist.checkpoint.reading import read_arrays
from hpcdist.checkpoint.saving import save
from hpcdist.checkpoint.storage import data_files, named, open_checkpoint
from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.text import an
from hpcdist.transport.waiting.work import Work

_METHODS = ("send_recv", "broadcast", "multi_group_broadcast", "grouped_send_recv")


def save_state_dict(
    state_dict: Any,
    path: str | os.PathLike[str],
    process_group: Group | None = None,
    coordinator_rank: int = 0,
    unique_id: int | None = None,
    async_save: bool = False,
    safetensors: bool = False,
    save_replicas: bool = False,
) -> Work:
    """Write a state to a folder, as `hpcdist.checkpoint.save` does. Collective.

    Args:
        state_dict: arrays, `LocalSlice`s and values, nested as you like.
        path: a folder.
        process_group: the ranks that hold the state; None for all.
        coordinator_rank: the world rank that looks at the folder and decides.
        unique_id: makes `path` a series of checkpoints, of which this is one.
        async_save: return when the state has been copied; `wait` for the work.
        safetensors: the format of the data, which it always is.
        save_replicas: accepted; an array that several ranks have is still written once.

    Example:
        >>> import tempfile, numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = dist.save_state_dict({"w": np.ones(3)}, folder)

    """
    return save(
        state_dict,
        path,
        process_group,
        step=unique_id,
        async_save=bool(async_save),
        coordinator_rank=coordinator_rank,
    )


def load_state_dict(
    state_dict: Any,
    path: str | os.PathLike[str],
    process_group: Group | None = None,
    coordinator_rank: int = 0,
    unique_id: int | None = None,
    offload: bool = False,
    mw_name_compatibility: bool = True,
    aoa_config: dict[str, list[str]] | None = None,
    safetensors: bool = False,
    worker_groups: list[Group] | None = None,
    comm_method: str = "broadcast",
) -> None:
    """Fill a state from a checkpoint, as `hpcdist.checkpoint.load` does. Collective.

    The state may want less than was saved; all that it wants must be there.

    Args:
        state_dict: arrays and `LocalSlice`s are filled, values replaced.
        path: the folder given to `save_state_dict`.
        process_group: the ranks that load; None for all.
        coordinator_rank: the world rank that looks at the folder and decides.
        unique_id: this checkpoint of a series; None for the last one.
        offload: accepted: what is read passes through host memory, block by block.
        mw_name_compatibility: accepted: names are compared as they are.
        aoa_config: not supported: arrays keep their names and shapes.
        safetensors: the format of the data, which it always is.
        worker_groups: accepted: each rank reads what it needs, and nothing is sent.
        comm_method: accepted, as above.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it has other arrays, shapes or
            dtypes; on every rank.

    Example:
        >>> import tempfile, numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> state = {"w": np.zeros(3)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = dist.save_state_dict({"w": np.ones(3)}, folder)
        ...     dist.load_state_dict(state, folder)
        >>> state["w"]
        array([1., 1., 1.])

    """
    _refuse_changes(aoa_config)
    if comm_method not in _METHODS:
        raise UsageError(f"comm_method must be one of {', '.join(_METHODS)}, got {comm_method!r}")
    load_into(
        state_dict,
        path,
        process_group,
        unique_id,
        what_is_wanted,
        coordinator_rank=coordinator_rank,
    )


def load_merged_state_dict(
    path: str | os.PathLike[str],
    prefix: str | None = None,
    unique_id: int | None = None,
    offload: bool = False,
    aoa_config: dict[str, list[str]] | None = None,
    safetensors: bool = False,
) -> dict[str, Any]:
    """Return the whole arrays of a checkpoint by name, as NumPy arrays. Local: one process reads.

    Args:
        path: the folder given to `save_state_dict`.
        prefix: only arrays whose names begin with it, as ``model.layers``.
        unique_id: this checkpoint of a series; None for the last one.
        offload: accepted: the arrays are in host memory.
        aoa_config: not supported: arrays keep their names and shapes.
        safetensors: the format of the data, which it always is.

    Example:
        >>> import tempfile, numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = dist.save_state_dict({"w": np.ones(3)}, folder)
        ...     print(dist.load_merged_state_dict(folder))
        {'w': array([1., 1., 1.])}

    """
    _refuse_changes(aoa_config)
    folder, manifest = open_checkpoint(named(path), unique_id)
    names = [name for name in manifest.arrays if name.startswith(prefix or "")]
    with data_files(folder, manifest) as files:
        return read_arrays(files, manifest, names)


def _refuse_changes(aoa_config: Any) -> None:
    if aoa_config:
        raise UsageError(
            "aoa_config is not supported: arrays are loaded under the names and in the shapes with "
            "which they were saved; rename and reshape what load(None, path) returns"
        )


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

    Example:
        >>> import tempfile, numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> class Model:
        ...     w = dist.Parameter(np.ones(3))
        ...     def named_parameters(self):
        ...         yield "w", self.w
        >>> optimizer = dist.optim.Adam(Model().named_parameters())
        >>> model, optimizer, _ = dist.group_sharded_parallel(Model(), optimizer, "os_g")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     dist.save_group_sharded_model(model, folder, optimizer)

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
        f"{what} is {an(type(thing).__name__)}, which has no state_dict(); pass what "
        "group_sharded_parallel returned"
    )
