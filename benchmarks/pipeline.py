"""What a step of a pipeline costs, and how much of it ranks are idle: ``mpiexec -n 2 python ...``.

Layers sleep, so that ranks may share cores: for each micro-batch a rank sleeps 20 ms forward and 40
backward, half of these for its weights. Each schedule of `PipelineParallel` stands beside the same
one of `torch.distributed.pipelining` over gloo, in turns in the same processes. The bubble is the
part of the median step beyond what the same layers take without a pipeline, in turns with it (they
sleep a little longer than asked, and torch's autograd takes half a millisecond for each); the limit
is what the schedule has if messages take no time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import core_per_rank  # noqa: F401  first: NumPy's BLAS looks when it is loaded
import torch
from mpi4py import MPI
from report import Report, Row, read_options
from torch import nn
from torch.distributed import pipelining
from torch.nn import functional

import hpcdist as dist
from hpcdist.bench.interleaved import Candidates, Interleaved, interleave
from hpcdist.bench.libraries.torch import start_gloo, stop_gloo
from hpcdist.parallel.hybrid_options import HybridOptions, Pipeline
from hpcdist.text import duration, times
from hpcdist.torch.pipeline import PipelineLayer, PipelineParallel, predict_bubble
from hpcdist.torch.pipeline.schedule import Placement, rank_of, stages_of

FORWARD_S = 20e-3
MICRO, WIDTH = 4, 256


class Setting(NamedTuple):
    """A schedule, by its name and by torch's class; stages on each rank; micro-batches per rank."""

    name: str
    torchs: str
    chunks: int = 1
    rounds: int = 2
    placement: Placement = "loop"

    def __str__(self) -> str:
        return f"{self.name}, {self.chunks} x {self.rounds}"


SETTINGS = (
    Setting("FThenB", "ScheduleGPipe"),
    Setting("1F1B", "Schedule1F1B"),
    Setting("1F1B", "Schedule1F1B", rounds=4),
    Setting("VPP", "ScheduleInterleaved1F1B", chunks=2),
    Setting("ZBVPP", "ScheduleInterleavedZeroBubble", chunks=2),
    Setting("ZBV", "ScheduleZBVZeroBubble", chunks=2, placement="V"),
)


class Nap(torch.autograd.Function):
    """Passes a tensor on; sleeps on both ways."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return slope, None, None


class Sleeper(nn.Module):
    """A layer that sleeps forward, and backward as long for its input and for its weight."""

    def __init__(self, nap_s: float) -> None:
        super().__init__()
        self.nap_s = nap_s
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Nap.apply(x, self.nap_s, self.nap_s) + Nap.apply(self.weight, 0.0, self.nap_s)


def own_step(setting: Setting, comm: Any, batch: torch.Tensor) -> Callable[[], None]:
    """Return one step of `PipelineParallel`."""
    stages = comm.size * setting.chunks
    layers = PipelineLayer(
        [Sleeper(FORWARD_S / setting.chunks) for _ in range(stages)],
        loss_fn=functional.mse_loss,
        num_virtual_pipeline_stages=setting.chunks,
        placement=setting.placement,
    )
    pipeline = Pipeline(MICRO, setting.rounds * comm.size)
    model = PipelineParallel(layers, None, HybridOptions(pipeline=pipeline))

    def step() -> None:
        model.zero_grad()
        model.forward_backward_pipeline((batch, batch), schedule=setting.name)

    return step


def step_alone(setting: Setting, batch: torch.Tensor) -> Callable[[], None]:
    """Return the same work of one rank without a pipeline."""
    layers = [Sleeper(FORWARD_S / setting.chunks) for _ in range(setting.chunks)]
    micros = batch.split(MICRO)

    def step() -> None:
        for layer in layers:
            layer.zero_grad()
        for micro in micros:
            made = micro
            for layer in layers:
                made = layer(made)
            functional.mse_loss(made, torch.ones_like(made)).backward()

    return step


def gloo_step(setting: Setting, comm: Any, batch: torch.Tensor) -> Callable[[], None]:
    """Return one step of torch's own schedule."""
    count = comm.size * setting.chunks
    own = stages_of(comm.rank, comm.size, setting.chunks, setting.placement)
    layers = [Sleeper(FORWARD_S / setting.chunks) for _ in own]
    stages = [
        pipelining.PipelineStage(layer, stage, count, torch.device("cpu"))
        for layer, stage in zip(layers, own, strict=True)
    ]
    made = getattr(pipelining, setting.torchs)
    schedule = made(
        stages[0] if setting.chunks == 1 else stages,
        setting.rounds * comm.size,
        loss_fn=functional.mse_loss,
    )
    given = (batch,) if comm.rank == 0 else ()
    is_last = comm.rank == rank_of(count - 1, comm.size, setting.placement)
    target = {"target": batch, "losses": []} if is_last else {}

    def step() -> None:
        for layer in layers:
            layer.zero_grad()
        schedule.step(*given, **target)

    return step


def candidates(settings: tuple[Setting, ...], comm: Any) -> Candidates:
    steps: dict[str, Callable[[], None]] = {}
    for setting in settings:
        batch = torch.ones(MICRO * setting.rounds * comm.size, WIDTH, requires_grad=True)
        steps[f"{setting}"] = own_step(setting, comm, batch)
        steps[f"{setting}, gloo"] = gloo_step(setting, comm, batch)
        steps[f"{setting}, alone"] = step_alone(setting, batch)
    return steps


def row(found: Interleaved, setting: Setting, ranks: int) -> Row:
    micros = setting.rounds * ranks
    own, gloo, busy = (found.median(f"{setting}{of}") for of in ("", ", gloo", ", alone"))
    return {
        "schedule": setting.name,
        "stages per rank": setting.chunks,
        "micro-batches": micros,
        "step": own,
        "/ gloo": found.ratio(f"{setting}", to=f"{setting}, gloo"),
        "bubble": 1 - busy / own,
        "on gloo": 1 - busy / gloo,
        "limit": predict_bubble(setting.name, ranks, micros, setting.chunks, setting.placement),
    }


COLUMNS: dict[str, Callable[[Any], str]] = {
    "schedule": str,
    "stages per rank": str,
    "micro-batches": str,
    "step": duration,
    "/ gloo": times,
    "bubble": "{:.3f}".format,
    "on gloo": "{:.3f}".format,
    "limit": "{:.3f}".format,
}


def main() -> None:
    options = read_options(__doc__, rounds=9)
    dist.init_parallel_env()
    comm = MPI.COMM_WORLD.Dup()
    torch_dist = start_gloo(comm)
    report = Report("pipeline", options, comm)
    settings = SETTINGS[1:2] if options.quick else SETTINGS
    found = interleave(comm, candidates(settings, comm), rounds=options.rounds)
    rows = [row(found, setting, comm.size) for setting in settings]
    report.table("A step of a pipeline: ... times as long as torch's on gloo", COLUMNS, rows)
    report.boxes("one step", {name: list(found.seconds[name]) for name in found.seconds})
    report.close()
    stop_gloo(torch_dist)


if __name__ == "__main__":
    main()
