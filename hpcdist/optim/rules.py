"""The formulas: how weights, gradient and state of one block become the next ones, in place.

All arrays are of one shape and one floating dtype: flat, or rows, each a parameter of its own. The
functions use NumPy's ufuncs with ``out=``, which every array library that implements NumPy's
protocols (CuPy) runs on its own memory; no array is made here, but for sums over rows. The loops in
C for rows (`ps/native/rules.c`) have the same bits; torch's own optimizers have torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any

import numpy as np

from hpcdist.named_tuple import NamedTuple

Options = Mapping[str, Any]

LANES = 8
"""Sums that the numbers of a row are added up in, as the compiled loop does."""


class Block(NamedTuple):
    """The operands of a formula: `states` are in the order of `Rule.states`.

    `room` is two arrays of the same length whose contents do not matter. `step` counts from 1.
    `ratio` is that of `Rule.ratio`, where it is known before the gradient is used.
    """

    weights: Any
    gradient: Any
    states: Sequence[Any]
    room: Sequence[Any]
    options: Options
    step: int
    ratio: float = 1.0


class Rule(NamedTuple):
    """One algorithm.

    `advance` uses the gradient once. `measure` returns two sums of squares, as numbers of the
    library of the arrays, and `ratio` makes of them, summed over the whole parameter, a factor of
    the step. Where `apply` is given, `advance` changes the state only; then `measure` sees weights
    and state, and `apply` changes the weights by the ratio. Where it is not, `measure` sees weights
    and gradient, and `advance` has the ratio in its block.
    """

    states: tuple[str, ...]
    advance: Callable[[Block], None]
    measure: Callable[[Block], tuple[Any, Any]] | None = None
    apply: Callable[[Block, float], None] | None = None
    ratio: Callable[[float, float, Options], float] | None = None

    @property
    def measures_gradients(self) -> bool:
        """Whether `measure` comes before `advance`."""
        return self.measure is not None and self.apply is None

    def ratio_of(self, squares: Sequence[float], options: Options) -> float:
        """Return `ratio` of two sums over a whole parameter."""
        assert self.ratio is not None
        first, second = squares
        return self.ratio(float(first), float(second), options)


def sgd(block: Block) -> None:
    """W -= lr (g + decay w) (Robbins and Monro 1951)."""
    weights, options, room = block.weights, block.options, block.room
    slope = _decayed(block)
    np.multiply(slope, options["learning_rate"], out=room[0])
    np.subtract(weights, room[0], out=weights)


def momentum(block: Block) -> None:
    """Move by an average of past gradients.

    v = mu v + (1 - dampening) g, w -= lr v; with `nesterov` w -= lr (g + mu v) (Polyak 1964;
    Sutskever et al. 2013, as torch and Paddle write it). The first step takes v = g.
    """
    weights, options, room = block.weights, block.options, block.room
    (speed,), mu = block.states, options["momentum"]
    slope = _decayed(block)
    if block.step == 1:
        np.copyto(speed, slope)
    else:
        np.multiply(speed, mu, out=speed)
        np.multiply(slope, 1 - options["dampening"], out=room[1])
        np.add(speed, room[1], out=speed)
    step = speed
    if options["nesterov"]:
        np.multiply(speed, mu, out=room[1])
        step = np.add(slope, room[1], out=room[1])
    np.multiply(step, options["learning_rate"], out=room[1])
    np.subtract(weights, room[1], out=weights)


def adam(block: Block) -> None:
    """Divide an average of gradients by the root of one of their squares.

    m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, w -= lr m' / (sqrt(v') + eps) with
    m' = m / (1 - b1^t), v' = v / (1 - b2^t) (Kingma and Ba 2015, algorithm 1); decay is added to g.
    """
    _moments(block, _decayed(block))
    _move(block)


def adamw(block: Block) -> None:
    """Apply Adam with decoupled weight decay: w *= 1 - lr decay (Loshchilov and Hutter 2019)."""
    weights, options = block.weights, block.options
    if options["weight_decay"]:
        factor = 1 - options["learning_rate"] * options["weight_decay"]
        np.multiply(weights, factor, out=weights)
    _moments(block, block.gradient)
    _move(block)


def lamb_advance(block: Block) -> None:
    """Advance the two averages of Adam; see `lamb_apply`."""
    _moments(block, block.gradient)


def lamb_measure(block: Block) -> tuple[Any, Any]:
    """Return the sums of squares of the weights and of their direction."""
    direction = _direction(block)
    return _squares(block, block.weights), _squares(block, direction)


def lamb_apply(block: Block, ratio: float) -> None:
    """W -= lr ratio u with u = m' / (sqrt(v') + eps) + decay w, ratio = |w| / |u| of the parameter.

    The ratio is 1 where one of the norms is 0 (You et al. 2020, algorithm 2).
    """
    weights, direction = block.weights, _direction(block)
    np.multiply(direction, block.options["learning_rate"] * ratio, out=direction)
    np.subtract(weights, direction, out=weights)


def length_ratio(weights: float, direction: float, _: Options) -> float:
    """Return the ratio of two norms, given their squares; 1 where one is 0."""
    return sqrt(weights / direction) if weights > 0 and direction > 0 else 1.0


def lars_measure(block: Block) -> tuple[Any, Any]:
    """Return the sums of squares of the weights and of the gradient."""
    return _squares(block, block.weights), _squares(block, block.gradient)


def lars_ratio(weights: float, gradient: float, options: Options) -> float:
    """Return coefficient |w| / (|g| + decay |w| + eps), given squares; 1 where a norm is 0."""
    if not (weights > 0 and gradient > 0):
        return 1.0
    size = sqrt(weights)
    below = sqrt(gradient) + float(options["weight_decay"]) * size + float(options["epsilon"])
    return float(options["lars_coeff"]) * size / below


def lars(block: Block) -> None:
    """V = mu v + lr ratio (g + decay w), w -= v (You, Gitman and Ginsburg 2017, algorithm 1)."""
    weights, options, room = block.weights, block.options, block.room
    (speed,) = block.states
    slope = _decayed(block)
    np.multiply(slope, options["learning_rate"] * block.ratio, out=room[1])
    np.multiply(speed, options["momentum"], out=speed)
    np.add(speed, room[1], out=speed)
    np.subtract(weights, speed, out=weights)


def adagrad(block: Block) -> None:
    """S += g^2, w -= lr g / (sqrt(s) + eps) (Duchi, Hazan and Singer 2011)."""
    weights, options, room = block.weights, block.options, block.room
    (squares,), gradient = block.states, block.gradient
    np.multiply(gradient, gradient, out=room[0])
    np.add(squares, room[0], out=squares)
    np.sqrt(squares, out=room[0])
    np.add(room[0], options["epsilon"], out=room[0])
    np.divide(gradient, room[0], out=room[0])
    np.multiply(room[0], options["learning_rate"], out=room[0])
    np.subtract(weights, room[0], out=weights)


def ftrl(block: Block) -> None:
    """Follow the regularized leader, with per-coordinate rates (McMahan et al. 2013, algorithm 1).

    z += g - w (sqrt(n + g^2) - sqrt(n)) / lr, n += g^2; w is 0 where |z| <= l1, and elsewhere
    (sign(z) l1 - z) / ((beta + sqrt(n)) / lr + l2).
    """
    weights, options, (room, other) = block.weights, block.options, block.room
    (linear, squares), gradient = block.states, block.gradient
    rate = options["learning_rate"]
    np.multiply(gradient, gradient, out=room)
    np.sqrt(squares, out=other)
    np.add(squares, room, out=squares)
    np.sqrt(squares, out=room)
    np.subtract(room, other, out=other)
    np.divide(other, rate, out=other)
    np.multiply(other, weights, out=other)
    np.add(linear, gradient, out=linear)
    np.subtract(linear, other, out=linear)
    np.add(room, options["beta"], out=room)
    np.divide(room, rate, out=room)
    np.add(room, options["l2"], out=room)
    np.abs(linear, out=other)
    np.minimum(other, options["l1"], out=other)
    np.copysign(other, linear, out=other)
    np.subtract(other, linear, out=other)
    np.divide(other, room, out=weights)


def rowwise_adagrad(block: Block) -> None:
    """S += mean(g^2) over the row, w -= lr g / (sqrt(s) + eps); s is one number."""
    weights, options, (room, _) = block.weights, block.options, block.room
    (squares,), gradient = block.states, block.gradient
    np.multiply(gradient, gradient, out=room)
    dim, half = room.shape[1], LANES // 2
    lanes = np.zeros((len(room), LANES), room.dtype)
    for start in range(0, dim, LANES):
        part = room[:, start : start + LANES]
        lanes[:, : part.shape[1]] += part
    while half:
        lanes[:, :half] += lanes[:, half : 2 * half]
        half //= 2
    np.add(squares, lanes[:, :1] / dim, out=squares)
    np.divide(gradient, np.sqrt(squares) + options["epsilon"], out=room)
    np.multiply(room, options["learning_rate"], out=room)
    np.subtract(weights, room, out=weights)


# ---- what they share


def _squares(block: Block, values: Any) -> Any:
    """Return the sum of squares; uses the second of the room.

    A dot product would have other bits on other processors, and on GPUs need cuBLAS.
    """
    return np.sum(np.multiply(values, values, out=block.room[1]))


def _decayed(block: Block) -> Any:
    """Return the gradient with the weights' decay; maybe in the first of the room."""
    decay = block.options["weight_decay"]
    if not decay:
        return block.gradient
    np.multiply(block.weights, decay, out=block.room[0])
    return np.add(block.room[0], block.gradient, out=block.room[0])


def _moments(block: Block, slope: Any) -> None:
    """Advance the averages of the gradient and of its square; uses the second of the room."""
    (first, second), options, room = block.states, block.options, block.room[1]
    np.subtract(slope, first, out=room)
    np.multiply(room, 1 - options["beta1"], out=room)
    np.add(first, room, out=first)
    np.multiply(second, options["beta2"], out=second)
    np.multiply(slope, slope, out=room)
    np.multiply(room, 1 - options["beta2"], out=room)
    np.add(second, room, out=second)


def _quotient(block: Block) -> float:
    """Leave m / (sqrt(v) + eps c) in the room; times the result it is m' / (sqrt(v') + eps).

    c is the root of 1 - b2^t: dividing once less than the formula says.
    """
    (first, second), options, room = block.states, block.options, block.room[0]
    root = sqrt(1 - options["beta2"] ** block.step)
    np.sqrt(second, out=room)
    np.add(room, options["epsilon"] * root, out=room)
    np.divide(first, room, out=room)
    return root / (1 - float(options["beta1"]) ** block.step)


def _move(block: Block) -> None:
    weights, room = block.weights, block.room[0]
    factor = _quotient(block)
    np.multiply(room, block.options["learning_rate"] * factor, out=room)
    np.subtract(weights, room, out=weights)


def _direction(block: Block) -> Any:
    decay, room = block.options["weight_decay"], block.room
    factor = _quotient(block)
    np.multiply(room[0], factor, out=room[0])
    if decay:
        np.multiply(block.weights, decay, out=room[1])
        np.add(room[0], room[1], out=room[0])
    return room[0]


_MOMENTS = ("moment1", "moment2")

SGD = Rule((), sgd)
MOMENTUM = Rule(("velocity",), momentum)
ADAM = Rule(_MOMENTS, adam)
ADAMW = Rule(_MOMENTS, adamw)
LAMB = Rule(_MOMENTS, lamb_advance, lamb_measure, lamb_apply, length_ratio)
LARS = Rule(("velocity",), lars, lars_measure, ratio=lars_ratio)
ADAGRAD = Rule(("squares",), adagrad)
ROWWISE_ADAGRAD = Rule(("squares",), rowwise_adagrad)
FTRL = Rule(("linear", "squares"), ftrl)
