"""Collectives between nodes, beside flat MPI: ``python nodes.py``, as root (it starts the nodes).

Four nodes of two ranks are connected by a switch of 1 Gbit/s and 0.1 ms (tests/slurm), whose
program takes a part of a core. Ranks are numbered node by node (block) and in turn (cyclic). The
ratio is MPI's time by hpcdist's. `--mbit 100` is a network that is slow enough for the cores.

`--predict` measures 2, 4 and 8 nodes of a rank, and what `hpcdist bench --predict` makes of the
first two for the last.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from compression import DELAY_S, GBIT_S, NODES, SLURM
from report import Options, Report

from hpcdist.bench.predict import fit, predict
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
FITTED, PREDICTED = (2, 4), 8
FORESEEN: dict[str, Any] = {"case": str, "size": volume}
FORESEEN |= {f"{nodes} nodes": duration for nodes in (*FITTED, PREDICTED)}
FORESEEN |= {"predicted": duration, "predicted / measured": times}
LIMIT_S = 1200


def measure(cluster: Any, mpi: Any, given: Any, nodes: int, each: int, *how: str) -> list[Any]:
    """Return what `hpcdist bench` finds on so many nodes, of so many ranks each."""
    found = Path(cluster.folder, f"{nodes}.json")
    peer = () if given.predict else ("--against", "mpi4py")
    words = (*CASES, "--sizes", given.sizes, *peer, "--rounds", given.rounds, "--json", found)
    job = ("-N", nodes, "-n", nodes * each, f"--ntasks-per-node={each}", *how)
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


def foreseen(found: dict[int, list[Any]]) -> list[dict[str, Any]]:
    """Return a row for each case and size, with what is predicted of the most nodes."""
    own = {
        nodes: {
            (each["case"], each["nbytes"]): each for each in rows if each["library"] == "hpcdist"
        }
        for nodes, rows in found.items()
    }
    models = fit([each for nodes in FITTED for each in own[nodes].values()])
    sizes = sorted({nbytes for _, nbytes in own[PREDICTED]})
    told = {
        (each["case"], each["nbytes"]): each["seconds"]
        for each in predict(models, [PREDICTED], sizes)
    }
    return [
        {"case": case, "size": nbytes}
        | {f"{nodes} nodes": own[nodes][case, nbytes]["median_s"] for nodes in own}
        | {"predicted": told[case, nbytes]}
        | {"predicted / measured": told[case, nbytes] / each["median_s"]}
        for (case, nbytes), each in own[PREDICTED].items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="1M,4M", help="bytes a rank hands in (1M,4M)")
    parser.add_argument("--mbit", type=float, default=1000, help="rate of a cable in Mbit/s (1000)")
    parser.add_argument("--predict", action="store_true", help="see above")
    parser.add_argument("--json", action="store_true", help="write to benchmarks/results/")
    given = parser.parse_args()
    from private_slurm import find_mpis, start_cluster

    mpi = find_mpis()[0]
    report = Report("nodes", Options(given.rounds, False, given.json, None), mpi=mpi.name)
    with start_cluster(PREDICTED if given.predict else NODES, "switch") as cluster:
        cluster.cables(rate=given.mbit * GBIT_S / 1000, delay=DELAY_S / 2)
        what = cluster, mpi, given
        if given.predict:
            by_nodes = {nodes: measure(*what, nodes, 1) for nodes in (*FITTED, PREDICTED)}
            report.table(f"{PREDICTED} nodes, as 2 and 4 tell", FORESEEN, foreseen(by_nodes))
        else:
            found = {each: measure(*what, NODES, RANKS // NODES, "-m", each) for each in LAYOUTS}
            report.table(f"{RANKS} ranks on {NODES} nodes", COLUMNS, table_of(found))
    report.close()


if __name__ == "__main__":
    main()
