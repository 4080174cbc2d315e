"""`Accessor`: how gradients change rows; the rules of `hpcdist.optim`, a step count for each row.

A row is a parameter of its own: its state starts at zero when it gets its place, and its steps are
counted where it was pushed. So rows that are pushed together, always, have the bits that a dense
optimizer gives to a parameter of these rows.

State of a row, flat: the arrays of `Rule.states`, one after the other, or a number for each, where
the rule is row-wise; the weights in float32, where rows have 16 bits; the count of steps, where the
rule uses it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from math import sqrt
from typing import Any, final

import ml_dtypes
import numpy as np

from hpcdist import optim
from hpcdist.arrays.dtypes import dtype_row
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.compiled import expect, load
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.optim import rules
from hpcdist.optim.algorithms import check_options
from hpcdist.optim.rules import Block, Options, Rule
from hpcdist.optim.slices import BLOCK
from hpcdist.ps.slabs import Slabs

_compiled = load("hpcdist.ps._native")
_update_rows: Any = getattr(_compiled, "update_rows", None)
_LOOPS = ("float32", "float64")
_NUMBERS = 8
"""How many numbers a compiled loop takes, used or not."""

_NONE, _ONE = np.empty((0, 2)), np.ones((1, 2))
_AT_A_TIME = 1 << 12
"""Rows that are gathered and updated at a time."""

_NARROW = 2
"""Bytes of the floats that get master weights."""

_BFLOAT16 = ("bfloat16", "torch.bfloat16")


class Choice(NamedTuple):
    """A rule that rows can have.

    `defaults` are the options it takes, `counts` says whether it needs a count of steps, `rowwise`
    whether each of its states is one number for a row. `loop` is the number of the compiled loop,
    and `numbers` gives what that takes from the options.
    """

    rule: Rule
    defaults: Mapping[str, Any]
    loop: int
    numbers: Callable[[Options], list[float]]
    counts: bool = False
    rowwise: bool = False


def _defaults(algorithm: type[optim.Optimizer]) -> dict[str, Any]:
    """Return the options of an optimizer, which are its arguments but for the parameters."""
    arguments = list(inspect.signature(algorithm).parameters.values())[1:]
    return {each.name: each.default for each in arguments}


def _adam_numbers(options: Options) -> list[float]:
    """Return learning rate, decay, what averages and weights are multiplied by, and epsilon."""
    beta1, beta2 = options["beta1"], options["beta2"]
    rates = [1 - beta1, beta2, 1 - beta2]
    return [options["learning_rate"], options["weight_decay"], *rates, 1.0, options["epsilon"]]


def _adamw_numbers(options: Options) -> list[float]:
    rate, decay, *rates, _, epsilon = _adam_numbers(options)
    return [rate, 0.0, *rates, 1 - rate * decay, epsilon]


def _momentum_numbers(options: Options) -> list[float]:
    rest = options["momentum"], 1 - options["dampening"], options["nesterov"]
    return [options["learning_rate"], options["weight_decay"], *rest]


def _as_they_are(*names: str) -> Callable[[Options], list[float]]:
    return lambda options: [options[name] for name in names]


CHOICES: dict[str, Choice] = {
    "sgd": Choice(
        rules.SGD, _defaults(optim.SGD), 0, _as_they_are("learning_rate", "weight_decay")
    ),
    "momentum": Choice(rules.MOMENTUM, _defaults(optim.Momentum), 1, _momentum_numbers, True),
    "adagrad": Choice(
        rules.ADAGRAD,
        {"learning_rate": 0.01, "epsilon": 1e-6},
        2,
        _as_they_are("learning_rate", "epsilon"),
    ),
    "rowwise_adagrad": Choice(
        rules.ROWWISE_ADAGRAD,
        {"learning_rate": 0.01, "epsilon": 1e-6},
        5,
        _as_they_are("learning_rate", "epsilon"),
        rowwise=True,
    ),
    "adam": Choice(rules.ADAM, _defaults(optim.Adam), 3, _adam_numbers, True),
    "adamw": Choice(rules.ADAMW, _defaults(optim.AdamW), 3, _adamw_numbers, True),
    "ftrl": Choice(
        rules.FTRL,
        {"learning_rate": 0.05, "beta": 1.0, "l1": 0.0, "l2": 0.0},
        4,
        _as_they_are("learning_rate", "beta", "l1", "l2"),
    ),
}

expect(
    _compiled,
    NUMBERS=_NUMBERS,
    LANES=rules.LANES,
    **{name.upper(): choice.loop for name, choice in CHOICES.items()},
)
"""By name: the rules whose rows do not depend on each other."""


def accessor_of(optimizer: Any, dtype: Any = "float32") -> Accessor:
    """Return the accessor of an optimizer for rows of `dtype`.

    Args:
        optimizer: a name (``"sgd"``, ``"momentum"``, ``"adagrad"``, ``"rowwise_adagrad"``,
            ``"adam"``, ``"adamw"``, ``"ftrl"``), a pair of a name and a dict of options, or an
            optimizer of `hpcdist.optim`, as a class or with parameters; then its first group has
            the options.
        dtype: that of the rows; any real floating dtype.

    Raises:
        UsageError: there is no such rule for rows, an option is unknown or out of its range, or
            the dtype is not floating.

    Example:
        >>> from hpcdist.ps import accessor_of
        >>> accessor_of(("adam", {"learning_rate": 0.01})).options["learning_rate"]
        0.01

    """
    if isinstance(optimizer, Accessor):
        return accessor_of((optimizer.name, optimizer.options), dtype)
    name, options = _named(optimizer)
    choice = CHOICES.get(name.lower())
    if choice is None:
        raise UsageError(
            f"optimizer={optimizer!r} has no rule for rows; take one of {', '.join(CHOICES)}, or "
            "an optimizer of hpcdist.optim whose name is among them"
        )
    unknown = sorted(set(options) - set(choice.defaults))
    if unknown:
        raise UsageError(
            f"optimizer {name!r} has no option {', '.join(unknown)}; it takes "
            f"{', '.join(choice.defaults)}"
        )
    merged = {**choice.defaults, **options}
    _check(name, merged)
    return Accessor(name.lower(), merged, row_dtype(dtype))


def _check(name: str, options: Options) -> None:
    """Raise `UsageError` where an option is out of its range."""
    check_options(options)
    for each in ("beta", "l1", "l2"):
        value = options.get(each, 0)
        if not isinstance(value, (int, float)) or not value >= 0:
            raise UsageError(f"{each} must be a number, at least 0, got {value!r}")
    if name.lower() == "ftrl" and not options["learning_rate"]:
        raise UsageError("ftrl divides by its learning_rate, which must be above 0, got 0")


def row_dtype(dtype: Any) -> np.dtype:
    """Return a dtype that rows can have, or raise `UsageError`."""
    try:
        found = np.dtype(ml_dtypes.bfloat16 if str(dtype) in _BFLOAT16 else dtype)
    except TypeError as error:
        raise UsageError(f"dtype={dtype!r} is not a dtype; pass float32, for example") from error
    if found.hasobject or dtype_row(found).family != "float":
        raise UsageError(f"rows are of a real floating dtype, got {found}; pass float32")
    native: np.dtype = found.newbyteorder("=")
    return native


def _named(optimizer: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(optimizer, str):
        return optimizer, {}
    if isinstance(optimizer, type) and issubclass(optimizer, optim.Optimizer):
        return optimizer.__name__, {}
    if isinstance(optimizer, optim.Optimizer):
        group = optimizer.param_groups[0]
        return type(optimizer).__name__, {k: v for k, v in group.items() if k != "params"}
    if isinstance(optimizer, tuple) and len(optimizer) == 2 and isinstance(optimizer[1], Mapping):
        return str(optimizer[0]), optimizer[1]
    raise UsageError(
        f"optimizer={optimizer!r} is not an optimizer: pass a name "
        f"({', '.join(CHOICES)}), a pair of a name "
        "and a dict of options, or an optimizer of hpcdist.optim"
    )


@final
class Accessor:
    """Changes rows by their gradients; every row by itself. Made by `accessor_of`.

    Attributes:
        name: that of the rule.
        options: its options, by name.
        dtype: that of the rows.
        state_dtype: that of the state: of the rows, or float32 where those have 16 bits.

    """

    def __init__(self, name: str, options: dict[str, Any], dtype: np.dtype) -> None:
        self.name = name
        self.options = options
        self.dtype = dtype
        self.state_dtype = np.dtype(np.float32) if dtype.itemsize == _NARROW else dtype
        self._choice = CHOICES[name]
        self._corrections = Corrections()

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"Accessor({self.name}, {given})"

    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate from the next update on.

        Args:
            value: a number the optimizer takes.

        """
        _check(self.name, {**self.options, "learning_rate": value})
        self.options = {**self.options, "learning_rate": float(value)}

    @property
    def has_master(self) -> bool:
        """Whether the state has the weights in float32."""
        return self.dtype != self.state_dtype

    def state_width(self, dim: int) -> int:
        """Return how many numbers of state a row of length `dim` has.

        Args:
            dim: elements of a row.

        """
        return self._states(dim) + dim * self.has_master + self._choice.counts

    def _states(self, dim: int) -> int:
        """Return how many numbers the states of the rule have for a row."""
        return (1 if self._choice.rowwise else dim) * len(self._choice.rule.states)

    def start(self, rows: NumpyArray) -> NumpyArray:
        """Return the state of new rows.

        Args:
            rows: of shape ``(count, dim)``.

        """
        count, dim = rows.shape
        state = np.zeros((count, self.state_width(dim)), self.state_dtype)
        self.adopt(rows, state)
        return state

    def adopt(self, rows: NumpyArray, state: NumpyArray) -> None:
        """Copy the rows to the master weights in the state, if it has some.

        Args:
            rows: of shape ``(count, dim)``.
            state: of shape ``(count, state_width(dim))``, written.

        """
        if self.has_master:
            dim = rows.shape[1]
            begin = self._states(dim)
            state[:, begin : begin + dim] = rows

    def update_in(self, rows: Slabs, state: Slabs, slots: NumpyArray, grads: NumpyArray) -> None:
        """Change the rows in distinct slots; negative slots are skipped.

        Args:
            rows: the rows of all slots, changed in place.
            state: of the same slots, changed in place.
            slots: integers.
            grads: a row for each slot.

        """
        if _update_rows is not None and self.dtype.name in _LOOPS:
            self._update_compiled(rows, state, slots, grads)
            return
        there = np.flatnonzero(slots >= 0)
        for start in range(0, there.size, _AT_A_TIME):
            part = there[start : start + _AT_A_TIME]
            some, kept = rows.read(slots[part]), state.read(slots[part])
            self.update(some, kept, grads[part])
            rows.write(slots[part], some)
            state.write(slots[part], kept)

    def _update_compiled(
        self, rows: Slabs, state: Slabs, slots: NumpyArray, grads: NumpyArray
    ) -> None:
        choice, options = self._choice, self.options
        numbers = np.zeros(_NUMBERS)
        given = choice.numbers(options)
        numbers[: len(given)] = given
        grads = np.ascontiguousarray(grads, self.dtype)
        where = grads, slots, rows.layout[0], state.layout[0], rows.shift, rows.width, state.width
        loop = self.dtype.itemsize, choice.loop
        if "beta2" not in options:
            _update_rows(*loop, *where, numbers, _ONE if choice.counts else _NONE, False)
            return
        more = _update_rows(*loop, *where, numbers, *self._corrections.upto(0, options))
        if more:
            _update_rows(*loop, *where, numbers, *self._corrections.upto(more, options))

    def update(self, rows: NumpyArray, state: NumpyArray, grads: NumpyArray) -> None:
        """Change `rows` and their `state` in place by one gradient for each row.

        Args:
            rows: of shape ``(count, dim)``.
            state: of shape ``(count, state_width(dim))``.
            grads: of the shape of `rows`.

        """
        if not rows.size:
            return
        for chosen, step in self._steps(state):
            if chosen is None:
                self._update(rows, state, grads, step)
            else:
                some, kept = rows[chosen], state[chosen]
                self._update(some, kept, grads[chosen], step)
                rows[chosen], state[chosen] = some, kept

    def _steps(self, state: NumpyArray) -> Iterator[tuple[NumpyArray | None, int]]:
        """Count a step for all rows; give those of each count (None: all rows)."""
        if not self._choice.counts:
            yield None, 1
            return
        counts = state[:, -1]
        counts += 1
        found, inverse = np.unique(counts, return_inverse=True)
        if found.size == 1:
            yield None, int(found[0])
            return
        order = np.argsort(inverse, kind="stable")
        ends = np.cumsum(np.bincount(inverse))
        for step, stop, start in zip(found, ends, [0, *ends], strict=False):
            yield order[start:stop], int(step)

    def _update(self, rows: NumpyArray, state: NumpyArray, grads: NumpyArray, step: int) -> None:
        """Change rows in blocks that stay in the cache."""
        rule, dim = self._choice.rule, rows.shape[1]
        length = max(1, min(BLOCK // dim, len(rows)))
        rooms = [np.empty((length, dim), self.state_dtype) for _ in range(3)]
        begin = self._states(dim)
        for start in range(0, len(rows), length):
            part = slice(start, start + length)
            states = np.split(state[part, :begin], len(rule.states), axis=1) if begin else []
            weights = state[part, begin : begin + dim] if self.has_master else rows[part]
            room = [each[: len(weights)] for each in rooms]
            slope = grads[part]
            if slope.dtype != self.state_dtype:
                np.copyto(room[2], slope, casting="unsafe")
                slope = room[2]
            rule.advance(Block(weights, slope, states, room[:2], self.options, step))
            if self.has_master:
                np.copyto(rows[part], weights, casting="unsafe")


@final
class Corrections:
    """What Adam corrects its averages by, for every count of steps, as `hpcdist.optim` has it.

    From some count on both numbers are 1: then there are no more of them.
    """

    def __init__(self) -> None:
        self._betas: tuple[float, float] | None = None
        self._pairs = _ONE

    def upto(self, steps: int, options: Options) -> tuple[NumpyArray, bool]:
        """Return pairs by count, those of `steps` among them, and whether later ones differ."""
        beta1, beta2 = betas = float(options["beta1"]), float(options["beta2"])
        if betas != self._betas:
            self._betas, self._pairs = betas, _ONE
        while steps >= len(self._pairs) and self._is_open():
            counts = range(len(self._pairs), 2 * len(self._pairs))
            roots = [sqrt(1 - beta2**count) for count in counts]
            factors = [root / (1 - beta1**count) for root, count in zip(roots, counts, strict=True)]
            self._pairs = np.concatenate([self._pairs, np.column_stack([roots, factors])])
        return self._pairs, self._is_open()

    def _is_open(self) -> bool:
        return len(self._pairs) == 1 or not bool((self._pairs[-1] == 1).all())
