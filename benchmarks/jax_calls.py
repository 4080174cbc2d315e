"""What an all_reduce costs in JAX, called and inside of jit: ``mpiexec -n 2 python jax_calls.py``.

Beside it are the same array of NumPy, the way without the compiled handler, mpi4py in JAX's
`io_callback`, and mpi4jax where it is installed. A program of a hundred operations, in a
`fori_loop`, shows what one costs that is called by nobody but XLA. Each rank has cores of its own,
as in most jobs: XLA begins as many threads as it finds cores, in each rank.
"""

from __future__ import annotations

import os
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

SIZES = {"8 bytes": 2, "1 MiB": 1 << 18, "64 MiB": 1 << 24}
LOOPS = {"8 bytes": 100, "1 MiB": 100, "64 MiB": 10}
WITHIN = {
    "8 bytes": "3 us more than NumPy",
    "1 MiB": "1.05 of NumPy",
    "64 MiB": "1.05 of NumPy",
}
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


def looped(verb: Verb, count: int) -> Verb:
    return lambda x: lax.fori_loop(0, count, lambda _, y: verb(y) / 2, x)


def calls(comm: MPI.Intracomm, length: str) -> dict[str, Callable[[], Any]]:
    """Return one operation per call."""
    size = SIZES[length]
    array, x = np.ones(size, "f4"), jnp.ones(size, "f4")
    found: dict[str, Callable[[], Any]] = {
        "NumPy": partial(dist.all_reduce, array),
        "not compiled": lambda: jax.block_until_ready(hj.all_reduce(x)),
        "nothing, compiled": compiled("", lambda x: x + 1, x),
    }
    return found | {name: compiled(name, verb, x) for name, verb in verbs(comm).items()}


def loops(comm: MPI.Intracomm, length: str) -> dict[str, Callable[[], Any]]:
    """Return some operations per call."""
    size, count = SIZES[length], LOOPS[length]
    array, x = np.ones(size, "f4"), jnp.ones(size, "f4")

    def in_numpy() -> None:
        for _ in range(count):
            dist.all_reduce(array)
            np.divide(array, 2, out=array)

    found = {name: compiled(name, looped(verb, count), x) for name, verb in verbs(comm).items()}
    return {"NumPy": in_numpy, **found}


def keep_to_own_cores(comm: MPI.Intracomm) -> None:
    """Divide the cores of a node between its ranks, if they share them."""
    here, cores = comm.Split_type(MPI.COMM_TYPE_SHARED), sorted(os.sched_getaffinity(0))
    if len(cores) == os.cpu_count() and here.size <= len(cores):
        os.sched_setaffinity(0, cores[here.rank :: here.size])
    here.Free()


def main() -> None:
    options = read_options(__doc__, rounds=21)
    dist.init_parallel_env()
    comm = MPI.COMM_WORLD.Dup()
    keep_to_own_cores(comm)
    report = Report("jax_calls", options, comm)
    once = dict.fromkeys(LOOPS, 1)
    tables = {"A call": (calls, once), "An operation in a loop": (loops, LOOPS)}
    for title, (contestants, counts) in tables.items():
        for length, per_call in counts.items():
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
            report.table(f"{title}, {length}; the aim in a loop: {WITHIN[length]}", shown, rows)
    report.close()


if __name__ == "__main__":
    main()
