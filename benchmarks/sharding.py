"""One step of sharded training, and what a rank holds: ``mpiexec -n 2 python sharding.py``.

Forward, backward and Adam of a network of 21 million parameters, 32 samples per rank, one thread
per rank, at each stage of ZeRO: hpcdist's engine for arrays, torch's engines behind the same call,
and torch's engines over gloo (ZeroRedundancyOptimizer with DDP, FSDP2), in turns in the same
processes. Then the bytes that a rank holds between steps, counted from its arrays, for mixed
precision with Adam, beside the formulas of the ZeRO paper.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import core_per_rank  # noqa: F401  first: NumPy's BLAS looks when it is loaded
from held import held_nbytes
from mpi4py import MPI
from report import Report, Row, read_options

import hpcdist as dist
from hpcdist.bench.interleaved import Candidates, Interleaved, interleave
from hpcdist.bench.libraries.torch import start_gloo, stop_gloo, torch_network
from hpcdist.bench.networks import (
    RATE,
    Batch,
    Network,
    cross_entropy_slope,
    random_batch,
    random_weights,
)
from hpcdist.text import duration, percent, times

LEVELS = {1: "os", 2: "os_g", 3: "p_g_os"}
GLOO = {1: "ZeroRedundancyOptimizer", 2: "FSDP2, no reshard", 3: "FSDP2"}


# ---- the candidates


def array_step(level: str, batch: Batch) -> Callable[[], None]:
    """Return one step of hpcdist's engine for arrays."""
    network = Network(random_weights())
    optimizer: Any = dist.optim.Adam(network.named_parameters(), RATE)
    model, optimizer, _ = dist.group_sharded_parallel(network, optimizer, level)
    inputs, labels = batch

    def step() -> None:
        network.backward(cross_entropy_slope(model(inputs), labels))
        optimizer.step()

    return step


def torch_step(model: Any, optimizer: Any, batch: Batch) -> Callable[[], None]:
    """Return one step of a torch module."""
    import torch

    x, y = (torch.from_numpy(array) for array in batch)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def own_torch_step(network: Any, level: str, batch: Batch) -> Callable[[], None]:
    """Return one step of torch's engines behind `group_sharded_parallel`."""
    import torch

    optimizer = torch.optim.Adam(network.parameters(), RATE)
    model, optimizer, _ = dist.group_sharded_parallel(network, optimizer, level)
    return torch_step(model, optimizer, batch)


def gloo_step(network: Any, stage: int, batch: Batch, mesh: Any) -> Callable[[], None]:
    """Return one step of torch's engines over gloo, as their documentation has it."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    if stage == 1:
        model = DistributedDataParallel(network, gradient_as_bucket_view=True)
        zero = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, parameters_as_bucket_view=True, lr=RATE
        )
        return torch_step(model, zero, batch)
    for layer in network:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh, reshard_after_forward=stage == 3)
    model = fully_shard(network, mesh=mesh, reshard_after_forward=stage == 3)
    return torch_step(model, torch.optim.Adam(model.parameters(), RATE), batch)


def candidates(rank: int, torch_dist: Any) -> Candidates:
    """Return what takes one step, by name."""
    batch = random_batch(rank)
    steps = {f"arrays, stage {stage}": array_step(level, batch) for stage, level in LEVELS.items()}
    if torch_dist is None:
        return steps
    from torch.distributed.device_mesh import init_device_mesh

    network = torch_network(random_weights())
    mesh = init_device_mesh("cpu", (torch_dist.get_world_size(),))
    for stage, level in LEVELS.items():
        steps[f"modules, stage {stage}"] = own_torch_step(deepcopy(network), level, batch)
        steps[f"{GLOO[stage]} on gloo"] = gloo_step(deepcopy(network), stage, batch, mesh)
    return steps


# ---- what they took


def step_row(found: Interleaved, name: str) -> Row:
    row: dict[str, Any] = {"step": name, "median": found.median(name), "best": found.best(name)}
    stage = name[-1]
    rival = f"{GLOO[int(stage)]} on gloo" if stage.isdigit() else name
    if rival != name and rival in found.seconds:
        row["/ gloo"] = found.ratio(name, to=rival)
        row["best / gloo"] = row["best"] / found.best(rival)
    return row


COLUMNS = {
    "step": str,
    "median": duration,
    "best": duration,
    "/ gloo": times,
    "best / gloo": times,
}


# ---- what a rank holds


def memory_row(stage: int, level: str, ranks: int, batch: Batch) -> Row:
    """Train one step in float16 with master weights, and count."""
    weights = [
        (matrix.astype("f2"), None if bias is None else bias.astype("f2"))
        for matrix, bias in random_weights((256, 512, 1024, 512, 10))
    ]
    network = Network(weights)
    psi = sum(parameter.data.size for _, parameter in network.named_parameters())
    optimizer: Any = dist.optim.Adam(network.named_parameters(), RATE)
    limits = {"buffer_max_size": 1 << 18, "segment_size": 1 << 16}
    model, optimizer, _ = dist.group_sharded_parallel(network, optimizer, level, **limits)
    network.backward(model(batch[0][:, :256].astype("f2")))
    network._inputs.clear()
    optimizer.step()
    whole = {1: 4, 2: 2, 3: 0}[stage]
    formula = whole * psi + (16 - whole) * psi / ranks
    held = held_nbytes(model, optimizer)
    return {
        "stage": str(stage),
        "bytes per parameter": held / psi,
        "formula": formula / psi,
        "off by": held / formula - 1,
    }


MEMORY_COLUMNS = {
    "stage": str,
    "bytes per parameter": "{:.2f}".format,
    "formula": "{:.2f}".format,
    "off by": percent,
}


def main() -> None:
    options = read_options(__doc__, rounds=15)
    dist.init_parallel_env()
    comm = MPI.COMM_WORLD.Dup()
    torch_dist = start_gloo(comm)
    report = Report("sharding", options, comm)
    found = interleave(comm, candidates(comm.rank, torch_dist), rounds=options.rounds)
    rows = [step_row(found, name) for name in found.seconds]
    report.table("One step with Adam: ... times as long as torch's engine on gloo", COLUMNS, rows)
    batch = random_batch(comm.rank)
    report.table(
        "What a rank holds between steps, float16 with master weights and Adam",
        MEMORY_COLUMNS,
        [memory_row(stage, level, comm.size, batch) for stage, level in LEVELS.items()],
    )
    report.boxes("one training step", {name: list(found.seconds[name]) for name in found.seconds})
    report.close()
    stop_gloo(torch_dist)


if __name__ == "__main__":
    main()
