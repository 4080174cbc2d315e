"""Collectives between nodes, beside flat MPI: ``python nodes.py``, as root (it starts the nodes).

Four nodes of two ranks are connected by a switch of 1 Gbit/s and 0.1 ms (tests/slurm), whose
program takes a part of a core. Ranks are numbered node by node (block) and in turn (cyclic). The
ratio is MPI's time by hpcdist's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from compression import DELAY_S, GBIT_S, NODES, SLURM
from report import Options, Report

from hpcdist.text import duration, times, volume

sys.path.insert(0, str(SLURM))
RANKS = 2 * NODES
CASES = "all_reduce", "reduce_scatter", "all_gather", "broadcast", "alltoall"
LAYOUTS = "block", "cyclic"
COLUMNS: dict[str, Any] = {"case": str, "size": volume}
COLUMNS |= {
    f"{layout}{what}": show
    for layout in LAYOUTS
    for what, show in (("", duration), (", MPI", duration), (", ratio", times))
}
LIMIT_S = 1200


def measure(cluster: Any, mpi: Any, layout: str, sizes: str, rounds: int) -> list[Any]:
    """Return what `hpcdist bench` finds on the nodes."""
    found = Path(cluster.folder, f"{layout}.json")
    words = (*CASES, "--sizes", sizes, "--against", "mpi4py", "--rounds", rounds, "--json", found)
    job = ("-N", NODES, "-n", RANKS, f"--ntasks-per-node={RANKS // NODES}", "-m", layout)
    bench = (sys.executable, "-m", "hpcdist", "bench", *words)
    ended = cluster.srun(*job, "--time=20", *bench, mpi=mpi, timeout=LIMIT_S)
    if ended.returncode:
        sys.exit(ended.stderr)
    rows: list[Any] = json.loads(found.read_text())["rows"]
    return rows


def table_of(found: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Return a row for each case and size, with both layouts."""
    lines: dict[Any, dict[str, Any]] = {}
    for layout, rows in found.items():
        seconds = {
            (each["case"], each["nbytes"], each["library"]): each["median_s"] for each in rows
        }
        for case, nbytes, library in seconds:
            if library != "hpcdist":
                continue
            ours, theirs = (seconds[case, nbytes, each] for each in ("hpcdist", "mpi4py"))
            line = lines.setdefault((case, nbytes), {"case": case, "size": nbytes})
            line |= {layout: ours, f"{layout}, MPI": theirs, f"{layout}, ratio": theirs / ours}
    return [*lines.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="1M,4M", help="bytes a rank hands in (1M,4M)")
    parser.add_argument("--json", action="store_true", help="write to benchmarks/results/")
    given = parser.parse_args()
    from private_slurm import find_mpis, start_cluster

    mpi = find_mpis()[0]
    report = Report("nodes", Options(given.rounds, False, given.json, None), mpi=mpi.name)
    with start_cluster(NODES, "switch") as cluster:
        cluster.cables(rate=GBIT_S, delay=DELAY_S / 2)
        found = {each: measure(cluster, mpi, each, given.sizes, given.rounds) for each in LAYOUTS}
    report.table(f"{RANKS} ranks on {NODES} nodes", COLUMNS, table_of(found))
    report.close()


if __name__ == "__main__":
    main()
