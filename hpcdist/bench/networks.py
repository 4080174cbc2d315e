"""A perceptron of 21 million parameters in NumPy, and the weights it shares with torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.parallel.parameter import Parameter

WIDTHS = 1024, 2048, 4096, 2048, 1024, 10
BATCH = 32
RATE = 1e-4
"""Small: the weights shall stay ordinary numbers however often they are trained."""

Array = npt.NDArray[Any]
Batch = tuple[Array, Array]
"""Inputs and labels."""
Weights = Sequence[tuple[Array, "Array | None"]]
"""The matrix and the bias (if any) of each layer."""


def random_weights(widths: Sequence[int] = WIDTHS) -> Weights:
    """Return a matrix and a bias for each layer, the same on every rank."""
    random = np.random.default_rng(0)
    return [
        ((random.standard_normal((to, of)) * (2 / of) ** 0.5).astype("f4"), np.zeros(to, "f4"))
        for of, to in pairwise(widths)
    ]


def random_batch(rank: int, widths: Sequence[int] = WIDTHS) -> Batch:
    """Return this rank's inputs and labels."""
    random = np.random.default_rng(rank)
    inputs = random.standard_normal((BATCH, widths[0])).astype("f4")
    return inputs, random.integers(0, widths[-1], BATCH)


class Network:
    """Linear layers with ReLU between them; `backward` assigns each gradient once it is there."""

    def __init__(self, weights: Weights) -> None:
        self._layers = [
            (Parameter(matrix.copy()), None if bias is None else Parameter(bias.copy()))
            for matrix, bias in weights
        ]
        self._named = [
            (f"{number}.{name}", parameter)
            for number, layer in enumerate(self._layers)
            for name, parameter in zip(("weight", "bias"), layer, strict=True)
            if parameter is not None
        ]
        self._inputs: list[Array] = []

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """Return the parameters with their names."""
        return self._named

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for _, parameter in self._named:
            parameter.grad = None

    def __call__(self, x: Array) -> Array:
        """Return the scores of the inputs; `backward` goes back from here."""
        self._inputs = []
        for weight, bias in self._layers:
            self._inputs.append(np.maximum(x, 0, out=x) if self._inputs else x)
            x = x @ weight.data.T
            if bias is not None:
                x += bias.data
        return x

    def backward(self, slope: Array) -> None:
        """Go back from the slope of the loss with respect to the output."""
        for number in reversed(range(len(self._layers))):
            (weight, bias), x = self._layers[number], self._inputs[number]
            if bias is not None:
                bias.grad = slope.sum(axis=0)
            weight.grad = slope.T @ x
            if number:
                slope = slope @ weight.data
                slope *= x > 0


def cross_entropy_slope(scores: Array, labels: Array) -> Array:
    """Return the slope of the mean cross entropy with respect to the scores."""
    slope: Array = np.exp(scores - scores.max(axis=1, keepdims=True))
    slope /= slope.sum(axis=1, keepdims=True)
    slope[np.arange(len(labels)), labels] -= 1
    slope /= np.float32(len(labels))
    return slope


def numpy_step(model: Any, network: Network, batch: Batch) -> Callable[[], None]:
    """Return what trains `network` on one batch; `model` is itself or its DataParallel."""
    inputs, labels = batch
    parameters = [parameter for _, parameter in network.named_parameters()]

    def step() -> None:
        model.zero_grad()
        network.backward(cross_entropy_slope(model(inputs), labels))
        for parameter in parameters:
            slope: Any = parameter.grad
            slope *= np.float32(RATE)
            parameter.data -= slope

    return step
