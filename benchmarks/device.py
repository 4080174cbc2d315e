"""Arrays in GPU memory, beside raw NCCL and beside copies: ``mpiexec -n 4 python device.py``.

Give each rank a GPU of its own; HPCDIST_SHARE_GPU=1 allows several ranks on one, without NCCL. What
does a small call take beyond the same one of `cupy.cuda.nccl`, and how much of its bandwidth has a
large one? How much of an all_reduce hides behind products of matrices? Through host memory, how
near does it come to copying the bytes to locked memory and back? Without a GPU it says so and ends.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI
from report import Options, Report, read_options

import hpcdist as dist
from hpcdist.bench.interleaved import Interleaved, interleave
from hpcdist.bench.libraries import start_peer
from hpcdist.bench.libraries.hpcdist import start_own
from hpcdist.bench.memory_kinds import MEMORIES, check_devices
from hpcdist.bench.plan import Plan, measure
from hpcdist.bench.rows import OWN, PINNED, Row
from hpcdist.bench.startup import Started
from hpcdist.bench.task import make_task, read_dtype
from hpcdist.bench.unavailable import Unavailable
from hpcdist.errors import UsageError
from hpcdist.text import duration, percent, volume

MEMORY, NCCL = "cuda", "nccl"
CASES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "alltoall_single")
SMALL, LARGE = 8, 64 << 20
OVERLAPPED = 2 << 20, 16 << 20, 64 << 20
ADDED_S = 3e-6
"""What a small call may take more than NCCL's own; this and the shares are aims, not tests."""
SHARE_OF_NCCL, SHARE_OF_COPY, HIDDEN = 0.97, 0.85, 0.9


def reached(yes: bool) -> str:
    return "yes" if yes else "no"


# ---- beside NCCL


def races_beside_nccl(comm: MPI.Intracomm, rounds: int) -> dict[tuple[str, int], Interleaved]:
    """Race hpcdist and NCCL on the same arrays, by case and size; `Unavailable` without NCCL."""
    world, memory = dist.get_group(), MEMORIES[MEMORY]
    libraries = [start_own(world), start_peer(NCCL, comm, True, on_device=True)]
    found = {}
    for case in CASES:
        for nbytes in (SMALL, LARGE):
            nbytes = max(nbytes, 4 * world.nranks)
            task = make_task(case, world, nbytes, read_dtype("float32"), MEMORY, "SUM")
            calls = {each.name: each.calls[case](task) for each in libraries}
            found[case, nbytes] = interleave(comm, calls, rounds=rounds, wait=memory.waiter())
    for library in libraries:
        library.close()
    return found


def beside_nccl(case: str, nbytes: int, found: Interleaved) -> Row:
    """Say what a race found: small calls are compared by time, large ones by bandwidth."""
    row = {"case": case, "size": nbytes, **{name: found.median(name) for name in (OWN, NCCL)}}
    added, share = found.added(OWN, to=NCCL), found.ratio(NCCL, to=OWN)
    if nbytes < LARGE:
        aim, good = f"at most {duration(ADDED_S)} more", added <= ADDED_S
    else:
        aim, good = f"{percent(SHARE_OF_NCCL)} of it", share >= SHARE_OF_NCCL
    return row | {"added": added, "share": share, "aim": aim, "reached": reached(good)}


# ---- beside computing, and through the host


def plan_of(case: str, sizes: Sequence[int], options: Options, against: Sequence[str]) -> Plan:
    return Plan(
        (case,),
        sizes,
        memories=(MEMORY,),
        against=against,
        rounds=options.rounds,
        quick=options.quick,
    )


def hidden(rows: Sequence[Row]) -> list[Row]:
    return [
        {
            "size": row["nbytes"],
            "library": row["library"],
            "alone": row["alone_s"],
            "hidden": row["hidden"],
            "aim": HIDDEN,
            "reached": reached(row["hidden"] >= HIDDEN),
        }
        for row in rows
    ]


def beside_copy(rows: Sequence[Row]) -> list[Row]:
    """Compare hpcdist with the copy to locked host memory and back, at each size."""
    taken = {(row["library"], row["nbytes"]): row for row in rows}
    return [
        {
            "size": nbytes,
            "hpcdist": taken[OWN, nbytes]["median_s"],
            "copy": row["median_s"],
            "share": 1 / row["ratio"],
            "aim": SHARE_OF_COPY,
            "reached": reached(1 / row["ratio"] >= SHARE_OF_COPY),
        }
        for (library, nbytes), row in taken.items()
        if library == PINNED
    ]


def start_staged() -> dist.Group:
    """Start anew, with all device memory going through the host. Collective."""
    dist.destroy_process_group()
    os.environ["HPCDIST_DEVICE_BACKEND"] = "staged"
    return dist.init_parallel_env()


def main() -> None:
    options = read_options(__doc__, rounds=51)
    dist.init_parallel_env()
    comm = MPI.COMM_WORLD.Dup()
    try:
        about = check_devices(comm, (MEMORY,))
    except UsageError as reason:
        if comm.rank == 0:
            print(f"no GPU, nothing measured: {reason}")
        return
    report = Report("device", options, comm)
    notes: list[str] = []
    report_beside_nccl(report, comm, options, f"Beside raw NCCL, on {about}", notes)
    report_hidden(report, options, notes)
    report_beside_copy(report, options, notes)
    if comm.rank == 0:
        print(*dict.fromkeys(notes), sep="\n")
    report.close()


def report_beside_nccl(
    report: Report, comm: MPI.Intracomm, options: Options, title: str, notes: list[str]
) -> None:
    try:
        races = races_beside_nccl(comm, options.rounds)
    except Unavailable as reason:
        notes.append(f"{NCCL} is left out: {reason}")
        return
    shown: dict[str, Any] = {"case": str, "size": volume, OWN: duration, NCCL: duration}
    shown |= {"added": duration, "share": percent, "aim": str, "reached": str}
    report.table(title, shown, [beside_nccl(*point, found) for point, found in races.items()])


def report_hidden(report: Report, options: Options, notes: list[str]) -> None:
    plan = plan_of("overlap_matmul", OVERLAPPED, options, (NCCL,))
    rows = hidden(measure(dist.get_group(), plan, Started(0.0, None), notes))
    shown = {"size": volume, "library": str, "alone": duration, "hidden": percent}
    shown |= {"aim": percent, "reached": str}
    report.table("all_reduce behind products of matrices", shown, rows)


def report_beside_copy(report: Report, options: Options, notes: list[str]) -> None:
    plan = plan_of("all_reduce", (1 << 20, 8 << 20, LARGE), options, ())
    rows = beside_copy(measure(start_staged(), plan, Started(0.0, None), notes))
    shown = {"size": volume, "hpcdist": duration, "copy": duration, "share": percent}
    shown |= {"aim": percent, "reached": str}
    report.table("all_reduce through host memory, beside copying there and back", shown, rows)


if __name__ == "__main__":
    main()
