"""`ArrayModel`: the user's model of `Parameter`s, seen through the engine that trains it."""

from __future__ import annotations

from typing import Any

from hpcdist.parallel.module_state import array_in, load, parameters_and_buffers, unique
from hpcdist.parallel.parameter import Parameter


class ArrayModel:
    """What an engine shows of the model in `_layers`: neither names nor attributes tell of it."""

    _layers: Any

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model."""
        run = self._layers if callable(self._layers) else self._layers.forward
        return run(*inputs, **kwargs)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model.

        Args:
            inputs: of the model, by position.
            kwargs: of the model, by name.

        """
        return self(*inputs, **kwargs)

    def parameters(self) -> list[Parameter]:
        """Return the parameters, each once."""
        return [parameter for _, parameter in self.named_parameters()]

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """Return names, without a prefix, and parameters, each once."""
        return unique(self._layers.named_parameters())

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own ``state_dict()``, or its arrays by name, without a prefix.

        Args:
            args: of the model's own method, by position; ignored where it has none.
            kwargs: of the same, by name.

        """
        own = getattr(self._layers, "state_dict", None)
        if own is not None:
            return own(*args, **kwargs)
        return {name: array_in(entry) for name, entry in parameters_and_buffers(self._layers)}

    def set_state_dict(self, state_dict: Any, use_structured_name: bool = True) -> Any:
        """Load what `state_dict` returned. Local: do the same on every rank.

        The model's own ``set_state_dict`` or ``load_state_dict`` does it, if it has one.

        Args:
            state_dict: arrays by name.
            use_structured_name: accepted: names are always those of `state_dict`.

        Raises:
            UsageError: a name is missing or unknown, or an array has another shape.

        """
        for name in ("set_state_dict", "load_state_dict"):
            own = getattr(self._layers, name, None)
            if own is not None:
                return own(state_dict)
        load(parameters_and_buffers(self._layers), state_dict)
        return None

    load_state_dict = set_state_dict

    def __getattr__(self, name: str) -> Any:
        if name == "_layers":
            raise AttributeError(name)
        return getattr(self._layers, name)
