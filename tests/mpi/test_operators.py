"""Every operator on every kind of numbers, by all ways, against NumPy."""

import numpy as np
import pytest
from checks import combined
from collective_programs import Step, operators, run_program

import hpcdist as dist
from hpcdist.transport.tuning import Algorithm, TuningRule

VERBS = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan")
NUMBERS = ("longdouble", "clongdouble", "datetime64[ns]", "pair", "bool", "int16", "uint64")
SHAPES = ((3, 5), (2003,))
WAYS = ("eager", "python", "pieces", "nodes", "hierarchical")


@pytest.fixture(params=WAYS)
def _by_every_way(request, size):
    """Start the world anew so that reductions go by one of the ways there are."""
    if request.param == "python":
        request.getfixturevalue("world_with")(kernel="never")
    if request.param == "pieces":
        request.getfixturevalue("world_with")(piece_mb=100 / 2**20)
    if request.param == "nodes":
        request.getfixturevalue("world_with")(ranks_per_node=1)
    if request.param == "hierarchical":
        rules = [
            TuningRule(verb, "ordinary", Algorithm.HIERARCHICAL, nodes="several") for verb in VERBS
        ]
        request.getfixturevalue("tuned")(rules, ranks_per_node=2 if size > 2 else 1)


def step(operation, dtype, op, shape, form, size):
    members, memory = tuple(range(size)), "mixed" if form == "sync" else "ordinary"
    seed = len(operation) + 10 * op
    return Step(operation, members, 0, dtype, shape, op, 0, form, "list", False, seed, memory)


@pytest.mark.usefixtures("_by_every_way")
@pytest.mark.parametrize(
    ("_by_every_way", "dtype", "shape"), combined(WAYS, NUMBERS, SHAPES), indirect=["_by_every_way"]
)
def test_every_reduction_takes_every_operator_of_its_dtype(dtype, shape, size):
    run_program(
        [
            step(verb, dtype, op, shape, form, size)
            for verb in VERBS
            for op in operators(dtype)
            for form in ("sync", "async", "plan")
        ]
    )


@pytest.mark.usefixtures("_by_every_way")
@pytest.mark.parametrize("count", [2, 3001])
def test_the_digits_of_a_long_double_are_not_lost_on_the_way(count, rank, size):
    tiny = np.finfo("longdouble").eps
    x = np.full(count, 1 if rank == 0 else tiny, "longdouble")
    dist.all_reduce(x)
    assert (x == np.longdouble(1) + (size - 1) * tiny).all()
    z = np.full(count, rank + 1 + (rank + 1) * 1j, "clongdouble") * tiny
    dist.all_reduce(z, dist.ReduceOp.AVG)
    assert (z == (size + 1) / np.longdouble(2) * (1 + 1j) * tiny).all()


@pytest.mark.usefixtures("_by_every_way")
@pytest.mark.parametrize("count", [2, 3001])
def test_a_search_for_the_largest_value_tells_where_it_is(count, rank, size):
    x = np.zeros(count, [("value", "f8"), ("index", "i4")])
    x["value"], x["index"] = (rank + np.arange(count)) % size, rank
    dist.all_reduce(x, dist.ReduceOp.MAXLOC)
    assert (x["value"] == size - 1).all()
    assert (x["index"] == (size - 1 - np.arange(count)) % size).all()


def test_pairs_and_times_are_refused_where_they_have_no_meaning():
    for dtype, op in [("i4,f8", "MAXLOC"), ("f8,i4", "SUM"), ("M8[s]", "SUM"), ("f8", "MINLOC")]:
        x = np.zeros(3, dtype)
        with pytest.raises(dist.UsageError, match=f"{op} is not defined"):
            dist.all_reduce(x, dist.ReduceOp[op])
    dist.barrier()
