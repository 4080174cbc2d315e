"""Drills: ranks die in operations of every kind; those that are left get a `RankFailure`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from environments import ROOT

from hpcdist.launch.launchers import find_site

PROGRAM = Path(__file__).with_name("dying.py")
RUN = (sys.executable, "-m", "hpcdist", "run", "--survive")
LEFT = 3
"""So many ranks are left at the end of a job, at least."""
FAMILIES = {
    "all_reduce": ["small", "through the board", "ordinary", "shared"],
    "works": ["asynchronous", "waited for on a thread", "asked for", "many at once", "coroutine"],
    "reductions": ["reduce", "reduce_scatter", "scan", "all_reduced", "barrier"],
    "movements": ["broadcast", "all_gather", "all_gather, uneven", "gather", "scatter"],
    "exchanges": ["alltoall_single", "alltoall_single, large", "alltoall, uneven", "stream",
                  "stream of the calculation"],
    "objects": ["all_gather_object", "all_gather_object, large", "broadcast_object_list",
                "gather_object", "scatter_object_list", "all_to_all_object"],
    "messages": ["ring", "ring, large", "ring, on a thread", "ring, asked for"],
    "batches": ["batch", "any source", "wait_any", "messages of objects"],
    "plans": ["plan of all_reduce", "plan of broadcast", "plan of barrier", "plan of all_gather"],
    "groups": ["in pairs", "new_group", "new_group that stays", "together"],
    "what is made of these": ["memory", "save", "save in the background", "arrays",
                              "data parallel"],
    "rpc": ["rpc", "rpc by mpi"],
    "torch's collectives": ["torch all_reduce", "torch async all_reduce", "torch future",
                            "torch broadcast", "torch reduce", "torch barrier"],
    "torch's movements": ["torch all_gather", "torch all_gather_into_tensor",
                          "torch reduce_scatter_tensor", "torch reduce_scatter", "torch gather",
                          "torch scatter"],
    "torch's exchanges": ["torch all_to_all_single", "torch all_to_all", "torch send",
                          "torch batch", "torch objects", "torch functional"],
    "torch's groups": ["torch monitored_barrier", "torch new_group"],
    "torch's trainings": ["torch DDP", "torch DataParallel", "torch FSDP2", "torch ZeRO"],
}  # fmt: skip
CALLED = ("rpc", "rpc by mpi")
"""Ways whose error is a `RemoteError`, of the rank that was called."""
AS_TEXT = ("torch future", "torch DDP")
"""Ways in which torch's C++ makes a text of the error."""
LAYOUTS = {"one node": {}, "nodes of two": {"HPCDIST_RANKS_PER_NODE": "2"}}

if find_site(os.environ).family != "openmpi":
    pytest.skip("only Open MPI goes on when a rank dies", allow_module_level=True)
pytestmark = pytest.mark.slow  # `test_recover` and `test_survive` have some of it


def run(folder, ways, env):
    """Run the ways one after the other; return what the ranks that were left have told of each."""
    nprocs = LEFT + len(ways) + len(ways) // 4
    done = subprocess.run(
        [*RUN, "-n", str(nprocs), str(PROGRAM), str(folder), *ways],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/checks'}"} | env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mpi4py.MPI.Exception" not in done.stdout
    lines = [re.sub(r"^\[\d+\] ", "", line) for line in done.stdout.splitlines()]
    told = [json.loads(line) for line in lines if line.startswith("{")]
    return {way: [each for each in told if each["way"] == way] for way in ways}, nprocs


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_ranks_that_are_left_hear_who_died_and_go_on(family, layout, tmp_path):
    if "torch" in family:
        pytest.importorskip("torch")
    ways = FAMILIES[family]
    found, left = run(tmp_path, ways, LAYOUTS[layout])
    for way in ways:
        left -= len(found[way][0]["victims"])
        assert len(found[way]) == left
        for each in found[way]:
            check(way, each)


def check(way, told):
    """Check what a rank was told in an operation in which others died."""
    dead = {*told["victims"]}
    assert dead <= {*told["lost"]}, told
    if way in CALLED:
        assert told["is_remote"], told  # of the dead, or of one that has heard of it before
    elif way in AS_TEXT:
        assert told["is_of_a_death"], told
    else:
        assert told["is_failure"], told
        assert {*told["named"]}, told
        assert {*told["named"]} <= dead, told
