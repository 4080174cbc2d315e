"""`hpcdist bench -n 2` starts its ranks as `hpcdist run` does."""

import subprocess
import sys

import pytest

from hpcdist.launch.site import find_site
from hpcdist.runtime.environ import snapshot

pytestmark = pytest.mark.skipif(find_site(snapshot()).mpiexec is None, reason="no mpiexec")


def hpcdist_bench(*words):
    argv = [sys.executable, "-m", "hpcdist", "bench", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def test_it_starts_its_ranks():
    done = hpcdist_bench("barrier", "-n", "2", "--quick", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("barrier, 2 ranks on 1 node") == 1


def test_what_is_wrong_is_told_once_and_nothing_is_started():
    done = hpcdist_bench("-n", "2", "--against", "nothing")
    assert done.returncode == 2
    assert done.stderr.count("nothing is unknown") == 1
