"""The output of a command is read whole, its failures are errors, and it never outlives us."""

import io
import os
import signal
import subprocess
import sys
import time

import pytest

import hpcdist as dist
from hpcdist.data.pipe import piped
from hpcdist.runtime.process import stat_of

TEXT = b"".join(b"line %d\n" % i for i in range(50_000))


@pytest.fixture(params=["path", "open file"])
def source(request, tmp_path):
    (tmp_path / "part").write_bytes(TEXT)
    if request.param == "path":
        return str(tmp_path / "part")
    return io.BytesIO(TEXT)


def output(command, source, **settings):
    with piped(command, source, name="part", **settings) as file:
        return file.read()


@pytest.mark.parametrize("command", ["cat", "tac | tac", "grep 'line' && true"])
def test_the_output_of_a_command_is_read_whole(command, source):
    assert output(command, source) == TEXT


@pytest.mark.parametrize("command", ["head -n 2", "cat | head -n 2", "sed -n '1,2p;2q'"])
def test_a_command_need_not_read_all(command, source):
    assert output(command, source) == b"line 0\nline 1\n"


def test_an_exit_code_is_an_error_with_the_last_lines_of_its_standard_error(source):
    with pytest.raises(dist.DatasetError) as caught:
        output("cat; for i in 1 2 3 4 5 6 7; do echo told $i >&2; done; exit 3", source)
    told = str(caught.value)
    assert told.startswith("part: pipe_command 'cat; for i")
    assert "ended with exit code 3" in told
    assert told.endswith("told 3\ntold 4\ntold 5\ntold 6\ntold 7")


@pytest.mark.skipif(not os.path.exists("/bin/bash"), reason="pipefail is of bash")
def test_a_failure_inside_of_a_pipeline_is_an_error(source):
    with pytest.raises(dist.DatasetError, match="ended with exit code 7"):
        output("(cat; exit 7) | cat", source)


def test_a_command_that_is_not_there_is_an_error(source):
    with pytest.raises(dist.DatasetError, match=r"exit code 127[\s\S]*no-such-command"):
        output("no-such-command", source)


def test_a_command_that_is_killed_is_an_error(source):
    with pytest.raises(dist.DatasetError, match="was ended by SIGKILL"):
        output("cat >/dev/null; kill -KILL $$", source)


def test_a_command_that_writes_nothing_is_an_error_unless_it_may(source):
    with pytest.raises(dist.DatasetError, match="has written nothing; pass allow_empty=True"):
        output("cat >/dev/null", source)
    assert output("cat >/dev/null", source, allow_empty=True) == b""


def test_a_command_that_hangs_is_ended(source, tmp_path):
    command = f"echo $$ > {tmp_path}/pid; echo first; sleep 1000 & sleep 1000"
    with pytest.raises(dist.DatasetError, match="has written nothing for 2 s, and was ended"):
        output(command, source, timeout=2)
    assert_ended(tmp_path)


def test_closing_early_ends_a_command(source, tmp_path):
    with piped(f"echo $$ > {tmp_path}/pid; yes", source, name="part") as file:
        assert file.read(4) == b"y\ny\n"
    assert_ended(tmp_path)


def test_a_source_that_cannot_be_read_is_an_error():
    class Broken(io.RawIOBase):
        def read(self, size=-1):
            raise OSError("the disk is gone")

    with pytest.raises(dist.DatasetError, match="could not be given the file: OSError: the disk"):
        output("cat", Broken())


def test_a_command_does_not_outlive_a_process_that_is_killed(tmp_path):
    (tmp_path / "part").write_bytes(b"x")
    program = (
        "from hpcdist.data.pipe import piped\n"
        f"piped('echo $$ > {tmp_path}/pid; echo go; sleep 1000', '{tmp_path}/part').read()"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert process.poll() is None
            time.sleep(0.05)
        assert is_running(tmp_path)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert_ended(tmp_path)


def test_a_command_does_not_begin_before_it_is_watched(tmp_path):
    (tmp_path / "part").write_bytes(b"x")
    program = (
        "import os, signal, subprocess, time\n"
        "from hpcdist.data.pipe import piped\n"
        "real = subprocess.Popen\n"
        "def start(command, **options):\n"
        "    if 'kill' in command[2]:\n"
        "        time.sleep(0.3)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return real(command, **options)\n"
        "subprocess.Popen = start\n"
        f"piped('echo $$ > {tmp_path}/pid; sleep 5', '{tmp_path}/part')"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "pid").exists()


def is_running(folder):
    """Return whether a process of the command's group is there, and is no zombie."""
    group = (folder / "pid").read_text().strip()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, _, found = stat_of(entry)[1][:3]
        except ValueError:  # it has just ended
            continue
        if found == group and state != "Z":
            return True
    return False


def assert_ended(folder):
    while is_running(folder):  # a killed process is not gone at once; pytest's limit ends this
        time.sleep(0.05)
