"""`hpcdist bench -n 2` starts its ranks as `hpcdist run` does."""

import os
import pty
import subprocess
import sys

import pytest

from hpcdist.launch.launchers import find_site
from hpcdist.runtime.process import snapshot

pytestmark = pytest.mark.skipif(find_site(snapshot()).mpiexec is None, reason="no mpiexec")


def hpcdist_bench(*words):
    return hpcdist("bench", *words)


def hpcdist(*words):
    argv = [sys.executable, "-m", "hpcdist", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def test_it_starts_its_ranks():
    done = hpcdist_bench("barrier", "-n", "2", "--quick", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("barrier, 2 ranks on 1 node") == 1


def test_what_is_wrong_is_told_once_and_nothing_is_started():
    done = hpcdist_bench("-n", "2", "--against", "nothing")
    assert done.returncode == 2
    assert done.stderr.count("nothing is unknown") == 1


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["bench barrier --quick", "tune --quick --sizes 64K scatter"])
def test_progress_is_shown_on_the_users_terminal_and_only_there(command):
    words = [*command.split(), "-n", "2", "--rounds", "2"]
    shown, quiet = on_a_terminal(words), hpcdist(*words)
    assert quiet.returncode == 0, quiet.stderr
    assert "\x1b[2K" not in quiet.stdout + quiet.stderr
    assert quiet.stderr == ""
    assert f"{command.split()[1 if 'bench' in command else -1]} on 2 ranks" in shown
    assert shown.count("\x1b[2K") >= 2
    assert shown.rstrip("\r\n").endswith("\x1b[2K")  # at last the line is taken away


def on_a_terminal(words):
    """Run `hpcdist` with a terminal as standard error; return what that shows."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "hpcdist", *words], stdout=subprocess.PIPE, stderr=theirs
    ) as process:
        os.close(theirs)
        told = b"".join(iter(lambda: _read(ours), b""))
        process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 0, told
    return told.decode()


def _read(terminal):
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # nobody writes to it any more
        return b""
