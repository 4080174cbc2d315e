"""The tutorial word by word: its files, run by its commands, print what the page says."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from docs_pages import blocks, examples, text_of

from hpcdist.launch.environment import inherited
from hpcdist.launch.launchers import find_site

PAGE = "docs/tutorial.md"
NAMES = re.findall(r"^(?:.*[Ss]ave (?:this|it) as) `(\w+\.py)`", text_of(PAGE), re.M)
FILES = dict(zip(NAMES, examples(PAGE), strict=True))
LIMIT_S = 300


def steps():
    """Return the commands that run files, with what each prints, in the order of the page."""
    found = []
    for block in blocks(PAGE, "console"):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, output = part.partition("\n")
            if re.match(r"(python|hpcdist run) .*\.py", command):
                found.append((command, sorted(output.splitlines())))
    return found


def test_each_file_is_run():
    commands = " ".join(command for command, _ in steps())
    assert [name for name in FILES if name not in commands] == []
    assert list(FILES) == ["hello.py", "pi.py", "wrong.py", "train.py", "plot.py"]


@pytest.mark.thorough
def test_the_commands_print_what_the_page_says(tmp_path):
    if find_site(os.environ).mpiexec is None:
        pytest.skip("there is no mpiexec that fits the MPI library")
    for name, example in FILES.items():
        (tmp_path / name).write_text(example.code)
    for command, output in steps():
        needed = next(example.needs for name, example in FILES.items() if name in command)
        if not needed or importlib.util.find_spec(needed):
            assert (command, sorted(_run(command, tmp_path).splitlines())) == (command, output)


def _run(command, folder):
    program, *arguments = shlex.split(command)
    module = ["-m", "hpcdist"] if program == "hpcdist" else []
    if program == "hpcdist":
        arguments[1:1] = ["--launcher", "mpiexec"]  # also where the tests are a job of Slurm
    left_out = inherited(os.environ, here=True)
    environ = {name: value for name, value in os.environ.items() if name not in left_out}
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, *module, *arguments],
        cwd=folder,
        env={
            **environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [root, environ.get("PYTHONPATH")])),
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.replace(f"{folder}{os.sep}", "")  # in messages that name a line
