"""Ranks that are killed while they run tasks, have objects, or are waited for."""

import threading
import time
from concurrent import futures

import pytest
import rpc_processes
from rpc_processes import as_rank_0, others

import hpcdist as dist
from hpcdist.comm.session import simulated_rank, standing_for
from hpcdist.rpc.agent import require_agent

PATIENCE_S = 60


def raised(kind, function, *args, **options):
    with pytest.raises(kind) as caught:
        function(*args, **options)
    return caught.value


def test_tasks_of_a_rank_that_is_killed_fail_and_the_others_run_the_rest():
    with others(2) as ranks:

        def run():
            executor = dist.rpc.Executor(ranks=[1, 2])
            held = executor.submit(rpc_processes.sleep_for_ever)
            served = executor.submit(rpc_processes.pid).result(PATIENCE_S)
            (lost,) = [rank for rank, process in ranks.processes.items() if process.pid != served]
            ranks.kill(lost)
            error = held.exception(PATIENCE_S)
            assert isinstance(error, dist.RemoteError)
            assert f"rank {lost}" in str(error)
            found = list(executor.map(rpc_processes.add, range(20), range(20)))
            assert found == [2 * n for n in range(20)]
            waiting = [executor.submit(rpc_processes.sleep_for_ever) for _ in range(3)]
            while not waiting[0].running():
                time.sleep(0.01)
            ranks.kill(3 - lost)
            first, *rest = [each.exception(PATIENCE_S) for each in waiting]
            assert isinstance(first, dist.RemoteError)
            for error in rest:
                assert isinstance(error, futures.BrokenExecutor)
                assert f"rank {3 - lost}" in str(error)
            raised(futures.BrokenExecutor, executor.submit, rpc_processes.pid)
            executor.shutdown()

        as_rank_0(ranks, run)


def test_an_actor_goes_with_its_rank():
    with others(1) as ranks:

        def run():
            place = dist.rpc.remote(1, rpc_processes.Place)
            assert place.pid() == ranks.processes[1].pid
            pending = place.sleep.rpc_async()
            ranks.kill(1)
            assert pending.exception(PATIENCE_S).rank == 1
            assert raised(dist.RemoteError, place.pid).rank == 1
            raised(dist.RemoteError, dist.rpc.remote, 1, rpc_processes.Place)

        as_rank_0(ranks, run)


def test_a_rank_that_serves_hears_of_one_that_is_killed():
    with others(2) as ranks:

        def run():
            serving = dist.rpc.rpc_async(1, rpc_processes.serve_others)
            while not dist.rpc.rpc_sync(1, rpc_processes.has_served):
                time.sleep(0.01)
            require_agent().done.settle(lambda: None)
            ranks.kill(2)
            assert serving.wait(PATIENCE_S) == 2

        as_rank_0(ranks, run)


def test_a_broadcast_to_a_rank_that_is_killed_runs_on_the_others_and_names_it():
    with others(2) as ranks:

        def run():
            sleeping = dist.rpc.rpc_async(1, rpc_processes.sleep_for_ever)
            ranks.kill(1)
            sleeping.exception(PATIENCE_S)
            error = raised(dist.RemoteError, dist.rpc.broadcast, rpc_processes.count)
            assert error.rank == 1
            assert "has not answered" in str(error)
            assert dist.rpc.rpc_sync(2, rpc_processes.count) == 2
            assert dist.rpc.rpc_sync(0, rpc_processes.count) == 2

        as_rank_0(ranks, run)


def test_many_threads_lose_a_rank_at_once():
    with others(1) as ranks:

        def run():
            rank = simulated_rank()
            found = []

            def call():
                with standing_for(rank):
                    while True:
                        try:
                            dist.rpc.rpc_sync(1, rpc_processes.add, (1, 2))
                        except dist.RemoteError as error:
                            found.append(error.rank)
                            return

            threads = [threading.Thread(target=call) for _ in range(8)]
            for thread in threads:
                thread.start()
            time.sleep(0.2)
            ranks.kill(1)
            for thread in threads:
                thread.join()
            assert found == [1] * 8

        as_rank_0(ranks, run)
