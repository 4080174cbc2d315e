"""The programs of the tutorial and of README, run by their commands, print what the page says."""

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

SAVED = r"[Ss]ave (?:this|it) as `(\w+\.py)`[^`]*?^```python\n(.*?)^```$"
HOMES = {"docs/tutorial.md": "/home/me/tutorial", "README.md": "/home/me"}
"""The pages, and where a reader of each is thought to have saved the programs."""
LIMIT_S = 300


def programs(page):
    """Return the files that a reader saves, and what is in them."""
    return dict(re.findall(SAVED, text_of(page), re.M | re.S))


def steps(page):
    """Return the commands that run files, with what each prints, in the order of the page."""
    found = []
    for block in blocks(page, "console"):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, output = part.partition("\n")
            if re.match(r"(python|hpcdist run) .*\.py", command) and output:
                found.append((command, sorted(output.splitlines())))
    return found


def test_each_file_of_the_tutorial_is_run():
    page = "docs/tutorial.md"
    commands = " ".join(command for command, _ in steps(page))
    assert [name for name in programs(page) if name not in commands] == []
    assert list(programs(page)) == ["hello.py", "pi.py", "wrong.py", "train.py", "plot.py"]


@pytest.mark.thorough
def test_the_commands_print_what_the_tutorial_says(tmp_path):
    page = "docs/tutorial.md"
    for command, output in _commands_that_can_run(page, tmp_path):
        done = _run(page, command, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (command, sorted(done.stdout.splitlines())) == (command, output)


def test_ranks_that_disagree_are_told_what_readme_says(tmp_path):
    ((command, output),) = _commands_that_can_run("README.md", tmp_path)
    done = _run("README.md", command, tmp_path)
    assert done.returncode == 1
    assert len(output) == 7
    assert [line for line in output if line not in done.stderr.splitlines()] == []


def _commands_that_can_run(page, folder):
    """Save the programs of a page, and return its commands for which all is installed."""
    if find_site(os.environ).mpiexec is None:
        pytest.skip("there is no mpiexec that fits the MPI library")
    needs = {example.code: example.needs for example in examples(page)}
    for name, code in programs(page).items():
        (folder / name).write_text(code)
    return [
        (command, output)
        for command, output in steps(page)
        for name, code in programs(page).items()
        if name in command and (not needs[code] or importlib.util.find_spec(needs[code]))
    ]


def _run(page, command, folder):
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
    for name in ("stdout", "stderr"):  # messages name files
        setattr(done, name, getattr(done, name).replace(str(folder), HOMES[page]))
    return done
