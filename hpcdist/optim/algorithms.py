"""SGD, Momentum, Adam, AdamW, LAMB and LARS for `Parameter`s.

The first argument of each is an iterable of parameters, of pairs of a name and a parameter
(``model.named_parameters()``; names make checkpoints readable), or of dicts with ``"params"`` and
options of their own, which are groups as in torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from hpcdist.errors import UsageError
from hpcdist.optim import rules
from hpcdist.optim.optimizer import Optimizer, Slots
from hpcdist.optim.rules import Options


@final
class SGD(Optimizer):
    """w -= learning_rate (g + weight_decay w).

    Args:
        parameters: `Parameter`s, pairs of a name and one, or groups with options of their own, as
            dictionaries with ``"params"``.
        learning_rate: how far a step goes; `set_lr` changes it.
        weight_decay: how much of the weights is added to the gradient.

    Raises:
        UsageError: an option is out of its range, or there is no parameter.

    Reference: Robbins and Monro, A Stochastic Approximation Method, 1951.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> w = dist.Parameter(np.ones(2))
        >>> optimizer = dist.optim.SGD([w], learning_rate=0.5)
        >>> w.grad = np.ones(2)
        >>> optimizer.step()
        >>> w.data
        array([0.5, 0.5])

    """

    def __init__(
        self, parameters: Iterable[Any], learning_rate: float = 0.01, weight_decay: float = 0.0
    ) -> None:
        self._slots = _slots(parameters, rules.SGD, locals())


@final
class Momentum(Optimizer):
    """v = momentum v + (1 - dampening) (g + weight_decay w); w -= learning_rate v.

    With `nesterov` w -= learning_rate (g + momentum v). The first step takes v = g. These are
    the formulas of `torch.optim.SGD` with ``momentum``.

    Args:
        parameters: `Parameter`s, pairs of a name and one, or groups with options of their own, as
            dictionaries with ``"params"``.
        learning_rate: how far a step goes; `set_lr` changes it.
        momentum: how much of v stays, from 0 to 1.
        dampening: how much of a gradient does not come into v.
        nesterov: whether the step looks ahead by v.
        weight_decay: how much of the weights is added to the gradient.

    Raises:
        UsageError: an option is out of its range, or there is no parameter.

    Reference: Polyak 1964; Sutskever, Martens, Dahl and Hinton, ICML 2013.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> w = dist.Parameter(np.ones(2))
        >>> optimizer = dist.optim.Momentum([w], learning_rate=0.5, momentum=0.9)
        >>> w.grad = np.ones(2)
        >>> optimizer.step()
        >>> w.data
        array([0.5, 0.5])

    """

    def __init__(
        self,
        parameters: Iterable[Any],
        learning_rate: float = 0.01,
        momentum: float = 0.9,
        dampening: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        self._slots = _slots(parameters, rules.MOMENTUM, locals())


@final
class Adam(Optimizer):
    """w -= learning_rate m / (sqrt(v) + epsilon), of averages m of g and v of g^2 without bias.

    Args:
        parameters: `Parameter`s, pairs of a name and one, or groups with options of their own, as
            dictionaries with ``"params"``.
        learning_rate: how far a step goes; `set_lr` changes it.
        beta1: how much of m stays, below 1.
        beta2: how much of v stays, below 1.
        epsilon: keeps the divisor from 0.
        weight_decay: how much of the weights is added to the gradient: g + weight_decay w.

    Raises:
        UsageError: an option is out of its range, or there is no parameter.

    Reference: Kingma and Ba, Adam: A Method for Stochastic Optimization, ICLR 2015.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> w = dist.Parameter(np.ones(2))
        >>> optimizer = dist.optim.Adam([w], learning_rate=0.5)
        >>> w.grad = np.ones(2)
        >>> optimizer.step()
        >>> w.data.round(3)
        array([0.5, 0.5])

    """

    def __init__(
        self,
        parameters: Iterable[Any],
        learning_rate: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self._slots = _slots(parameters, rules.ADAM, locals())


@final
class AdamW(Optimizer):
    """Adam whose decay does not pass through its averages: w *= 1 - learning_rate weight_decay.

    Args:
        parameters: `Parameter`s, pairs of a name and one, or groups with options of their own, as
            dictionaries with ``"params"``.
        learning_rate: how far a step goes; `set_lr` changes it.
        beta1: how much of m stays, below 1.
        beta2: how much of v stays, below 1.
        epsilon: keeps the divisor from 0.
        weight_decay: see above.

    Raises:
        UsageError: an option is out of its range, or there is no parameter.

    Reference: Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> w = dist.Parameter(np.ones(2))
        >>> optimizer = dist.optim.AdamW([w], learning_rate=0.5, weight_decay=0.0)
        >>> w.grad = np.ones(2)
        >>> optimizer.step()
        >>> w.data.round(3)
        array([0.5, 0.5])

    """

    def __init__(
        self,
        parameters: Iterable[Any],
        learning_rate: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        self._slots = _slots(parameters, rules.ADAMW, locals())


@final
class LAMB(Optimizer):
    """AdamW whose step is as long as the parameter: w -= learning_rate |w| / |u| u.

    u is Adam's direction plus weight_decay w; the ratio of norms is taken over each whole
    parameter, also where it is sharded, and is 1 where a norm is 0.

    Args:
        parameters: `Parameter`s, pairs of a name and one, or groups with options of their own, as
            dictionaries with ``"params"``.
        learning_rate: how far a step goes; `set_lr` changes it.
        beta1: how much of m stays, below 1.
        beta2: how much of v stays, below 1.
        epsilon: keeps the divisor from 0.
        weight_decay: how much of the weights is added to the direction.

    Raises:
        UsageError: an option is out of its range, or there is no parameter.

    Reference: You et al., Large Batch Optimization for Deep Learning, ICLR 2020.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> w = dist.Parameter(np.ones(2))
        >>> optimizer = dist.optim.LAMB([w], learning_rate=0.5, weight_decay=0.0)
        >>> w.grad = np.ones(2)
        >>> optimizer.step()
        >>> w.data.round(3)
        array([0.5, 0.5])

    """

    def __init__(
        self,
        parameters: Iterable[Any],
        learning_rate: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        self._slots = _slots(parameters, rules.LAMB, locals())


@final
class LARS(Optimizer):
    """Momentum with a learning rate for each parameter, in proportion to its weights.

    v = momentum v + learning_rate ratio (g + weight_decay w); w -= v, where ratio is
    lars_coeff |w| / (|g| + weight_decay |w| + epsilon), taken over each whole parameter, also where
    it is sharded, and 1 where a norm is 0. Without decay for some parameters: in a group of
    their own.

    Args:
        parameters: `Parameter`s, pairs of a name and one, or groups with options of their own, as
            dictionaries with ``"params"``.
        learning_rate: how far a step goes; `set_lr` changes it.
        momentum: how much of v stays, from 0 to 1.
        lars_coeff: how far a step goes in proportion to the weights.
        weight_decay: how much of the weights is added to the gradient.
        epsilon: keeps the divisor from 0.

    Raises:
        UsageError: an option is out of its range, or there is no parameter.

    Reference: You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks, 2017.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> w = dist.Parameter(np.ones(2))
        >>> optimizer = dist.optim.LARS([w], learning_rate=0.5, lars_coeff=0.1, weight_decay=0.0)
        >>> w.grad = np.ones(2)
        >>> optimizer.step()
        >>> w.data
        array([0.95, 0.95])

    """

    def __init__(
        self,
        parameters: Iterable[Any],
        learning_rate: float = 0.1,
        momentum: float = 0.9,
        lars_coeff: float = 0.001,
        weight_decay: float = 0.0005,
        epsilon: float = 0.0,
    ) -> None:
        self._slots = _slots(parameters, rules.LARS, locals())


_BELOW_ONE = ("momentum", "beta1", "beta2")
_AT_LEAST_ZERO = ("learning_rate", "weight_decay", "epsilon", "lars_coeff", *_BELOW_ONE)


def _slots(parameters: Iterable[Any], rule: rules.Rule, given: dict[str, Any]) -> Slots:
    """Check the arguments of an optimizer, which are its options but for the first two."""
    options = {name: value for name, value in given.items() if name not in ("self", "parameters")}
    slots = Slots(parameters, rule, options)
    for group in slots.groups:
        check_options(group)
    return slots


def check_options(options: Options) -> None:
    """Raise `UsageError` where an option is out of its range."""
    for name in _AT_LEAST_ZERO:
        value = options.get(name, 0)
        if not isinstance(value, (int, float)) or not value >= 0:
            raise UsageError(f"{name} must be a number, at least 0, got {value!r}")
        if name in _BELOW_ONE and value >= 1:
            raise UsageError(f"{name} must be below 1, got {value!r}")
    if options.get("nesterov") and (not options["momentum"] or options["dampening"]):
        raise UsageError(
            "nesterov needs momentum above 0 and dampening 0, got "
            f"momentum={options['momentum']!r} and dampening={options['dampening']!r}"
        )
