"""mpi4py alone: the shortest program that does the same, on the same arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mpi4py import MPI
from mpi4py.util import pkl5

from hpcdist.bench.interleaved import Call
from hpcdist.bench.task import Array, Library, Maker, Messages, Task

_OPS = {"SUM": MPI.SUM, "MAX": MPI.MAX, "MIN": MPI.MIN, "PROD": MPI.PROD, "AVG": MPI.SUM}


def version() -> str:
    """Return the MPI library that mpi4py has loaded, as in ``"Open MPI 5.0.7"``."""
    vendor, numbers = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, numbers))}"


def start(comm: MPI.Intracomm, _whole: bool) -> Library:
    """Return mpi4py on a duplicate of `comm`. Collective."""
    own = comm.Dup()
    calls = {**_array_calls(own), **_reductions(own), **_object_calls(own)}
    return Library("mpi4py", calls, _messages(own), partial(_begin, own), None, own.Free)


class _Request:
    """Gives an MPI request the method name of the others."""

    def __init__(self, request: MPI.Request) -> None:
        self.wait = request.Wait


def _wire(array: Array) -> Array:
    """Return `array` in a dtype that MPI can move: 16-bit floats as integers."""
    return array.view("u2") if _is_short(array) else array


def _is_short(array: Array) -> bool:
    return array.dtype.itemsize == 2 and array.dtype.kind in "fV"


def _array_calls(comm: MPI.Intracomm) -> dict[str, Maker]:
    """Return the collectives that only move."""

    def broadcast(task: Task) -> Call:
        return partial(comm.Bcast, _wire(task.x), 0)

    def all_gather(task: Task) -> Call:
        return partial(comm.Allgather, _wire(task.x), _wire(task.out))

    def all_gather_list(task: Task) -> Call:
        return partial(_gather_and_copy, comm, task)

    def gather(task: Task) -> Call:
        out = _wire(task.out) if task.rank == 0 else None
        return partial(comm.Gather, _wire(task.x), out, 0)

    def scatter(task: Task) -> Call:
        x = _wire(task.x) if task.rank == 0 else None
        return partial(comm.Scatter, x, _wire(task.out), 0)

    def alltoall(task: Task) -> Call:
        return partial(comm.Alltoall, _wire(task.x), _wire(task.out))

    def barrier(_: Task) -> Call:
        return comm.Barrier

    def new_group(_: Task) -> Call:
        return lambda: comm.Dup().Free()

    makers = (broadcast, all_gather, all_gather_list, gather, scatter, alltoall, barrier, new_group)
    return {**{make.__name__: make for make in makers}, "alltoall_single": alltoall}


def _gather_and_copy(comm: MPI.Intracomm, task: Task) -> None:
    """Gather into one array and copy: MPI knows no list of arrays."""
    comm.Allgather(_wire(task.x), _wire(task.out))
    count = task.x.size
    for rank, part in enumerate(task.parts):
        part[...] = task.out[rank * count : (rank + 1) * count]


def _reductions(comm: MPI.Intracomm) -> dict[str, Maker]:
    def all_reduce(task: Task) -> Call:
        op = _OPS[task.op]
        return _averaged(task, task.x, lambda x: comm.Allreduce(MPI.IN_PLACE, x, op))

    def scan(task: Task) -> Call:
        op = _OPS[task.op]
        return _averaged(task, task.x, lambda x: comm.Scan(MPI.IN_PLACE, x, op))

    def reduce(task: Task) -> Call:
        op, at_root = _OPS[task.op], task.rank == 0

        def call(x: Array) -> None:
            given, got = (MPI.IN_PLACE, x) if at_root else (x, None)
            comm.Reduce(given, got, op, 0)

        return _averaged(task, task.x, call)

    def reduce_scatter(task: Task) -> Call:
        op, wide = _OPS[task.op], _is_short(task.x)

        def call(out: Array) -> None:
            comm.Reduce_scatter_block(task.x.astype("f4") if wide else task.x, out, op)

        return _averaged(task, task.out, call)

    makers = (all_reduce, scan, reduce, reduce_scatter)
    return {make.__name__: make for make in makers}


def _averaged(task: Task, array: Array, call: Callable[[Array], None]) -> Call:
    """Return the obvious program around `call`: 16-bit floats are added as float32 ones."""
    average = task.op == "AVG"
    if not average and not _is_short(array):
        return partial(call, array)

    def convert_and_call() -> None:
        work = array.astype("f4") if _is_short(array) else array
        call(work)
        if average:
            work /= task.size
        if work is not array:
            array[...] = work

    return convert_and_call


def _object_calls(comm: MPI.Intracomm) -> dict[str, Maker]:
    """Return the object collectives of `pkl5`, which sends arrays beside the pickle."""
    out_of_band = pkl5.Intracomm(comm)

    def broadcast_object_list(task: Task) -> Call:
        return partial(out_of_band.bcast, [task.thing] if task.rank == 0 else None, 0)

    def all_gather_object(task: Task) -> Call:
        return partial(out_of_band.allgather, task.thing)

    return {
        "broadcast_object_list": broadcast_object_list,
        "all_gather_object": all_gather_object,
    }


def _begin(comm: MPI.Intracomm, task: Task) -> Call:
    return lambda: _Request(comm.Iallreduce(MPI.IN_PLACE, task.x, _OPS[task.op]))


def _messages(comm: MPI.Intracomm) -> Messages:
    return Messages(_wire, comm.Send, comm.Recv, comm.Isend, comm.Irecv, MPI.Request.Waitall)
