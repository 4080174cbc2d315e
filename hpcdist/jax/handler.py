"""The compiled handler, which XLA calls for an operation of a program: it works in XLA's memory.

It is optional; `io_callback` does the same with copies. It is compiled without JAX, for one version
of XLA's interface for foreign functions, and registered if jaxlib says that its XLA has that.

XLA tells the handler a number, under which `number_of` keeps a function here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import mlir

from hpcdist.compiled import load

TARGET = "hpcdist_operation"
"""What XLA knows the handler by."""

_handler = load("hpcdist.jax._handler")
_operations: list[Callable[..., str | None]] = []
_one_at_a_time = Lock()


def _version() -> tuple[int, int]:
    """Return the version of XLA's interface, from the header that jaxlib has."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text("utf-8")
    major, minor = (
        re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR")
    )
    return (int(major[1]), int(minor[1])) if major and minor else (-1, -1)


def register() -> bool:
    """Let XLA know the handler; returns whether it can call it."""
    if _handler is None:
        return False
    major, minor = _version()
    expected = _handler.NUMBERS["XLA_MAJOR"]
    if major != expected:
        warnings.warn(
            f"XLA's interface for foreign functions has version {major}.{minor}, and hpcdist was "
            f"compiled for {expected}: operations inside of jax.jit go by io_callback, which is "
            "slower; use a newer hpcdist, or an older JAX",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    jax.ffi.register_ffi_target(TARGET, _handler.learn(_operations, minor), platform="cpu")
    return True


IS_THERE = register()
"""Whether operations of compiled programs go by the handler."""


def number_of(function: Callable[..., str | None]) -> int:
    """Return the number by which the handler calls `function` with addresses, for good."""
    with _one_at_a_time:
        _operations.append(function)
        return len(_operations) - 1


def lower(
    ctx: Any, number: int, token: Any, operands: Sequence[Any], *, in_place: bool
) -> tuple[Any, Sequence[Any]]:
    """Let the program call operation `number`; returns the token behind it, and the results.

    Args:
        ctx: what JAX gives to a rule.
        number: what `number_of` returned.
        token: the token before it.
        operands: arrays, row by row.
        in_place: whether the results are written over the operands.

    """
    emit = jax.ffi.ffi_lowering(
        TARGET,
        has_side_effect=True,
        result_types=[token.type, *map(_type, ctx.avals_out)],
        operand_output_aliases={1: 1} if in_place else None,
    )
    behind, *results = emit(
        ctx.replace(avals_in=[_TOKEN, *ctx.avals_in], avals_out=[_TOKEN, *ctx.avals_out]),
        token,
        *operands,
        number=np.int64(number),
    )
    return behind, results


_TOKEN = ShapedArray((), np.dtype(bool))
"""What a token is laid out as."""


def _type(aval: Any) -> Any:
    return mlir.ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype))
