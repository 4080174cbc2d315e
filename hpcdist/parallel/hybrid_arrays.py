"""What `fleet.distributed_model`, `distributed_optimizer` and `distributed_scaler` make for arrays.

Models of `Parameter`s are trained along dp and sharding: by `DataParallel`, or sharded as by
`group_sharded_parallel`. Their layers and their backward pass are the user's, so there is nothing
that mp, pp and sep could take apart.
"""

from __future__ import annotations

from typing import Any, final

from hpcdist.comm.states import verifying
from hpcdist.errors import UsageError
from hpcdist.optim.optimizer import Optimizer
from hpcdist.parallel.hybrid import HybridCommunicateGroup
from hpcdist.parallel.hybrid_options import HybridOptions
from hpcdist.parallel.model import DataParallel
from hpcdist.parallel.scaler import GradScaler
from hpcdist.parallel.sharding.arrays import check_optimizer, shard_model
from hpcdist.parallel.sharding.engine import LEVELS
from hpcdist.parallel.sharding.gradients import ShardGroups
from hpcdist.parallel.sharding.group_sharded import ShardingOptions
from hpcdist.parallel.sharding.model import ShardedModel

_MiB = 1 << 20

_FOR_TORCH = {
    "amp": "keep parameters in 16 bits, or use hpcdist.GradScaler",
    "recompute": "keep less in your forward pass",
    "gradient_merge": "accumulate in `with model.no_sync():`",
    "localsgd": "average weights by hpcdist.average_gradients",
    "lars": "use hpcdist.optim.LARS",
    "lamb": "use hpcdist.optim.LAMB",
}
"""What a strategy may ask for that is done for torch alone, and what to do instead."""


def distribute_model(
    model: Any, hcg: HybridCommunicateGroup, options: HybridOptions | None = None
) -> Any:
    """Return what trains a model of arrays on a grid. Collective over the grid.

    Raises:
        UsageError: the grid has axes that need a torch module, or the strategy asks for more; the
            other ranks get a `RemoteError`.
        MismatchError: ranks have other strategies or other parameters.

    """
    options = options or HybridOptions()
    with verifying(hcg.mesh.group, "value") as alike:
        alike += [("strategy", (), repr(options))]
        _check_supported(hcg, options)
    if hcg.degree("sharding") == 1:
        return DataParallel(
            model,
            comm_buffer_size=options.fuse_grad_size_MB,
            last_comm_buffer_size=options.last_comm_group_size_MB,
            find_unused_parameters=options.find_unused_parameters,
            group=hcg["dp"],
        )
    copies = hcg["dp"] if hcg.degree("dp") > 1 else None
    sharding = ShardingOptions(
        LEVELS[options.sharding.stage - 1],
        ShardGroups(hcg["sharding"], copies),
        options.sharding.offload,
        sync_buffers=False,
        limit=int(options.fuse_grad_size_MB * _MiB),
        segment=_MiB,
        ahead=True,
        excluded=(),
    )
    return shard_model(model, sharding, lambda trained: None)


def distribute_optimizer(
    optimizer: Any, hcg: HybridCommunicateGroup, options: HybridOptions | None = None
) -> Any:
    """Return the optimizer that steps what `distribute_model` returns, in either order. Local.

    Raises:
        UsageError: it is not one of `hpcdist.optim`, or has taken steps.

    """
    _check_supported(hcg, options or HybridOptions())
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"the optimizer of a model of arrays must be one of hpcdist.optim, got {optimizer!r}"
        )
    return optimizer if hcg.degree("sharding") == 1 else LaterSharded(optimizer)


def distribute_scaler(scaler: Any, hcg: HybridCommunicateGroup) -> GradScaler:
    """Return the scaler: it asks the optimizer, which knows of all ranks."""
    if type(scaler) is not GradScaler:
        raise UsageError(
            f"the scaler of a model of arrays must be an hpcdist.GradScaler, got {scaler!r}"
        )
    return scaler


@final
class LaterSharded:
    """The sharded form of an optimizer, made when it is first used.

    By then `distribute_model` has sharded the model, which may come after the optimizer. It has all
    that `ShardedOptimizer` has.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.__dict__.update(_optimizer=optimizer, _made=None)

    def _sharded(self) -> Any:
        if self._made is None:
            slots = self._optimizer.slots
            owners = {id(owner): owner for slot in slots if (owner := slot.parameter.owner())}
            model = next(iter(owners.values()), None)
            if len(owners) != 1 or not isinstance(model, ShardedModel):
                raise UsageError(
                    "the optimizer's parameters belong to no model that distributed_model has "
                    "sharded; give it the model, too"
                )
            trained = [each for each in model.parameters() if each.requires_grad]
            check_optimizer(self._optimizer, trained)
            self.__dict__["_made"] = model.shard(self._optimizer)
        return self._made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sharded(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._sharded(), name, value)

    def __repr__(self) -> str:
        return f"LaterSharded({self._made or self._optimizer!r})"


def _check_supported(hcg: HybridCommunicateGroup, options: HybridOptions) -> None:
    needing = [axis for axis in ("mp", "pp", "sep", "cp") if hcg.degree(axis) > 1]
    if needing:
        raise UsageError(
            f"a model of arrays is trained along dp and sharding alone, but the grid has "
            f"{', '.join(f'{axis}={hcg.degree(axis)}' for axis in needing)}: these axes need the "
            "layers and the autograd of a torch.nn.Module"
        )
    for asked, remedy in _FOR_TORCH.items():
        if getattr(options, asked) is not None:
            raise UsageError(f"strategy.{asked} is for torch modules; {remedy}")
    if options.sync_batch_norm or options.gradient_scale != "avg":
        raise UsageError(
            "sync_batch_norm and a gradient_scale other than 'avg' are for torch modules; leave "
            "them as they are"
        )
