"""Ranks do not come out of `init_rpc` at the same moment: the first ones call the last ones."""

import time

import hpcdist as dist
from hpcdist.rpc import start
from hpcdist.rpc.agent import Agent


def who():
    return dist.rpc.get_current_worker_info().rank


def test_a_call_that_comes_during_init_rpc_waits_for_its_end(monkeypatch):
    def slow(setup):
        agent = Agent(setup)
        if setup.me == 0:
            time.sleep(0.5)  # the others are on their way
        return agent

    def run():
        dist.rpc.init_rpc()
        assert dist.rpc.rpc_sync(0, who) == 0
        dist.rpc.shutdown()

    monkeypatch.setattr(start, "Agent", slow)
    dist.simulate(3, run, timeout=60)
