"""`Wrapper`: a module around the user's, whose parts it shows as if they were its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hpcdist.errors import UsageError


class Wrapper(torch.nn.Module):  # type: ignore[misc] # torch is untyped
    """A module that holds the user's in `_layers`: neither names nor attributes tell of it.

    A state saved without it loads with it, and the other way round.
    """

    _layers: Any

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_layers":
                raise
            return getattr(self._layers, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Give a parameter, buffer or module to the module that is held, which trains it."""
        held = None if name[0] == "_" else self.__dict__.get("_modules", {}).get("_layers")
        if held is not None and name == "module":
            raise UsageError("the module of a wrapper stays; wrap the other module in its place")
        if held is not None and (
            isinstance(value, (torch.nn.Parameter, torch.nn.Module))
            or any(name in parts for parts in (held._parameters, held._buffers, held._modules))
        ):
            setattr(held, name, value)
        else:
            super().__setattr__(name, value)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Delegate to the module: names have no prefix.

        Args:
            args: of the module's own method, by position.
            kwargs: of the same, by name.

        """
        yield from self._layers.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Delegate to the module: names have no prefix.

        Args:
            args: of the module's own method, by position.
            kwargs: of the same, by name.

        """
        yield from self._layers.named_buffers(*args, **kwargs)

    @property
    def module(self) -> torch.nn.Module:
        """The module that is trained."""
        return self._layers

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state: names have no prefix of ours. Local.

        Args:
            args: of the module's own method, by position.
            kwargs: of the same, by name.

        """
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the module's state. Local: do the same on every rank.

        Args:
            args: of the module's own method, by position.
            kwargs: of the same, by name.

        """
        return self.module.load_state_dict(*args, **kwargs)

    def set_state_dict(self, state_dict: Any, use_structured_name: bool = True) -> Any:
        """Alias of `load_state_dict`. Local."""
        return self.load_state_dict(state_dict)
