"""Asynchronous operations, plans, and waiting for several of them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.testing.contract.base import (
    Contract,
)


class Works(Contract):
    """Asynchronous operations, plans, and waiting for several of them."""

    def test_asynchronous_operations_end_in_order(self) -> None:
        def check() -> None:
            size = dist.get_world_size()
            arrays = [np.full(1000, float(each)) for each in range(10)]
            works = [dist.all_reduce(x, sync_op=False) for x in arrays]
            dist.all_reduce(arrays[0])  # a blocking one queues behind
            gathered: list[Any] = []
            dist.all_gather_object(gathered, 1, sync_op=False).wait()
            assert all(work.is_completed() for work in works)
            for each, x in enumerate(arrays[1:], 1):
                assert (x == each * size).all()
            assert len(gathered) == size

        self.run(check)

    def test_work_makes_progress_while_the_caller_computes(self) -> None:
        def check() -> None:
            x = np.ones(100_000)
            work = dist.all_reduce(x, sync_op=False)
            deadline = time.monotonic() + 10
            while not work.is_completed() and time.monotonic() < deadline:
                time.sleep(0.001)
            assert work.is_completed()
            assert (x == dist.get_world_size()).all()

        self.run(check)

    def test_ranks_may_mix_blocking_and_asynchronous_calls(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            for each in range(6):
                x = np.array([1])
                dist.all_reduce(x, sync_op=(rank + each) % 2 == 0).wait()
                assert x[0] == size

        self.run(check)

    def test_plans_start_again_on_the_same_arrays(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            for x in (np.ones(3), np.ones((3, 3)).T, np.ones(3, "f2")):
                plan = dist.plan_all_reduce(x)
                for _ in range(2):
                    plan.start().wait()
                assert (x == size**2).all()
                plan.free()
                with pytest.raises(dist.UsageError, match="freed"):
                    plan.start()
            y = np.array([rank])
            plan = dist.plan_broadcast(y, size - 1)
            plan.start().wait()
            assert y[0] == size - 1
            plan.free()

        self.run(check)

    def test_all_works_are_waited_for_together_and_any_of_them_alone(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            arrays = [np.empty(1, int) for _ in range(4)]
            incoming = [dist.irecv(x, (rank - 1) % size, tag=t) for t, x in enumerate(arrays)]
            assert dist.wait_all([]) is True
            outgoing = [dist.isend(np.array([tag]), (rank + 1) % size, tag=tag) for tag in (3, 1)]
            arrived = []
            for _ in outgoing:
                at, work = dist.wait_any(incoming)
                assert work is incoming.pop(at)
                arrived.append(int(arrays.pop(at)[0]))
            assert sorted(arrived) == [1, 3]
            dist.barrier()
            outgoing += [dist.isend(np.array([tag]), (rank + 1) % size, tag=tag) for tag in (0, 2)]
            x = np.ones(3)
            works = [*incoming, *outgoing, dist.all_reduce(x, sync_op=False)]
            assert dist.wait_all(works, timeout=60) is True
            assert [int(each[0]) for each in arrays] == [0, 2]
            assert (x == size).all()

        self.run(check)

    def test_waiting_for_works_that_do_not_end_is_limited(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            x = np.empty(1, int)
            work = dist.irecv(x, (rank - 1) % size, tag=5)
            for wait in (dist.wait_all, dist.wait_any):
                with pytest.raises(dist.CollectiveTimeout, match=r"within 0\.01 s"):
                    wait([work], timeout=0.01)
            dist.barrier()
            dist.send(np.array([rank]), (rank + 1) % size, tag=5)
            assert dist.wait_any([work])[0] == 0
            assert x[0] == (rank - 1) % size
            with pytest.raises(dist.UsageError, match="no works"):
                dist.wait_any([])

        self.run(check)

    def test_wait_all_ends_everything_and_raises_what_went_wrong(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            wrong, x = np.ones(2 + (rank == size - 1)), np.ones(3)
            works = [dist.all_reduce(each, sync_op=False) for each in (wrong, x)]
            if size == 1:
                dist.wait_all(works)
                return
            with pytest.raises(dist.MismatchError, match="rank"):
                dist.wait_all(works)
            assert all(work.is_completed() for work in works)
            assert (x == size).all()
            with pytest.raises(dist.MismatchError, match="rank"):
                dist.wait_any(works[:1])

        self.run(check)

    def test_works_are_awaited_while_the_event_loop_goes_on(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()

            async def relay() -> list[int]:
                """Receive from the rank below what that rank sends when it has ticked."""
                ticks, x = 0, np.empty(1, int)
                receive = dist.irecv(x, (rank - 1) % size)

                async def tick() -> None:
                    nonlocal ticks
                    for _ in range(20):
                        await asyncio.sleep(0)
                        ticks += 1
                    await dist.isend(np.array([rank]), (rank + 1) % size)

                got, _ = await asyncio.gather(receive, tick())
                assert got is receive
                gathered: list[Any] = []
                await dist.all_gather_object(gathered, ticks, sync_op=False)
                assert gathered == [20] * size
                return [got.source, int(x[0])]

            assert asyncio.run(relay()) == [(rank - 1) % size] * 2

        self.run(check)

    def test_a_coroutine_that_is_cancelled_leaves_the_operation_under_way(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            x, wrong = np.empty(1, int), np.ones(2 + (rank == size - 1))

            async def give_up() -> dist.Work:
                receive = dist.irecv(x, (rank - 1) % size, tag=9)
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(receive, 0.02)
                if size > 1:
                    with pytest.raises(dist.MismatchError, match="rank"):
                        await dist.all_reduce(wrong, sync_op=False)
                return receive

            receive = asyncio.run(give_up())
            dist.barrier()
            dist.send(np.array([rank]), (rank + 1) % size, tag=9)
            receive.wait()
            assert x[0] == (rank - 1) % size

        self.run(check)
