"""A transport that another package brings keeps the contract, with no word of it in hpcdist."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import first_of

PACKAGE = Path(__file__).parent / "switchboard"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The environment of programs for which the package is installed."""
    target, source = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("source") / "toy"
    shutil.copytree(PACKAGE, source)  # a build leaves files beside what it builds
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", target, source], check=True)
    path = os.pathsep.join(filter(None, [str(target), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "HPCDIST_TIMEOUT_S": "60"}


@pytest.mark.parametrize("size", first_of([1, 3]))
def test_a_transport_of_another_package_is_started_by_its_name_and_keeps_the_contract(
    size, environment
):
    tests = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", PACKAGE / "ranks/contract.py"]
    job = subprocess.run(
        [sys.executable, "-m", "hpcdist_switchboard", str(size), sys.executable, *tests],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert job.returncode == 0, job.stdout
    assert job.stdout.count(" passed in ") == size


def test_who_starts_it_without_its_launcher_is_told(environment):
    program = "import hpcdist\nhpcdist.init_parallel_env(backend='Switchboard')"
    alone = {name: each for name, each in environment.items() if "SWITCHBOARD" not in name}
    done = subprocess.run(
        [sys.executable, "-c", program], env=alone, capture_output=True, text=True
    )
    assert "UsageError: no switchboard was found" in done.stderr


UNTIL_ONE_HAS_LEFT = """
import time
import hpcdist as dist
world = dist.init_parallel_env(backend="switchboard")
membership = world.transport.membership
dist.barrier()
while world.rank == 0 and not membership.look():
    time.sleep(0.01)
if world.rank == 0:
    print(membership)
"""


def test_ranks_learn_which_of_them_have_left(environment):
    command = ["-m", "hpcdist_switchboard", "2", sys.executable, "-c", UNTIL_ONE_HAS_LEFT]
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "<Membership: ranks [0], rank 1 " in done.stdout
