"""Ranks with work on their GPUs go on when one of them dies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from requirements import missing

from hpcdist.launch.launchers import find_site
from hpcdist.runtime import gpu

PROGRAM = Path(__file__).with_name("dying_gpu.py")
SETTINGS = {"EMULATED_GPU_COUNT": "3", "HPCDIST_SHARE_GPU": "1", "NCCL_MAX_CTAS": "2"}
"""Where there are fewer GPUs the ranks share them, which NCCL does while their kernels fit."""
RUN = (sys.executable, "-m", "hpcdist", "run", "--survive", "-n", "3")


@pytest.mark.skipif(
    find_site(os.environ).family != "openmpi", reason="only Open MPI goes on when a rank dies"
)
@pytest.mark.parametrize(
    ("way", "end"),
    [("nccl", "reading"), ("nccl", "wait"), ("nccl", "synchronize"), ("staged", "reading")],
)
def test_who_waits_for_numbers_of_a_dead_rank_goes_on(way, end):
    if "EMULATED_GPU_COUNT" not in os.environ and not gpu.count():
        missing("gpu", "there are no GPUs here, and no emulated ones; `make test-gpu` has them")
    done = subprocess.run(
        [*RUN, str(PROGRAM), way, end],
        capture_output=True,
        text=True,
        env=os.environ | SETTINGS,
        timeout=90,
        check=False,
    )
    assert done.stdout.count("went on") == 2, done.stdout + done.stderr
