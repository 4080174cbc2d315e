"""Several devices in one process: inside of `shard_map` an operation is done once for all of them.

All devices bring their shards to the first of them, which does the operation for the stack, as
`vmap` does; then each takes its part of the result. So it does not matter in which order the
devices of a process come. An error there ends the job, as an uncaught exception does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hpcdist.comm.session import is_simulated
from hpcdist.errors import UsageError
from hpcdist.jax.primitives import bind


def bind_once(verb: str, *operands: Any, **params: Any) -> Any:
    """Do `verb`, or trace it; inside of `shard_map` once for all devices of its mesh."""
    axes = _axes()
    if not axes:
        return bind(verb, *operands, several=False, **params)
    if is_simulated():
        raise UsageError(
            f"{verb} is inside of shard_map over several devices, whose threads are no ranks of "
            "hpcdist.simulate; run it under mpiexec, or with one device"
        )
    place = lax.axis_index(axes)
    stacks = [lax.all_gather(each, axes) for each in operands]
    do = partial(bind, verb, several=True, **params)
    if stacks:
        do = jax.vmap(do)
    shapes = jax.eval_shape(do, *stacks)

    def leave(*stacks: Any) -> Any:
        zeros = jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), shapes)
        return jax.tree.map(lambda each: _varying(each, axes), zeros)

    results = lax.cond(place == 0, do, leave, *stacks)
    return jax.tree.map(lambda each: lax.all_gather(each, axes)[0][place], results)


def _axes() -> tuple[str, ...]:
    """Return the axes of the mesh of the `shard_map` that is being traced, if it has devices."""
    mesh = _current_mesh()
    axes = tuple(getattr(mesh, "manual_axes", ()))
    return axes if any(mesh.shape[axis] > 1 for axis in axes) else ()


_current_mesh: Any = getattr(jax.sharding, "get_abstract_mesh", lambda: None)


def _varying(x: Any, axes: tuple[str, ...]) -> Any:
    """Let JAX take `x`, which is a constant, for one that differs between devices."""
    if hasattr(lax, "pcast"):
        return lax.pcast(x, axes, to="varying")
    return lax.pvary(x, axes)  # of JAX 0.6 and 0.7
