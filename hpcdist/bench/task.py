"""`Task`: one thing to be measured, and `Library`: who can do it.

A library is a table: for each case a function that makes, of a task, what is called again and
again. All libraries work on the same arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.arrays.dtypes import dtype_row
from hpcdist.bench.interleaved import Call
from hpcdist.bench.memory_kinds import MEMORIES
from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple

Array = npt.NDArray[Any]


class Task(NamedTuple):
    """What one measurement works on; the ranks are those of the group that is measured.

    Attributes:
        rank: this process's rank in the group.
        size: the ranks of the group.
        op: the name of the reduction.
        x: what this rank hands in.
        out: what it gets, where that is another array.
        parts: `out` (or, for `scatter`, `x`), in one array for each rank.
        root: rank 0 of the group as a rank of the world.
        thing: the Python object of the object collectives.

    """

    rank: int
    size: int
    op: str
    x: Array
    out: Array
    parts: list[Array]
    thing: Any
    root: int = 0


Maker = Callable[[Task], Call]


class Messages(NamedTuple):
    """How a library sends arrays to a rank of the group.

    `prepare` makes of an array what the others take; `begin_*` return what `wait` takes.
    """

    prepare: Callable[[Array], Any]
    send: Callable[[Any, int], Any]
    recv: Callable[[Any, int], Any]
    begin_send: Callable[[Any, int], Any]
    begin_recv: Callable[[Any, int], Any]
    wait: Callable[[list[Any]], Any]


class Library(NamedTuple):
    """A candidate: what it can do on a group.

    Attributes:
        name: as in the reports.
        calls: for each case what makes its call.
        messages: how it sends.
        begin: for `all_reduce`: makes what begins it and returns something with `wait`.
        parallel: the data-parallel form of a torch module, None where it has none.
        close: ends the library; collective.

    """

    name: str
    calls: Mapping[str, Maker]
    messages: Messages
    begin: Maker
    parallel: Callable[[Any], Any] | None
    close: Call


# ---- the arrays

# How many arrays of the size at hand a rank gets, as a function of the number of ranks; and
# whether what it hands in or gets is cut into one part for each rank.
_OUT_PER_IN: Mapping[str, Callable[[int], float]] = {
    "all_gather": lambda size: size,
    "all_gather_list": lambda size: size,
    "gather": lambda size: size,
    "scatter": lambda size: 1 / size,
    "reduce_scatter": lambda size: 1 / size,
    "alltoall": lambda _: 1,
    "alltoall_single": lambda _: 1,
}
_CUT_IN = ("scatter", "reduce_scatter", "alltoall", "alltoall_single")


def read_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of this name, bfloat16 and its relatives among them."""
    import ml_dtypes

    try:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        dtype_row(dtype)
    except (TypeError, UsageError) as error:
        raise UsageError(f"{name!r} is not a dtype: use float32, bfloat16 or the like") from error
    return dtype


def make_task(
    case: str, group: Group, nbytes: int, dtype: np.dtype[Any], memory: str, op: str
) -> Task:
    """Return the task of `case` where each rank hands in `nbytes`; collective.

    The arrays are in the memory of that name in `MEMORIES`. They hold zeros (sums of them stay
    finite), and their memory is there already. They have at least one element, for each rank where
    they are cut.
    """
    size = group.nranks
    cut = size if case in _CUT_IN else 1
    count = max(1, nbytes // dtype.itemsize // cut) * cut
    zeros = MEMORIES[memory].zeros
    x = zeros(count, dtype, group)
    per_in = _OUT_PER_IN.get(case)
    out = x if per_in is None else zeros(round(count * per_in(size)), dtype, group)
    parts = _parts(case, x, out, size, lambda: zeros(count, dtype, group))
    return Task(group.rank, size, op, x, out, parts, thing_of(nbytes), group.ranks[0])


def _parts(case: str, x: Array, out: Array, size: int, fresh: Callable[[], Array]) -> list[Array]:
    """Return one array for each rank; those of `all_gather_list` lie apart."""
    if case == "all_gather_list":
        return [fresh() for _ in range(size)]
    if case in _OUT_PER_IN and case != "reduce_scatter":
        return np.split(x if case == "scatter" else out, size)
    return []


def result_bytes(case: str, nbytes: int, size: int) -> int:
    """Return the bytes a rank gets where each of `size` ranks hands in `nbytes`."""
    per_in = _OUT_PER_IN.get(case)
    return nbytes if per_in is None else round(nbytes * per_in(size))


def thing_of(nbytes: int) -> dict[str, Any]:
    """Return a small dictionary, with an array of `nbytes` in it if that is above 0."""
    small = {"epoch": 3, "loss": 0.25, "name": "train"}
    return {**small, "weights": np.zeros(nbytes, np.uint8)} if nbytes else small
