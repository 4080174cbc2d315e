"""Memory and time of computing activations again: ``python recompute.py``.

A network of 32 layers and their functions, forward and backward, on one process: as it is, and
with `recompute_sequential` in 8 segments. Memory is the largest that the process has had in a step
beyond what it has between steps (VmHWM, which Linux resets when asked); what is freed is given back
at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import core_per_rank  # noqa: F401  first: NumPy's BLAS looks when it is loaded
import torch
from mpi4py import MPI
from report import Report, read_options
from torch import nn

import hpcdist as dist
from hpcdist.bench.interleaved import interleave
from hpcdist.text import duration, times
from hpcdist.torch.recompute import recompute_sequential

LAYERS, WIDTH, ROWS, SEGMENTS = 32, 256, 4096, 8
KEPT, AGAIN = "all is kept", f"recompute, {SEGMENTS} segments"
AIM = 0.6
"""How much of the memory it may take: the aim, not a test."""
M_MMAP_THRESHOLD = -3


def candidates() -> dict[str, Callable[[], None]]:
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model, x = nn.Sequential(*layers), torch.randn(ROWS, WIDTH, requires_grad=True)

    def step(forward: Callable[[], torch.Tensor]) -> None:
        forward().sum().backward()
        model.zero_grad(set_to_none=False)
        x.grad = None

    return {
        KEPT: lambda: step(lambda: model(x)),
        AGAIN: lambda: step(lambda: recompute_sequential({"segments": SEGMENTS}, model, x)),
    }


def resident(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))


def peak_of(step: Callable[[], None]) -> int:
    """Return the bytes that a step takes beyond those that are there before."""
    step()
    with open("/proc/self/clear_refs", "w") as flag:
        flag.write("5")
    before = resident("VmRSS")
    step()
    return resident("VmHWM") - before


COLUMNS = {
    "step": str,
    "memory, MiB": "{:.1f}".format,
    "/ all": times,
    "aim": times,
    "median": duration,
    "time / all": times,
}


def main() -> None:
    options = read_options(__doc__, rounds=5)
    dist.init_parallel_env()
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    comm = MPI.COMM_WORLD.Dup()
    report = Report("recompute", options, comm)
    steps = candidates()
    peaks = {name: peak_of(step) for name, step in steps.items()}
    found = interleave(comm, steps, rounds=options.rounds)
    rows = []
    for name in steps:
        row: dict[str, Any] = {"step": name, "memory, MiB": peaks[name] / 2**20}
        row |= {"/ all": peaks[name] / peaks[KEPT], "median": found.median(name)}
        rows.append(row | {"time / all": found.ratio(name, KEPT)})
    rows[-1]["aim"] = AIM
    report.table(f"{LAYERS} layers of {WIDTH}, {ROWS} rows", COLUMNS, rows)
    report.close()


if __name__ == "__main__":
    main()
