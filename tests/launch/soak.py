"""Soak of recoveries: ``python tests/launch/soak.py [--runs 200] [--first 0] [--engine NAME]``.

Each run is a job of `soaking.py` with another seed: six ranks, of which up to four die at random
moments. It is compared with a training without a death. The last lines tell how long recoveries
took, and the longest pauses between two steps, with what was done again.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("soaking.py")
LIMIT_S = 120.0


RANKS, MOST_DEATHS = 6, 4
LAST_DEATH_S = 1.2
USUAL = ("data parallel", "arrays os", "arrays os_g", "arrays p_g_os")


class Plan(NamedTuple):
    """What a run is: how it trains, with how many copies, and who dies after how many seconds.

    `on_a_node` ranks each are taken for those of a node, all of them where it is 0.
    """

    engine: str
    on_a_node: int
    copies: int
    every: int
    deaths: dict[int, float]


def plan_run(seed, ranks=RANKS, engine=None):
    """Return the plan of a run. In every second one all die shortly after each other."""
    numbers = random.Random(seed)
    victims = numbers.sample(range(ranks), numbers.randint(1, MOST_DEATHS))
    moments = [numbers.uniform(0, LAST_DEATH_S) for _ in victims]
    if numbers.random() < 0.5:
        moments = [moments[0] + numbers.expovariate(1 / 0.04) for _ in victims]
    deaths = {rank: min(at, LAST_DEATH_S) for rank, at in zip(victims, moments, strict=True)}
    chosen = numbers.choice(USUAL)
    on_a_node = numbers.choice((0, 0, 2, 3))
    return Plan(engine or chosen, on_a_node, numbers.randint(1, 2), numbers.randint(1, 7), deaths)


class Run(NamedTuple):
    """What a run came to: what is wrong with it, seconds of its recoveries, and of its pauses."""

    flaws: tuple[str, ...]
    recoveries: tuple[float, ...]
    pauses: tuple[float, ...]
    output: str


def start(seed, folder, *, nprocs, survive, engine=None, env=None):
    """Run the program to its end; return its exit code, None for a hang, and what it said."""
    words = [sys.executable, "-m", "hpcdist", "run", *(["--survive"] if survive else [])]
    arguments = [str(PROGRAM), str(seed), str(folder), *([engine] if engine else [])]
    job = subprocess.Popen(
        [*words, "-n", str(nprocs), *arguments],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/checks'}"} | (env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        return job.communicate(timeout=LIMIT_S)[0], job.returncode
    except subprocess.TimeoutExpired:
        job.send_signal(signal.SIGINT)
        return job.communicate()[0], None


def prints_of(said):
    """Return the fingerprints that the ranks of a run have printed."""
    return re.findall(r"ends with (\w+) after", said)


def expected(engine=None):
    """Return the fingerprint of a training without a death, on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        said, _ = start(0, folder, nprocs=1, survive=False, engine=engine)
    (found,) = prints_of(said)
    return found


def soak(seed, wanted, engine=None):
    """Do a run, and look what is wrong with it."""
    plan = plan_run(seed, engine=engine)
    nodes = {"HPCDIST_RANKS_PER_NODE": str(plan.on_a_node)} if plan.on_a_node else {}
    with tempfile.TemporaryDirectory() as folder:
        said, code = start(seed, folder, nprocs=RANKS, survive=True, engine=engine, env=nodes)
    prints = prints_of(said)
    left = RANKS - len(plan.deaths)
    flaws = {
        "hang": code is None,
        f"exit code {code}": code not in (0, None),
        f"{len(prints)} of {left} ranks came to the end": len(prints) != left,
        "other weights": {*prints} - {wanted},
        "wrong sum": "AssertionError" in said,
        "an error of mpi4py": "mpi4py.MPI.Exception" in said,
    }
    return Run(
        tuple(name for name, is_so in flaws.items() if is_so),
        tuple(map(float, re.findall(r"signal SIGALRM +([\d.]+) s", said))),
        tuple(map(float, re.findall(r"after ([\d.]+)$", said, re.MULTILINE))),
        said,
    )


def distribution(seconds):
    """Return a line about how seconds are distributed."""
    found = np.array(seconds or [np.nan])
    parts = " ".join(f"{each:.3f}" for each in np.percentile(found, (50, 90, 99, 100)))
    return f"{len(seconds)}: median, 90 %, 99 %, longest {parts} s"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--engine", help="one of training_engines, for all runs")
    options = parser.parse_args()
    wanted, runs = expected(options.engine), {}
    for seed in range(options.first, options.first + options.runs):
        began = time.monotonic()
        runs[seed] = run = soak(seed, wanted, options.engine)
        seconds, plan = time.monotonic() - began, plan_run(seed, engine=options.engine)
        print(f"{seed}: {', '.join(run.flaws) or 'right'} in {seconds:.1f} s, {plan}")
        print(f"   pauses {run.pauses}, recoveries {run.recoveries}", flush=True)
        if run.flaws:
            print(run.output, flush=True)
    bad = {seed: run.flaws for seed, run in runs.items() if run.flaws}
    deaths = sum(len(plan_run(seed).deaths) for seed in runs)
    print(f"{len(runs)} runs, {deaths} deaths, {len(bad)} failed: {bad}")
    print("recoveries", distribution([each for run in runs.values() for each in run.recoveries]))
    print("pauses", distribution([max(run.pauses, default=0.0) for run in runs.values()]))
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
