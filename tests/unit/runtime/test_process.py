"""What the system tells of a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hpcdist.launch.job.processes import _birth
from hpcdist.runtime.process import stat_of
from hpcdist.transport.flight.rings import ancestors, born, condition
from hpcdist.transport.shm.segment import is_dead

# The system keeps 15 bytes of a name, which end within the last letter of the first one here.
NAMES = ["fourteen bytes\N{LATIN SMALL LETTER A WITH DIAERESIS}", "x) Z 1 (", ""]
NAMED = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)
print("named", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", NAMES)
def test_a_process_may_have_any_name(name):
    command = [sys.executable, "-X", "utf8", "-c", NAMED, name]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout.readline() == b"named\n"
        told, fields = stat_of(process.pid)
        assert os.fsencode(told) == name.encode()[:15]
        assert int(fields[1]) == os.getpid()
        assert not is_dead(process.pid)
        assert _birth(process.pid) == str(born(process.pid)) != "0"
        assert condition(process.pid, born(process.pid)) == "running"
        assert ancestors(process.pid)[0] == os.getpid()
        process.communicate()
        assert stat_of(process.pid) == ("", [])
        assert is_dead(process.pid)
