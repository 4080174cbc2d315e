"""How the ranks of a node come to share memory, when one of them dies meanwhile."""

import os
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from hpcdist.config import Config
from hpcdist.errors import UsageError
from hpcdist.transport.mpi.share_node import open_node
from hpcdist.transport.mpi.site import make_site
from hpcdist.transport.shm.heap import Heap


class Died(MPI.Exception):
    """What MPI raises where another rank has died."""


def fail(*_):
    raise Died(MPI.ERR_OTHER)


def copy(data, into):
    into[...] = data.reshape(into.shape)


STEPS = {
    "when ranks tell each other what they have": {"allgather": fail, "Allgather": fail},
    "when ranks tell each other that they can": {
        "allgather": lambda offer: [offer],
        "Allgather": copy,
        "Allreduce": fail,
    },
    "when the first tells where the memory of a group is": {"Bcast": fail},
    "when ranks tell each other that they can, of a group": {
        "Bcast": lambda _: None,
        "Allreduce": fail,
    },
}


@pytest.mark.parametrize("step", STEPS)
def test_a_death_leaves_no_descriptor_open(step):
    heap = Heap(1 << 20)
    heap.open()  # which stays
    site = SimpleNamespace(heap=heap, config=Config(), deaths=None)
    parent = SimpleNamespace(ranks=[0], heaps=[None], pids=[os.getpid()], rights=0)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(Died):
        open_node(
            SimpleNamespace(rank=0, size=1, **STEPS[step]),
            [0],
            site,
            1.0,
            lambda: None,
            parent if "Bcast" in STEPS[step] else None,
        )
    assert os.listdir("/proc/self/fd") == before


def test_memory_of_less_than_a_page_is_refused_by_its_variable():
    with pytest.raises(UsageError, match=r"HPCDIST_SHARED_HEAP_MB=0\.001 is less than a page"):
        make_site(Config(shared_heap_mb=0.001), [0], None, None)
