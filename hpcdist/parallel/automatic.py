"""`to_distributed`: a program for one process, as one for all ranks."""

from __future__ import annotations

from typing import Any, final

from hpcdist.comm.dispatch import as_flag
from hpcdist.comm.session import require_session
from hpcdist.data.shard_loader import ShardDataloader, shard_dataloader
from hpcdist.errors import UsageError
from hpcdist.lazy import load
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.parallel.layers import is_module, shard_layer
from hpcdist.parallel.stages import ShardingStage1, shard_optimizer


@final
class ToDistributedConfig:
    """Further options of `to_distributed`.

    Attributes:
        input_spec: accepted for Paddle's sake: nothing is compiled.
        sequence_parallel: whether activations are cut by the sequence, which is refused.

    Example:
        >>> from hpcdist.auto_parallel import ToDistributedConfig
        >>> ToDistributedConfig().sequence_parallel
        False

    """

    def __init__(self) -> None:
        self.input_spec: Any = None
        self.sequence_parallel = False


def to_distributed(
    model: Any,
    optimizer: Any,
    dataloader: Any,
    device_num: int,
    node_num: int | None = 1,
    config: ToDistributedConfig | None = None,
) -> tuple[Any, Any, ShardDataloader]:
    """Run the training program of one process on all ranks, unchanged but for this line.

    The loop over the batches, the loss and the steps stay as they were, and so do the numbers:
    each batch is cut over all ranks, the model computes on them what it would in one process, and
    the state of the optimizer is cut over them, too. Layers are not cut: for that, use
    `parallelize` with plans made for the model. Collective over all ranks.

    Args:
        model: a `torch.nn.Module`.
        optimizer: one of torch.optim, of the model's parameters and fresh.
        dataloader: a ``torch.utils.data.DataLoader``, or any iterable of batches.
        device_num: the number of ranks on each node.
        node_num: the number of nodes; None for one.
        config: a `ToDistributedConfig`.

    Returns:
        Model, optimizer and loader, to be used in place of what was given.

    Raises:
        UsageError: a wrong argument; there are not ``device_num * node_num`` ranks.

    Example:
        >>> import torch, hpcdist as dist
        >>> n = dist.init_parallel_env().nranks
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> batches = [torch.ones(4, 8)] * 3
        >>> model, optimizer, batches = dist.to_distributed(model, optimizer, batches, device_num=n)
        >>> for batch in batches:
        ...     model(batch).sum().backward()
        ...     optimizer.step()

    """
    ranks = require_session().world.ranks
    for name, value in (("device_num", device_num), ("node_num", node_num or 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} must be a positive integer, got {value!r}")
    nodes = node_num or 1
    if device_num * nodes != len(ranks):
        raise UsageError(
            f"device_num={device_num} on node_num={nodes} are {device_num * nodes} ranks, but the "
            f"job has {len(ranks)}; give their number, or start as many"
        )
    if config is not None and not isinstance(config, ToDistributedConfig):
        raise UsageError(f"config must be a ToDistributedConfig or None, got {config!r}")
    if config is not None and as_flag(config.sequence_parallel, "config.sequence_parallel"):
        raise UsageError(
            "sequence_parallel=True needs to know the layers of the model: use parallelize with "
            "SequenceParallelBegin and SequenceParallelEnd in its parallelize_plan"
        )
    if not is_module(model):
        raise UsageError(f"to_distributed takes a torch.nn.Module, got {model!r}")
    mesh = ProcessMesh(ranks, ["dp"])
    loader = shard_dataloader(dataloader, mesh, shard_dims="dp")
    follow = load("hpcdist.torch.optimizers:follow_parameters")
    with follow(optimizer, model):
        shard_layer(model, mesh)
    return model, shard_optimizer(optimizer, ShardingStage1("dp", mesh)), loader
