"""The path of a call: which files of hpcdist a small `all_reduce` enters, from its call to its end.

Whoever wants to understand a call reads these files and no others, so there are to be few.
`docs/architecture.md` follows a call through them: the one compiled call, and the way without it.
"""

import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.transport.shm.hot import switched_off

PACKAGE = Path(dist.__file__).parent
MOST = 9
FIRST = [
    "comm/collectives.py",
    "comm/dispatch.py",
    "comm/describe.py",
    "transport/mpi/transport.py",
]
RUN = [*FIRST, "transport/waiting/queue.py"]
ALONE = [*RUN, "transport/mpi/context.py", "transport/mpi/collectives.py"]
ON_ONE_NODE = [
    *RUN,
    "transport/mpi/intranode.py",
    "transport/mpi/agreement.py",
    "transport/call/call.py",
]
AFTER_SPINNING = {"transport/waiting/polling.py", "transport/mpi/decision.py"}
"""What a rank enters next that has to wait: it polls, or finds that all have come meanwhile."""

HOT = ["comm/collectives.py"]
HANDED_OVER = [
    *("comm/hot.py", *FIRST[1:3], "transport/waiting/queue.py", FIRST[3]),
    *("transport/mpi/context.py", *ON_ONE_NODE[5:7]),
]
"""What a rank enters that has to wait in the compiled call."""


def files_entered(function):
    """Return the files of hpcdist whose functions run in `function()`, in the order of entry."""
    entered = {}

    def note(frame, event, _):
        if event == "call":
            entered[Path(frame.f_code.co_filename)] = None

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return [path.relative_to(PACKAGE).as_posix() for path in entered if PACKAGE in path.parents]


def paths(rank, size, world):
    """The paths of many calls; in turn, each rank is the last to come, which waits for nobody."""
    node = world.transport.context.node
    if size > 1 and not (node and node.can_pipeline):
        pytest.skip("the ranks do not share memory by the compiled kernel")
    x, found = np.ones(10), []
    with switched_off():
        dist.all_reduce(x)
    for last in [*range(size)] * 20:
        dist.barrier()
        time.sleep(5e-3 * (rank == last))
        found.append(files_entered(lambda: dist.all_reduce(x)))
    return found


@pytest.mark.parametrize("way", [nullcontext, switched_off])
def test_a_small_all_reduce_enters_few_files_and_a_rank_that_waits_one_more(way, rank, size, world):
    if way is nullcontext and size > 1:
        whole, then = HOT, [*HANDED_OVER, None]
    else:
        whole, then = (ALONE if size == 1 else ON_ONE_NODE), [None]
    with way():
        found = paths(rank, size, world)
    assert min(found, key=len) == whole
    assert len(whole) + 1 <= MOST
    for path in found:  # in a long wait more is done, for other ranks
        assert path[: len(whole)] == whole
        for entered, expected in zip(path[len(whole) :], then, strict=False):
            assert entered == expected if expected else entered in AFTER_SPINNING
