"""What a test needs of the machine: where it is missing, the test skips and says why, or fails.

``HPCDIST_REQUIRE=gpu,slurm`` names what must be there.
"""

import os
import shutil
from pathlib import Path

import pytest


def missing(requirement, reason):
    """Skip the test because of `reason`, or fail it if `requirement` must be there."""
    if requirement in os.environ.get("HPCDIST_REQUIRE", "").split(","):
        pytest.fail(f"{requirement} is required, but {reason}")
    pytest.skip(reason)


def needs_room_for_workers():
    """Skip where the workers of torch's DataLoader cannot have a queue, and batches in it."""
    shm = Path("/dev/shm")
    if not shm.exists() or shutil.disk_usage(shm).free < 1 << 20:
        missing("shm", "processes of torch share memory in /dev/shm, where there is no room")
