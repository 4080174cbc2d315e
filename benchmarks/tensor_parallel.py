"""An MLP cut over ranks, by our layers and torch's: ``mpiexec -n 2 python tensor_parallel.py``.

Four blocks of two layers, of a width and four times that, with a residual: zero_grad, forward,
backward. The layers of `hpcdist.torch.model_parallel` and torch's `parallelize_module`, which makes
DTensors, have the same weights, ranks and backend, and take turns in the same processes, one thread
per rank. CPU is what a rank's process has computed in a step, in whatever thread: waiting counts,
where it spins.
"""

from __future__ import annotations

from collections.abc import Callable
from time import process_time
from typing import Any

import core_per_rank  # noqa: F401  first: NumPy's BLAS looks when it is loaded
import numpy as np
import torch
from mpi4py import MPI
from report import Report, read_options
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import hpcdist as dist
from hpcdist.bench.interleaved import interleave
from hpcdist.text import duration, times
from hpcdist.torch.mesh import device_mesh_of
from hpcdist.torch.model_parallel import ColumnParallelLinear, RowParallelLinear

BLOCKS, ROWS = 4, 32
WIDTHS = (64, 512)
OURS, THEIRS, ALONE = "f/g layers", "DTensor", "one process"
AIM = 0.5
"""How much of DTensor's CPU a step of width 64 may take: the aim, not a test."""


class Mlp(nn.Module):
    """Blocks of two layers, with the function between them."""

    def __init__(self, width: int, up: Callable[..., Any], down: Callable[..., Any]) -> None:
        super().__init__()
        self.up = nn.ModuleList(up(width, 4 * width) for _ in range(BLOCKS))
        self.down = nn.ModuleList(down(4 * width, width) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return x


def ours(width: int, group: dist.Group) -> nn.Module:
    def up(*sizes: int) -> nn.Module:
        return ColumnParallelLinear(*sizes, has_bias=True, gather_output=False, mp_group=group)

    def down(*sizes: int) -> nn.Module:
        return RowParallelLinear(*sizes, input_is_parallel=True, mp_group=group)

    return Mlp(width, up, down)


def theirs(width: int, group: dist.Group) -> nn.Module:
    mesh = device_mesh_of(dist.ProcessMesh(group.ranks, ["mp"]))
    plan = {"up.*": ColwiseParallel(), "down.*": RowwiseParallel()}
    return parallelize_module(Mlp(width, nn.Linear, nn.Linear), mesh, plan)


def alone(width: int, _: dist.Group) -> nn.Module:
    return Mlp(width, nn.Linear, nn.Linear)


def step_of(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    return step


def candidates(width: int, group: dist.Group) -> dict[str, Callable[[], None]]:
    x = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(1))
    found = {}
    for name, make in {OURS: ours, THEIRS: theirs, ALONE: alone}.items():
        torch.manual_seed(0)
        found[name] = step_of(make(width, group), x)
    return found


def cpu_of(steps: dict[str, Callable[[], None]], rounds: int, each: int = 10) -> dict[str, Any]:
    """Return the CPU seconds of a step on this rank, in each round, in turns."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        names = list(steps)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            begin = process_time()
            for _ in range(each):
                steps[name]()
            taken[name].append((process_time() - begin) / each)
    return {name: np.array(seconds) for name, seconds in taken.items()}


COLUMNS = {
    "width": str,
    "step": str,
    "CPU": duration,
    "/ DTensor": times,
    "aim": times,
    "median": duration,
    "time / DTensor": times,
}


def main() -> None:
    options = read_options(__doc__, rounds=21)
    world = dist.init_parallel_env()
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD.Dup()
    report = Report("tensor_parallel", options, comm)
    rows = []
    for width in WIDTHS:
        steps = candidates(width, world)
        found = interleave(comm, steps, rounds=options.rounds, sample_s=0.02)
        cpu = cpu_of(steps, options.rounds)
        for name in steps:
            row: dict[str, Any] = {"width": width, "step": name, "median": found.median(name)}
            row["CPU"] = float(np.median(cpu[name]))
            row["/ DTensor"] = float(np.median(cpu[name] / cpu[THEIRS]))
            row["time / DTensor"] = found.ratio(name, THEIRS)
            if name == OURS and width == WIDTHS[0]:
                row["aim"] = AIM
            rows.append(row)
    report.table(f"An MLP of {BLOCKS} blocks, {ROWS} rows, on rank 0", COLUMNS, rows)
    report.close()


if __name__ == "__main__":
    main()
