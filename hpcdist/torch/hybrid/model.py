"""`HybridModel`: a module that is trained on a grid of ranks.

Along mp its layers have done what there is to do: here weights that are not cut become equal.
Along dp, sharding, sep and cp its gradients are averaged, by `DataParallel` or by torch's
``fully_shard``.

[Note: who averages] In a backward pass gradients are averaged while it computes. Where a step
comes only after several passes (gradient merge, `accumulate_steps` of sharding), they stay on the
rank, and the optimizer averages their sum. Where ranks of dp go ways of their own for a while
(localsgd), dp is left out, and the optimizer averages weights. A `Role` tells it what the backward
pass has averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch

from hpcdist.comm.group import Group
from hpcdist.comm.states import verify_states
from hpcdist.parallel.clipping import Measured
from hpcdist.parallel.hybrid import HybridCommunicateGroup
from hpcdist.parallel.hybrid_options import HybridOptions
from hpcdist.parallel.model import DataParallel
from hpcdist.parallel.module_state import sync_params_buffers
from hpcdist.parallel.sharding.engine import LEVELS
from hpcdist.parallel.sharding.gradients import ShardGroups
from hpcdist.parallel.sharding.group_sharded import ShardingOptions
from hpcdist.torch.alike import Inputs, states_of_layers
from hpcdist.torch.batch_norm import SyncBatchNorm
from hpcdist.torch.data_parallel import TorchDataParallel
from hpcdist.torch.hybrid.states import Part, State, as_state, fill, part_of
from hpcdist.torch.module_state import Entries, check_names, entries_of, give_extras
from hpcdist.torch.on_grid import DATA_AXES, check_settled, give_roles, measure_on_grid
from hpcdist.torch.sharded import shard_fully
from hpcdist.torch.wrapper import Wrapper

_MiB = 1 << 20
_SEGMENT = 1 << 20
"""Bytes that are gathered together at least, as by default in `group_sharded_parallel`."""


@final
class HybridModel(Wrapper):
    """A wrapper of a module that trains it on all ranks of a grid; see `distributed_model`.

    Collective over the ranks of the grid that have the same part of the model. Paddle's
    `TensorParallel`, `SegmentParallel` and `ShardingParallel` are other names of it.

    Args:
        layers: the module.
        hcg: the grid.
        strategy: what to do; None for nothing special.

    Attributes:
        grid: where it is trained.

    Raises:
        UsageError: nothing in it is trained.
        MismatchError: ranks have other parameters where they should be equal.

    Example:
        >>> import torch, hpcdist as dist
        >>> _ = dist.fleet.init(dp=-1)
        >>> model = dist.fleet.distributed_model(torch.nn.Linear(8, 1))
        >>> model(torch.ones(4, 8)).sum().backward()

    """

    def __init__(
        self,
        layers: torch.nn.Module,
        hcg: HybridCommunicateGroup,
        strategy: HybridOptions | None = None,
    ) -> None:
        super().__init__()
        options = strategy or HybridOptions()
        self.grid = hcg
        self._amp = options.amp
        verify_states(states_of_layers(layers), hcg.fused(*DATA_AXES, "mp"), "layer")
        share_weights(layers, hcg["mp"], apart=True)
        compares = hcg.degree("mp") > 1 and options.tensor_parallel.compare_inputs
        self._inputs = Inputs(hcg["mp"]) if compares else None
        if options.localsgd is not None:
            share_weights(layers, hcg.fused(*DATA_AXES))
        axes = axes_of_gradients(options)
        if options.sync_batch_norm:
            layers = SyncBatchNorm.convert_sync_batchnorm(layers, hcg.fused(*DATA_AXES))
        if cuts_parameters(hcg, options):
            self._layers = shard_fully(layers, hcg.fused(*axes), _sharding(hcg, options))
        else:
            self._layers = replicate(layers, hcg.fused(*axes), options)
            self._layers.grad_need_sync = not gathers(options)
        give_roles(self.named_parameters(), hcg, settled_axes(hcg, options))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module, in mixed precision if the strategy says so.

        Args:
            inputs: of the module, by position.
            kwargs: of the module, by name.

        """
        if self._inputs is not None:
            self._inputs.check((inputs, kwargs) if kwargs else inputs)
        with self._precision():
            return self._layers(*inputs, **kwargs)

    def _precision(self) -> AbstractContextManager[Any]:
        if self._amp is None:
            return nullcontext()
        device = next(self.parameters()).device.type
        dtype = getattr(torch, self._amp.dtype)
        precision: AbstractContextManager[Any] = torch.autocast(device, dtype=dtype)
        return precision

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients of forwards inside the context without communication, if possible.

        Where gradients are cut (stages 2 and 3 of sharding) each backward pass is reduced as it
        comes, and the sums are the same.
        """
        if isinstance(self._layers, TorchDataParallel):
            return self._layers.no_sync()
        return nullcontext()

    norm_is_collective = True

    def measure_gradients(self, norm_type: float) -> Measured:
        """Return the norm of all gradients, and a function that scales them. Collective.

        Over the axes of one model; each of its elements counts once.

        Args:
            norm_type: the power: 2 for the Euclidean norm, ``inf`` for the largest absolute value.

        """
        parameters = list(self.parameters())
        check_settled(parameters)
        return measure_on_grid(parameters, self.grid, norm_type)

    # ---- states

    def sharded_state_dict(self) -> State:
        """Return the module's state: tensors whole, or what this rank has as `LocalSlice`s. Local.

        It has the names of ``state_dict``.
        """
        entries = entries_of(self.module)
        return {**as_state(_parts(entries)), **entries.extras}

    def load_sharded_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `LocalSlice`s or of whole tensors. Local.

        Args:
            state: by name; what this rank does not need may be missing.

        Raises:
            UsageError: something that this rank needs is missing or has another shape.

        """
        entries = entries_of(self.module)
        check_names(state, entries.extras)
        fill(_parts(entries), state)
        give_extras(self.module, entries.extras, state)

    # ---- a module like the one it holds

    @property
    def module(self) -> torch.nn.Module:
        """The module that is trained."""
        held = self._layers
        return held.module if isinstance(held, TorchDataParallel) else held

    def extra_repr(self) -> str:
        """Return the degrees of the grid; torch shows them with the module."""
        return ", ".join(f"{axis}={n}" for axis, n in self.grid.degrees.items() if n > 1)


def _parts(entries: Entries) -> Iterator[Part]:
    return (part_of(name, each, each) for name, each in entries.tensors.items())


# ---- what is done along which axes


def axes_of_gradients(options: HybridOptions) -> tuple[str, ...]:
    """Return the axes over which gradients are averaged, by whomever."""
    return tuple(axis for axis in DATA_AXES if axis != "dp" or options.localsgd is None)


def settled_axes(hcg: HybridCommunicateGroup, options: HybridOptions) -> tuple[str, ...]:
    """Return the axes over which the backward pass averages gradients.

    See [Note: who averages].
    """
    if gathers(options) and not cuts_parameters(hcg, options):
        return ()
    return axes_of_gradients(options)


def gathers(options: HybridOptions) -> bool:
    """Return whether several backward passes come before a step."""
    return options.gradient_merge is not None or options.sharding.accumulate_steps > 1


def cuts_parameters(hcg: HybridCommunicateGroup, options: HybridOptions) -> bool:
    """Return whether gradients, and maybe parameters, are cut over the axis "sharding"."""
    return hcg.degree("sharding") > 1 and options.sharding.stage > 1


def share_weights(layers: torch.nn.Module, group: Group, *, apart: bool = False) -> None:
    """Make weights equal on a group, but if `apart` those of which each rank has a part."""
    if group.nranks > 1:
        sync_params_buffers(layers, group, group.ranks[0], is_model_parallel=apart)


def replicate(layers: torch.nn.Module, group: Group, options: HybridOptions) -> Any:
    """Return a module whose gradients are averaged over a group in the backward pass."""
    return DataParallel(
        layers,
        comm_buffer_size=options.fuse_grad_size_MB,
        last_comm_buffer_size=options.last_comm_group_size_MB,
        find_unused_parameters=options.find_unused_parameters,
        group=group,
    )


def _sharding(hcg: HybridCommunicateGroup, options: HybridOptions) -> ShardingOptions:
    others = [axis for axis in axes_of_gradients(options) if axis != "sharding"]
    copies = hcg.fused(*others)
    return ShardingOptions(
        LEVELS[options.sharding.stage - 1],
        ShardGroups(hcg["sharding"], copies if copies.nranks > 1 else None),
        options.sharding.offload,
        sync_buffers=False,
        limit=int(options.fuse_grad_size_MB * _MiB),
        segment=_SEGMENT,
        ahead=True,
        excluded=(),
    )
