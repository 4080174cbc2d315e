"""JAX arrays: read through NumPy, never written; and the containers registered with JAX.

An array in host memory is seen without a copy, one on an accelerator through a copy in host
memory. New arrays are put on JAX's default device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpcdist.arrays.interface import Library, NumpyArray
from hpcdist.errors import UsageError

REMEDY = (
    "JAX arrays never change; average with hpcdist.average_gradients, which returns new arrays, or "
    "pass numpy.array(x)"
)


def _view(array: Any) -> NumpyArray:
    if isinstance(array, jax.core.Tracer):
        raise UsageError(
            "this JAX array has no values yet, because jax.jit, jax.grad or another "
            "transformation is tracing the function; use the verb of its name in hpcdist.jax"
        )
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise UsageError(
            f"this JAX array holds {array.dtype}, which has no plain memory; send "
            "jax.random.key_data(x)"
        )
    if not array.is_fully_addressable:
        raise UsageError(
            "this JAX array is spread over devices of several processes; send its "
            "addressable_shards"
        )
    view: NumpyArray = np.asarray(array)
    return view


def _wrap(array: NumpyArray) -> Any:
    return jnp.array(array)


LIBRARY = Library(_view, _wrap, REMEDY)


def open_container(
    node: Any,
) -> tuple[list[tuple[str, Any]], Callable[[list[Any]], Any]] | None:
    """Return the children of a registered container, with their steps, and how to rebuild it.

    None if `node` is a leaf for JAX.
    """
    keyed, structure = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda value: value is not node
    )
    if len(keyed) == 1 and keyed[0][1] is node:
        return None
    return [(jax.tree_util.keystr(path), child) for path, child in keyed], structure.unflatten
