"""Freed gradients stay with the process."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import numpy as np
from hpcdist.parallel.virtual.heap import keep_freed

def round_of_gradients():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    gradients = [np.ones(1 << 19) for _ in range(3)]
    del gradients
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "keep":
    keep_freed([1 << 22] * 3)
print(*[round_of_gradients() for _ in range(5)])
"""
PAGES = 3 << 10


def faults(how, **settings):
    """Return the page faults of the last of some rounds of 12 MiB."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        env=environ | {"NUMPY_MADVISE_HUGEPAGE": "0"} | settings,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


@pytest.fixture(autouse=True)
def _gnu():
    if "CS_GNU_LIBC_VERSION" not in os.confstr_names:
        pytest.skip("needs the GNU C library")


def test_freed_gradients_cost_no_page_faults():
    assert faults("keep") < PAGES / 10


def test_a_setting_of_the_user_stays():
    assert faults("keep", MALLOC_MMAP_THRESHOLD_="131072") > PAGES / 2
