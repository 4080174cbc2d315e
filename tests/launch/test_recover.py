"""Ranks die, and the others go on: `dist.recover`, in jobs of Open MPI that survive."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from environments import ROOT

from hpcdist.launch.launchers import find_site

PROGRAM = Path(__file__).with_name("recovering.py")
RANKS = 5
OPERATIONS = [
    "small",
    "ordinary",
    "shared",
    "broadcast",
    "asynchronous",
    "small asynchronous",
    "moved",
    "plan",
    "objects",
    "messages",
    "send and recv",
    "new group",
]
VICTIMS = ["0", "3", "0,2"]
USUAL = {("small", "0"), ("shared", "0,2"), ("messages", "3")}

if find_site(os.environ).family != "openmpi":
    pytest.skip("only Open MPI goes on when a rank dies", allow_module_level=True)


def how_often(operation, victims):
    return pytest.mark.thorough if (operation, victims) in USUAL else pytest.mark.slow


@pytest.mark.parametrize(
    ("operation", "victims"),
    [
        pytest.param(operation, victims, marks=how_often(operation, victims))
        for operation in OPERATIONS
        for victims in VICTIMS
    ],
)
def test_the_ranks_that_are_left_go_on(operation, victims):
    command = [sys.executable, "-m", "hpcdist", "run", "--survive", "-n", str(RANKS), str(PROGRAM)]
    done = subprocess.run(
        [*command, victims, operation], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    dead = victims.replace(",", " ")
    left = [rank for rank in range(RANKS) if str(rank) not in victims.split(",")]
    told = sorted(re.sub(r"^\[\d+\] ", "", line) for line in done.stdout.splitlines())
    assert [each.partition(" named ")[0] for each in told] == [
        f"{rank} {number} {len(left)} {dead}" for number, rank in enumerate(left)
    ]
    for each in told:  # at once, or only one of two
        named = each.partition(" named ")[2].split()
        assert named
        assert set(named) <= set(dead.split())


@pytest.mark.parametrize(
    "seed", [pytest.param(each, marks=pytest.mark.slow if each else ()) for each in range(50)]
)
def test_in_random_mixes_each_death_is_heard_of_and_nothing_lent_is_touched(seed):
    command = [sys.executable, "-m", "hpcdist", "run", "--survive", "-n", str(RANKS)]
    done = subprocess.run(
        [*command, str(PROGRAM.with_name("dying_mixes.py")), str(seed)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/checks'}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [re.sub(r"^\[\d+\] ", "", line) for line in done.stdout.splitlines()]
    assert told == [f"{RANKS - 2} died: []"] * 2, done.stdout + done.stderr


LENT = {("broadcast", 100_000, "ordinary")}


@pytest.mark.parametrize(
    ("operation", "nbytes", "how"),
    [
        pytest.param(*each, marks=pytest.mark.thorough if each in LENT else pytest.mark.slow)
        for each in itertools.product(
            ("all_reduce", "reduce", "broadcast", "all_gather", "objects"),
            (60_000, 100_000, 1 << 20, 16 << 20),
            ("ordinary", "shared"),
        )
    ],
)
def test_nobody_writes_to_what_a_rank_had_lent_before_it_heard_of_a_death(
    operation, nbytes, how, tmp_path
):
    command = [sys.executable, "-m", "hpcdist", "run", "--survive", "-n", "3"]
    done = subprocess.run(
        [*command, str(PROGRAM.with_name("lending.py")), tmp_path, operation, str(nbytes), how],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = sorted(re.sub(r"^\[\d+\] ", "", line) for line in done.stdout.splitlines())
    assert told == ["0 2 intact 2.0 2.0", "1 2 intact 2.0 2.0"]
