"""The path of a call: which files of hpcdist a small `all_reduce` enters, from its call to its end.

Whoever wants to understand a call reads these files and no others, so there are to be few.
`docs/architecture.md` follows a call through them: the one compiled call, and the way without it.
What is made of several calls has a number of files that it does not exceed.
"""

import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import hpcdist as dist
from hpcdist import checkpoint
from hpcdist.optim import SGD
from hpcdist.ps import SparseTable
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
ALONE = [*RUN, *(f"transport/mpi/{name}.py" for name in ("context", "verbs", "collectives"))]
ON_ONE_NODE = [
    *RUN,
    "transport/mpi/intranode.py",
    "transport/mpi/agreement.py",
    "transport/call/call.py",
]
AFTER_SPINNING = {"transport/waiting/polling.py", "transport/mpi/decision.py"}
"""What a rank enters next that has to wait: it polls, or finds that all have come meanwhile."""
IN_A_WAIT = {"comm/hot.py", *AFTER_SPINNING}

HOT: list[str] = []
"""The compiled call is the public function."""
HANDED_OVER = [
    *("comm/hot.py", *FIRST[1:3], "transport/waiting/queue.py", FIRST[3]),
    *("transport/mpi/context.py", *ON_ONE_NODE[5:7]),
]
"""What a rank enters that has to wait in the compiled call."""


def files_entered(function):
    """Return the files of hpcdist whose functions run in `function()`, in the order of entry.

    `named_tuple.py` does what Python itself does for classes of `typing.NamedTuple`.
    """
    entered = {}

    def note(frame, event, _):
        if event == "call":
            entered[Path(frame.f_code.co_filename)] = None

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    own = [path.relative_to(PACKAGE).as_posix() for path in entered if PACKAGE in path.parents]
    return [path for path in own if path != "named_tuple.py"]


def paths(rank, size, world, call):
    """The paths of many calls; in turn, each rank is the last to come, which waits for nobody."""
    node = world.transport.context.node
    if size > 1 and not (node and node.can_pipeline):
        pytest.skip("the ranks do not share memory by the compiled kernel")
    found = []
    with switched_off():
        call()
    for last in [*range(size)] * 20:
        dist.barrier()
        time.sleep(5e-3 * (rank == last))
        found.append(files_entered(call))
    return found


@pytest.mark.parametrize("way", [nullcontext, switched_off])
def test_a_small_all_reduce_enters_few_files_and_a_rank_that_waits_one_more(way, rank, size, world):
    if way is nullcontext and size > 1:
        whole, then = HOT, [*HANDED_OVER, None]
    else:
        whole, then = (ALONE if size == 1 else ON_ONE_NODE), [None]
    x = np.ones(10)
    with way():
        found = paths(rank, size, world, lambda: dist.all_reduce(x))
    assert min(found, key=len) == whole
    assert len(whole) + 1 <= MOST
    for path in found:  # in a long wait more is done, for other ranks
        assert path[: len(whole)] == whole
        for entered, expected in zip(path[len(whole) :], then, strict=False):
            assert entered == expected if expected else entered in AFTER_SPINNING


# ---- what is made of several calls


def reshard(world, _):
    mesh, to = dist.ProcessMesh(world.ranks), [dist.Shard(1)]
    a = dist.shard_tensor(np.ones((8, 8)), mesh, [dist.Shard(0)])
    return lambda: dist.reshard(a, mesh, to)


class Model:
    def __init__(self):
        self.weight, self.bias = dist.Parameter(np.ones((4, 3))), dist.Parameter(np.ones(3))

    def named_parameters(self):
        return [("weight", self.weight), ("bias", self.bias)]

    def __call__(self, x):
        return x @ self.weight.data + self.bias.data


def training_step(_, __):
    model = Model()
    trained, x = dist.DataParallel(model), np.ones((2, 4))
    optimizer = SGD(trained.parameters(), 0.1)

    def step():
        error = trained(x)
        model.bias.grad, model.weight.grad = error.sum(0), x.T @ error
        optimizer.step()
        optimizer.clear_grad()

    return step


STATE = {"weight": np.ones((4, 3)), "bias": np.ones(3), "epoch": 3}


def save(_, folder):
    return lambda: checkpoint.save(STATE, folder)


def load(_, folder):
    checkpoint.save(STATE, folder)
    return lambda: checkpoint.load(STATE, folder)


def push(_, __):
    table, ids = SparseTable("path of a push", 4, optimizer="sgd"), np.arange(8)
    return lambda: table.push(ids, np.ones((8, 4), np.float32))


def pull(_, __):
    table, ids = SparseTable("path of a pull", 4, optimizer="sgd"), np.arange(8)
    return lambda: table.pull(ids)


@pytest.mark.parametrize(
    ("make", "most"),
    [(reshard, 21), (training_step, 12), (save, 39), (load, 44), (push, 32), (pull, 30)],
)
def test_what_is_made_of_several_calls_enters_few_files(make, most, rank, size, world, folder):
    if size == 1:
        pytest.skip("a rank alone has other ways")
    found = paths(rank, size, world, make(world, folder))
    shortest = min(([file for file in path if file not in IN_A_WAIT] for path in found), key=len)
    assert len(shortest) <= most, " ".join(shortest)
