"""`Copies`: the ranks of a grid that have the same weights of a pipeline, and so their gradients.

Ranks along dp, sharding, sep and cp have the same stage; stages may share a weight (`ties`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch

from hpcdist.comm.group import Group
from hpcdist.comm.groups import new_group
from hpcdist.parallel.averages import fused_allreduce_gradients
from hpcdist.parallel.hybrid import HybridCommunicateGroup
from hpcdist.parallel.hybrid_options import HybridOptions
from hpcdist.parallel.module_state import sync_params_buffers
from hpcdist.torch.on_grid import DATA_AXES, give_roles
from hpcdist.torch.pipeline.layers import PipelineLayer
from hpcdist.torch.pipeline.ties import Tie, add_gradients


@final
class Copies:
    """Makes weights equal that are copies of each other, and completes their gradients.

    Collective over the grid: it begins with weights.

    Args:
        layers: the stages of this rank.
        grid: where they are.
        options: what is done over which axes.

    """

    def __init__(
        self, layers: PipelineLayer, grid: HybridCommunicateGroup, options: HybridOptions
    ) -> None:
        self._layers, self._grid = layers, grid
        self._fills = options.find_unused_parameters
        axes = [axis for axis in DATA_AXES if axis != "dp" or options.localsgd is None]
        self._group = grid.fused(*axes)
        self._make_equal()
        self._ties = [(tie, self._group_of(tie, axes)) for tie in layers.ties]
        give_roles(self._by_one_name(), grid, DATA_AXES)

    def complete_gradients(self) -> None:
        """Make gradients those of the whole batch of all pipelines, and of all shared weights.

        Collective over the ranks that have the same stage, and the same weights.
        """
        tied = {id(tie.weight) for tie, _ in self._ties}
        own = [each for _, each in self._layers.named_parameters() if id(each) not in tied]
        if self._fills:
            for each in own:
                if each.requires_grad and each.grad is None:
                    each.grad = torch.zeros_like(each)
        if self._group.nranks > 1:
            fused_allreduce_gradients(own, group=self._group)
        for tie, group in self._ties:
            add_gradients(tie.weight, group, self._group.nranks)

    def _make_equal(self) -> None:
        for group, apart in ((self._grid["mp"], True), (self._grid.fused(*DATA_AXES), False)):
            if group.nranks > 1:
                sync_params_buffers(self._layers, group, group.ranks[0], is_model_parallel=apart)

    def _group_of(self, tie: Tie, axes: Sequence[str]) -> Group:
        """Return all ranks that have copies of a shared weight. Collective over them."""
        along, place = self._layers.group.ranks, self._grid.mesh.axis("pp")
        stages = {self._place(along[each])[place] for each in tie.ranks}
        ranks = self._grid.ranks("pp", *axes)
        return new_group([each for each in ranks if self._place(each)[place] in stages])

    def _place(self, rank: int) -> tuple[int, ...]:
        place = self._grid.mesh.coordinate_of(rank)
        assert place is not None
        return place

    def _by_one_name(self) -> Iterable[tuple[str, Any]]:
        """Give parameters, shared ones by the name that they have in one process."""
        shared = {id(tie.weight): tie.name for tie, _ in self._ties}
        for name, each in self._layers.named_parameters():
            yield shared.get(id(each), name), each
        if not any(True for _ in self._layers.named_parameters()):
            yield from (("", each) for each in self._layers.parameters())
