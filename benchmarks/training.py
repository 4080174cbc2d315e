"""One training step, and what averaging its gradients costs: ``mpiexec -n 2 python training.py``.

zero_grad, forward, backward and SGD of a network of 21 million parameters, 32 samples per rank,
one thread per rank. hpcdist and gloo train the same weights, in turns in the same processes.
Communication is what a step takes longer than the same step that keeps its gradients to itself.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import core_per_rank  # noqa: F401  first: NumPy's BLAS looks when it is loaded
from mpi4py import MPI
from report import Report, Row, read_options

import hpcdist as dist
from hpcdist.bench.interleaved import Candidates, Interleaved, interleave
from hpcdist.bench.libraries.torch import start_gloo, stop_gloo, torch_network, torch_step
from hpcdist.bench.networks import Network, numpy_step, random_batch, random_weights
from hpcdist.text import duration, percent, times


class Rival(NamedTuple):
    """What a candidate is compared with."""

    alone: str
    gloo: str | None = None
    aim: float | None = None
    """How many times as long as gloo's a step may take: the aim, not a test."""


RIVALS = {
    "DDP on gloo": Rival("torch alone"),
    "DataParallel": Rival("torch alone", "DDP on gloo", 0.8),
    "DDP on hpcdist": Rival("torch alone", "DDP on gloo"),
    "FSDP2 on gloo": Rival("torch alone"),
    "FSDP2 on hpcdist": Rival("torch alone", "FSDP2 on gloo", 0.55),
    "DataParallel, arrays": Rival("NumPy alone"),
}


# ---- the candidates


def torch_models(torch_dist: Any) -> dict[str, Any]:
    """Return the same network, without communication and in every parallel form."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.nn.parallel import DistributedDataParallel as Ddp

    import hpcdist.torch  # noqa: F401  the backend

    network = torch_network(random_weights())
    hpcdist_world = torch_dist.new_group(backend="hpcdist")
    hpcdist_mesh = DeviceMesh.from_group(hpcdist_world, "cpu")
    gloo_mesh = init_device_mesh("cpu", (torch_dist.get_world_size(),))
    parallel: dict[str, Callable[[Any], Any]] = {
        "torch alone": lambda model: model,
        "DDP on gloo": Ddp,
        "DataParallel": dist.DataParallel,
        "DDP on hpcdist": lambda model: Ddp(model, process_group=hpcdist_world),
        "FSDP2 on gloo": lambda model: sharded(model, gloo_mesh),
        "FSDP2 on hpcdist": lambda model: sharded(model, hpcdist_mesh),
    }
    return {name: make(deepcopy(network)) for name, make in parallel.items()}


def sharded(model: Any, mesh: Any) -> Any:
    """Shard the parameters layer by layer."""
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def candidates(rank: int, torch_dist: Any) -> tuple[Candidates, dict[str, Any]]:
    """Return what takes one step, and the models that say what their exchange has cost."""
    batch = random_batch(rank)
    torches = torch_models(torch_dist) if torch_dist is not None else {}
    steps = {name: torch_step(model, batch) for name, model in torches.items()}
    alone, network = Network(random_weights()), Network(random_weights())
    engine = dist.DataParallel(network)
    steps["NumPy alone"] = numpy_step(alone, alone, batch)
    steps["DataParallel, arrays"] = numpy_step(engine, network, batch)
    models = {**torches, "DataParallel, arrays": engine}
    return steps, {name: model for name, model in models.items() if name.startswith("DataP")}


# ---- what they took


def step_row(found: Interleaved, name: str) -> Row:
    row: dict[str, Any] = {"step": name, "median": found.median(name), "best": found.best(name)}
    rival = RIVALS.get(name)
    if rival is None:
        return row
    row["communication"] = found.added(name, to=rival.alone)
    row["share"] = row["communication"] / row["median"]
    if rival.gloo is None:
        return row
    row |= {"/ gloo": found.ratio(name, to=rival.gloo), "aim": rival.aim}
    row["best / gloo"] = row["best"] / found.best(rival.gloo)
    row["its / gloo's"] = row["communication"] / found.added(rival.gloo, to=rival.alone)
    return row


COLUMNS = {
    "step": str,
    "median": duration,
    "best": duration,
    "/ gloo": times,
    "best / gloo": times,
    "aim": times,
    "communication": duration,
    "share": percent,
    "its / gloo's": times,
}


def stats_row(name: str, model: Any) -> Row:
    stats = model.comm_stats()
    return {
        "model": name,
        "buckets": stats.buckets / stats.backwards,
        "MB": stats.nbytes / stats.backwards / 1e6,
        "under way": stats.comm_s / stats.backwards,
        "exposed": stats.exposed_s / stats.backwards,
        "hidden": stats.hidden,
        "overlapped": "yes" if stats.overlapped else "no",
    }


STATS_COLUMNS = {
    "model": str,
    **dict.fromkeys(("buckets", "MB"), "{:.0f}".format),
    **dict.fromkeys(("under way", "exposed"), duration),
    "hidden": percent,
    "overlapped": str,
}


def main() -> None:
    options = read_options(__doc__, rounds=21)
    dist.init_parallel_env()
    comm = MPI.COMM_WORLD.Dup()
    torch_dist = start_gloo(comm)
    report = Report("training", options, comm)
    steps, models = candidates(comm.rank, torch_dist)
    found = interleave(comm, steps, rounds=options.rounds)
    rows = [step_row(found, name) for name in found.seconds]
    report.table("One training step: ... times as long as gloo's", COLUMNS, rows)
    report.table(
        "comm_stats() per backward pass, on rank 0",
        STATS_COLUMNS,
        [stats_row(name, model) for name, model in models.items()],
    )
    report.boxes("one training step", {name: list(found.seconds[name]) for name in found.seconds})
    report.close()
    stop_gloo(torch_dist)


if __name__ == "__main__":
    main()
