"""Training tools on backend "hpcdist" compute what they compute on gloo, bit by bit.

Each ``with_*.py`` is a program as its users write it. It runs on two ranks, where a sum has one
order only: under torchrun on gloo, and under each MPI at hand on hpcdist.
"""

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TOOLS = sorted(path.stem.removeprefix("with_") for path in HERE.glob("with_*.py"))
MPICH = HERE.parents[1] / ".mpich"
MPIS = {
    "the MPI of this Python": (shutil.which("mpiexec", path=Path(sys.executable).parent), {}),
    "MPICH": (
        shutil.which("mpiexec", path=MPICH / "bin"),
        {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(MPICH / "lib")},
    ),
}
QUIET = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
LIMIT_S = 600  # DeepSpeed compiles a part of it when it is first used


@pytest.fixture(scope="session", autouse=True)
def own_extensions(tmp_path_factory):
    """Compile in a folder of this run: a compilation that was killed leaves a lock for ever."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))


def results(command, tool, backend, env):
    """Run a program; return what each rank has told."""
    with tempfile.TemporaryDirectory() as folder:
        job = subprocess.run(
            [*command, HERE / f"with_{tool}.py", backend],
            env=os.environ | QUIET | env | {"RESULTS": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        assert job.returncode == 0, job.stdout[-8000:]
        return {path.stem: json.loads(path.read_text()) for path in Path(folder).glob("*.json")}


@functools.cache
def on_gloo(tool):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # gloo's threads now and then abort a process that ends: begin such a job anew
    return results([*torchrun, "--nproc-per-node", "2", "--max-restarts", "3"], tool, "gloo", {})


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_computes_on_hpcdist_what_it_computes_on_gloo(tool, mpi):
    mpiexec, env = MPIS[mpi]
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed")
    if mpiexec is None:
        pytest.skip("no mpiexec here")
    got = results([mpiexec, "-n", "2", sys.executable], tool, "hpcdist", env)
    assert got.keys() == {"0", "1"}
    assert got == on_gloo(tool)
    assert all(numbers for told in got.values() for numbers in told.values())
