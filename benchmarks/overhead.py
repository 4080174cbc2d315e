"""What a small call costs beyond the same call of mpi4py: ``mpiexec -n 2 python overhead.py``.

On one rank (``-n 1``) nobody is waited for: what is left is what the calls themselves cost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from report import Report, read_options

import hpcdist as dist
from hpcdist.bench.interleaved import interleave
from hpcdist.comm import describe
from hpcdist.comm.session import resolve_group
from hpcdist.text import duration, times

WITHIN_S = {
    "call": 2e-6,
    "asynchronous": 5e-6,
    "plan": 0.3e-6,
    "there and back": 2e-6,
    "large": 5e-6,
}
"""What a call may cost more than mpi4py's: the aim, not a test."""


class Pair(NamedTuple):
    """The same operation through hpcdist and through mpi4py."""

    operation: str
    aim: str
    hpcdist: Callable[[], Any]
    mpi4py: Callable[[], Any]


def pairs(comm: MPI.Intracomm) -> list[Pair]:
    kinds = small_calls, asynchronous_calls, messages, plans, torch_calls
    return [pair for kind in kinds for pair in kind(comm)]


def small_calls(comm: MPI.Intracomm) -> list[Pair]:
    """Return each collective of 8 bytes per rank, from and into arrays that are at hand."""
    one, mine, all_of_them, theirs = (
        np.zeros(1),
        np.zeros(1),
        np.zeros(comm.size),
        np.ones(comm.size),
    )
    into = mine if comm.rank == 0 else None
    calls = {
        "all_reduce": (
            partial(dist.all_reduce, one),
            partial(comm.Allreduce, MPI.IN_PLACE, one),
        ),
        "broadcast": (partial(dist.broadcast, one, 0), partial(comm.Bcast, one, 0)),
        "reduce": (partial(dist.reduce, one, 0), partial(comm.Reduce, one, into, root=0)),
        "all_gather": (
            partial(dist.all_gather, all_of_them, one),
            partial(comm.Allgather, one, all_of_them),
        ),
        "reduce_scatter": (
            partial(dist.reduce_scatter, one, all_of_them),
            partial(comm.Reduce_scatter_block, all_of_them, one),
        ),
        "alltoall": (
            partial(dist.alltoall, all_of_them, theirs),
            partial(comm.Alltoall, theirs, all_of_them),
        ),
    }
    found = [Pair(f"{name} of 8 bytes", "call", *ways) for name, ways in calls.items()]
    return [
        *found,
        Pair("barrier", "call", dist.barrier, comm.Barrier),
        _blocks(comm, np.ones(comm.size << 10)),
        *objects(comm, {"step": 1, "loss": 0.5}),
    ]


def _blocks(comm: MPI.Intracomm, data: Any) -> Pair:
    into = np.zeros_like(data)
    return Pair(
        "alltoall_single, 8 KiB for each",
        "call",
        partial(dist.alltoall_single, into, data),
        partial(comm.Alltoall, data, into),
    )


def objects(comm: MPI.Intracomm, content: Any) -> list[Pair]:
    """Return collectives of a small dict."""
    gathered: list[Any] = []
    return [
        Pair(
            "all_gather of a small dict",
            "call",
            partial(dist.all_gather_object, gathered, content),
            partial(comm.allgather, content),
        ),
        Pair(
            "broadcast of a small dict",
            "call",
            lambda: dist.broadcast_object_list([content], 0),
            partial(comm.bcast, content),
        ),
    ]


def asynchronous_calls(comm: MPI.Intracomm) -> list[Pair]:
    """Return sums that are started and waited for at once: nothing is computed meanwhile."""
    return [
        _started_and_waited_for(comm, size, np.zeros(nbytes // 8))
        for size, nbytes in [("8 bytes", 8), ("64 KiB", 64 << 10), ("1 MiB", 1 << 20)]
    ]


def _started_and_waited_for(comm: MPI.Intracomm, size: str, data: Any) -> Pair:
    return Pair(
        f"all_reduce of {size}, sync_op=False: wait()",
        "asynchronous",
        lambda: dist.all_reduce(data, sync_op=False).wait(),
        lambda: comm.Iallreduce(MPI.IN_PLACE, data).Wait(),
    )


def messages(comm: MPI.Intracomm) -> list[Pair]:
    """Return messages there and back between the ranks of each pair; a rank without one rests."""
    if comm.size == 1:
        return []
    found = [
        _there_and_back(comm, f"{name}, there and back", aim, np.ones(nbytes // 8))
        for name, nbytes, aim in [
            ("message of 8 bytes", 8, "there and back"),
            ("message of 8 KiB", 8 << 10, "there and back"),
            ("message of 1 MiB", 1 << 20, "large"),
        ]
    ]
    content, place = {"step": 1, "loss": 0.5}, [None]
    return [
        *found,
        Pair(
            "message of a small dict, there and back",
            "there and back",
            _in_turn(
                comm,
                lambda peer: dist.send_object_list([content], peer),
                lambda peer: dist.recv_object_list(place, peer),
            ),
            _in_turn(comm, partial(comm.send, content), lambda peer: comm.recv(source=peer)),
        ),
    ]


def _there_and_back(comm: MPI.Intracomm, operation: str, aim: str, data: Any) -> Pair:
    into = np.zeros_like(data)
    ours = _in_turn(comm, partial(dist.send, data), partial(dist.recv, into))
    theirs = _in_turn(comm, partial(comm.Send, data), partial(comm.Recv, into))
    return Pair(operation, aim, ours, theirs)


def _in_turn(
    comm: MPI.Intracomm, send: Callable[[int], Any], receive: Callable[[int], Any]
) -> Callable[[], Any]:
    """Return what the even rank of a pair begins, and the odd one answers."""
    peer = comm.rank ^ 1
    if peer >= comm.size:
        return lambda: None
    first, second = (send, receive) if comm.rank < peer else (receive, send)

    def both() -> None:
        first(peer)
        second(peer)

    return both


def plans(comm: MPI.Intracomm) -> list[Pair]:
    one = np.zeros(1)
    plan, request = dist.plan_all_reduce(one), comm.Allreduce_init(MPI.IN_PLACE, one)
    barrier_plan, barrier_request = dist.plan_barrier(), comm.Barrier_init()
    return [
        Pair(
            "plan_all_reduce: start().wait()",
            "plan",
            lambda: plan.start().wait(),
            lambda: (request.Start(), request.Wait()),
        ),
        Pair(
            "plan_barrier: start().wait()",
            "plan",
            lambda: barrier_plan.start().wait(),
            lambda: (barrier_request.Start(), barrier_request.Wait()),
        ),
    ]


def torch_calls(comm: MPI.Intracomm) -> list[Pair]:
    try:
        import torch
    except ImportError:
        return []
    tensor, one = torch.zeros(1, dtype=torch.float64), np.zeros(1)
    all_reduce = partial(comm.Allreduce, MPI.IN_PLACE, one)
    return [
        Pair("all_reduce of a torch tensor", "call", partial(dist.all_reduce, tensor), all_reduce)
    ]


def steps(comm: MPI.Intracomm) -> dict[str, Callable[[], Any]]:
    """Return the parts of an all_reduce of 8 bytes, each called alone."""
    one = np.zeros(1)
    group = resolve_group(None)
    transport: Any = group.transport
    op = dist.ReduceOp.SUM
    call = describe.all_reduce(group, one, op)
    return {
        "all of it": partial(dist.all_reduce, one),
        "find the group": partial(resolve_group, None),
        "describe": partial(describe.all_reduce, group, one, op),
        "run the call": partial(transport.run, call),
        "  agree": partial(transport.context.agree, call),
        "  mpi4py": partial(comm.Allreduce, MPI.IN_PLACE, [one, 1, MPI.DOUBLE], MPI.SUM),
        "an empty call": partial(int),
    }


def main() -> None:
    options = read_options(__doc__, rounds=101)
    dist.init_parallel_env()
    comm = MPI.COMM_WORLD.Dup()
    report = Report("overhead", options, comm)
    rows = []
    for pair in pairs(comm):
        found = interleave(
            comm, {"hpcdist": pair.hpcdist, "mpi4py": pair.mpi4py}, rounds=options.rounds
        )
        added, within = found.added("hpcdist", to="mpi4py"), WITHIN_S[pair.aim]
        rows.append(
            {
                "operation": pair.operation,
                "hpcdist": found.median("hpcdist"),
                "mpi4py": found.median("mpi4py"),
                "ratio": found.ratio("hpcdist", to="mpi4py"),
                "added": added,
                "aim": within,
                "reached": "yes" if added <= within else "no",
            }
        )
    shown = {"operation": str, "hpcdist": duration, "mpi4py": duration, "ratio": times}
    shown |= {"added": duration, "aim": duration, "reached": str}
    report.table("A small call beside mpi4py's", shown, rows)

    found = interleave(comm, steps(comm), rounds=options.rounds)
    report.table(
        "Where an all_reduce of 8 bytes spends its time",
        {"step": str, "time": duration},
        [{"step": step, "time": found.median(step)} for step in found.seconds],
    )
    report.close()


if __name__ == "__main__":
    main()
