"""What computing with arrays across ranks costs: ``mpiexec -n 2 python arrays.py``.

Against NumPy on the same part, which communicates nothing, against raw mpi4py, written by hand for
just this case with buffers that it uses again, and against other libraries, where they are
installed: torch's DTensor over gloo, Heat, mpi4py-fft (`array_peers`). What a row aims at is told
at its end: `seen` is the median over the rounds, `at best` the same of the fastest rounds, which is
what counts where the machine has other work.
"""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, product
from typing import Any, NamedTuple

import core_per_rank  # noqa: F401  first: NumPy's BLAS looks when it is loaded
import numpy as np
from array_peers import Peer, calls_of, peers_here
from mpi4py import MPI
from report import Report, Row, read_options

import hpcdist as dist
from hpcdist.bench.interleaved import Call, Interleaved, interleave
from hpcdist.boxes import volume as volume_of
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout, layout_of
from hpcdist.mesh.planner import plan_reshard
from hpcdist.mesh.reads import reads_of
from hpcdist.text import duration, times, volume
from hpcdist.transport.shm.heap import Heap

MiB = 1 << 20


class Aim(NamedTuple):
    """How fast hpcdist is to be: `limit` times as long as `to`, or that many seconds longer."""

    to: str
    limit: float
    more: bool = False

    def __str__(self) -> str:
        if self.more:
            return f"{self.to} + {duration(self.limit)}"
        return f"{self.limit:g} x {self.to}"

    def seen(self, found: Interleaved) -> tuple[float, float]:
        """Return what was seen: in the median round, and in the fastest ones."""
        if self.more:
            best = found.best("hpcdist") - found.best(self.to)
            return found.added("hpcdist", to=self.to), best
        return found.ratio("hpcdist", to=self.to), found.best("hpcdist") / found.best(self.to)

    def shown(self, value: float) -> str:
        return duration(value) if self.more else times(value)


class Case(NamedTuple):
    """What is timed.

    Attributes:
        name: also that in the tables of `array_peers`.
        nbytes: of the part of a rank.
        candidates: hpcdist, and what is written here.
        aims: of hpcdist.
        given: what other libraries make their call of.

    """

    name: str
    nbytes: int
    candidates: dict[str, Call]
    aims: Sequence[Aim] = ()
    given: tuple[Any, ...] = ()


def more(seconds: float) -> tuple[Aim]:
    return (Aim("numpy", seconds, more=True),)


def part_of_rows(
    comm: MPI.Intracomm, rows: int, columns: int, make: Callable[..., Any] = np.empty
) -> tuple[DistArray, Any]:
    """Return an array cut along its rows, and its part."""
    mesh = dist.ProcessMesh([*range(comm.size)])
    layout = layout_of(mesh, (rows, columns), [dist.Shard(0)])
    part = make(layout.local_shape(mesh.coordinate))
    part[...] = np.random.default_rng(comm.rank).random(part.shape)
    return DistArray._of(part, layout), part


# ---- cases


def small(comm: MPI.Intracomm) -> Iterator[Case]:
    a, x = part_of_rows(comm, 4 * comm.size, 4)
    b, y = part_of_rows(comm, 4 * comm.size, 4)

    def summed() -> Any:
        total = x.sum(keepdims=True)
        comm.Allreduce(MPI.IN_PLACE, total)
        return total

    for name, ours, numpys, aims, given in [
        ("a + b", lambda: a + b, lambda: x + y, more(1e-6), (x, y)),
        ("a * 2.0", lambda: a * 2.0, lambda: x * 2.0, more(1e-6), (x,)),
        ("np.exp(a)", lambda: np.exp(a), lambda: np.exp(x), more(3e-6), (x,)),
        ("a[:, 1:3]", lambda: a[:, 1:3], lambda: x[:, 1:3], (), ()),
        ("a.sum(1)", lambda: a.sum(1), lambda: x.sum(1), more(5e-6), (x,)),
    ]:
        yield Case(name, x.nbytes, {"hpcdist": ours, "numpy": numpys}, aims, given)
    yield Case(
        "a.sum()", x.nbytes, {"hpcdist": a.sum, "numpy": x.sum, "mpi4py": summed}, given=(x,)
    )


def new_shapes(comm: MPI.Intracomm) -> Iterator[Case]:
    mesh, numbers = dist.ProcessMesh([*range(comm.size)]), count()
    vector = DistArray._of(np.ones(4), layout_of(mesh, (4,), []))

    def rows() -> int:  # nobody remembers the layout of an array that is gone: it is new again
        return 4 + next(numbers) % 500

    def made() -> DistArray:
        layout = layout_of(mesh, (rows() * comm.size, 4), [dist.Shard(0)])
        return DistArray._of(np.ones(layout.local_shape(mesh.coordinate)), layout)

    def fresh() -> Any:
        return np.ones((rows(), 4))

    def doubled(make: Callable[[], Any]) -> Any:
        a = make()
        return a + a

    def pair(function: Callable[..., Any]) -> dict[str, Call]:
        return {"hpcdist": lambda: function(made), "numpy": lambda: function(lambda: made().local)}

    yield Case("a + b of a new shape", 8 << 10, pair(doubled), more(50e-6), (fresh,))
    yield Case(
        "y + vector of a new shape",
        8 << 10,
        {"hpcdist": lambda: made() + vector, "numpy": lambda: made().local + vector.local},
        more(50e-6),
        (fresh, np.ones(4)),
    )
    summed = pair(lambda make: make().sum(1))
    yield Case("a.sum(1) of a new shape", 8 << 10, summed, more(50e-6), (fresh,))


def large(comm: MPI.Intracomm, nbytes: int) -> Iterator[Case]:
    columns = 1024
    rows = nbytes // 8 // columns * comm.size
    a, x = part_of_rows(comm, rows, columns)
    b, y = part_of_rows(comm, rows, columns)

    def summed() -> Any:
        total = x.sum(0)
        comm.Allreduce(MPI.IN_PLACE, total)
        return total

    def deviation() -> Any:
        total = comm.allreduce(x.sum())
        apart = x - total / (rows * columns)
        return np.sqrt(comm.allreduce(np.square(apart, out=apart).sum()) / (rows * columns))

    chain = {
        "hpcdist": lambda: (a * 2.0 + b) * a - b / 3.0,
        "numpy": lambda: (x * 2.0 + y) * x - y / 3.0,
    }
    yield Case("(a * 2 + b) * a - b / 3", nbytes, chain, [Aim("numpy", 1.02)], (x, y))
    calls: dict[str, Call] = {"hpcdist": lambda: a.sum(0), "numpy": lambda: x.sum(0)}
    yield Case("a.sum(0)", nbytes, calls | {"mpi4py": summed}, [Aim("numpy", 1.1)], (x,))
    calls = {"hpcdist": a.std, "numpy": x.std, "mpi4py": deviation}
    yield Case("a.std()", nbytes, calls, [Aim("numpy", 1.05)], (x,))


def resharding(comm: MPI.Intracomm, nbytes: int) -> Iterator[Case]:
    """Yield the ways from one layout to another, of an array of `nbytes`, into memory there is."""
    mesh, size = dist.ProcessMesh([*range(comm.size)]), comm.size
    columns = 1024 * size
    shape = max(1, nbytes // 8 // columns // size) * size, columns
    rows, part = shape[0] // size, shape[1] // size

    def made(placement: Any, make: Callable[..., Any] = dist.empty) -> DistArray:
        layout = layout_of(mesh, shape, [placement])
        local = make(layout.local_shape(mesh.coordinate))
        local[...] = np.arange(local.size).reshape(local.shape)
        return DistArray._of(local, layout)

    def ours(source: DistArray, target: Any) -> Call:
        out = made(target)
        return lambda: dist.reshard(source, mesh, [target], out=out)

    cut, whole = made(dist.Shard(0)), made(dist.Replicate())
    contributed, ordinary = made(dist.Partial()), made(dist.Shard(0), np.empty)
    x, everything = ordinary.local, np.zeros(shape)
    packed, turned, own = np.zeros((size, rows, part)), np.zeros((shape[0], part)), np.zeros_like(x)

    def alltoall() -> None:
        packed[...] = x.reshape(rows, size, part).swapaxes(0, 1)
        comm.Alltoall(packed, turned)

    def copy() -> None:
        np.copyto(own, x)

    def gather() -> None:
        comm.Allgather(x, everything)

    def slice_() -> None:
        np.copyto(own, everything[comm.rank * rows : comm.rank * rows + rows])

    def scatter() -> None:
        comm.Reduce_scatter_block(everything, own)

    S0, S1, R = dist.Shard(0), dist.Shard(1), dist.Replicate()  # noqa: N806 - as they are written
    calls = {"hpcdist": ours(cut, S1), "numpy": copy, "mpi4py": alltoall}
    yield Case("S0 -> S1", x.nbytes, calls, [Aim("mpi4py", 0.6), Aim("numpy", 1.3)], (x,))
    calls = {"hpcdist": ours(ordinary, S1), "numpy": copy, "mpi4py": alltoall}
    yield Case("S0 -> S1 of ordinary memory", x.nbytes, calls)
    calls = {"hpcdist": ours(cut, R), "mpi4py": gather}
    yield Case("S0 -> R", x.nbytes, calls, [Aim("mpi4py", 0.7)], (x,))
    calls = {"hpcdist": ours(ordinary, R), "mpi4py": gather}
    yield Case("S0 -> R of ordinary memory", x.nbytes, calls, [Aim("mpi4py", 0.7)])
    calls = {"hpcdist": ours(contributed, S0), "mpi4py": scatter}
    yield Case("P -> S0", everything.nbytes, calls, [Aim("mpi4py", 0.3)], (everything,))
    calls = {"hpcdist": ours(whole, S0), "numpy": slice_}
    yield Case("R -> S0", everything.nbytes, calls, given=(everything,))


def multiplication(comm: MPI.Intracomm, length: int) -> tuple[int, dict[str, Call], Any]:
    """Return bytes, what multiplies two matrices of rows, and the parts, as `shard_tensor` has."""
    length -= length % comm.size
    a, x = part_of_rows(comm, length, length, dist.empty)
    b, y = part_of_rows(comm, length, length, dist.empty)

    def multiplied() -> Any:
        whole = np.empty((length, length))
        comm.Allgather(y, whole)
        return x @ whole

    return x.nbytes, {"hpcdist": lambda: a @ b, "mpi4py": multiplied}, (x, y)


def products(comm: MPI.Intracomm, length: int) -> Iterator[Case]:
    nbytes, calls, given = multiplication(comm, length)
    (x, _), local = given, np.ones((given[0].shape[1],) * 2)
    calls["numpy"] = lambda: x @ local
    yield Case("a @ b", nbytes, calls, [Aim("mpi4py", 1.02)], given)


def sorting(comm: MPI.Intracomm, length: int) -> Iterator[Case]:
    mesh, draw = dist.ProcessMesh([*range(comm.size)]), np.random.default_rng(comm.rank)
    floats, numbers = draw.random(length), draw.integers(0, 1 << 40, length)
    for name, part in {"np.sort(a)": floats, "np.sort(a) of int64": numbers}.items():
        a = dist.dtensor_from_local(part, mesh, [dist.Shard(0)], shape=(length * comm.size,))
        calls = {"hpcdist": lambda a=a: np.sort(a), "numpy": lambda part=part: np.sort(part)}
        yield Case(name, part.nbytes, calls, [Aim("numpy", 1.2)], (part,))
    a = dist.dtensor_from_local(floats, mesh, [dist.Shard(0)], shape=(length * comm.size,))
    calls = {"hpcdist": lambda: np.argsort(a), "numpy": lambda: np.argsort(floats, kind="stable")}
    yield Case("np.argsort(a)", floats.nbytes, calls)


def transforms(comm: MPI.Intracomm, lengths: Sequence[int]) -> Iterator[Case]:
    size = comm.size
    for length in lengths:
        length -= length % size
        a, x = part_of_rows(comm, length, length)
        z = x + 1j * x
        a = DistArray._of(z, a.layout)

        def transposed(z: Any = z, each: int = length // size) -> Any:
            rows = np.fft.fft(z, axis=1)
            sent = np.ascontiguousarray(rows.reshape(each, size, each).swapaxes(0, 1))
            taken = np.empty_like(sent)
            comm.Alltoall(sent, taken)
            return np.fft.fft(taken.reshape(each * size, each), axis=0)

        calls = {"hpcdist": lambda a=a: np.fft.fft2(a), "mpi4py": transposed}
        yield Case("fft2(z)", z.nbytes, calls, [Aim("mpi4py", 0.8)], (z,))


# ---- what is counted


def most_held(call: Call) -> int:
    """Return how many bytes of arrays a call holds at most, in the heap and elsewhere."""
    most, empty = 0, Heap.empty
    first: list[int] = []

    def counting(heap: Heap, nbytes: int) -> Any:
        nonlocal most
        made = empty(heap, nbytes)
        first.append(heap.used - nbytes)
        most = max(most, heap.used - first[0])
        return made

    call()
    Heap.empty = counting  # type: ignore[method-assign]  # counts what is held
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1] + most
    finally:
        tracemalloc.stop()
        Heap.empty = empty  # type: ignore[method-assign]  # as it was


def held_by_products(comm: MPI.Intracomm, length: int) -> Row:
    """Return the bytes held by a product of matrices beyond its result."""
    nbytes, calls, _ = multiplication(comm, length)
    held = {name: comm.allreduce(most_held(call), MPI.MAX) - nbytes for name, call in calls.items()}
    return {"operation": "a @ b", **held, "seen": held["hpcdist"] / held["mpi4py"], "aim": 0.5}


def received(src: Layout, dst: Layout) -> float:
    """Return how many bytes a rank receives by the planner's steps, on average."""
    sizes, total = src.mesh.shape, 0.0
    for step in plan_reshard(src, dst, 1):
        here, there = src.nbytes_local(1), step.to.nbytes_local(1)
        others = 1 - 1 / sizes[step.axis]
        if step.verb == "exchange":
            pieces = [
                volume_of(piece.box)
                for place in src.mesh.coordinates()
                for piece in reads_of(src, step.to, place)
                if piece.coordinate != place
            ]
            total += sum(pieces) / src.mesh.size
        elif step.verb == "all_gather":
            total += there - here
        elif step.verb in _MOVED:
            total += {"all_reduce": 2 * here, "reduce_scatter": here, "all_to_all": there}[
                step.verb
            ] * others
        src = step.to
    return total


_MOVED = "all_reduce", "reduce_scatter", "all_to_all"


def bytes_of_pairs() -> Iterator[Row]:
    """Yield what all pairs of placements receive, beside the way through Replicate. Local."""
    each = dist.Shard(0), dist.Shard(1), dist.Replicate(), dist.Partial()
    for sizes in ((2,), (4,), (2, 2), (4, 4), (4, 8)):
        mesh = dist.ProcessMesh(shape=sizes)
        layouts = [
            layout_of(mesh, (64, 64), placements) for placements in product(each, repeat=len(sizes))
        ]
        whole = layout_of(mesh, (64, 64), [])
        pairs = [*itertools.permutations(layouts, 2)]
        ours = sum(received(src, dst) for src, dst in pairs)
        usual = sum(received(src, whole) + received(whole, dst) for src, dst in pairs)
        yield {
            "mesh": " x ".join(map(str, sizes)),
            "pairs": len(pairs),
            "hpcdist": ours / len(pairs),
            "through Replicate": usual / len(pairs),
            "seen": ours / usual,
            "aim": 0.5,
        }


# ---- tables


NAMES = "hpcdist", "numpy", "mpi4py", "DTensor", "Heat", "mpi4py-fft"


def rows_of(case: Case, found: Interleaved) -> Iterator[Row]:
    """Yield a row for each aim of a case, the first with what each candidate takes."""
    line: dict[str, Any] = {"operation": case.name, "size": case.nbytes}
    line |= {name: found.median(name) for name in NAMES if name in found.seconds}
    for aim in case.aims or [None]:
        if aim is not None:
            seen, best = aim.seen(found)
            line |= {"seen": aim.shown(seen), "at best": aim.shown(best), "aim": str(aim)}
            line |= {"": "met" if seen <= aim.limit else "missed", "share": seen / aim.limit}
        yield line
        line = {"operation": case.name}


def columns_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the columns that there is anything for."""
    shown: dict[str, Any] = {"operation": str, "size": volume, **dict.fromkeys(NAMES, duration)}
    shown |= dict.fromkeys(("seen", "at best", "aim", ""), str)
    return {name: show for name, show in shown.items() if any(name in row for row in rows)}


def draw_shares(axes: Any, rows: Sequence[Row]) -> None:
    """Draw how near to its aim each operation is: as a share of it, at most 1."""
    names = [f"{row['operation']}\n{row['aim']}" for row in rows]
    shares = [max(row["share"], 0.0) for row in rows]
    bars = axes.barh(
        range(len(rows)), shares, color=["C0" if share <= 1 else "C3" for share in shares]
    )
    axes.bar_label(bars, [f"{share:.2f}" for share in shares], fontsize=7, label_type="center")
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.axvline(1, color="grey", linestyle="--")
    axes.set_xlim(0, 2)  # bars beyond that run out
    axes.invert_yaxis()
    axes.set_xlabel("share of what is aimed at")


def main() -> None:
    options = read_options(__doc__, rounds=15)
    world = dist.init_parallel_env()
    comm = MPI.COMM_WORLD.Dup()
    report = Report("arrays", options, comm)
    peers, notes = peers_here(comm)
    quick = options.quick
    tables: dict[str, Iterator[Case]] = {
        "small arrays": small(comm),
        "shapes never seen": new_shapes(comm),
        "large arrays": large(comm, MiB if quick else 32 * MiB),
        "from one layout to another": resharding(comm, 2 * MiB if quick else 64 * MiB),
        "matrix products": products(comm, 256 if quick else 2048),
        "sorting": sorting(comm, 50_000 if quick else 1_000_000),
        "Fourier transforms": transforms(comm, [64, 256] if quick else [256, 2048]),
    }
    for title, cases in tables.items():
        rows = table_of(comm, cases, peers, options.rounds, notes)
        report.table(title, columns_of(rows), rows)
        report.panel(title, partial(draw_shares, rows=[row for row in rows if "share" in row]))
    held = held_by_products(comm, 256 if quick else 2048)
    shown = {"operation": str, "hpcdist": volume, "mpi4py": volume, "seen": times, "aim": times}
    report.table("bytes held beyond the result", shown, [held])
    shown = {"mesh": str, "pairs": str, "hpcdist": volume, "through Replicate": volume}
    report.table(
        "bytes a rank receives for an array of 4096, mean over all pairs of placements",
        {**shown, "seen": times, "aim": times},
        [*bytes_of_pairs()] if world.rank == 0 else [],
    )
    report.note(*dict.fromkeys(notes))
    report.close()


def table_of(
    comm: MPI.Intracomm,
    cases: Iterator[Case],
    peers: Mapping[str, Peer],
    rounds: int,
    notes: list[str],
) -> list[Row]:
    """Time cases, and return their rows; `notes` get what was left out. Collective."""
    rows: list[Row] = []
    for case in cases:
        others: dict[str, Call] = {}
        if case.given:
            others, missing = calls_of(comm, peers, case.name, *case.given)
            notes += missing
        found = interleave(comm, case.candidates | others, rounds=rounds)
        rows += rows_of(case, found)
    return rows


if __name__ == "__main__":
    main()
