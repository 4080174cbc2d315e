"""`Stage`: some layers in a row, and what micro-batches under way need of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch

from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.torch.pipeline.split_backward import WeightsLeft, backward_inputs, backward_weights
from hpcdist.torch.pipeline.wire import Bundle

Layer = Callable[[Any], Any]
Autocast = Callable[[], AbstractContextManager[Any]]


class _Pass(NamedTuple):
    """A micro-batch between its forward and its backward pass."""

    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]


@final
class Stage:
    """A part of a model.

    Attributes:
        number: which of the stages of the pipeline.
        run: calls the layers.
        splits: whether a backward pass can be done in two parts without computing activations
            twice.

    """

    def __init__(self, number: int, run: Layer, *, splits: bool = True) -> None:
        self.number, self.run, self.splits = number, run, splits
        self._passes: dict[int, _Pass] = {}
        self._left: dict[int, WeightsLeft] = {}

    def forward(
        self,
        micro: int,
        given: Bundle | Any,
        finish: Callable[[Any], Any] | None,
        autocast: Autocast = nullcontext,
    ) -> Any:
        """Compute a micro-batch and keep what its backward pass needs.

        Args:
            micro: its number.
            given: what the stage before has handed on; or what the model is called with.
            finish: computes what the backward pass begins with from what the last layer returns;
                None for a stage that is not the last.
            autocast: in which precision to compute.

        Returns:
            What is handed on, as a `Bundle`; of the last stage what `finish` returns.

        """
        is_first = not isinstance(given, Bundle)
        x = given if is_first else given.tensors if given.is_tuple else given.tensors[0]
        with autocast():
            outputs = self.run(x)
            outputs = bundle_of(outputs) if finish is None else finish(outputs)
        if torch.is_grad_enabled():
            leaves = () if is_first else given.tensors
            made = outputs.tensors if isinstance(outputs, Bundle) else (outputs,)
            self._passes[micro] = _Pass(_differentiable(leaves), _differentiable(made))
        return outputs

    def backward(self, micro: int, gradients: Bundle | None, *, whole: bool = True) -> Bundle:
        """Compute gradients, and drop what the micro-batch needed; return those of the inputs.

        Args:
            micro: its number.
            gradients: those of the outputs; None for the last stage.
            whole: False leaves the weights to `backward_weights`.

        """
        inputs, outputs = self._passes.pop(micro)
        if gradients is None:
            slopes: Sequence[torch.Tensor] = [torch.ones_like(each) for each in outputs]
        else:
            slopes = gradients.tensors
        found: Sequence[torch.Tensor | None]
        if not outputs:
            found = [None] * len(inputs)
        elif whole or not self.splits:
            torch.autograd.backward(outputs, slopes)
            found = [each.grad for each in inputs]
        else:
            found, self._left[micro] = backward_inputs(outputs, slopes, inputs)
        return Bundle(
            tuple(
                torch.zeros_like(each) if grad is None else grad
                for each, grad in zip(inputs, found, strict=True)
            ),
            is_tuple=True,
        )

    def backward_weights(self, micro: int) -> None:
        """Compute what `backward` has left of the gradients."""
        left = self._left.pop(micro, None)
        if left is not None:
            backward_weights(left)

    def forget(self) -> None:
        """Drop all micro-batches under way."""
        self._passes.clear()
        self._left.clear()


def bundle_of(outputs: Any) -> Bundle:
    """Return what a stage hands on.

    Raises:
        UsageError: it is neither a tensor nor a tuple of tensors.

    """
    is_tuple = isinstance(outputs, (tuple, list))
    tensors = tuple(outputs) if is_tuple else (outputs,)
    wrong = [each for each in tensors if not isinstance(each, torch.Tensor)]
    if wrong or not tensors:
        got = type(wrong[0]).__name__ if wrong else "nothing"
        raise UsageError(
            f"a stage hands on a tensor or a tuple of tensors, got {got} among what its last layer "
            "returns"
        )
    if any(each.layout is not torch.strided for each in tensors):
        raise UsageError("a stage hands on dense tensors; let its last layer call to_dense()")
    return Bundle(tensors, is_tuple)


def _differentiable(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(each for each in tensors if each.requires_grad)
