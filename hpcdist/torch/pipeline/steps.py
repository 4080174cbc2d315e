"""`Steps`: lets batches go through all stages of a pipeline, and all ranks of a grid end together.

[Note: all or none] A step is collective over the whole grid: pipelines beside each other, and
ranks that compute one stage together, end it together. What fails on a rank is raised on all of
them, and no gradient is left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, final
from zlib import crc32

import numpy as np
import torch

from hpcdist.comm.collectives import all_gather, all_reduce
from hpcdist.comm.group import Group
from hpcdist.comm.making import hurried
from hpcdist.comm.together import UNTOLD, Together, together
from hpcdist.errors import (
    CollectiveTimeout,
    MismatchError,
    UsageError,
    add_note,
    is_secondary,
)
from hpcdist.parallel.hybrid import HybridCommunicateGroup
from hpcdist.parallel.hybrid_options import HybridOptions
from hpcdist.torch.alike import Inputs
from hpcdist.torch.pipeline.batches import Batch, as_batch, common_rows, cut, cuts_of, rows_of
from hpcdist.torch.pipeline.layers import PipelineLayer
from hpcdist.torch.pipeline.observed import Observed
from hpcdist.torch.pipeline.runner import Finish, Runner
from hpcdist.torch.pipeline.schedule import Plan, plan_pipeline, rule_of

_SAME_STAGE = ("mp", "sep", "cp")
"""Axes whose ranks compute a stage together."""


@final
class Steps:
    """Runs the steps of a pipeline on this rank.

    Attributes:
        last: what the last step was that trained; None before the first.

    """

    def __init__(
        self, layers: PipelineLayer, grid: HybridCommunicateGroup, options: HybridOptions
    ) -> None:
        self._layers, self._grid, self._options = layers, grid, options
        self.last: Observed | None = None
        compares = grid.degree("mp") > 1 and options.tensor_parallel.compare_inputs
        self._inputs = Inputs(grid["mp"]) if compares else None

    @property
    def everyone(self) -> Group:
        """All ranks of the grid."""
        return self._grid.mesh.group

    @property
    def device(self) -> torch.device:
        """Where the stages of this rank are."""
        for tensor in (*self._layers.parameters(), *self._layers.buffers()):
            return tensor.device
        return torch.get_default_device()

    def precision(self) -> AbstractContextManager[Any]:
        """Return where forward passes compute."""
        amp = self._options.amp
        if amp is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, amp.dtype))  # type: ignore[no-any-return]

    def run(
        self,
        data: Any,
        schedule: str,
        check: Callable[[], None] | None,
        finish_with: Callable[[Sequence[Any], Sequence[float]], Finish],
        losses: Sequence[torch.Tensor],
        *,
        training: bool = False,
    ) -> torch.Tensor:
        """Run a batch through all stages; return the sum of `losses`, those of the last one.

        See [Note: all or none].

        Args:
            data: the batch.
            schedule: by which it is trained.
            check: raises what this rank finds wrong, before anything is sent; None also says that
                labels are not needed.
            finish_with: gets the labels of the micro-batches and their weights, and returns what
                the last stage does with outputs.
            losses: what that adds to.
            training: whether there is a backward pass.

        """
        failure: BaseException | None = None
        try:
            with ExitStack() as blocks:
                for axis in _SAME_STAGE:
                    if self._grid.degree(axis) > 1:
                        blocks.enter_context(together(self._grid[axis]))
                plan, batch, cuts = self._agree(data, schedule, check, training)
                if self._inputs is not None:
                    self._inputs.check(batch._asdict())
                runner = Runner(
                    plan,
                    self._layers.group,
                    self._layers.stages,
                    self.device,
                    self.precision,
                    self._describe_stage,
                )
                sizes = np.diff(cuts)
                finish = finish_with(cut(batch.labels, cuts), list(sizes / cuts[-1]))
                runner.run(cut(batch.inputs, cuts), finish)
                if runner.failure is not None:
                    raise runner.failure
        except BaseException as error:
            failure = error
        loss = self._meet(failure, losses)
        if training:
            self.last = Observed(plan, runner.spans, self._layers.group)
        return loss

    def _agree(
        self, data: Any, schedule: str, check: Callable[[], None] | None, training: bool
    ) -> tuple[Plan, Batch, list[int]]:
        """Return what the ranks of the pipeline do, if they all can. Collective over them."""
        layers = self._layers
        batches: list[Batch] = []
        evaluating = "evaluate a batch" if check is not None else "compute a batch without its loss"
        what = f"train a batch by schedule {schedule!r}" if training else evaluating

        def own() -> tuple[int, int]:
            if check is not None:
                check()
            if training:
                rule_of(schedule)
            batches.append(as_batch(data))
            rows = self._rows(batches[0], labels=check is not None)
            if rows:
                cuts_of(rows, self._options.pipeline)
            return rows, crc32(what.encode())

        told = _shared(own, layers.group)
        if len({mark for _, mark in told}) > 1:
            raise MismatchError(
                f"the ranks of the pipeline mean different things: this one would {what}; call the "
                "same, with the same schedule, on all of them"
            )
        ranks = layers.group.ranks
        rows = common_rows([(rank, each) for rank, (each, _) in zip(ranks, told, strict=True)])
        cuts = cuts_of(rows, self._options.pipeline)
        plan = plan_pipeline(
            schedule if training else "FThenB",
            layers.num_stages,
            len(cuts) - 1,
            layers.chunks,
            layers.placement,
            training=training,
        )
        return plan, batches[0], cuts

    def _rows(self, batch: Batch, *, labels: bool) -> int:
        """Return how many samples this rank has; 0 if that is not for it to know."""
        layers = self._layers
        found = [rows_of(batch.inputs, "inputs")] if layers.has_first else []
        if layers.has_first and found == [None]:
            raise UsageError("the first stage has no inputs; pass (inputs, labels)")
        if labels and layers.group.rank == layers.last_rank:
            found.append(rows_of(batch.labels, "labels"))
        known = {rows for rows in found if rows is not None}
        if len(known) > 1:
            raise UsageError(f"inputs and labels have {found} rows; give a label for each input")
        return known.pop() if known else 0

    def _meet(self, failure: BaseException | None, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of the losses that the last stage of this pipeline has.

        Collective over the grid: what has failed on one rank is raised on all.
        """
        everyone, layers = self.everyone, self._layers
        count = len(layers.losses)
        loss = sum((each.cpu() for each in losses), torch.zeros(count, dtype=torch.float64))
        if everyone.nranks == 1:
            if failure is not None:
                raise failure
            return loss
        # Failures, those that came first, losses by rank.
        told = np.zeros(2 + everyone.nranks * count)
        is_first = failure is not None and not is_secondary(failure)
        told[:2] = failure is not None, is_first
        by_rank = told[2:].reshape(everyone.nranks, count)
        by_rank[everyone.rank] = loss.numpy()

        def tell() -> None:
            if failure is not None and (is_first or not told[1]):
                raise failure

        try:
            with hurried(everyone.transport, failure):
                all_reduce(told, group=everyone)
                if told[0]:
                    Together(everyone).share(tell)
        except CollectiveTimeout as reason:
            if failure is None or reason is failure:
                raise
            add_note(failure, UNTOLD.format(reason))
            raise failure from failure.__cause__
        last = everyone.get_group_rank(layers.group.ranks[layers.last_rank])
        return torch.from_numpy(by_rank[last].copy())

    def _describe_stage(self, stage: int) -> str:
        layers = self._layers
        return f"stage {stage} of {layers.total_stages} ({layers.layers_of(stage)})"


def _shared(own: Callable[[], tuple[int, int]], group: Group) -> list[tuple[int, int]]:
    """Return the results of `own` on all ranks; raise its error on all ranks. Collective."""
    mine, problem = (0, 0), None
    try:
        mine = own()
    except Exception as error:
        problem = error
    everyone = np.zeros((group.nranks, 3), np.int64)
    all_gather(everyone, np.array([problem is not None, *mine]), group)
    if everyone[:, 0].any():

        def tell() -> None:
            if problem is not None:
                raise problem

        Together(group).share(tell)
    return [(rows, mark) for _, rows, mark in everyone.tolist()]
