"""How much of the communication a backward pass hides: ``mpiexec -n 2 python hiding.py``.

20 layers, each with one parameter of 8 MiB, whose backward pass sleeps: the processor is free
while the device computes. Hidden is what is saved of the time that computing and communicating
take one after the other, as a share of the shorter one: 100 % is all there is to save.
Alone, the communication is one blocking all_reduce per layer. Of what is not hidden, the step
`waits` for a part at its end; by the rest its computing is `slower`: it hands buckets over, and
shares memory and cores with what is reduced.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from report import Report, Row, read_options

import hpcdist as dist
from hpcdist.bench.interleaved import Candidates, Interleaved, interleave
from hpcdist.bench.libraries.torch import start_gloo, stop_gloo
from hpcdist.text import duration, percent

LAYERS = 20
ELEMENTS = 2 << 20
NAP_S = 8e-3
AIM = 0.9
"""The share of the communication that ought to be hidden: the aim, not a test."""


class Rival(NamedTuple):
    """What a candidate's step is made of: computing, and communicating."""

    compute: str
    comm: str


RIVALS = {
    "DataParallel": Rival("torch", "all_reduce"),
    "DataParallel, always": Rival("torch", "all_reduce"),
    "DataParallel, never": Rival("torch", "all_reduce"),
    "DDP on gloo": Rival("torch", "gloo"),
    "DataParallel, arrays": Rival("NumPy", "all_reduce"),
    "DataParallel, arrays, always": Rival("NumPy", "all_reduce"),
}


# ---- torch


def torch_network() -> Any:
    """Return layers that pass their input on; each has a parameter, and sleeps on the way back."""
    import torch

    torch.set_num_threads(1)

    gradient = torch.zeros(ELEMENTS)

    class Nap(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor, __: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, slope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            time.sleep(NAP_S)
            return slope, gradient

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(ELEMENTS))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Nap.apply(x, self.weight)

    return torch.nn.Sequential(*(Layer() for _ in range(LAYERS)))


def torch_step(model: Any) -> Callable[[], None]:
    """Return a step that adds to the gradients where they are, as the one alone does."""
    import torch

    x = torch.ones(1, requires_grad=True)

    def step() -> None:
        model(x).backward()

    return step


def torch_models() -> dict[str, Any]:
    from torch.nn.parallel import DistributedDataParallel

    models = {
        "torch": torch_network(),
        "DDP on gloo": DistributedDataParallel(torch_network()),
        "DataParallel": dist.DataParallel(torch_network()),
    }
    for how in ("always", "never"):
        with overlap(how):
            models[f"DataParallel, {how}"] = dist.DataParallel(torch_network())
    return models


@contextmanager
def overlap(how: str) -> Iterator[None]:
    """Set what DataParallel reads when it is made."""
    os.environ["HPCDIST_OVERLAP"] = how
    try:
        yield
    finally:
        del os.environ["HPCDIST_OVERLAP"]


# ---- NumPy


class Network:
    """As many parameters as layers."""

    def __init__(self) -> None:
        self.layers = [dist.Parameter(np.zeros(ELEMENTS, "f4")) for _ in range(LAYERS)]

    def named_parameters(self) -> Iterator[tuple[str, dist.Parameter]]:
        return ((f"{number}", layer) for number, layer in enumerate(self.layers))

    def __call__(self) -> None:
        pass


def numpy_step(model: Any, network: Network) -> Callable[[], None]:
    slope = np.zeros(ELEMENTS, "f4")

    def step() -> None:
        model()
        for layer in reversed(network.layers):
            time.sleep(NAP_S)
            layer.grad = slope

    return step


# ---- the race


def communicate(all_reduce: Callable[[Any], Any], arrays: list[Any]) -> Callable[[], None]:
    def communicate_all() -> None:
        for each in arrays:
            all_reduce(each)

    return communicate_all


def candidates(torch_dist: Any) -> tuple[Candidates, dict[str, Any]]:
    """Return what takes one step or a part of it, and the models that keep statistics."""
    arrays = [np.ones(ELEMENTS, "f4") for _ in range(LAYERS)]
    average = partial(dist.all_reduce, op=dist.ReduceOp.AVG)
    alone = Network()
    steps = {"all_reduce": communicate(average, arrays), "NumPy": numpy_step(alone, alone)}
    models: dict[str, Any] = {}
    for how in ("auto", "always"):
        name, network = f"DataParallel, arrays{'' if how == 'auto' else ', always'}", Network()
        with overlap(how):
            models[name] = dist.DataParallel(network)
        steps[name] = numpy_step(models[name], network)
    if torch_dist is not None:
        import torch

        tensors = [torch.zeros(ELEMENTS) for _ in range(LAYERS)]
        steps["gloo"] = communicate(torch_dist.all_reduce, tensors)
        found = torch_models()
        steps |= {name: torch_step(model) for name, model in found.items()}
        models |= found
    return steps, {name: model for name, model in models.items() if name.startswith("DataP")}


def row_of(found: Interleaved, name: str, models: dict[str, Any]) -> Row:
    rival = RIVALS[name]
    compute, comm, step = (found.seconds[each] for each in (rival.compute, rival.comm, name))
    hidden = float(np.median((compute + comm - step) / np.minimum(compute, comm)))
    row: dict[str, Any] = {"step": name, "median": found.median(name), "best": found.best(name)}
    row |= {"compute": found.median(rival.compute), "alone": found.median(rival.comm)}
    row["hidden"] = hidden
    if name not in models:
        return row
    stats = models[name].comm_stats()
    exposed = stats.exposed_s / stats.backwards
    row |= {"it says": stats.hidden, "under way": stats.comm_s / stats.backwards}
    if name in ("DataParallel", "DataParallel, arrays"):  # which do not count the first passes
        row |= {"waits": exposed, "slower": row["median"] - row["compute"] - exposed}
    return row | {"overlapped": "yes" if stats.overlapped else "no"}


COLUMNS = {
    "step": str,
    **dict.fromkeys(("median", "best", "compute", "alone"), duration),
    **dict.fromkeys(("hidden", "it says"), percent),
    **dict.fromkeys(("under way", "waits", "slower"), duration),
    "overlapped": str,
}


def main() -> None:
    options = read_options(__doc__, rounds=15)
    dist.init_parallel_env()
    comm = MPI.COMM_WORLD.Dup()
    torch_dist = start_gloo(comm)
    report = Report("hiding", options, comm)
    steps, models = candidates(torch_dist)
    found = interleave(comm, steps, rounds=options.rounds)
    rows = [row_of(found, name, models) for name in RIVALS if name in found.seconds]
    report.table(
        f"A backward pass that leaves the processor alone; {percent(AIM)} hidden is the aim",
        COLUMNS,
        rows,
    )
    steps_of = {row["step"]: list(found.seconds[row["step"]]) for row in rows}
    report.boxes("a backward pass that sleeps", steps_of)
    report.close()
    stop_gloo(torch_dist)


if __name__ == "__main__":
    main()
