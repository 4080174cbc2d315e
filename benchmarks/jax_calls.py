"""What an all_reduce costs in JAX, called and inside of jit: ``mpiexec -n 2 python jax_calls.py``.

Beside it are the same array of NumPy, the way without the compiled handler, mpi4py in JAX's
`io_callback`, and mpi4jax where it is installed. A program of a hundred operations, in a
`fori_loop`, shows what one costs that is called by nobody but XLA.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from mpi4py import MPI
from report import Report, read_options

import hpcdist as dist
import hpcdist.jax as hj
from hpcdist.bench.interleaved import interleave
from hpcdist.jax import handler
from hpcdist.text import duration, times

SIZES = {"8 bytes": 2, "1 MiB": 1 << 18}
LOOP = 100
WITHIN = {"8 bytes": "3 us more than NumPy", "1 MiB": "1.05 of NumPy"}
"""What an operation inside of jit may cost: the aim, not a test."""

Verb = Callable[[Any], Any]


def verbs(comm: MPI.Intracomm) -> dict[str, Verb]:
    """Return ways to sum an array of JAX over all ranks, in a function that is traced."""
    found: dict[str, Verb] = {"hpcdist": lambda x: hj.all_reduce(x)}
    if handler.IS_THERE:
        found["hpcdist, called back"] = lambda x: hj.all_reduce(x)
    found["mpi4py, called back"] = partial(_by_mpi4py, comm)
    try:
        import mpi4jax
    except ImportError:
        return found
    return found | {"mpi4jax": lambda x: mpi4jax.allreduce(x, op=MPI.SUM, comm=comm)}


def _by_mpi4py(comm: MPI.Intracomm, x: Any) -> Any:
    def add_up(x: Any) -> Any:
        y = np.array(x)
        comm.Allreduce(MPI.IN_PLACE, y)
        return y

    return io_callback(add_up, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True)


def compiled(name: str, function: Verb, x: Any) -> Callable[[], Any]:
    """Return a call of `function`, compiled for the way that `name` says."""
    there = handler.IS_THERE
    handler.IS_THERE = there and name != "hpcdist, called back"
    step = jax.jit(lambda x: function(x))
    jax.block_until_ready(step(x))
    handler.IS_THERE = there
    return lambda: jax.block_until_ready(step(x))


def looped(verb: Verb) -> Verb:
    return lambda x: lax.fori_loop(0, LOOP, lambda _, y: verb(y) / 2, x)


def calls(comm: MPI.Intracomm, size: int) -> dict[str, Callable[[], Any]]:
    """Return one operation per call."""
    array, x = np.ones(size, "f4"), jnp.ones(size, "f4")
    found: dict[str, Callable[[], Any]] = {
        "NumPy": partial(dist.all_reduce, array),
        "not compiled": lambda: jax.block_until_ready(hj.all_reduce(x)),
        "nothing, compiled": compiled("", lambda x: x + 1, x),
    }
    return found | {name: compiled(name, verb, x) for name, verb in verbs(comm).items()}


def loops(comm: MPI.Intracomm, size: int) -> dict[str, Callable[[], Any]]:
    """Return a hundred operations per call."""
    array, x = np.ones(size, "f4"), jnp.ones(size, "f4")

    def in_numpy() -> None:
        for _ in range(LOOP):
            dist.all_reduce(array)
            np.divide(array, 2, out=array)

    found = {name: compiled(name, looped(verb), x) for name, verb in verbs(comm).items()}
    return {"NumPy": in_numpy, **found}


def main() -> None:
    options = read_options(__doc__, rounds=21)
    dist.init_parallel_env()
    comm = MPI.COMM_WORLD.Dup()
    report = Report("jax_calls", options, comm)
    tables = {"A call": (calls, 1), f"An operation of {LOOP} in a loop": (loops, LOOP)}
    for title, (contestants, per_call) in tables.items():
        for size, length in SIZES.items():
            found = interleave(comm, contestants(comm, length), rounds=options.rounds)
            rows = [
                {
                    "all_reduce by": name,
                    "time": found.median(name) / per_call,
                    "of NumPy's": found.ratio(name, to="NumPy"),
                    "added": found.added(name, to="NumPy") / per_call,
                }
                for name in found.seconds
            ]
            shown = {"all_reduce by": str, "time": duration, "of NumPy's": times, "added": duration}
            report.table(f"{title}, {size}; the aim in a loop is {WITHIN[size]}", shown, rows)
    report.close()


if __name__ == "__main__":
    main()
