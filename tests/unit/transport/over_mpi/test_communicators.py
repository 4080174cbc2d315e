"""What looks at the processes of a node while a communicator is made."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("mpi4py")
from hpcdist.transport.mpi.communicators import sight_of

LONG_MS, FOR_EVER_MS = 60_000, -1


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


def test_a_process_that_ends_is_seen_at_once(process):
    with sight_of([os.getpid(), process.pid]) as died:
        assert not died(0)
        process.kill()
        assert died(LONG_MS)  # also as long as nobody has waited for it


def test_a_process_that_has_ended_before_is_seen(process):
    process.kill()
    process.wait()
    with sight_of([process.pid]) as died:
        assert died(0)


def test_the_look_ends_when_it_is_woken():
    woken, wake = os.pipe()
    with sight_of([os.getpid()], woken) as died:
        os.close(wake)
        assert not died(FOR_EVER_MS)
    os.close(woken)
