"""`PipelineLayer`: a model as a row of layers, of which each rank builds those of its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from hpcdist.comm.collectives import broadcast
from hpcdist.comm.group import Group
from hpcdist.comm.session import resolve_group
from hpcdist.comm.states import State, first_difference
from hpcdist.comm.together import Together
from hpcdist.errors import MismatchError, UsageError
from hpcdist.integers import integer
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.hybrid import HybridCommunicateGroup, current_grid
from hpcdist.torch.alike import module_in_words, value_in_words
from hpcdist.torch.pipeline.descriptions import LayerDesc, SharedLayerDesc
from hpcdist.torch.pipeline.schedule import Placement, rank_of, stages_of
from hpcdist.torch.pipeline.segments import costs_by_name, plan_segments
from hpcdist.torch.pipeline.stage import Layer, Stage
from hpcdist.torch.pipeline.ties import Member, Tie, tie_here, tie_ranks
from hpcdist.torch.recompute import recompute, recompute_hybrid


class LayerCosts(NamedTuple):
    """The cost of each layer, for `seg_method` of a `PipelineLayer`; in seconds or any unit.

    Example:
        >>> from hpcdist.torch.pipeline import LayerCosts
        >>> costs = LayerCosts((1.0, 4.0, 1.0))  # for `seg_method`

    """

    costs: tuple[float, ...]


class PipelineLayer(torch.nn.Module):  # type: ignore[misc] # torch is untyped
    """A sequence of layers, cut into stages; each rank builds the layers of its stages.

    Each layer gets what the one before it returns: a tensor, or a tuple of tensors as one argument.
    Parameters are named by the place of their layer in the whole row, as in
    ``torch.nn.Sequential``, so that checkpoints fit any number of stages. A model may be a subclass
    that hands its layers to ``super().__init__``.

    A described layer is made with a seed of its own, which is drawn once from torch's default
    generator (of the first rank) and moved on by the place of the layer: the weights are the same
    for any number of stages. Collective over the group.

    Args:
        layers: `LayerDesc`s, modules (which are then built on every rank), and functions.
        num_stages: how many ranks the pipeline has; None for those of the group.
        topology: a `CommunicateTopology`, whose axis "pipe" is the pipeline where there is no grid.
        loss_fn: called as ``loss_fn(output, labels)``; returns the mean over the samples. Of a list
            of such functions all are computed, and `train_batch` says which one trains.
        seg_method: how layers are cut into stages: "uniform"; "parameters"; "layer:Name", to have
            equal numbers of layers whose class is named so, a regular expression; the first layer
            of each stage; or `LayerCosts`.
        recompute_interval: so many layers in a row keep their input only, and are computed again
            in the backward pass; 0 for none.
        recompute_ctx: what `recompute_hybrid` takes as its context; None for `recompute`.
        num_virtual_pipeline_stages: how many stages each rank has; default 1.
        group: the ranks of the pipeline, first stage first; None for those of the current grid
            (`fleet.init`), or for all ranks where there is none.
        placement: of several stages on each rank: "loop" goes from the first rank to the last one
            and again so, "V" back from the last one to the first.

    Attributes:
        group: the ranks of the pipeline.
        bounds: the first layer of each stage, and the number of layers.
        stages: the stages of this rank.

    Raises:
        UsageError: a wrong argument, or a layer cannot be made; the other ranks of the group get
            a `RemoteError`.
        MismatchError: ranks describe other layers, or cut them in another way.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch.pipeline import LayerDesc, PipelineLayer
        >>> group = dist.init_parallel_env()
        >>> Linear = torch.nn.Linear
        >>> layers = [LayerDesc(Linear, 8, 8), torch.relu, LayerDesc(Linear, 8, 1)]
        >>> model = PipelineLayer(layers, loss_fn=torch.nn.functional.mse_loss, group=group)
        >>> [name for name, _ in model.named_parameters()]  # on one rank, all of them
        ['0.weight', '0.bias', '2.weight', '2.bias']

    """

    def __init__(
        self,
        layers: Sequence[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        seg_method: Any = "uniform",
        recompute_interval: int = 0,
        recompute_ctx: Any = None,
        num_virtual_pipeline_stages: int | None = None,
        *,
        group: Group | None = None,
        placement: Placement = "loop",
    ) -> None:
        super().__init__()
        self.group = _group_for(group, topology)
        self.loss_fn = loss_fn
        self.recompute_interval, self.recompute_ctx = recompute_interval, recompute_ctx
        self.chunks = 1 if num_virtual_pipeline_stages is None else num_virtual_pipeline_stages
        self.placement: Placement = placement
        self.bounds: list[int] = []
        self.stages: list[Stage] = []
        self._none = [torch.nn.Parameter(torch.empty(0), requires_grad=False)]
        ranks = Together(self.group)
        told = ranks.share(lambda: self._check_arguments(layers, num_stages, seg_method))
        if any(each != told[0] for each in told):
            raise MismatchError(first_difference(told, self.group.ranks, "layer"))
        seed = _common_seed(self.group)
        self._calls: dict[int, Layer] = {}
        ranks.share(lambda: self._build(layers, seg_method, seed))
        self.ties: list[Tie] = tie_ranks(self.group, self._shared(layers))

    @property
    def losses(self) -> list[Callable[..., Any]]:
        """All functions in ``loss_fn``."""
        given: Any = self.loss_fn
        if isinstance(given, (list, tuple)):
            return [*given]
        return [] if given is None else [given]

    @property
    def num_stages(self) -> int:
        """How many ranks the pipeline has."""
        return self.group.nranks

    @property
    def total_stages(self) -> int:
        """How many stages the pipeline has."""
        return self.num_stages * self.chunks

    @property
    def has_first(self) -> bool:
        """Whether this rank has the first stage."""
        return self.group.rank == 0

    @property
    def last_rank(self) -> int:
        """The rank in the group that has the last stage."""
        return rank_of(self.total_stages - 1, self.num_stages, self.placement)

    def stage_of(self, index: int) -> int:
        """Return the stage that has a layer.

        Args:
            index: of the layer, from 0.

        """
        return next(each for each in range(len(self.bounds)) if index < self.bounds[each + 1])

    def layers_of(self, stage: int) -> str:
        """Describe which layers a stage has.

        Args:
            stage: from 0.

        """
        first, end = self.bounds[stage : stage + 2]
        return f"layer {first}" if end == first + 1 else f"layers {first} to {end - 1}"

    def forward(self, x: Any) -> Any:
        """Call all layers, if this rank has all of them.

        Args:
            x: the input of the first layer.

        """
        if self.num_stages > 1:
            raise UsageError(
                f"this rank has only a part of the {self.num_stages} stages; call train_batch or "
                "eval_batch of PipelineParallel(layers, ...)"
            )
        for stage in sorted(self.stages, key=lambda each: each.number):
            x = stage.run(x)
        return x

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """Iterate over the parameters; a rank without any has an empty one, for the optimizer.

        Args:
            recurse: with those of sub-modules.

        """
        found = [*super().parameters(recurse)]
        yield from found or self._none

    def extra_repr(self) -> str:
        """Return which stages these are; torch shows it with the module."""
        own = ", ".join(str(stage.number) for stage in self.stages)
        return f"stages {own} of {self.total_stages}"

    # ---- how it is made

    def _check_arguments(
        self, layers: Sequence[Any], num_stages: int | None, seg_method: Any
    ) -> list[State]:
        """Refuse wrong arguments; return what all ranks have to say alike. Local."""
        if num_stages not in (None, self.num_stages):
            raise UsageError(
                f"num_stages={num_stages}, but the pipeline has the {self.num_stages} ranks "
                f"{self.group.ranks}; leave num_stages out, or give the group of these stages"
            )
        integer(self.chunks, "num_virtual_pipeline_stages", 1)
        integer(self.recompute_interval, "recompute_interval", 0)
        if self.placement not in ("loop", "V"):
            raise UsageError(f'placement is "loop" or "V", got {self.placement!r}')
        if not all(map(callable, self.losses)):
            raise UsageError(f"loss_fn must be a function, or a list of them, got {self.loss_fn!r}")
        for place, each in enumerate(layers):
            if not isinstance(each, LayerDesc) and not callable(each):
                raise UsageError(
                    f"layer {place} is {each!r}; a layer is a LayerDesc, a torch module or a "
                    "function"
                )
        cut = (
            f"seg_method={seg_method!r}, {self.chunks} stages on each rank, {self.placement}, "
            f"losses: {len(self.losses)}"
        )
        return [(name, (), "") for name in [*map(_name_of, layers), cut]]

    def _build(self, layers: Sequence[Any], seg_method: Any, seed: int) -> None:
        self.bounds = _bounds_of(layers, self.total_stages, seg_method)
        for number in stages_of(self.group.rank, self.num_stages, self.chunks, self.placement):
            own = range(*self.bounds[number : number + 2])
            for index in own:
                self._calls[index] = self._made(layers[index], index, seed)
            self.stages.append(self._stage(number, [self._calls[index] for index in own]))
        tie_here(self._shared(layers))

    def _made(self, layer: Any, index: int, seed: int) -> Layer:
        if not isinstance(layer, LayerDesc):
            if isinstance(layer, torch.nn.Module):
                self.add_module(str(index), layer)
            return layer  # type: ignore[no-any-return]
        with seeded(seed + index):
            made = layer.build_layer()
        self.add_module(str(index), made)
        if isinstance(layer, SharedLayerDesc) and layer.forward_func is not None:
            return partial(layer.forward_func, made)
        return made  # type: ignore[no-any-return]

    def _stage(self, number: int, calls: Sequence[Layer]) -> Stage:
        interval = self.recompute_interval
        if not interval:
            return Stage(number, partial(_through, calls))
        parts = [calls[first : first + interval] for first in range(0, len(calls), interval)]
        recomputed = [
            partial(_recomputed, partial(_through, part), self.recompute_ctx) for part in parts
        ]
        return Stage(number, partial(_through, recomputed), splits=False)

    def _shared(self, layers: Sequence[Any]) -> dict[str, list[Member]]:
        """Return for each key the layers that share a weight, on whatever ranks they are."""
        shared: dict[str, list[Member]] = {}
        for index, desc in enumerate(layers):
            if isinstance(desc, SharedLayerDesc):
                rank = rank_of(self.stage_of(index), self.num_stages, self.placement)
                made = Member(index, rank, desc, self._modules.get(str(index)))
                shared.setdefault(desc.key, []).append(made)
        return shared


def _group_for(group: Group | None, topology: Any) -> Group:
    """Return the ranks of the pipeline."""
    grid = current_grid()
    if grid is None and topology is not None:
        grid = HybridCommunicateGroup(topology)
    found = grid["pp"] if group is None and grid is not None else resolve_group(group)
    if not found.is_member():
        raise UsageError(
            f"rank {found.world_rank} is not in group {found.name}, whose world ranks are "
            f"{found.ranks}; a PipelineLayer is made on the ranks of its pipeline"
        )
    return found


def _common_seed(group: Group) -> int:
    seed = np.array([int(torch.randint(1 << 62, ()))])
    if group.nranks > 1:
        broadcast(seed, group.ranks[0], group)
    return int(seed[0])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's default generators in the block; after it they go on as before."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng([*devices]):
        torch.manual_seed(seed)
        yield


def _through(calls: Sequence[Layer], x: Any) -> Any:
    for call in calls:
        x = call(x)
    return x


def _recomputed(call: Layer, context: Mapping[str, Any] | None, x: Any) -> Any:
    return recompute_hybrid(context, call, x) if context else recompute(call, x)


# ---- segments


def _bounds_of(layers: Sequence[Any], stages: int, method: Any) -> list[int]:
    if isinstance(method, LayerCosts):
        if len(method.costs) != len(layers):
            raise UsageError(f"LayerCosts has {len(method.costs)} costs for {len(layers)} layers")
        return plan_segments(method.costs, stages)
    if not isinstance(method, str):
        return plan_segments([1] * len(layers), stages, method)
    if method == "uniform":
        return plan_segments([1] * len(layers), stages)
    if method == "parameters":
        return plan_segments([_parameters_of(each) for each in layers], stages)
    return plan_segments(costs_by_name([_name_of(each) for each in layers], method, stages), stages)


def _name_of(layer: Any) -> str:
    """Return the description of a layer that ranks compare: its factory and its arguments."""
    if isinstance(layer, LayerDesc):
        given = [*map(value_in_words, layer.inputs)]
        given += [f"{name}={value_in_words(each)}" for name, each in layer.kwargs.items()]
        return f"{layer.name}({', '.join(given)})"
    if isinstance(layer, torch.nn.Module):
        return module_in_words(layer)
    return value_in_words(layer)


def _parameters_of(layer: Any) -> int:
    """Count the parameters of a layer, of a described one without memory for them."""
    if isinstance(layer, LayerDesc):
        with seeded(0), torch.device("meta"):
            layer = layer.build_layer()
    if not isinstance(layer, torch.nn.Module):
        return 0
    return sum(each.numel() for each in layer.parameters())
