"""What DataParallel adds to a step with many small parameters: ``mpiexec -n 1 python hooks.py``.

200 layers, each a matrix of 1000 float32 elements; zero_grad, forward, backward and SGD with 32
samples on one thread. One rank has nobody to wait for: what is left is the price of hooks,
buckets and the call of the exchange.
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


def main() -> None:
    options = read_options(__doc__, rounds=51)
    dist.init_parallel_env()
    comm = MPI.COMM_WORLD.Dup()
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
