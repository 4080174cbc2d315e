"""Jobs with tables: an example that learns as well as with all rows everywhere; a killed server."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdist.launch.environment import inherited
from hpcdist.launch.launchers import find_site
from hpcdist.runtime.process import snapshot

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "wide_and_deep.py"

DRILL = """
import os, signal
import numpy as np
from hpcdist import fleet, ps

fleet.init(server_num=1)
table = ps.SparseTable("rows", 3, mode="{mode}")
if fleet.is_server():
    def dies(*args):
        print("the server dies", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    type(table.core.shard).push = dies
    fleet.run_server()
fleet.init_worker()
table.pull([1])
table.push([1], np.ones((1, 3), np.float32))
table.flush()
fleet.stop_worker()
"""


def run(script, *arguments, ranks, timeout=200):
    """Run a script on ranks; return what has ended."""
    if find_site(snapshot()).mpiexec is None:
        pytest.skip("no mpiexec")
    left_out = inherited(os.environ, here=True)
    environ = {name: value for name, value in os.environ.items() if name not in left_out}
    command = ["hpcdist", "run", "-n", str(ranks), "--launcher", "mpiexec", str(script)]
    return subprocess.run(
        [sys.executable, "-m", *command, *arguments],
        env={**environ, "HPCDIST_TIMEOUT_S": "600", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="module")
def dense():
    """What is learned without tables."""
    pytest.importorskip("torch")
    return area(run(EXAMPLE, "--dense", ranks=1))


@pytest.mark.thorough
@pytest.mark.parametrize("servers", [0, 1])
def test_rows_in_tables_learn_as_rows_on_every_rank_do(dense, servers):
    spread = area(run(EXAMPLE, "--servers", str(servers), ranks=2 + servers))
    assert spread == pytest.approx(dense, abs=1e-3)
    assert dense > 0.75


def area(done):
    told = re.search(r"epoch 1: AUC ([\d.]+)", done.stdout)
    assert told, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
    return float(told[1])


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_server_that_is_killed_ends_the_job_and_is_named(mode, tmp_path):
    script = tmp_path / "drill.py"
    script.write_text(DRILL.format(mode=mode))
    done = run(script, ranks=3)
    assert "the server dies" in done.stdout, done.stdout + done.stderr
    assert done.returncode != 0
    assert "rank 2" in done.stderr
    assert "SIGKILL" in done.stderr
