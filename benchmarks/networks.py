"""A perceptron of 21 million parameters, in torch and in NumPy, with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

import hpcdist as dist

WIDTHS = 1024, 2048, 4096, 2048, 1024, 10
BATCH = 32
RATE = 1e-4
"""Small: the weights shall stay ordinary numbers however often they are trained."""

Weights = Sequence[tuple[np.ndarray, "np.ndarray | None"]]
"""The matrix and the bias (if any) of each layer."""


def random_weights(widths: Sequence[int] = WIDTHS) -> Weights:
    """Return a matrix and a bias for each layer, the same on every rank."""
    random = np.random.default_rng(0)
    return [
        ((random.standard_normal((to, of)) * (2 / of) ** 0.5).astype("f4"), np.zeros(to, "f4"))
        for of, to in pairwise(widths)
    ]


def random_batch(rank: int, widths: Sequence[int] = WIDTHS) -> tuple[np.ndarray, np.ndarray]:
    """Return this rank's inputs and labels."""
    random = np.random.default_rng(rank)
    inputs = random.standard_normal((BATCH, widths[0])).astype("f4")
    return inputs, random.integers(0, widths[-1], BATCH)


# ---- torch


def torch_network(weights: Weights) -> Any:
    import torch

    torch.set_num_threads(1)
    layers: list[Any] = []
    for matrix, bias in weights:
        linear = torch.nn.Linear(matrix.shape[1], matrix.shape[0], bias=bias is not None)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(matrix))
            if bias is not None:
                linear.bias.copy_(torch.from_numpy(bias))
        layers += [linear, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def torch_step(model: Any, inputs: np.ndarray, labels: np.ndarray) -> Callable[[], None]:
    """Return what trains `model` (plain or parallel) on one batch."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), RATE)
    x, y = torch.from_numpy(inputs), torch.from_numpy(labels)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


# ---- NumPy


class Network:
    """Linear layers with ReLU between them; `backward` assigns each gradient once it is there."""

    def __init__(self, weights: Weights) -> None:
        self._layers = [tuple(map(_parameter, pair)) for pair in weights]
        self._named = [
            (f"{number}.{name}", parameter)
            for number, layer in enumerate(self._layers)
            for name, parameter in zip(("weight", "bias"), layer, strict=True)
            if parameter is not None
        ]
        self._inputs: list[np.ndarray] = []

    def named_parameters(self) -> list[tuple[str, dist.Parameter]]:
        return self._named

    def zero_grad(self) -> None:
        for _, parameter in self._named:
            parameter.grad = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self._inputs = []
        for weight, bias in self._layers:
            self._inputs.append(np.maximum(x, 0, out=x) if self._inputs else x)
            x = x @ weight.data.T
            if bias is not None:
                x += bias.data
        return x

    def backward(self, slope: np.ndarray) -> None:
        """Go back from the slope of the loss with respect to the output."""
        for number in reversed(range(len(self._layers))):
            (weight, bias), x = self._layers[number], self._inputs[number]
            if bias is not None:
                bias.grad = slope.sum(axis=0)
            weight.grad = slope.T @ x
            if number:
                slope = slope @ weight.data
                slope *= x > 0


def _parameter(array: np.ndarray | None) -> dist.Parameter | None:
    return None if array is None else dist.Parameter(array.copy())


def cross_entropy_slope(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the slope of the mean cross entropy with respect to the scores."""
    slope = np.exp(scores - scores.max(axis=1, keepdims=True))
    slope /= slope.sum(axis=1, keepdims=True)
    slope[np.arange(len(labels)), labels] -= 1
    slope /= np.float32(len(labels))
    return slope


def numpy_step(
    model: Any, network: Network, inputs: np.ndarray, labels: np.ndarray
) -> Callable[[], None]:
    """Return what trains `network` on one batch; `model` is itself or its DataParallel."""
    parameters = [parameter for _, parameter in network.named_parameters()]

    def step() -> None:
        model.zero_grad()
        network.backward(cross_entropy_slope(model(inputs), labels))
        for parameter in parameters:
            slope = parameter.grad
            slope *= np.float32(RATE)
            parameter.data -= slope

    return step
