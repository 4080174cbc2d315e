"""Spares take the places of ranks that die: jobs of `hpcdist run --survive --spares`."""

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from test_run import SOON_S, command, environment, processes

from hpcdist.launch.command import Family
from hpcdist.launch.launchers import find_site

PROGRAM = Path(__file__).with_name("sparing.py")
STEPS = 20
TOLD = re.compile(
    r"process (\d+): rank (\d+) of (\d+), recovery (\d+), lost \[(.*)\], replaced \[(.*)\], "
    r"from steps \[(.*)\], trained (\w+), drawn (\w+)"
)

pytestmark = pytest.mark.skipif(
    find_site(os.environ).family is not Family.OPENMPI, reason="only Open MPI survives"
)


class Trained(NamedTuple):
    """What a job has come to, as its ranks have told in their order."""

    ranks: list[int]
    """The processes that were the ranks at the end."""
    size: int
    recoveries: int
    lost: str
    replaced: str
    first: list[str]
    """For each rank the steps with which it began."""
    trained: str
    drawn: str
    said: str


@pytest.fixture
def train(tmp_path):
    """Run the program; nothing of it may be left."""
    mark = f"SPARING_MARK={tmp_path}"

    def train(*deaths, nprocs=4, spares=1, options=(), code=0, **settings):
        words = command("--survive", "-n", nprocs, "--spares", spares, *options)
        done = subprocess.run(
            [*words, sys.executable, "-X", mark, str(PROGRAM), str(STEPS), *deaths],
            env=environment() | {"HPCDIST_TIMEOUT_S": "60"} | settings,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return result(done)

    yield train
    until = time.monotonic() + SOON_S
    while (left := processes(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == []


def result(done):
    """Return what the ranks of a job have told; all tell the same of the world."""
    found = sorted(
        (match.groups() for match in TOLD.finditer(done.stdout)), key=lambda each: each[1]
    )
    if not found:
        return Trained([], 0, 0, "", "", [], "", "", done.stderr)
    told, *others = {(each[2:6], each[7:]) for each in found}
    assert not others, done.stdout
    (size, recoveries, lost, replaced), (trained, drawn) = told
    ranks, first = [int(each[0]) for each in found], [each[6] for each in found]
    return Trained(
        ranks, int(size), int(recoveries), lost, replaced, first, trained, drawn, done.stderr
    )


WHOLE = "bac43e7c"
"""What is trained in so many steps, on any number of ranks."""
DRAWN = "8df534c6"
"""What the random numbers of four ranks come to."""


@pytest.mark.thorough
def test_a_spare_takes_a_place_and_once_there_is_none_the_others_close_up(train):
    found = train("1@9/0", "0@14/1", nprocs=2)
    assert (found.ranks, found.size, found.recoveries) == ([2], 1, 2)
    assert (found.lost, found.replaced) == ("0", "")
    assert (found.first, found.trained) == (["8, 12"], WHOLE)
    assert "2 of 3 processes died" in found.said
    assert re.search(r"1 +1 +signal SIGKILL +[\d.]+ s +taken by 2\n", found.said)
    assert re.search(r"0 +0 +signal SIGKILL +[\d.]+ s\n", found.said)


@pytest.mark.slow
def test_nobody_dies_and_the_spares_end_with_the_job(train):
    found = train(spares=2)
    assert (found.ranks, found.size, found.recoveries) == ([0, 1, 2, 3], 4, 0)
    assert (found.trained, found.drawn) == (WHOLE, DRAWN)
    assert "died" not in found.said


DRILLS = {
    "one of two spares": (["2@9/0"], 2, [0, 1, 4, 3], "2", "2"),
    "rank 0": (["0@9/0"], 1, [4, 1, 2, 3], "0", "0"),
    "two at once, two spares": (["0@9/0", "2@9/0"], 2, [4, 1, 5, 3], "0, 2", "0, 2"),
    "one after the other": (["1@9/0", "1@13/1"], 2, [0, 5, 2, 3], "1", "1"),
    "another rank while the spare joins": (["3@9/0", "1@joining"], 2, [0, 4, 2, 5], "1, 3", "1, 3"),
    "the spare as it joins": (["2@9/0", "4@joining"], 2, [0, 1, 5, 3], "2", "2"),
    "the spare in its place": (["1@9/0", "1@9/1"], 2, [0, 5, 2, 3], "1", "1"),
    "a parked spare": (["4@parked", "2@9/0"], 2, [0, 1, 5, 3], "2", "2"),
}
"""Who dies, of four ranks and so many spares; who is which rank at the end, lost and replaced."""


@pytest.mark.slow
@pytest.mark.parametrize("drill", DRILLS)
def test_the_training_is_that_of_a_job_without_a_death(train, drill):
    deaths, spares, ranks, lost, replaced = DRILLS[drill]
    found = train(*deaths, spares=spares)
    assert (found.ranks, found.size, found.lost, found.replaced) == (ranks, 4, lost, replaced)
    assert (found.trained, found.drawn) == (WHOLE, DRAWN)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deaths", "ranks"),
    [
        (["2@9/0", "0@9/0"], [4, 1, 3]),
        (["2@9/0", "4@joining"], [0, 1, 3]),
        (["4@parked", "2@9/0"], [0, 1, 3]),
    ],
)
def test_without_a_spare_for_each_the_world_is_smaller(train, deaths, ranks):
    found = train(*deaths)
    assert (found.ranks, found.size, found.trained) == (ranks, 3, WHOLE)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_deaths_of_any_processes_at_any_moment_change_nothing(train, seed):
    chance = random.Random(seed)
    processes = chance.sample(range(6), chance.randint(1, 3))
    deaths = [f"{process}@{chance.uniform(0.2, 1.8):.3f}s" for process in processes]
    found = train(*deaths, spares=2, SPARING_COPIES="3", SPARING_PAUSE_S="0.15")
    dead_ranks = sum(process in range(4) for process in processes)
    left = 6 - len(processes)
    assert found.trained == WHOLE
    assert found.size == min(4, left)
    if dead_ranks == len(processes) <= 2:
        assert found.drawn == DRAWN


@pytest.mark.slow
def test_copies_are_on_other_nodes_and_a_node_that_dies_is_replaced_by_spares(train):
    settings = {"HPCDIST_RANKS_PER_NODE": "2"}
    found = train("2@9/0", "3@9/0", spares=2, **settings)
    assert (found.ranks, found.replaced) == ([0, 1, 4, 5], "2, 3")
    assert (found.trained, found.drawn) == (WHOLE, DRAWN)


@pytest.mark.slow
def test_below_the_fewest_ranks_a_job_starts_again_from_disk(train, tmp_path):
    options = ("--min-ranks", 4, "--restarts", 1)
    path = str(tmp_path / "checkpoints")
    found = train("2@13/0", "1@15/1", options=options, SPARING_PATH=path)
    assert found.said.count("left, and --min-ranks asks for 4. Let the job end") == 3
    assert "restart 1 of 1" in found.said
    assert (found.size, found.recoveries, found.first) == (4, 0, ["8"] * 4)
    assert found.trained == WHOLE


@pytest.mark.slow
def test_a_buddy_pair_dies_and_the_training_goes_on_from_disk(train, tmp_path):
    path = str(tmp_path / "checkpoints")
    found = train("1@15/0", "2@15/0", spares=2, SPARING_PATH=path)
    assert "going on with step 8" in found.said
    assert (found.ranks, found.trained, found.drawn) == ([0, 4, 5, 3], WHOLE, DRAWN)


@pytest.mark.slow
def test_where_no_rank_is_left_spares_do_not_begin_anew(train):
    found = train("0@9/0", "1@9/0", nprocs=2, code=137)
    assert found.ranks == []
    assert "2 of 3 processes died" in found.said


NO_WORLD = """
import os
import hpcdist
print("process", os.environ["OMPI_COMM_WORLD_RANK"], "of", hpcdist.get_world_size())
"""
SECOND_WORLD = """
import os, signal
import numpy as np
import hpcdist as dist
process = dist.get_rank()
if process < dist.get_world_size():
    dist.init_parallel_env()
    dist.barrier()
    dist.destroy_process_group()
world = dist.init_parallel_env()
try:
    while not world.generation:
        dist.all_reduce(np.ones(3))
        if process == 1:
            os.kill(os.getpid(), signal.SIGKILL)
except dist.RankFailure:
    dist.recover()
dist.destroy_process_group()
world = dist.init_parallel_env()
print("process", process, "of", world.nranks, "is", world.rank)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "told"),
    [
        (NO_WORLD, ["process 0 of 2", "process 1 of 2", "process 2 of 2"]),
        (SECOND_WORLD, ["process 0 of 2 is 0", "process 2 of 2 is 1"]),
    ],
)
def test_programs_need_no_world_and_may_have_several(tmp_path, text, told):
    path = tmp_path / "program.py"
    path.write_text(text)
    done = subprocess.run(
        command("--no-label", "--survive", "-n", 2, "--spares", 1, path),
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == told
