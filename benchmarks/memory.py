"""How often each gradient is held: ``mpiexec -n 2 python memory.py``.

A network of 21 million parameters is trained some steps, alone and in parallel. What is left in
memory after a backward pass are weights, gradients and whatever the exchange keeps. Gradients
that are views of the buckets are held once. Homes are the arrays in which gradients lie: as many
as there are buckets, or one for each gradient.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterable
from typing import Any

import core_per_rank  # noqa: F401  first: NumPy's BLAS looks when it is loaded
import numpy as np
from mpi4py import MPI
from report import Report, Row, read_options

import hpcdist as dist
from hpcdist.bench.libraries.torch import start_gloo, stop_gloo, torch_network, torch_step
from hpcdist.bench.networks import Network, numpy_step, random_batch, random_weights
from hpcdist.text import times

M_MMAP_THRESHOLD = -3

Made = tuple[Callable[[], Any], Callable[[], Iterable[Any]]]
"""What takes one step, and what returns the gradients."""


# ---- what is measured


def torch_made(parallel: Callable[[Any], Any]) -> Made:
    model = parallel(torch_network(random_weights()))
    parameters = list(model.parameters())
    return torch_step(model, random_batch(0)), lambda: [each.grad for each in parameters]


def numpy_made(parallel: Callable[[Any], Any]) -> Made:
    network = Network(random_weights())
    parameters = [parameter for _, parameter in network.named_parameters()]
    step = numpy_step(parallel(network), network, random_batch(0))
    return step, lambda: [each.grad for each in parameters]


def same(model: Any) -> Any:
    return model


def makers(torch_dist: Any) -> dict[str, Callable[[], Made]]:
    """Return the candidates; each is compared with the one alone before it."""
    found = {}
    if torch_dist is not None:
        from torch.nn.parallel import DistributedDataParallel as Ddp

        found = {
            "torch alone": lambda: torch_made(same),
            "DataParallel": lambda: torch_made(dist.DataParallel),
            "DDP on gloo": lambda: torch_made(Ddp),
            "DDP on gloo, with views": lambda: torch_made(
                lambda model: Ddp(model, gradient_as_bucket_view=True)
            ),
        }
    return found | {
        "NumPy alone": lambda: numpy_made(same),
        "DataParallel, arrays": lambda: numpy_made(dist.DataParallel),
    }


# ---- bytes


def resident(field: str = "VmRSS") -> int:
    """Return the bytes this process has in memory, or had at most (VmHWM)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")


def home(gradient: Any) -> tuple[int, int]:
    """Return address and bytes of the array that `gradient` is a part of."""
    if not isinstance(gradient, np.ndarray):
        storage = gradient.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    while isinstance(gradient.base, np.ndarray):
        gradient = gradient.base
    return gradient.ctypes.data, gradient.nbytes


def row_of(name: str, make: Callable[[], Made], steps: int) -> dict[str, Any]:
    gc.collect()
    before = resident()
    step, gradients = make()
    for _ in range(steps):
        step()
    gc.collect()
    after = resident()
    forget_peak()
    step()
    held = list(gradients())
    homes = dict(home(each) for each in held)
    return {
        "model": name,
        "gradients": sum(each.nbytes for each in held),
        "count": len(held),
        "homes": len(homes),
        "held": sum(homes.values()),
        "resident": after - before,
        "peak": resident("VmHWM") - before,
    }


def compared(row: Row, alone: Row) -> Row:
    """Say what a parallel model holds beyond the one alone, in units of its gradients."""
    more = {f"{key} +": (row[key] - alone[key]) / row["gradients"] for key in ("resident", "peak")}
    return dict(row) | (more if row is not alone else {})


def rows_of(candidates: dict[str, Callable[[], Made]], steps: int) -> list[Row]:
    rows: list[Row] = []
    alone: Row = {}
    for name, make in candidates.items():
        row = row_of(name, make, steps)
        alone = row if name.endswith("alone") else alone
        rows.append(compared(row, alone))
    return rows


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"


def main() -> None:
    options = read_options(__doc__, rounds=5)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 17)  # what is freed is given back at once
    dist.init_parallel_env()
    comm = MPI.COMM_WORLD.Dup()
    torch_dist = start_gloo(comm)
    report = Report("memory", options, comm)
    candidates = makers(torch_dist)
    rows_of(candidates, 1)  # what is loaded and set up once does not count
    rows = rows_of(candidates, options.rounds)
    shown: dict[str, Any] = {"model": str}
    shown |= {"gradients": megabytes, "held": megabytes, "count": str, "homes": str}
    shown |= dict.fromkeys(("resident", "peak"), megabytes)
    shown |= dict.fromkeys(("resident +", "peak +"), times)
    report.table("Memory after a step, on rank 0; + is in units of the gradients", shown, rows)
    report.close()
    stop_gloo(torch_dist)


if __name__ == "__main__":
    main()
