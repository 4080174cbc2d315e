"""`PipelineParallel`: trains a `PipelineLayer`, each rank its stages, a batch in micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, final

import torch

from hpcdist.comm.group import Group
from hpcdist.comm.states import verify_states
from hpcdist.comm.together import Together
from hpcdist.errors import UsageError
from hpcdist.parallel.hybrid import HybridCommunicateGroup
from hpcdist.parallel.hybrid_options import HybridOptions
from hpcdist.parallel.topology import CommunicateTopology
from hpcdist.torch.alike import states_of_layers
from hpcdist.torch.on_grid import DATA_AXES
from hpcdist.torch.pipeline.copies import Copies
from hpcdist.torch.pipeline.layers import PipelineLayer
from hpcdist.torch.pipeline.observed import Observed
from hpcdist.torch.pipeline.refusals import check_fit, check_layers, check_loss, check_training
from hpcdist.torch.pipeline.runner import Finish
from hpcdist.torch.pipeline.schedule import Span
from hpcdist.torch.pipeline.steps import Steps
from hpcdist.torch.pipeline.timeline import Bubble
from hpcdist.torch.wrapper import Wrapper


@final
class PipelineParallel(Wrapper):
    """A wrapper of a model that trains a batch at a time; see `train_batch`.

    Collective over the grid: weights become equal on the ranks that have the same stage, but for
    those of which each rank of mp has a part.

    Args:
        layers: the model; its group is the axis "pp" of the grid.
        hcg: the grid; None for a pipeline and nothing else.
        strategy: ``pipeline`` says how batches are cut, and by which schedule they are computed;
            None for the defaults.

    Attributes:
        grid: where it is trained.
        schedule: the name of the schedule, unless `train_batch` is told another one.

    Raises:
        UsageError: a wrong argument; the other ranks of the grid get a `RemoteError`.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch.pipeline import LayerDesc, PipelineLayer, PipelineParallel
        >>> group = dist.init_parallel_env()
        >>> layers = [LayerDesc(torch.nn.Linear, 8, 8), LayerDesc(torch.nn.Linear, 8, 1)]
        >>> layers = PipelineLayer(layers, loss_fn=torch.nn.functional.mse_loss, group=group)
        >>> model = PipelineParallel(layers)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loss = model.train_batch([torch.ones(1, 8), torch.ones(1, 1)], optimizer)

    """

    _layers: PipelineLayer

    def __init__(
        self,
        layers: PipelineLayer,
        hcg: HybridCommunicateGroup | None = None,
        strategy: HybridOptions | None = None,
    ) -> None:
        super().__init__()
        check_layers(layers)
        self._layers, self.options = layers, strategy or HybridOptions()
        self.grid = _grid_of(layers.group) if hcg is None else hcg
        self.schedule: str = self.options.pipeline.schedule
        Together(self.grid.mesh.group).share(lambda: check_fit(layers, self.grid, self.options))
        verify_states(states_of_layers(layers), self.grid.fused(*DATA_AXES, "mp"), "layer")
        self._steps = Steps(layers, self.grid, self.options)
        self._copies = Copies(layers, self.grid, self.options)

    # ---- training

    def train_batch(
        self,
        data: Any,
        optimizer: Any,
        lr_scheduler: Any = None,
        scaler: Any = None,
        loss_fn_idx: int = 0,
        *,
        schedule: str | None = None,
    ) -> Any:
        """Compute a batch, step the optimizer and clear the gradients. Collective over the grid.

        The batch goes through the stages in micro-batches of ``micro_batch_size`` samples; the last
        may be smaller, and there may be fewer than ``accumulate_steps``. Gradients are those of the
        mean loss over all samples, averaged over the axes dp, sharding, sep and cp.

        Args:
            data: ``(inputs, labels)``. The first stage needs the inputs, the last one the labels;
                other ranks may have None in their place, or in place of both.
            optimizer: of this model's ``parameters()``.
            lr_scheduler: stepped after the optimizer.
            scaler: scales the loss; one of `fleet.distributed_scaler` or `shard_scaler`, so that
                all ranks skip the same steps.
            loss_fn_idx: which one of several functions in ``loss_fn`` gives the gradients.
            schedule: another schedule than ``self.schedule``, by any name that Paddle or torch has
                for it.

        Returns:
            The mean loss of the batch, on all ranks of the pipeline: a float64. Of a list of
            ``loss_fn`` the list of their means.

        Raises:
            UsageError: a wrong argument, or what a stage raises, on the rank where it happens.
            RemoteError: another rank failed; it tells the rank and the stage.

        """
        loss = self.forward_backward_pipeline(
            data, scaler, loss_fn_idx, schedule=schedule, optimizer=optimizer
        )
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        if lr_scheduler is not None:
            lr_scheduler.step()
        return loss

    @torch.enable_grad()  # type: ignore[untyped-decorator]
    def forward_backward_pipeline(
        self,
        data: Any,
        scaler: Any = None,
        loss_fn_idx: int = 0,
        *,
        schedule: str | None = None,
        optimizer: Any = None,
    ) -> Any:
        """Compute a batch and add its gradients to the present ones; see `train_batch`.

        Args:
            data: as of `train_batch`.
            scaler: scales the loss; None for none.
            loss_fn_idx: as of `train_batch`.
            schedule: as of `train_batch`.
            optimizer: if it is given, it is checked before anything is sent.

        """
        self.train()
        earlier = [(each, each.grad) for each in self.parameters() if each.grad is not None]
        for each, _ in earlier:
            each.grad = None
        losses: list[torch.Tensor] = []
        named = self.schedule if schedule is None else schedule

        def check() -> None:
            ranks = self.grid.mesh.group.nranks
            check_training(self._layers, optimizer, scaler, ranks, self.device)
            check_loss(self._layers, loss_fn_idx)

        def finish_with(labels: Sequence[Any], weights: Sequence[float]) -> Finish:
            def finish(micro: int, output: Any) -> Any:
                found = self._losses_of(output, labels[micro])
                losses.append(_stacked(found) * weights[micro])
                loss = found[loss_fn_idx] * weights[micro]
                if not loss.requires_grad:
                    raise UsageError(
                        "loss_fn returns a loss without a graph, so nothing would be trained; "
                        "compute it from the output, and do not detach it"
                    )
                return loss if scaler is None else scaler.scale(loss)

            return finish

        try:
            loss = self._steps.run(data, named, check, finish_with, losses, training=True)
        except BaseException:
            self.zero_grad()
            for each, gradient in earlier:
                each.grad = gradient
            raise
        self._copies.complete_gradients()
        with torch.no_grad():
            for each, gradient in earlier:
                each.grad = gradient if each.grad is None else each.grad.add_(gradient)
        return self._told(loss)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def eval_batch(self, data: Any, compute_loss: bool = True) -> Any:
        """Compute a batch without gradients. Collective over the grid.

        Args:
            data: as of `train_batch`; the labels are not needed without `compute_loss`.
            compute_loss: False returns what the model does, of the whole batch.

        Returns:
            The mean loss, or the list of them, on all ranks of the pipeline; or the output on the
            ranks that have the last stage, and None on others.

        """
        self.eval()
        losses: list[torch.Tensor] = []
        outputs: dict[int, Any] = {}

        def finish_with(labels: Sequence[Any], weights: Sequence[float]) -> Finish:
            def finish(micro: int, output: Any) -> Any:
                if compute_loss:
                    found = self._losses_of(output, labels[micro])
                    losses.append(_stacked(found) * weights[micro])
                else:
                    outputs[micro] = output
                return output

            return finish

        check = (lambda: check_loss(self._layers)) if compute_loss else None
        loss = self._steps.run(data, self.schedule, check, finish_with, losses)
        if compute_loss:
            return self._told(loss)
        return _concat_outputs([outputs[micro] for micro in sorted(outputs)])

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model, where one rank has all of it.

        Args:
            inputs: of the model, by position.
            kwargs: of the model, by name.

        """
        with self._steps.precision():
            return self._layers(*inputs, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context that changes nothing: `train_batch` communicates once for each batch."""
        return nullcontext()

    # ---- how busy the ranks are

    def bubble(self) -> Bubble:
        """Return the share of the last step in which the pipeline's ranks were idle. Collective.

        Measured from the beginning of the first forward pass to the end of the last backward pass.
        """
        return self._last().bubble()

    def timeline(self) -> list[list[Span]]:
        """Return when each rank of the pipeline computed what in the last step. Collective.

        In seconds from the beginning of the step, at which the ranks meet.
        """
        return self._last().timeline()

    def draw(self, path: str | Path) -> None:
        """Draw the last step of all ranks of the pipeline as SVG. Collective.

        The first of them writes the picture.

        Args:
            path: of the picture.

        """
        self._last().draw(path)

    def _last(self) -> Observed:
        if self._steps.last is None:
            raise UsageError("there was no train_batch yet; call it once before")
        return self._steps.last

    def _losses_of(self, output: Any, labels: Any) -> list[torch.Tensor]:
        given = (output,) if labels is None else (output, labels)
        return [_one_number(loss_fn(*given)) for loss_fn in self._layers.losses]

    def _told(self, losses: torch.Tensor) -> Any:
        """Return the result of a batch: a loss, or one for each function of a list."""
        return losses[0] if callable(self._layers.loss_fn) else [*losses]

    # ---- a module like the one it holds

    @property
    def module(self) -> PipelineLayer:
        """The model."""
        return self._layers

    @property
    def device(self) -> torch.device:
        """Where the stages of this rank are."""
        return self._steps.device

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """Delegate to the model, which has an empty one for a rank without any.

        Args:
            recurse: with those of sub-modules.

        """
        yield from self._layers.parameters(recurse)


def _grid_of(group: Group) -> HybridCommunicateGroup:
    return HybridCommunicateGroup(CommunicateTopology(["pipe"], [group.nranks]), group=group)


def _one_number(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UsageError(f"loss_fn must return one number, the mean over its samples, got {got}")
    return loss.reshape(())


def _stacked(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([each.detach().double() for each in losses])


def _concat_outputs(outputs: Sequence[Any]) -> Any:
    """Return what the model returns for a whole batch; None where this rank has none of it."""
    if not outputs:
        return None
    if isinstance(outputs[0], (tuple, list)):
        return tuple(map(_concat_outputs, zip(*outputs, strict=True)))
    return torch.cat(list(outputs))
