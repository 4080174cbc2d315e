"""Random jitted programs of collectives, and what NumPy says each rank must end with.

A program is a tree of steps on whole numbers, so that all results are exact: operations of a group
(all ranks, or the even and the odd ones), computing, and control flow around programs. Read in this
order: `draw`, `Scene` (a rank and its groups), `OPERATIONS` (what a rank does, and what becomes of
the rows of all members), `traced` and `twin` (a program in JAX and in NumPy), `run_program`.
"""

import os
import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import hpcdist as dist
import hpcdist.jax as hj

PRIME, WIDTH = 1009, 4
Op = dist.ReduceOp


class Step(NamedTuple):
    """An operation of a group, or control flow around `bodies`."""

    what: str
    by_parity: bool
    number: int
    bodies: tuple[Any, ...] = ()


def draw(seed):
    """Return a program of some operations, nested at most three times."""
    return _draw(random.Random(seed), depth=3)


def _draw(source, depth):
    steps = []
    for _ in range(source.randint(1, 3)):
        flow = depth > 0 and source.random() < 0.4
        what = source.choice([*FLOWS] if flow else [*OPERATIONS])
        bodies = tuple(_draw(source, depth - 1) for _ in range(FLOWS[what])) if flow else ()
        steps.append(Step(what, source.random() < 0.5, source.randrange(1000), bodies))
    return tuple(steps)


FLOWS = {"scan": 1, "fori": 1, "while": 1, "cond": 2, "switch": 3, "jit": 1}
"""How many bodies each has."""


class Scene(NamedTuple):
    """The groups of a rank: of all ranks, and of those of its parity."""

    groups: tuple[Any, Any]

    def of(self, step):
        """Return the group of a step, and this rank's place in it."""
        group = self.groups[step.by_parity]
        return group, group.rank


def scene():
    """Make the groups. Collective."""
    n, rank = dist.get_world_size(), dist.get_rank()
    halves = [dist.new_group(range(first, n, 2)) if first < n else None for first in (0, 1)]
    return Scene((dist.get_group(), halves[rank % 2]))


# ---- operations: (what a rank does with its row, what becomes of the rows of all members)


def weights(m):
    return np.arange(1, m + 1, dtype="i4")[:, None]


def blocks(x, m):
    return x * weights(m)


def root(step, m):
    return step.number % m


def everywhere(row, m):
    return np.stack([row] * m)


def only_on(k, rows):
    return rows * (np.arange(len(rows)) == k)[:, None]


def ring(step, x, group, rank):
    m = group.nranks
    behind, before = group.ranks[(rank + 1) % m], group.ranks[(rank - 1) % m]
    if m == 1:
        return x
    if rank == 0:
        hj.send(x, behind, group, tag=step.number)
        return hj.recv(x, before, group, tag=step.number)
    y = hj.recv(x, before, group, tag=step.number)
    hj.send(x, behind, group, tag=step.number)
    return y


def around(step, x, group, rank):
    m, by = group.nranks, 1 + step.number % 2
    return hj.sendrecv(x, group.ranks[(rank + by) % m], group.ranks[(rank - by) % m], group)


def chain(step, x, group, rank):
    return hj.permute(x, [*zip(group.ranks, group.ranks[1:], strict=False)], group)


def mapped(step, x, group, rank):
    return jax.vmap(lambda each: hj.all_gather(each, group).sum())(x)


def reduction(op, twin):
    return (
        lambda step, x, group, rank: hj.all_reduce(x, op, group),
        lambda step, rows: everywhere(twin(rows), len(rows)),
    )


OPERATIONS = {
    "sum": reduction(Op.SUM, lambda rows: rows.sum(0)),
    "max": reduction(Op.MAX, lambda rows: rows.max(0)),
    "xor": reduction(Op.BXOR, lambda rows: np.bitwise_xor.reduce(rows, 0)),
    "all_gather": (
        lambda step, x, group, rank: (hj.all_gather(x, group) * weights(group.nranks)).sum(0),
        lambda step, rows: everywhere((rows * weights(len(rows))).sum(0), len(rows)),
    ),
    "reduce_scatter": (
        lambda step, x, group, rank: hj.reduce_scatter(blocks(x, group.nranks), group=group),
        lambda step, rows: rows.sum(0) * weights(len(rows)),
    ),
    "alltoall": (
        lambda step, x, group, rank: hj.alltoall(blocks(x, group.nranks), group).sum(0),
        lambda step, rows: rows.sum(0) * weights(len(rows)),
    ),
    "broadcast": (
        lambda step, x, group, rank: hj.broadcast(x, group.ranks[root(step, group.nranks)], group),
        lambda step, rows: everywhere(rows[root(step, len(rows))], len(rows)),
    ),
    "scatter": (
        lambda step, x, group, rank: hj.scatter(
            blocks(x, group.nranks), group.ranks[root(step, group.nranks)], group
        ),
        lambda step, rows: rows[root(step, len(rows))] * weights(len(rows)),
    ),
    "gather": (
        lambda step, x, group, rank: (
            x + hj.gather(x, group.ranks[root(step, group.nranks)], group).sum(0)
        ),
        lambda step, rows: (
            rows + only_on(root(step, len(rows)), everywhere(rows.sum(0), len(rows)))
        ),
    ),
    "reduce": (
        lambda step, x, group, rank: (
            x + hj.reduce(x, group.ranks[root(step, group.nranks)], group=group)
        ),
        lambda step, rows: (
            rows + only_on(root(step, len(rows)), everywhere(rows.sum(0), len(rows)))
        ),
    ),
    "ring": (ring, lambda step, rows: np.roll(rows, 1, 0)),
    "around": (around, lambda step, rows: np.roll(rows, 1 + step.number % 2, 0)),
    "chain": (chain, lambda step, rows: np.concatenate([0 * rows[:1], rows[:-1]])),
    "mapped": (mapped, lambda step, rows: everywhere(rows.sum(0), len(rows))),
    "compute": (
        lambda step, x, group, rank: x * (rank + 2) + step.number,
        lambda step, rows: rows * (weights(len(rows)) + 1) + step.number,
    ),
}


# ---- a program in JAX


def traced(program, x, scene):
    """Return what this rank makes of its row."""
    for step in program:
        x = _FLOW[step.what](step, x, scene) if step.bodies else _operate(step, x, scene) % PRIME
    return x


def _operate(step, x, scene):
    return OPERATIONS[step.what][0](step, x, *scene.of(step))


def _agreed(x):
    """Return a number that all ranks have."""
    return hj.all_reduce(x[0])


def _scan(step, x, scene):
    def body(x, number):
        y = traced(step.bodies[0], x + number, scene)
        return y % PRIME, y

    x, ys = lax.scan(body, x, jnp.arange(2, dtype="int32"))
    return (x + ys.sum(0)) % PRIME


def _fori(step, x, scene):
    return lax.fori_loop(0, 2, lambda i, x: traced(step.bodies[0], (x + i) % PRIME, scene), x)


def _while(step, x, scene):
    def goes_on(carry):
        x, i = carry
        return (i < 3) & (_agreed(x) % 4 != 0)

    def body(carry):
        x, i = carry
        return traced(step.bodies[0], x, scene), i + 1

    return lax.while_loop(goes_on, body, (x, 0))[0]


def _switch(step, x, scene):
    branches = [lambda x, body=body: traced(body, x, scene) for body in step.bodies]
    return lax.switch(_agreed(x) % len(branches), branches, x)


def _jit(step, x, scene):
    return jax.jit(lambda x: traced(step.bodies[0], x, scene))(x)


_FLOW = {
    "scan": _scan,
    "fori": _fori,
    "while": _while,
    "cond": _switch,
    "switch": _switch,
    "jit": _jit,
}


# ---- the same in NumPy, with a row for each rank


def twin(program, rows):
    for step in program:
        rows = _TWINS[step.what](step, rows) if step.bodies else _operate_on_all(step, rows) % PRIME
    return rows


def _operate_on_all(step, rows):
    rows = rows.copy()
    for first in (0, 1) if step.by_parity else (None,):
        members = slice(None) if first is None else slice(first, None, 2)
        if len(rows[members]):
            rows[members] = OPERATIONS[step.what][1](step, rows[members])
    return rows


def _scan_twin(step, rows):
    total = 0
    for number in range(2):
        rows = twin(step.bodies[0], rows + number)
        total = total + rows
    return (rows + total) % PRIME


def _fori_twin(step, rows):
    for i in range(2):
        rows = twin(step.bodies[0], (rows + i) % PRIME)
    return rows


def _while_twin(step, rows):
    for _ in range(3):
        if rows[:, 0].sum() % 4 == 0:
            break
        rows = twin(step.bodies[0], rows)
    return rows


def _switch_twin(step, rows):
    return twin(step.bodies[rows[:, 0].sum() % len(step.bodies)], rows)


_TWINS = {
    "scan": _scan_twin,
    "fori": _fori_twin,
    "while": _while_twin,
    "cond": _switch_twin,
    "switch": _switch_twin,
    "jit": lambda step, rows: twin(step.bodies[0], rows),
}


def run_programs(seeds):
    """Run programs on the calling rank, jitted, and compare to the bit. Collective."""
    groups = scene()
    for seed in seeds:
        try:
            _run_program(seed, groups)
        except BaseException:
            print(f"the random program of seed {seed} failed", flush=True)
            raise


def _run_program(seed, groups):
    program, rank = draw(seed), dist.get_rank()
    shape = (dist.get_world_size(), WIDTH)
    rows = np.random.default_rng(seed).integers(0, PRIME, shape, dtype="i4")
    found = jax.jit(lambda x: traced(program, x, groups))(rows[rank])
    np.testing.assert_array_equal(np.asarray(found), twin(program, rows)[rank])


MANY = int(os.environ.get("RANDOM_JAX_PROGRAMS", "2000"))
"""How many programs the slow tests run."""
