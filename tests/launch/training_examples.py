"""Examples that train, started as a user starts them."""

import os
import re
import subprocess
import sys
from pathlib import Path

from hpcdist.launch.environment import inherited

EXAMPLES = Path(__file__).parents[2] / "examples"


def losses_of(example, ranks, folder, *arguments):
    """Train on so many ranks; return the losses of the steps that were taken."""
    told = run(example, ranks, "--folder", folder, *arguments, tells=r"losses (.*)")
    return [*map(float, told[1].split())]


def run(example, ranks, *arguments, tells):
    """Run an example on so many ranks; return the match of what it has to tell."""
    left_out = inherited(os.environ, here=True)
    environ = {name: value for name, value in os.environ.items() if name not in left_out}
    command = ["hpcdist", "run", "-n", ranks, "--launcher", "mpiexec", EXAMPLES / example]
    done = subprocess.run(
        [sys.executable, "-m", *map(str, [*command, *arguments])],
        env={**environ, "HPCDIST_TIMEOUT_S": "300", "PYTHONPATH": str(EXAMPLES.parent)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    told = re.search(tells, done.stdout)
    assert told, done.stdout + done.stderr
    return told
