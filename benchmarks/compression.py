"""Training over a slow network, gradients whole and compressed: ``python compression.py``, as root.

It starts four nodes behind a switch of 1 Gbit/s and 0.1 ms (tests/slurm), and on them a model of 20
layers of 1000 x 1000 parameters, whose backward pass sleeps for 2.5 ms in each layer. Counted are
the bytes that leave the busiest node in a step, by the switch; the least is what whole gradients
need. ``--ranks 8`` takes two ranks a node.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from report import Options, Report

import hpcdist as dist
from hpcdist.text import duration, times, volume

SLURM = Path(__file__).parents[1] / "tests" / "slurm"
sys.path.insert(0, str(SLURM))
NODES, LAYERS, WIDTH, NAP_S = 4, 20, 1000, 2.5e-3
GBIT_S, DELAY_S = 125e6, 1e-4

WAYS = {
    "whole": None,
    "bfloat16": "bfloat16",
    "int8": "int8",
    "fp8": "fp8",
    "PowerSGD(4)": dist.PowerSGD(4),
}


class Network:
    """Layers of a square matrix each."""

    def __init__(self, width: int) -> None:
        self.layers = [dist.Parameter(np.zeros((width, width), "f4")) for _ in range(LAYERS)]

    def named_parameters(self) -> Iterator[tuple[str, dist.Parameter]]:
        return ((f"{number}", layer) for number, layer in enumerate(self.layers))

    def __call__(self) -> None:
        pass


def step(model: Any, layers: list[dist.Parameter], slope: np.ndarray[Any, Any]) -> None:
    """Do a backward pass, and wait for the means."""
    model()
    for layer in reversed(layers):
        time.sleep(NAP_S)
        layer.grad = slope
    model.synchronize()


def measure(switch: Path, width: int, steps: int) -> None:
    """Print for each way the seconds of a step, and the bytes that leave the busiest node."""
    from switch import ask

    dist.init_parallel_env()
    slope = np.random.default_rng(dist.get_rank()).normal(size=(width, width)).astype("f4")
    for name, compress in WAYS.items():
        network = Network(width)
        model = dist.DataParallel(network, compress=compress)
        for _ in range(4):  # until it is decided whether to overlap
            step(model, network.layers, slope)
        times = []
        for number in range(steps):
            dist.barrier()
            if number == steps - 1 and dist.get_rank() == 0:
                ask(switch, clear=True)
            dist.barrier()
            began = time.perf_counter()
            step(model, network.layers, slope)
            times.append(time.perf_counter() - began)
        dist.barrier()
        if dist.get_rank() == 0:
            time.sleep(0.05)
            sent = [found["sent"] for host, found in ask(switch).items() if host != "login"]
            print(json.dumps([name, min(times), max(sent)]), flush=True)


def main() -> None:
    """Start the nodes, and print a table; or measure, as a rank on one of them."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--ranks", type=int, default=NODES)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="write to benchmarks/results/")
    parser.add_argument("--switch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.switch:
        measure(options.switch, options.width, options.steps)
        return
    from private_slurm import find_mpis, start_cluster

    mpi = find_mpis()[0]
    report = Report("compression", Options(options.steps, False, options.json, None), mpi=mpi.name)
    with start_cluster(NODES, "switch") as cluster:
        cluster.cables(rate=GBIT_S, delay=DELAY_S / 2)
        words = ("--width", options.width, "--steps", options.steps)
        job = (f"-N{NODES}", f"-n{options.ranks}", "--time=20", sys.executable, __file__, *words)
        ended = cluster.srun(*job, "--switch", cluster.folder / "switch", mpi=mpi, timeout=1200)
    least = 2 * 4 * LAYERS * options.width**2 * (NODES - 1) / NODES
    rows = [
        {"gradients": name, "step": seconds, "sent": sent, "of the least": sent / least}
        for name, seconds, sent in map(json.loads, ended.stdout.splitlines())
    ]
    if not rows:
        sys.exit(ended.stderr)
    shown = {"gradients": str, "step": duration, "sent": volume, "of the least": times}
    title = (
        f"{options.ranks} ranks on {NODES} nodes; the least for whole gradients: {volume(least)}"
    )
    report.table(title, shown, rows)
    report.close()


if __name__ == "__main__":
    main()
