"""`to_static` and `DistModel`: one call trains, evaluates or predicts one batch.

Nothing is compiled: a `DistModel` is the loop body that everybody writes, put together from a
`Strategy`, whose sections `sections` carries out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, final

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_map

from hpcdist.comm.collectives import all_reduce
from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.events import Event, subscribe
from hpcdist.parallel.model import DataParallel
from hpcdist.parallel.strategy import Strategy
from hpcdist.torch.on_mesh import Joining, settle_all, settling, whole
from hpcdist.torch.optimizers import materialize_states
from hpcdist.torch.pipeline.parallel import PipelineParallel
from hpcdist.torch.rows import rows_of
from hpcdist.torch.sections import (
    autocasting,
    data_group,
    distributed,
    is_fsdp,
    is_on_mesh,
    mesh_of,
    recompute,
    scaler_for,
    training_group,
)
from hpcdist.torch.tensor_parallel import own_part
from hpcdist.transport.call.reduction import ReduceOp

Mode = Literal["train", "eval", "predict"]
_NEEDS: dict[str, tuple[str, ...]] = {
    "train": ("loss", "optimizer"),
    "eval": ("loss",),
    "predict": (),
}
"""What each mode needs beside the layer; a model begins in the first one that has it."""


@final
class Program:
    """What a `DistModel` does in a mode, printed a line each: its layers, or its communication.

    Attributes:
        operations: layers, or what this rank communicated, in order.

    """

    def __init__(self, operations: Sequence[str]) -> None:
        self.operations = tuple(operations)

    def __len__(self) -> int:
        return len(self.operations)

    def __str__(self) -> str:
        return "\n".join(self.operations) or "(nothing is communicated)"

    def __repr__(self) -> str:
        return f"Program({len(self)} operations)"


@final
class DistModel:
    """A torch module with its loss and optimizer, called batch by batch. Made by `to_static`.

    ``model(inputs, labels)`` in mode train computes the loss, its gradients and a step, and returns
    the loss; in mode eval it returns the loss; in mode predict, called with inputs only, the
    outputs. The last argument is the labels, unless `input_spec` says how many are inputs.

    For a batch that is cut over ranks, as those of `shard_dataloader` are, every rank gets what one
    process would get for the whole batch. If the layer has ordinary tensors, the loss is the mean
    over the rows, so that a loss which is a sum comes out as the mean of the sums. An ordinary
    tensor is a rank's own batch, and results computed from it are the rank's own.

    Args:
        layer: a `torch.nn.Module`: an ordinary one, which then trains data-parallel, or one from
            `shard_layer`, `parallelize` or `fully_shard`.
        loader: what the batches come from; a `ShardDataloader` tells the mesh.
        loss: called with outputs and labels.
        optimizer: one of torch.optim, of the layer's parameters.
        strategy: a `Strategy`.
        metrics: accepted for Paddle's sake.
        input_spec: two lists, of a description of each input and of each label; only their lengths
            matter.

    Attributes:
        mode: ``"train"``, ``"eval"`` or ``"predict"``.

    Raises:
        UsageError: a wrong argument; the strategy asks for something that is done in another way
            here.

    Example:
        >>> import torch, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> layer = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> model = dist.to_static(layer, loss=torch.nn.functional.mse_loss, optimizer=optimizer)
        >>> loss = model(torch.ones(4, 8), torch.ones(4, 1))
        >>> model.predict()
        >>> model(torch.ones(4, 8)).shape
        torch.Size([4, 1])

    """

    def __init__(
        self,
        layer: torch.nn.Module,
        loader: Any = None,
        loss: Callable[..., Any] | None = None,
        optimizer: Any = None,
        strategy: Strategy | None = None,
        metrics: Any = None,
        input_spec: Sequence[Sequence[Any]] | None = None,
    ) -> None:
        strategy = Strategy() if strategy is None else strategy
        _check_arguments(layer, loss, optimizer, strategy, input_spec)
        _warn_of(strategy)
        if strategy.base.seed is not None:
            torch.manual_seed(strategy.base.seed)
        self._layer = layer
        self._serial = _layers_of(layer)
        self._loss = loss
        self._inputs = None if input_spec is None else len(input_spec[0])
        recompute(layer, strategy.recompute)
        self._on_mesh = is_on_mesh(layer)
        self._group = data_group(loader)
        self._model, self._optimizer = distributed(layer, loader, optimizer, strategy)
        self._step = _Step(self._model, self._optimizer, strategy, training_group(loader))
        self._autocast = autocasting(layer, strategy.amp)
        self._programs: dict[str, Program] = {}
        given = {"loss": loss, "optimizer": optimizer}
        self._modes = [
            mode for mode, needs in _NEEDS.items() if all(given[each] is not None for each in needs)
        ]
        self._go_to(self._modes[0])

    # ---- modes

    def train(self) -> None:
        """Switch to mode train."""
        self._go_to("train")

    def eval(self) -> None:
        """Switch to mode eval."""
        self._go_to("eval")

    def predict(self) -> None:
        """Switch to mode predict."""
        self._go_to("predict")

    def _go_to(self, mode: str) -> None:
        if mode not in self._modes:
            raise UsageError(
                f"mode {mode} needs {' and '.join(_NEEDS[mode])}; give to_static what is missing"
            )
        self.mode = mode
        self._model.train(mode == "train")

    # ---- one batch

    def __call__(self, *args: Any) -> Any:
        """Train, evaluate or predict one batch. Collective."""
        if self.mode in self._programs:
            return self._run(args)
        operations: list[str] = []
        with _recording(operations):
            result = self._run(args)
        self._programs[self.mode] = Program(operations)
        return result

    def _run(self, args: tuple[Any, ...]) -> Any:
        batch = self._parted([*_flat(args)])
        if self._on_mesh:
            batch = tree_map(_even, batch)
        with nullcontext() if self.mode == "train" else torch.no_grad():
            rows = rows_of(batch)
            # What is not on a mesh takes this rank's part of the batch.
            inputs, labels = batch if self._on_mesh else tree_map(own_part, batch)
            if self.mode == "train":
                result = self._step(partial(self._compute, inputs, labels))
            else:
                result = self._compute(inputs, labels)
        if rows is not None:
            result = rows.whole(result)
        return result if self.mode == "predict" else whole(result)

    def _parted(self, values: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return inputs and labels."""
        count = self._inputs
        if count is None:
            count = len(values) if self.mode == "predict" else max(len(values) - 1, 1)
        if not 0 < count <= len(values):
            raise UsageError(f"the model takes {count} inputs and the labels, got {len(values)}")
        return values[:count], values[count:] if self.mode != "predict" else []

    def _compute(self, inputs: list[Any], labels: list[Any]) -> Any:
        """Return the loss, or in mode predict the outputs."""
        with self._autocast():
            outputs = self._model(*inputs)
            if self.mode == "predict":
                return outputs
            assert self._loss is not None
            listed = [*outputs] if isinstance(outputs, (tuple, list)) else [outputs]
            mesh = mesh_of(listed)
            if mesh is None:
                labels = tree_map(own_part, labels)
            with nullcontext() if mesh is None else Joining(mesh):
                return self._loss(*listed, *labels)

    def serial_main_program(self, mode: str | None = None) -> Program:
        """Return the layers of the model as it was given, for printing. Local.

        Args:
            mode: ``"train"``, ``"eval"`` or ``"predict"``; None for the current one. The layers
                are the same in all of them.

        """
        self._known_mode(mode)
        return self._serial

    def dist_main_program(self, mode: str | None = None) -> Program:
        """Return the operations of the first batch of a mode, for printing. Local.

        Args:
            mode: ``"train"``, ``"eval"`` or ``"predict"``; None for the current one.

        """
        mode = self._known_mode(mode)
        if mode not in self._programs:
            raise UsageError(f"no batch has been run in mode {mode} yet; run one, and ask again")
        return self._programs[mode]

    def _known_mode(self, mode: str | None) -> str:
        mode = self.mode if mode is None else mode
        if mode not in _NEEDS:
            raise UsageError(f"mode must be one of {', '.join(_NEEDS)}, got {mode!r}")
        return mode

    # ---- states

    def state_dict(self, mode: str = "all") -> dict[str, Any]:
        """Return the state, as checkpoints take it: sharded entries are this rank's part.

        Names are those of the layer's parameters and buffers, ``"<parameter>.<state>"`` for the
        optimizer's, and ``"learning_rates"``. Collective where the optimizer is sharded.

        Args:
            mode: ``"param"`` for the layer's state, ``"opt"`` for the optimizer's, ``"all"``.

        """
        state: dict[str, Any] = {}
        if _wants(mode, "param"):
            take = getattr(self._model, "sharded_state_dict", self._layer.state_dict)
            state |= take()
        if _wants(mode, "opt") and self._optimizer is not None:
            take = getattr(self._optimizer, "sharded_state_dict", self._optimizer_state)
            state |= take()
        return state

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, or some of it. Collective where it is sharded.

        Args:
            state_dict: names and tensors, whole or `LocalSlice`s.

        Raises:
            UsageError: the state lacks a parameter, or has what the model does not have.

        """
        own = set(self._layer.state_dict())
        layers = {name: each for name, each in state_dict.items() if name in own}
        rest = {name: each for name, each in state_dict.items() if name not in own}
        has_layers, has_rest = self._anywhere(bool(layers), bool(rest))
        if has_layers:
            self._load_layer(layers, own)
        if has_rest:
            self._load_optimizer(rest)

    def _anywhere(self, *flags: bool) -> list[bool]:
        """Return which flags hold on any rank: of little, a rank may own nothing. Collective."""
        if not hasattr(self._model, "load_sharded_state_dict"):
            return list(flags)
        found = np.array(flags, np.uint8)
        all_reduce(found, ReduceOp.MAX, self._group)
        return [bool(each) for each in found]

    def _load_layer(self, state: Mapping[str, Any], own: set[str]) -> None:
        if hasattr(self._model, "load_sharded_state_dict"):
            self._model.load_sharded_state_dict(state)
            return
        missing = sorted(own - set(state))
        if missing:
            raise UsageError(f"the state has no {missing[0]!r}; load one of the same model")
        self._layer.load_state_dict(state)

    def _load_optimizer(self, state: Mapping[str, Any]) -> None:
        if self._optimizer is None:
            raise UsageError(
                f"the state has {next(iter(state))!r}, but this model has no optimizer; load it "
                "into a model for training"
            )
        if hasattr(self._optimizer, "load_sharded_state_dict"):
            self._optimizer.load_sharded_state_dict(state)
            return
        own = self._optimizer_state()
        unlike = sorted(set(own) ^ set(state))
        if unlike:
            raise UsageError(
                f"the optimizer and its state differ in {unlike[0]!r}; load the state of the same "
                "model and optimizer"
            )
        for name, value in own.items():
            if isinstance(value, torch.Tensor):
                value.detach().copy_(state[name])
        rates = state["learning_rates"]
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _optimizer_state(self) -> dict[str, Any]:
        materialize_states(self._optimizer)
        names = {id(each): name for name, each in self._layer.named_parameters()}
        state = {
            f"{names[id(parameter)]}.{key}": value
            for parameter, states in self._optimizer.state.items()
            for key, value in states.items()
        }
        return state | {"learning_rates": [each["lr"] for each in self._optimizer.param_groups]}

    def __repr__(self) -> str:
        return f"DistModel({type(self._layer).__name__}, mode {self.mode!r})"


def _layers_of(module: torch.nn.Module) -> Program:
    """Return the layers of a module that have no layers in them."""
    inner = [
        f"{name or 'layer'}: {part}"
        for name, part in module.named_modules()
        if next(part.children(), None) is None
    ]
    return Program(inner)


# ---- one step of training


@final
class _Step:
    """Forward, backward, and after some of them a step of the optimizer."""

    def __init__(self, model: Any, optimizer: Any, strategy: Strategy, group: Group) -> None:
        merge, amp = strategy.gradient_merge, strategy.amp
        self._every = merge.k_steps if merge.enable else 1
        self._factor = 1 / self._every if merge.enable and merge.avg else 1.0
        self._model, self._optimizer, self._count = model, optimizer, 0
        self._scaler = scaler_for(model, strategy.amp, group)
        self._scale = None if amp.use_dynamic_loss_scaling else float(amp.init_loss_scaling)
        if merge.enable and is_on_mesh(model):
            for each in model.parameters():
                if each.requires_grad:
                    settling(each).every = self._every

    def __call__(self, compute: Callable[[], Any]) -> Any:
        """Return the loss of a batch, after its gradients have been used."""
        self._count += 1
        is_last = self._count % self._every == 0
        with self._syncing(is_last):
            loss = compute()
            scaled = loss if self._factor == 1 else loss * self._factor
            (scaled if self._scaler is None else self._scaler.scale(scaled)).backward()
        if is_last:
            self._take()
        return loss.detach()

    def _syncing(self, is_last: bool) -> AbstractContextManager[Any]:
        """Return a context that averages gradients only in the last pass before a step."""
        if is_fsdp(self._model):
            self._model.set_requires_gradient_sync(is_last)
        elif isinstance(self._model, DataParallel) and not is_last:
            return self._model.no_sync()
        return nullcontext()

    def _take(self) -> None:
        if self._every > 1:
            settle_all(self._model.parameters() if is_on_mesh(self._model) else ())
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update(self._scale)
        self._optimizer.zero_grad()


def _even(tensor: Any) -> Any:
    """Return a DTensor that has unequal parts as a whole: torch cannot flatten it otherwise."""
    if not isinstance(tensor, DTensor):
        return tensor
    wanted = [
        Replicate() if isinstance(each, Shard) and tensor.shape[each.dim] % size else each
        for each, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    ]
    return tensor.redistribute(placements=wanted)


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for each in values:
        if isinstance(each, (list, tuple)):
            yield from _flat(each)
        else:
            yield each


_REFUSED = {
    "pipeline": "cut the model by dist.parallelize with pp_config, and call its train_batch",
    "qat": "quantize the model with torchao",
}
"""Sections that would change the numbers, and what to use in their place."""


def _check_arguments(layer: Any, loss: Any, optimizer: Any, strategy: Any, input_spec: Any) -> None:
    if not isinstance(layer, torch.nn.Module):
        raise UsageError(f"to_static takes a torch.nn.Module, got {layer!r}")
    if isinstance(layer, PipelineParallel):
        raise UsageError(
            "a pipeline trains a batch by train_batch((inputs, labels), optimizer), and evaluates "
            "one by eval_batch; call those in place of to_static"
        )
    if not isinstance(strategy, Strategy):
        raise UsageError(f"strategy must be a Strategy or None, got {strategy!r}")
    if loss is not None and not callable(loss):
        raise UsageError(f"loss must be callable with outputs and labels, got {loss!r}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"the optimizer must be one of torch.optim, got {optimizer!r}")
    if optimizer is not None and loss is None:
        raise UsageError("to_static has an optimizer, but no loss to train with; give both")
    if input_spec is not None and not (
        isinstance(input_spec, (list, tuple)) and len(input_spec) == 2
    ):
        raise UsageError(f"input_spec must be two lists, of inputs and of labels: {input_spec!r}")
    for name, remedy in _REFUSED.items():
        if getattr(strategy, name).enable:
            raise UsageError(f"{name}.enable=True: to_static has nothing for it; {remedy}")
    if strategy.amp.enable and strategy.amp.level in ("o2", "o3"):
        raise UsageError(
            f"amp.level={strategy.amp.level!r}: weights of 16 bits are made by the layer: use "
            "level 'o1', or layer.to(torch.bfloat16) with sharding, which keeps master weights"
        )
    if strategy.gradient_merge.k_steps < 1:
        raise UsageError(
            f"gradient_merge.k_steps must be at least 1, got {strategy.gradient_merge.k_steps}"
        )


def _warn_of(strategy: Strategy) -> None:
    names = strategy.without_effect()
    if names:
        warnings.warn(
            f"nothing is compiled here, so these have no effect: {', '.join(names)}", stacklevel=4
        )


def _wants(mode: str, part: str) -> bool:
    if mode not in ("all", "param", "opt"):
        raise UsageError(f"mode must be 'all', 'param' or 'opt', got {mode!r}")
    return mode in ("all", part)


# ---- what is communicated


@contextmanager
def _recording(operations: list[str]) -> Iterator[None]:
    def listen(event: Event) -> None:
        if event.phase == "begin":
            operations.append(_describe_event(event))

    with ExitStack() as stack:
        stack.callback(subscribe(listen))
        yield


def _describe_event(event: Event) -> str:
    array = f" {event.dtype}{list(event.shape)}" if event.dtype else ""
    return f"{event.name}{array} among ranks {', '.join(map(str, event.ranks))}"
