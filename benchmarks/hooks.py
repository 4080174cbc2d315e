"""What DataParallel adds to a step with many small parameters: ``mpiexec -n 1 python hooks.py``.

200 layers, each a matrix of 1000 float32 elements; zero_grad, forward, backward and SGD with 32
samples on one thread. One rank has nobody to wait for: what is left is the price of hooks,
buckets and the call of the exchange.

On more ranks: what a step takes that looks for NaN before gradients are averaged, and that compares
the samples of ranks, as ranks along mp do, beside one that does neither.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import core_per_rank  # noqa: F401  first: NumPy's BLAS looks when it is loaded
from mpi4py import MPI
from report import Report, read_options

import hpcdist as dist
from hpcdist.bench.interleaved import Candidates, interleave
from hpcdist.bench.libraries.torch import start_gloo, stop_gloo, torch_network, torch_step
from hpcdist.bench.networks import Network, numpy_step, random_batch, random_weights
from hpcdist.text import duration

LAYERS = 200
WIDTHS = tuple((25, 40)[layer % 2] for layer in range(LAYERS + 1))
AIM = 0.02
"""How much longer a step may take: the aim, not a test."""
WATCHED_AIM = 0.01
"""The same for a step that is watched."""

ALONE = {
    "DataParallel": "torch alone",
    "DDP on gloo": "torch alone",
    "DataParallel, arrays": "NumPy alone",
}


def candidates(rank: int, torch_dist: Any) -> Candidates:
    weights = [(matrix, None) for matrix, _ in random_weights(WIDTHS)]
    batch = random_batch(rank, WIDTHS)
    alone, network = Network(weights), Network(weights)
    steps = {
        "NumPy alone": numpy_step(alone, alone, batch),
        "DataParallel, arrays": numpy_step(dist.DataParallel(network), network, batch),
    }
    if torch_dist is None:
        return steps
    from torch.nn.parallel import DistributedDataParallel

    model = torch_network(weights)
    models = {
        "torch alone": model,
        "DataParallel": dist.DataParallel(deepcopy(model)),
        "DDP on gloo": DistributedDataParallel(deepcopy(model)),
    }
    return steps | {name: torch_step(each, batch) for name, each in models.items()}


def watched(rank: int) -> Candidates:
    """Return a step of a model of torch with the watches that only several ranks have."""
    import torch

    from hpcdist.torch.alike import Inputs

    batch = random_batch(rank, WIDTHS)
    model: Any = dist.DataParallel(torch_network([(w, None) for w, _ in random_weights(WIDTHS)]))
    step, inputs = torch_step(model, batch), Inputs(dist.get_group())
    samples = torch.zeros(32, WIDTHS[0])

    def run(looks: bool, compares: bool) -> None:
        model._watch_nan.looks = looks
        if compares:
            inputs.check((samples,))
        step()

    return {
        "neither": lambda: run(False, False),
        "looks for NaN": lambda: run(True, False),
        "compares samples": lambda: run(False, True),
    }


def show_watched(report: Report, comm: Any, rounds: int) -> None:
    found = interleave(comm, watched(comm.rank), rounds=rounds, sample_s=0.02)
    rows = [
        {
            "step": name,
            "median": found.median(name),
            "of it": found.ratio(name, "neither") - 1,
            "best": found.best(name) / found.best("neither") - 1,
            "aim": WATCHED_AIM,
        }
        for name in found.seconds
    ]
    shown: dict[str, Any] = {"step": str, "median": duration}
    shown |= dict.fromkeys(("of it", "best", "aim"), "{:.1%}".format)
    report.table(f"A step with {LAYERS} parameters that is watched", shown, rows)


def main() -> None:
    options = read_options(__doc__, rounds=51)
    dist.init_parallel_env()
    comm = MPI.COMM_WORLD.Dup()
    if comm.size > 1:
        report = Report("hooks", options, comm)
        show_watched(report, comm, options.rounds)
        report.close()
        return
    torch_dist = start_gloo(comm)
    report = Report("hooks", options, comm)
    found = interleave(
        comm, candidates(comm.rank, torch_dist), rounds=options.rounds, sample_s=0.02
    )
    rows = []
    for name, alone in ALONE.items():
        if name in found.seconds:
            added = found.added(name, to=alone)
            row = {"step": name, "median": found.median(name), "alone": found.median(alone)}
            row |= {
                "added": added,
                "for each": added / LAYERS,
                "of it": found.ratio(name, alone) - 1,
            }
            rows.append(row | {"best": found.best(name) / found.best(alone) - 1, "aim": AIM})
    shown: dict[str, Any] = {"step": str}
    shown |= dict.fromkeys(("median", "alone", "added", "for each"), duration)
    shown |= dict.fromkeys(("of it", "best", "aim"), "{:.1%}".format)
    report.table(f"A step with {LAYERS} parameters of 1000 elements", shown, rows)
    report.close()
    stop_gloo(torch_dist)


if __name__ == "__main__":
    main()
