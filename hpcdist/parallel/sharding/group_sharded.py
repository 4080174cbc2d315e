"""`group_sharded_parallel`: one call that shards a model's training state over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.engines import ARRAYS, engine_for
from hpcdist.parallel.options import training_group
from hpcdist.parallel.sharding.engine import LEVELS, Level
from hpcdist.parallel.sharding.gradients import ShardGroups
from hpcdist.parallel.virtual.engine import VirtualRanks


class ShardingOptions(NamedTuple):
    """The arguments of `group_sharded_parallel` as an engine gets them, checked."""

    level: Level
    groups: ShardGroups
    offload: bool
    sync_buffers: bool
    limit: int
    segment: int
    ahead: bool
    excluded: Sequence[str | int]


def group_sharded_parallel(
    model: Any,
    optimizer: Any,
    level: str,
    scaler: Any = None,
    group: Group | None = None,
    offload: bool = False,
    sync_buffers: bool = False,
    buffer_max_size: int = 2**23,
    segment_size: int = 2**20,
    sync_comm: bool = False,
    dp_group: Group | None = None,
    exclude_layer: Sequence[str | int] | None = None,
) -> tuple[Any, Any, Any]:
    """Shard the training state over a group: each rank keeps a part instead of all of it.

    Collective over `group` and `dp_group`: parameters and buffers are checked and get the values
    of the first rank. Use what is returned in place of what was given.

    Args:
        model: an object with ``named_parameters()`` (of `hpcdist.Parameter`), which runs on
            hpcdist's engine for arrays, or a `torch.nn.Module`, which runs on torch's own; or a
            `DataParallel` with ``virtual_ranks`` of either, at levels ``os`` and ``os_g``: there
            each rank owns whole parameters, as evenly as these allow.
        optimizer: of exactly the model's parameters, fresh: one of `hpcdist.optim` for arrays, any
            of `torch.optim` for a module.
        level: ``"os"`` shards the optimizer's state; ``"os_g"`` the gradients, too; ``"p_g_os"``
            also the parameters, which are gathered layer by layer while they are used.
        scaler: a `hpcdist.GradScaler` (arrays) or `torch.amp.GradScaler` (modules), or None. The
            one that is returned agrees across ranks.
        group: the ranks that share one copy of the state; None for all.
        offload: keep the state in host memory. Arrays of NumPy, JAX and torch on the processor are
            there already, and nothing changes; for arrays on a device it is refused.
        sync_buffers: give all ranks the first rank's buffers after each backward pass.
        buffer_max_size: bytes of gradients that are reduced together (levels ``os``, ``os_g``).
        segment_size: bytes that are gathered together at least (level ``p_g_os``): smaller layers
            join the next one.
        sync_comm: never gather a layer ahead of its use.
        dp_group: the ranks of other groups that own the same parts as this one: gradients are
            averaged over them, too (hybrid sharding).
        exclude_layer: names of layers or parameters (of modules, also the ``id`` of a module) whose
            parameters stay gathered at level ``p_g_os``.

    Returns:
        Model, optimizer and scaler.

    Raises:
        UsageError: an argument is wrong, the optimizer has other parameters or has taken steps.
        MismatchError: the parameters of two ranks differ in name, order, shape or dtype.

    Reference: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models, SC 2020 (stages 1, 2, 3); Paddle's
    ``paddle.distributed.sharding.group_sharded_parallel``, whose ``os`` is its ``os_g``.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> class Line:
        ...     def __init__(self): self.w = dist.Parameter(np.zeros(3))
        ...     def named_parameters(self): return [("w", self.w)]
        ...     def __call__(self, x): return x @ self.w.data
        >>> _ = dist.init_parallel_env()
        >>> line = Line()
        >>> optimizer = dist.optim.SGD(line.named_parameters(), learning_rate=0.5)
        >>> model, optimizer, _ = dist.group_sharded_parallel(line, optimizer, "p_g_os")
        >>> _ = model(np.ones((2, 3)))
        >>> line.w.grad = np.ones(3)
        >>> optimizer.step()
        >>> model.state_dict()["w"]
        array([-0.5, -0.5, -0.5])

    """
    virtual = model if isinstance(model, VirtualRanks) else None
    options = ShardingOptions(
        _level(level),
        ShardGroups(
            training_group(virtual.group if virtual and group is None else group),
            None if dp_group is None else training_group(dp_group),
        ),
        bool(offload),
        bool(sync_buffers),
        _size("buffer_max_size", buffer_max_size),
        _size("segment_size", segment_size),
        not sync_comm,
        _entries(exclude_layer),
    )
    if virtual:
        _check_virtual(virtual, options)
    engines = _ENGINES_OF_VIRTUAL_RANKS if virtual else _ENGINES
    shard = engine_for(model, engines, "group_sharded_parallel")
    sharded: tuple[Any, Any, Any] = shard(model, optimizer, scaler, options)
    return sharded


_ENGINES = {
    ("torch", "Module"): "hpcdist.torch.sharded:shard_module",
    ARRAYS: "hpcdist.parallel.sharding.arrays:shard_arrays",
}

_ENGINES_OF_VIRTUAL_RANKS = {
    ("torch", "Module"): "hpcdist.torch.owned_optimizer:shard_virtual_module",
    ARRAYS: "hpcdist.parallel.virtual.sharding:shard_virtual_arrays",
}


def _check_virtual(model: VirtualRanks, options: ShardingOptions) -> None:
    if options.level == "p_g_os":
        raise UsageError(
            "level p_g_os does not go with virtual_ranks: all ranks would gather a layer at the "
            "same time, but have different numbers of virtual ranks; use level os_g, or leave "
            "virtual_ranks out"
        )
    if options.groups.replicate is not None or options.groups.shard.ranks != model.group.ranks:
        raise UsageError(
            "the state of a model on virtual ranks is sharded over all ranks that train it: leave "
            "group and dp_group out"
        )
    if options.offload:
        raise UsageError(
            "offload does not go with virtual_ranks: the optimizer steps parameters where they "
            "are; leave it out"
        )


def _level(level: str) -> Level:
    for known in LEVELS:
        if level == known:
            return known
    raise UsageError(f"The level must be os, os_g or p_g_os, got {level!r}")


def _size(name: str, size: int) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise UsageError(f"{name} must be a number of bytes, at least 0, got {size!r}")
    return size


def _entries(excluded: Sequence[str | int] | None) -> Sequence[str | int]:
    if isinstance(excluded, str):
        raise UsageError(f"exclude_layer must be a list of names, got {excluded!r}; write [name]")
    return list(excluded or ())
