"""A rank that is about to fail waits until its launcher has read why."""

import os
import select
import subprocess
import sys
import time

import pytest

READ_LATE_S = 0.2
REFUSED = {
    "init_parallel_env": ["-c", "import hpcdist; hpcdist.init_parallel_env()"],
    "the doctor": ["-m", "hpcdist", "doctor"],
    "an uncaught exception": [
        "-c",
        "from hpcdist.runtime.failure import *; end_job_on_failure(0); raise OSError('no kernel')",
    ],
}


@pytest.mark.parametrize("program", REFUSED.values(), ids=REFUSED)
def test_a_launcher_that_reads_late_still_gets_the_reason(program):
    taken, given = os.pipe()
    with (
        open(taken) as words,
        subprocess.Popen(
            [sys.executable, *program],
            env={**os.environ, "HPCDIST_KERNEL": "sometimes"},
            stdin=subprocess.DEVNULL,
            stdout=given,
            stderr=given,
        ) as rank,
    ):
        os.close(given)
        assert select.select([words], [], [], 100)[0]
        time.sleep(READ_LATE_S)
        assert rank.poll() is None
        assert "kernel" in words.read().lower()
    assert rank.wait() != 0
