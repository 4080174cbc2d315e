"""What a rank does: run torch's tests one by one, and write down how each began and ended.

``mpiexec -n N python ranks.py FOLDER``, where FOLDER has the order of `__main__.py`. A rank on
which a test fails ends the job, for the ranks are no longer in step.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from mpi4py import MPI
from torchs_tests import TorchsTests


def main() -> None:
    """Run the tests of the order, each on all ranks."""
    folder = Path(sys.argv[1])
    order = json.loads((folder / "order.json").read_text())
    comm = MPI.COMM_WORLD
    tests = TorchsTests(order["backend"], order["guise"], comm.rank, comm.size, folder)
    without = set(order["without"])
    with (folder / f"rank-{comm.rank}").open("w", buffering=1) as report:
        for name in tests.names():
            if name in without or not re.search(order["only"], name):
                continue
            print(json.dumps([name, "began", ""]), file=report)
            outcome, why = tests.run(name)
            print(json.dumps([name, outcome, why]), file=report)
            if outcome == "failed":
                os._exit(1)


main()
