"""The programs before and after run on two ranks, and print the same."""

import importlib.util
import os
import subprocess
import sys

import pytest
from docs_pages import ROOT, text_of

from hpcdist.launch.environment import inherited
from hpcdist.launch.launchers import find_site

FOLDER = ROOT / "examples/ported"
PAGE = "docs/ported.md"
LIMIT_S = 120
pytestmark = pytest.mark.thorough
HERE = ["hpcdist", "run", "-n", "2", "--launcher", "mpiexec", "--no-label"]
TORCHRUN = ["torch.distributed.run", "--nproc-per-node", "2"]
STARTED_BY = {"mpi4py_before": HERE, "torch_before": TORCHRUN}


def said(name, folder):
    left_out = inherited(os.environ, here=True)
    environ = {name: value for name, value in os.environ.items() if name not in left_out}
    path = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", *STARTED_BY.get(name, HERE), str(FOLDER / f"{name}.py")],
        cwd=folder,
        env={**environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    # gloo's threads now and then abort a process that has said all and is about to end
    assert done.returncode == 0 or name == "torch_before", done.stderr
    return done.stdout


@pytest.mark.parametrize("library", ["mpi4py", "torch"])
def test_the_program_after_prints_what_the_one_before_prints(library, tmp_path):
    if find_site(os.environ).mpiexec is None:
        pytest.skip("there is no mpiexec that fits the MPI library")
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    before = said(f"{library}_before", tmp_path)
    assert before
    assert said(f"{library}_after", tmp_path) == before


def test_the_page_shows_every_program():
    names = [path.name for path in FOLDER.glob("*.py")]
    assert [name for name in names if f'--8<-- "examples/ported/{name}"' not in text_of(PAGE)] == []
