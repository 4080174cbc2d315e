"""Print, as JSON, how many files are opened by importing hpcdist and by starting it."""

import importlib
import json
import sys
from collections import Counter
from pathlib import Path

PACKAGES = "hpcdist", "mpi4py", "ml_dtypes", "numpy"
opened: Counter = Counter()


def owner(path: str) -> str:
    for name in PACKAGES:
        if f"/{name}/" in path:
            return name
    return "others in Python" if "python3" in path else "the system and MPI"


def audit(event: str, args: tuple) -> None:
    if event == "open" and isinstance(args[0], (str, Path)):
        opened[owner(str(args[0]))] += 1


def count(step) -> Counter:
    opened.clear()
    step()
    return Counter(opened)


def start() -> None:
    import numpy as np

    dist = importlib.import_module("hpcdist")
    dist.init_parallel_env()
    dist.all_reduce(np.ones(1))


for known in ("numpy", "mpi4py"):
    importlib.import_module(known)
sys.addaudithook(audit)
steps = {
    "import": count(lambda: importlib.import_module("hpcdist")),
    "init and first all_reduce": count(start),
}
names = sorted({name for counted in steps.values() for name in counted})
rows = [
    {"files opened by": name, **{step: counted[name] for step, counted in steps.items()}}
    for name in names
]
print(json.dumps(rows))
