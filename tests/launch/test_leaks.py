"""A process that lives through many recoveries holds no more of the system than after the first."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdist.launch.launchers import find_site

PROGRAM = Path(__file__).with_name("leaking.py")
RANKS, DEATHS, RECOVERIES = 5, 2, 50

if find_site(os.environ).family != "openmpi":
    pytest.skip("only Open MPI goes on when a rank dies", allow_module_level=True)


@pytest.mark.slow
def test_fifty_recoveries_leave_no_descriptor_mapping_name_or_thread():
    run = (sys.executable, "-m", "hpcdist", "run", "--survive", "-n", str(RANKS))
    done = subprocess.run(
        [*run, str(PROGRAM), str(RECOVERIES)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [re.sub(r"^\[\d+\] ", "", line) for line in done.stdout.splitlines()]
    assert len(lines) == RANKS - DEATHS
    for line in lines:
        before, after = json.loads(line).values()
        assert all(after[what] <= before[what] for what in before), (before, after)
