"""Links that are not in use make room for others, and no call is lost by that."""

import threading
import time
from collections import defaultdict

import pytest

import hpcdist as dist
from hpcdist.comm.session import require_session, simulated_rank, standing_for
from hpcdist.rpc.agent import AGENT

PATIENCE_S = 60
GATE = threading.Event()
TOLD = defaultdict(list)


def links_of():
    return set(require_session()[AGENT]._board._all)


def pass_gate():
    return GATE.wait(PATIENCE_S)


@dist.rpc.inline
def tell(caller, number):
    TOLD[dist.get_rank(), caller].append(number)


def called_in_turn():
    dist.rpc.init_rpc(max_links=2)
    found = 0
    if dist.get_rank() == 0:
        GATE.clear()
        held = dist.rpc.rpc_async(1, pass_gate)
        (first,) = links_of()
        for _ in range(3):
            for rank in range(dist.get_world_size()):
                assert dist.rpc.rpc_sync(rank, dist.get_rank) == rank
        assert first in links_of()  # a call is under way there
        GATE.set()
        assert held.wait()
        until = time.monotonic() + PATIENCE_S
        while len(links_of()) > 3 and time.monotonic() < until:
            time.sleep(0.01)
        found = len(links_of())
    dist.barrier()
    dist.rpc.shutdown()
    return found


def test_links_that_are_not_in_use_are_closed_beyond_a_bound():
    assert dist.simulate(7, called_in_turn, timeout=PATIENCE_S)[0] <= 3


def call_everyone(turns):
    dist.rpc.init_rpc(max_links=1)
    rank, size = simulated_rank(), dist.get_world_size()
    problems = []

    def work(name):
        with standing_for(rank):
            try:
                for turn in range(turns):
                    to = (turn * 7 + len(name)) % size
                    told = dist.rpc.rpc_async(to, tell, (name, turn))
                    if turn % 3:
                        assert dist.rpc.rpc_sync(to, dist.get_rank) == to
                    if turn % 5 == 0:
                        told.wait(PATIENCE_S)
            except BaseException as error:
                problems.append(repr(error))

    names = [f"{dist.get_rank()}{'x' * n}" for n in range(3)]
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    dist.barrier()
    dist.rpc.shutdown()  # after this all have been told all
    told = [TOLD[to, name] for name in names for to in range(size)]
    assert all(each == sorted(each) for each in told)
    return sum(map(len, told))


@pytest.mark.parametrize("turns", [60, pytest.param(1500, marks=pytest.mark.thorough)])
def test_calls_from_all_sides_lose_nothing_and_keep_their_order(turns):
    TOLD.clear()
    assert dist.simulate(4, call_everyone, turns, timeout=2 * PATIENCE_S) == [3 * turns] * 4


def test_a_bound_is_a_number():
    def program():
        with pytest.raises(dist.UsageError, match="max_links must be an integer of at least 1"):
            dist.rpc.init_rpc(max_links=0)

    dist.simulate(1, program)
