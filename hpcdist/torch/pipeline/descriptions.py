"""`LayerDesc` and `SharedLayerDesc`: layers that are built on the rank that needs them."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from hpcdist.errors import UsageError
from hpcdist.text import an


class LayerDesc:
    """A layer that is not built yet: its class or function, and the arguments.

    Args:
        layer_func: a class of `torch.nn.Module`, or a function that returns one.
        inputs: its positional arguments.
        kwargs: its keyword arguments.

    Example:
        >>> import torch
        >>> from hpcdist.torch.pipeline import LayerDesc
        >>> layer = LayerDesc(torch.nn.Linear, 8, 1, bias=False)  # not built yet

    """

    def __init__(self, layer_func: Callable[..., Any], *inputs: Any, **kwargs: Any) -> None:
        if not callable(layer_func):
            raise UsageError(
                f"layer_func must be a class of torch.nn.Module, or a function that makes one, "
                f"got {layer_func!r}"
            )
        self.layer_func, self.inputs, self.kwargs = layer_func, inputs, kwargs

    @property
    def name(self) -> str:
        """The name of its class or function."""
        return str(getattr(self.layer_func, "__name__", type(self.layer_func).__name__))

    def build_layer(self) -> torch.nn.Module:
        """Make the layer."""
        layer = self.layer_func(*self.inputs, **self.kwargs)
        if not isinstance(layer, torch.nn.Module):
            raise UsageError(
                f"{self.name} made {an(type(layer).__name__)}; a LayerDesc makes torch modules. "
                "Give a function without weights as it is"
            )
        return layer

    def __repr__(self) -> str:
        given = [*map(repr, self.inputs), *(f"{key}={each!r}" for key, each in self.kwargs.items())]
        return f"{type(self).__name__}({', '.join([self.name, *given])})"


class SharedLayerDesc(LayerDesc):
    """A layer that shares a weight with all layers of the same `key`, on any stages.

    Each is a layer of its own but for the weight: the first one's is used by all, and its gradient
    is the sum of theirs.

    Args:
        key: what they have in common.
        layer_func: as of a `LayerDesc`.
        forward_func: called as ``forward_func(layer, x)`` in place of the layer; None: the layer.
        shared_weight_attr: the name of the parameter, or of a property that returns one; with
            dots for one of a sub-module.
        inputs: positional arguments of the layer.
        kwargs: its keyword arguments.

    Example:
        >>> import torch
        >>> from hpcdist.torch.pipeline import SharedLayerDesc
        >>> def logits(layer, x):
        ...     return x @ layer.weight.T
        >>> first = SharedLayerDesc("words", torch.nn.Embedding, None, "weight", 1000, 8)
        >>> last = SharedLayerDesc("words", torch.nn.Embedding, logits, "weight", 1000, 8)

    """

    def __init__(
        self,
        key: str,
        layer_func: Callable[..., Any],
        forward_func: Callable[..., Any] | None = None,
        shared_weight_attr: str = "weight",
        *inputs: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(layer_func, *inputs, **kwargs)
        if forward_func is not None and not callable(forward_func):
            raise UsageError(
                f"forward_func must be a function of a layer and its input, got {forward_func!r}; "
                "arguments of the layer come after shared_weight_attr"
            )
        if not isinstance(shared_weight_attr, str):
            raise UsageError(
                f"shared_weight_attr must be the name of a parameter, got {shared_weight_attr!r}; "
                "arguments of the layer come after it"
            )
        self.layer_name = self.key = key
        self.forward_func, self.shared_weight_attr = forward_func, shared_weight_attr

    def weight_of(self, layer: torch.nn.Module) -> torch.nn.Parameter:
        """Return the weight that is shared.

        Args:
            layer: one that was made of this description.

        """
        try:
            weight = attrgetter(self.shared_weight_attr)(layer)
        except AttributeError:
            weight = None
        if not any(weight is each for each in layer.parameters()):
            raise UsageError(
                f"{self.name} of the shared layers {self.key!r} has no parameter "
                f"{self.shared_weight_attr!r}; it has {_listed(layer)}"
            )
        return weight

    def name_in(self, layer: torch.nn.Module) -> str:
        """Return the name of the weight in the layer.

        Args:
            layer: one that was made of this description.

        """
        weight = self.weight_of(layer)
        return next(f"{name}" for name, each in layer.named_parameters() if each is weight)

    def give_weight(self, layer: torch.nn.Module, weight: torch.nn.Parameter) -> None:
        """Make a layer of this rank use the weight of another one.

        Args:
            layer: one that was made of this description.
            weight: of the same shape and dtype as its own.

        """
        own = self.weight_of(layer)
        check_alike(self.key, own, weight)
        for owner in layer.modules():
            for name, each in owner._parameters.items():
                if each is own:
                    owner._parameters[name] = weight


def check_alike(key: str, one: torch.Tensor, other: torch.Tensor) -> None:
    """Raise `UsageError` unless two layers can have one weight."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        raise UsageError(
            f"the shared layers {key!r} have weights of different kinds: {one.dtype} of shape "
            f"{tuple(one.shape)}, and {other.dtype} of shape {tuple(other.shape)}"
        )


def _listed(layer: torch.nn.Module) -> str:
    return ", ".join(name for name, _ in layer.named_parameters()) or "none"
