"""Programs written for torchrun, started by `hpcdist run`, and by mpiexec itself."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
from environments import ENVIRONMENTS, EVERY_MPI, ROOT

from hpcdist.launch.launchers import find_site
from hpcdist.runtime.torchrun import NOTE, set_by_hpcdist

pytestmark = pytest.mark.skipif(not ENVIRONMENTS, reason="no mpiexec")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")

PLACES = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"
TELL = """
import json, os, sys
names = {names!r}
sys.stdout.write(json.dumps({{name: os.environ.get(name) for name in names}}) + "\\n")
sys.stdout.flush()
"""
HEAR = TELL.format(names=(*PLACES, "MASTER_ADDR", "MASTER_PORT"))
SUM_OVER_GLOO = """
import torch
torch.distributed.init_process_group("gloo")
x = torch.ones(1)
torch.distributed.all_reduce(x)
assert x.item() == torch.distributed.get_world_size() == 2
torch.distributed.destroy_process_group()
"""


@pytest.fixture(params=EVERY_MPI)
def environ(request):
    """Return the environment of a job for each MPI, without what jobs around the tests have set."""
    given = ENVIRONMENTS[request.param]
    left = {name: value for name, value in given.items() if name not in set_by_hpcdist(given)}
    left.pop(NOTE, None)
    return left | {"PYTHONPATH": str(ROOT)}


def run(words, environ, **more):
    options = {"env": environ, "text": True, "capture_output": True, "timeout": 240}
    done = subprocess.run(words, check=False, stdin=subprocess.DEVNULL, **options, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def told(output):
    """Return what the ranks have told, by rank; lines may carry labels."""
    lines = [json.loads(line[line.index("{") :]) for line in output.splitlines() if "{" in line]
    return {each["RANK"]: each for each in lines}


def written(folder, *parts):
    path = folder / "program.py"
    path.write_text("".join(parts))
    return path


def hpcdist_run(*words):
    return [sys.executable, "-m", "hpcdist", "run", "-n", "2", *map(str, words)]


def test_a_program_for_torchrun_finds_its_place(environ, tmp_path):
    found = told(run(hpcdist_run(written(tmp_path, HEAR)), environ))
    assert sorted(found) == ["0", "1"]
    for rank, each in found.items():
        assert [each[name] for name in PLACES] == [rank, "2", rank, "2", "0"]
        assert each["MASTER_ADDR"] == "127.0.0.1"
    assert len({each["MASTER_PORT"] for each in found.values()}) == 1


def test_what_the_user_has_set_is_kept(environ, tmp_path):
    given = environ | {"LOCAL_RANK": "5", "MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}
    for each in told(run(hpcdist_run(written(tmp_path, HEAR)), given)).values():
        assert [each[name] for name in ("LOCAL_RANK", "MASTER_ADDR")] == ["5", "localhost"]
        assert each["MASTER_PORT"] == "1234"


@pytest.mark.thorough
@needs_torch
def test_torchs_own_backend_meets_at_the_address(environ, tmp_path):
    run(hpcdist_run(written(tmp_path, SUM_OVER_GLOO)), environ)


@needs_torch
def test_under_mpiexec_the_import_is_enough(environ, tmp_path):
    program = written(tmp_path, "import hpcdist.torch\n", HEAR, SUM_OVER_GLOO)
    mpiexec = find_site(environ).mpiexec
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    found = told(run([mpiexec, "-n", "2", sys.executable, str(program)], environ | root))
    for rank, each in found.items():
        assert [each[name] for name in PLACES] == [rank, "2", rank, "2", "0"]
    assert len(found) == 2
    assert len({each["MASTER_PORT"] for each in found.values()}) == 1


@pytest.mark.thorough
def test_a_job_inside_a_job_has_a_place_and_a_port_of_its_own(environ, tmp_path):
    inner = written(tmp_path, HEAR)
    outer = tmp_path / "outer.py"
    outer.write_text(
        f"import os, subprocess\n{HEAR}\n"
        f"if os.environ['RANK'] == '1': subprocess.run({hpcdist_run(inner)!r}, check=True)\n"
    )
    lines = run(hpcdist_run(outer), environ).splitlines()
    found = [json.loads(line[line.index("{") :]) for line in lines if "{" in line]
    assert sorted(each["RANK"] for each in found) == ["0", "0", "1", "1"]
    ports = [each["MASTER_PORT"] for each in found]
    assert sorted(ports.count(each) for each in set(ports)) == [2, 2]
