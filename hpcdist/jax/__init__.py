"""Collectives inside `jax.jit`, `grad`, `vmap` and `scan`: ``import hpcdist.jax as hj``.

Functions that return new arrays, eagerly and in traced functions, in the order of the program and
without tokens. Read in this order: `verbs` (what users call, and what is checked when a function is
traced), `devices` (several devices in one process), `primitives` (JAX's rules for each verb),
`running` (what happens when its turn has come), `averages` (gradients in buckets),
`processes` (several processes as one JAX).
"""

import os

try:
    import jax
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ModuleNotFoundError(
        "hpcdist.jax needs JAX, which is not installed: pip install 'hpcdist[jax]'", name="jax"
    ) from None

from hpcdist.jax.averages import (
    average as average,
    average_gradients as average_gradients,
)
from hpcdist.jax.processes import initialize as initialize
from hpcdist.jax.verbs import (
    all_gather as all_gather,
    all_reduce as all_reduce,
    alltoall as alltoall,
    barrier as barrier,
    broadcast as broadcast,
    gather as gather,
    permute as permute,
    recv as recv,
    reduce as reduce,
    reduce_scatter as reduce_scatter,
    scatter as scatter,
    send as send,
    sendrecv as sendrecv,
)
from hpcdist.transport.flight.call_site import pass_over

__all__ = [
    "all_gather",
    "all_reduce",
    "alltoall",
    "average",
    "average_gradients",
    "barrier",
    "broadcast",
    "gather",
    "initialize",
    "permute",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "sendrecv",
]

pass_over(os.path.dirname(jax.__file__) + os.sep)  # a program's line is not one of JAX's own
