"""What training on virtual ranks costs: ``mpiexec -n 2 python virtual_ranks.py``.

A step of torch modules with as many virtual ranks as ranks beside plain DataParallel, and one with
four times as many beside the accumulation of four batches. Ratios are how many times as long the
second takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import core_per_rank  # noqa: F401  first: NumPy's BLAS looks when it is loaded
import torch
from mpi4py import MPI
from report import Report, Row, read_options
from torch import nn

import hpcdist as dist
from hpcdist.bench.interleaved import interleave
from hpcdist.text import duration, times

ROWS = 64
"""Samples of a virtual rank in a step."""


def mlp(width: int) -> nn.Module:
    layers = [each for _ in range(3) for each in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Dropout(0.1))


def convolution(channels: int) -> nn.Module:
    def block(before: int) -> list[nn.Module]:
        return [nn.Conv2d(before, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]

    return nn.Sequential(*block(3), *block(channels), nn.AdaptiveAvgPool2d(1), nn.Flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP, 3 layers of 256": (lambda: mlp(256), (256,)),
    "MLP, 3 layers of 1024": (lambda: mlp(1024), (1024,)),
    "convolutions with batch norm": (lambda: convolution(32), (3, 16, 16)),
}
COLUMNS: dict[str, Any] = {"model": str, "plain": duration, "virtual": duration}
COLUMNS["virtual / plain"] = times


def accumulating(make: Callable[[], nn.Module], shape: tuple[int, ...], passes: int) -> Any:
    """Return a step of plain DataParallel that adds up so many batches."""
    model = dist.DataParallel(make())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batches = [torch.randn(ROWS, *shape) for _ in range(passes)]

    def step() -> None:
        optimizer.zero_grad()
        with model.no_sync():
            for batch in batches[1:]:
                model(batch).square().mean().backward()
        model(batches[0]).square().mean().backward()
        optimizer.step()

    return step


def on_virtual_ranks(make: Callable[[], nn.Module], shape: tuple[int, ...], passes: int) -> Any:
    """Return the step with so many virtual ranks on each rank."""
    model = dist.DataParallel(make(), virtual_ranks=passes * dist.get_world_size())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batch = torch.randn(ROWS * passes, *shape)

    def step() -> None:
        optimizer.zero_grad()
        for part in model.parts(batch):
            model(part.batch).square().mean().backward()
        optimizer.step()

    return step


def rows_of(comm: MPI.Intracomm, passes: int, rounds: int) -> list[Row]:
    rows = []
    for name, (make, shape) in MODELS.items():
        calls = {
            "plain": accumulating(make, shape, passes),
            "virtual": on_virtual_ranks(make, shape, passes),
        }
        found = interleave(comm, calls, rounds=rounds)
        medians = {each: found.median(each) for each in calls}
        ratio = found.ratio("virtual", to="plain")
        rows.append({"model": name, **medians, "virtual / plain": ratio})
    return rows


def main() -> None:
    options = read_options(__doc__, rounds=31)
    dist.init_parallel_env()
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD.Dup()
    report = Report("virtual_ranks", options, comm)
    for passes, title in ((1, "one virtual rank on each rank"), (4, "four virtual ranks on each")):
        report.table(title, COLUMNS, rows_of(comm, passes, options.rounds))
    report.close()


if __name__ == "__main__":
    main()
