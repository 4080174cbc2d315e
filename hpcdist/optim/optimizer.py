"""`Optimizer`: what the optimizers of plain arrays have in common; `Slots` does the work."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np

from hpcdist.arrays.buffer import is_writeable
from hpcdist.arrays.libraries import NumpyArray, library_of, view_of
from hpcdist.arrays.transfer import host_numbers, near, on_host
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.optim.rules import Options, Rule
from hpcdist.optim.slices import Slice
from hpcdist.text import an

State = dict[str, Any]


class Slot(NamedTuple):
    """One parameter of an optimizer: what it is called there, and its options."""

    name: str
    parameter: Any
    options: dict[str, Any]

    def label(self, index: int) -> str:
        """Return the name that its state is saved under."""
        return self.name or self.parameter.name or str(index)


class Rates(ABC):
    """What has groups of parameters, each with a learning rate."""

    @property
    @abstractmethod
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of parameters; options that are changed here hold from the next step on."""

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first group; assigning sets that of all groups."""
        return float(self.param_groups[0]["learning_rate"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        for group in self.param_groups:
            group["learning_rate"] = value

    def get_lr(self) -> float:
        """Return the learning rate (Paddle's name)."""
        return self.learning_rate

    def set_lr(self, value: float) -> None:
        """Set the learning rate of all groups (Paddle's name).

        Args:
            value: a positive number.

        """
        self.learning_rate = value


class Optimizer(Rates):
    """Changes parameters in place by their gradients, in `step`.

    Attributes:
        slots: its parameters with their options; see `param_groups`.

    """

    _slots: Slots

    @property
    def rule(self) -> Rule:
        """The algorithm."""
        return self._slots.rule

    @property
    def slots(self) -> Sequence[Slot]:
        """The parameters, in order, each with its options."""
        return self._slots.slots

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of parameters; options that are changed here hold from the next step on."""
        return self._slots.groups

    def step(self) -> None:
        """Change every parameter that has a gradient. Local."""
        self._slots.step()

    def narrow(self, parameters: Iterable[Any]) -> Slots:
        """Step only these of the parameters from now on; return what does. Local.

        Args:
            parameters: some of those that the optimizer has.

        """
        self._slots.narrow(parameters)
        return self._slots

    def has_stepped(self) -> bool:
        """Return whether a step has been taken or loaded, so that there is a state."""
        return self._slots.has_stepped()

    def clear_grad(self) -> None:
        """Clear the gradients of all parameters."""
        for slot in self.slots:
            slot.parameter.grad = None

    def zero_grad(self) -> None:
        """Alias of `clear_grad` (torch's name)."""
        self.clear_grad()

    def state_dict(self) -> State:
        """Return the state as a flat dict of new NumPy arrays and of numbers. Local.

        Keys are ``"<parameter>.<state>"``, for arrays of the parameter's shape,
        ``"<parameter>.step"`` and ``"learning_rate"``.
        """
        return self._slots.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Local; all or nothing.

        Args:
            state: what `state_dict` returned, of the same parameters and algorithm.

        Raises:
            UsageError: the state is of other parameters or of another algorithm.

        """
        self._slots.load(state)

    def __repr__(self) -> str:
        slots = getattr(self, "_slots", None)
        return f"{type(self).__name__}({slots.in_words() if slots else 'nothing'})"


@final
class Slots:
    """The parameters of one optimizer and their slices, which are made at the first step."""

    def __init__(self, parameters: Iterable[Any], rule: Rule, defaults: Options) -> None:
        self.rule = rule
        self.groups = [_group(each, defaults) for each in _as_groups(parameters)]
        self.slots = [
            Slot(name, parameter, group)
            for group in self.groups
            for name, parameter in group["params"]
        ]
        _check_slots(self.slots)
        self._slices: dict[int, Slice] = {}

    def narrow(self, parameters: Iterable[Any]) -> None:
        """See `Optimizer.narrow`."""
        kept = {id(each) for each in parameters}
        self.slots = [slot for slot in self.slots if id(slot.parameter) in kept]
        self._slices.clear()

    def slices(self) -> Iterator[tuple[str, Any, Slice]]:
        """Give the label, the parameter and the slice of each slot."""
        for index, slot in enumerate(self.slots):
            yield slot.label(index), slot.parameter, self._slice(index)

    def settle(self) -> None:
        """Show what has been loaded into the slices."""
        for index in range(len(self.slots)):
            kept = self._slice(index)
            kept.settle()
            self._give(index, kept)

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for index, slot in enumerate(self.slots):
            gradient = slot.parameter.memory()
            if gradient is None:
                continue
            kept = self._slice(index)
            self._update(kept, gradient.reshape(-1), slot.options)
            self._give(index, kept)

    def _update(self, kept: Slice, gradient: NumpyArray, options: Options) -> None:
        stop, rule = kept.size, self.rule
        kept.step += 1
        ratio = 1.0
        if rule.measures_gradients:
            ratio = rule.ratio_of(host_numbers(kept.measure(options, 0, stop, gradient)), options)
        kept.advance(gradient, options, 0, stop, ratio)
        if rule.apply is not None:
            ratio = rule.ratio_of(host_numbers(kept.measure(options, 0, stop)), options)
            kept.apply(options, 0, stop, ratio)

    def _slice(self, index: int) -> Slice:
        weights = _flat(self.slots[index].parameter.data)
        kept = self._slices.get(index)
        if kept is None:
            kept = self._slices[index] = Slice(weights, self.rule)
        else:
            kept.use(weights)
        return kept

    def _give(self, index: int, kept: Slice) -> None:
        """Show the new weights in a parameter whose array cannot be written, or is scattered."""
        parameter = self.slots[index].parameter
        array = parameter.data
        if type(array) is np.ndarray and np.may_share_memory(array, kept.weights):
            return
        library = library_of(array)
        view = view_of(array)
        mine = kept.weights.view(view.dtype).reshape(view.shape)
        if np.may_share_memory(view, mine):
            return
        if is_writeable(view):
            view[...] = mine
        else:
            parameter.data = library.wrap(mine)

    def in_words(self) -> str:
        """Describe the number of parameters and the options of the first group."""
        several = f" in {len(self.groups)} groups" if len(self.groups) > 1 else ""
        options = {name: value for name, value in self.groups[0].items() if name != "params"}
        return ", ".join(
            [
                f"{len(self.slots)} parameter{'s' * (len(self.slots) != 1)}{several}",
                *(f"{name}={value!r}" for name, value in options.items()),
            ]
        )

    def has_stepped(self) -> bool:
        """Return whether there is a state to lose."""
        return any(kept.step for kept in self._slices.values())

    def state_dict(self) -> State:
        """See `Optimizer.state_dict`."""
        state: State = {"learning_rate": self.groups[0]["learning_rate"]}
        for index, slot in enumerate(self.slots):
            kept = self._slice(index)
            label, shape = slot.label(index), slot.parameter.shape
            for name, array in kept.named_states():
                state[f"{label}.{name}"] = on_host(shaped(array, shape))
            state[f"{label}.step"] = kept.step
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """See `Optimizer.load_state_dict`."""
        own = self.state_dict()
        check_keys(own, state)
        for name, mine in own.items():
            check_like(name, mine, state[name])
        for index, slot in enumerate(self.slots):
            kept, label = self._slice(index), slot.label(index)
            for name, array in kept.named_states():
                mine = shaped(array, slot.parameter.shape)
                mine[...] = near(mine, state[f"{label}.{name}"])
            kept.step = int(state[f"{label}.step"])
            kept.settle()
            self._give(index, kept)
        for group in self.groups:
            group["learning_rate"] = float(state["learning_rate"])


def shaped(array: NumpyArray, shape: tuple[int, ...]) -> NumpyArray:
    """Show a flat state in its parameter's shape; that of complex numbers is pairs at the end."""
    whole = array.size == math.prod(shape)
    return array.reshape(shape if whole else (*shape, 2))


def check_keys(own: Iterable[str], given: Iterable[str]) -> None:
    """Refuse a state whose names are not those of `own`."""
    different = sorted(set(own) ^ set(given))
    if different:
        raise UsageError(
            f"the state has other entries than the optimizer: {', '.join(different[:8])} occur in "
            "one of them only; load the state_dict() of an optimizer of the same algorithm, "
            "parameters and dtypes"
        )


def check_like(name: str, mine: Any, given: Any) -> None:
    """Refuse an entry of another shape than `mine`."""
    if np.shape(mine) != np.shape(given):
        raise UsageError(
            f"the state's {name!r} has shape {np.shape(given)}, but the optimizer's has "
            f"{np.shape(mine)}; load the state_dict() of an optimizer of the same parameters"
        )


def _flat(array: Any) -> NumpyArray:
    """Return the array's memory, flat and writable, or a copy of it."""
    if type(array) is np.ndarray and array.flags.carray:
        return array.reshape(-1)
    view = view_of(array)
    flat = view.reshape(-1)
    return flat if is_writeable(flat) else flat.copy()


def _as_groups(parameters: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    if callable(getattr(parameters, "parameters", None)):
        raise UsageError("the optimizer got a model; pass model.parameters()")
    given = list(parameters)
    if given and all(isinstance(each, Mapping) for each in given):
        yield from given
    else:
        yield {"params": given}


def _group(given: Mapping[str, Any], defaults: Options) -> dict[str, Any]:
    unknown = sorted(given.keys() - defaults.keys() - {"params"})
    if unknown or "params" not in given:
        raise UsageError(
            f"a group of parameters has 'params' and optionally {', '.join(defaults)}, got "
            f"{', '.join(given) or 'nothing'}"
        )
    named = [each if isinstance(each, tuple) else ("", each) for each in given["params"]]
    return {**defaults, **given, "params": named}


def _check_slots(slots: Sequence[Slot]) -> None:
    if not slots:
        raise UsageError(
            "the optimizer got no parameters; pass model.parameters() or model.named_parameters()"
        )
    for slot in slots:
        if not callable(getattr(slot.parameter, "memory", None)):
            raise UsageError(
                f"the optimizer got {an(type(slot.parameter).__name__)}; pass hpcdist.Parameters "
                "(for torch's, use torch.optim)"
            )
    if len({id(slot.parameter) for slot in slots}) < len(slots):
        raise UsageError("the optimizer got a parameter twice; pass each once, in one group")
