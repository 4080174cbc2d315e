"""What type checkers take for an array; while a program runs, these names mean nothing.

A list of numbers is no array: nothing could be written into its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from typing import TypeAlias

    from typing_extensions import Buffer

    AnyArray: TypeAlias = "Array | SupportsDLPack | Buffer"
    """An array of NumPy, CuPy, torch, JAX or another library, or a buffer such as a bytearray."""
    AnyArrays: TypeAlias = "AnyArray | Sequence[AnyArray]"
    """One array, or a list with one for each rank."""
else:
    AnyArray = AnyArrays = Any


class Array(Protocol):
    """What the arrays of NumPy, CuPy, torch and JAX have in common."""

    @property
    def shape(self) -> Any:
        """The lengths along its dimensions."""

    @property
    def dtype(self) -> Any:
        """What its elements are."""


class SupportsDLPack(Protocol):
    """What shows its memory by DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
