"""Messages from one rank to another."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.testing.contract.base import (
    Contract,
)
from hpcdist.testing.message_programs import PROGRAMS, SIZES


class Messages(Contract):
    """Messages from one rank to another."""

    def test_a_ring_of_blocking_sends_does_not_lock(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            for count in (1, 200_000):
                got = np.empty(count)
                dist.send(np.full(count, float(rank)), (rank + 1) % size)
                dist.recv(got, (rank - 1) % size)
                assert (got == (rank - 1) % size).all()

        self.run(check)

    def test_messages_of_one_sender_keep_their_order(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            outgoing = [dist.isend(np.array([each]), (rank + 1) % size) for each in range(8)]
            arrays = [np.empty(1, int) for _ in range(8)]
            incoming = [dist.irecv(x, (rank - 1) % size) for x in arrays]
            for work in reversed(incoming + outgoing):
                work.wait()
            assert [int(x[0]) for x in arrays] == list(range(8))

        self.run(check)

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("program", PROGRAMS)
    def test_a_send_waits_for_no_receive_that_comes_later(self, program: str, size: str) -> None:
        self.run(lambda: PROGRAMS[program](SIZES[size]))

    def test_a_receive_that_timed_out_says_so_each_time_and_takes_no_message(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            group = dist.new_group(timeout=1)
            x = np.zeros(3)
            late = dist.irecv(x, (rank + 1) % size, group)
            for _ in range(2):
                with pytest.raises(dist.CollectiveTimeout, match="got no message"):
                    late.wait()
            dist.barrier()
            work = dist.isend(np.ones(3), (rank - 1) % size, group)
            dist.recv(np.zeros(3), (rank + 1) % size, group)
            work.wait()
            assert (x == 0).all()
            dist.barrier()

        self.run(check)

    @pytest.mark.parametrize("way", ["wait_any", "wait_all", "await"])
    def test_several_works_are_told_what_one_alone_is_told(self, way: str) -> None:
        async def awaited(work: Any) -> None:
            await work

        wait: Callable[[Any], Any] = {
            "wait_any": lambda work: dist.wait_any([work]),
            "wait_all": lambda work: dist.wait_all([work], timeout=100),
            "await": lambda work: asyncio.run(awaited(work)),
        }[way]

        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            if size == 1:
                return
            if rank == 0:
                dist.send(np.ones(3, "i4"), 1)
            if rank == 1:
                work = dist.irecv(np.ones(3), 0)
                with pytest.raises(dist.MismatchError, match="rank 0 sent"):
                    wait(work)
            dist.barrier()
            if rank == 1:
                dist.recv(np.ones(3, "i4"), 0)

        self.run(check)

    def test_a_value_that_cannot_be_read_is_called_off_on_all_ranks(self) -> None:
        def check() -> None:
            endless: list[Any] = []
            endless.append(endless)
            first = dist.get_rank() == 0
            gc.collect()  # what is found to be garbage at the end of the stack could not be ended
            with pytest.raises((dist.UsageError, dist.RemoteError), match="cannot be read"):
                dist.all_reduced(endless if first else [1])

        self.run(check)

    def test_tags_choose_messages_and_any_source_tells_the_sender(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            works = [dist.isend(np.array([rank]), 0, tag=tag) for tag in (1, 2)]
            if rank == 0:
                for tag in (2, 1):
                    seen = set()
                    for _ in range(size):
                        x = np.empty(1, int)
                        work = dist.recv(x, None, tag=tag)
                        assert work.source == x[0]
                        seen.add(work.source)
                    assert seen == set(range(size))
            for work in works:
                work.wait()

        self.run(check)

    def test_a_message_of_another_size_or_dtype_is_an_error_and_stays(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            for to in (0, 1):  # to oneself, and round the ring
                source = (rank - to) % size
                work = dist.isend(np.arange(4.0), (rank + to) % size)
                for wrong in (np.full(3, 7.0), np.full(5, 7.0), np.full(4, 7)):
                    with pytest.raises(dist.MismatchError, match=f"rank {source} sent"):
                        dist.recv(wrong, source)
                    assert (wrong == 7).all()
                right = np.empty(4)
                dist.recv(right, source)
                work.wait()
                assert right.tolist() == [0, 1, 2, 3]
                dist.barrier()

        self.run(check)

    @pytest.mark.parametrize("pause", [0, 0.2])
    def test_messages_match_by_their_dtype_whatever_the_timing(self, pause: float) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            if rank % 2 == 0 and rank + 1 < size:
                for dtype in ("f8", "i4", "f8"):
                    dist.send(np.full(3, 7, dtype), rank + 1)
                    time.sleep(pause)
            elif rank % 2:
                for dtype in ("i4", "f8", "f8"):
                    got = np.zeros(3, dtype)
                    dist.recv(got, rank - 1)
                    assert (got == 7).all()
            dist.barrier()

        self.run(check)

    def test_a_sender_that_waits_for_a_third_rank_may_still_send_what_matches(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            got = np.zeros(1, "i4")
            if size < 3:
                return
            if rank == 0:
                dist.send(np.ones(1), 1)
                dist.recv(got, 2)
                dist.send(got, 1)
            elif rank == 1:
                dist.recv(got, 0)
                assert got[0] == 7
                dist.recv(np.zeros(1), 0)
            elif rank == 2:
                time.sleep(1)
                dist.send(np.full(1, 7, "i4"), 0)
            dist.barrier()

        self.run(check)

    @pytest.mark.parametrize("sender_goes_on_to", ["barrier", "recv", "all_reduce", "wait"])
    def test_a_message_of_another_dtype_only_is_an_error_that_names_both(
        self, sender_goes_on_to: str
    ) -> None:
        def go_on(peer: int) -> None:
            if sender_goes_on_to == "recv":
                dist.recv(np.empty(1), peer)
            elif sender_goes_on_to == "all_reduce":
                dist.all_reduce(np.ones(1))
            elif sender_goes_on_to == "wait":
                dist.all_reduce(np.ones(1), sync_op=False).wait()
            else:
                dist.barrier()

        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            if size == 1:
                return
            if rank == 0:
                dist.send(np.ones(4), 1)
            if rank == 1:
                with pytest.raises(dist.MismatchError) as caught:
                    dist.recv(np.ones(4, "i4"), 0)
                for words in ("rank 0 sent", "float64", "rank 1 receives", "int32"):
                    assert words in str(caught.value)
                dist.recv(np.empty(4), 0)
                if sender_goes_on_to == "recv":
                    dist.send(np.ones(1), 0)
            if rank != 1 or sender_goes_on_to != "recv":
                go_on(1) if rank == 0 or sender_goes_on_to != "recv" else None

        self.run(check)

    def test_what_goes_to_no_rank_is_gone_and_nothing_comes_from_there(self) -> None:
        def check() -> None:
            nobody, x = dist.PROC_NULL, np.full(3, 7.0)
            objects: list[Any] = ["old"]
            works = [
                dist.send(x, nobody),
                dist.recv(x, nobody),
                dist.isend(x, np.int64(nobody)),
                dist.irecv(x, nobody, tag=3),
                dist.stream.recv(x, nobody),
                dist.send_object_list(objects, nobody),
                dist.recv_object_list(objects, nobody),
                dist.recv_object_list(objects, src_in_group=nobody),
            ]
            for work in works:
                assert work.is_completed()
                work.wait()
            assert works[1].source == nobody
            assert (x == 7).all()
            assert objects == ["old"]
            with pytest.raises(dist.UsageError, match="tag"):
                dist.send(x, nobody, tag=-1)
            with pytest.raises(dist.UsageError):
                dist.recv("no array", nobody)  # type: ignore[arg-type]

        self.run(check)

    def test_ranks_at_the_ends_of_a_line_have_a_neighbour_that_is_no_rank(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            left = rank - 1 if rank > 0 else dist.PROC_NULL
            right = rank + 1 if rank + 1 < size else dist.PROC_NULL
            halo = np.full(2, -1)
            works = [
                dist.irecv(halo[:1], left),
                dist.irecv(halo[1:], right),
                dist.isend(np.array([rank]), left),
                dist.isend(np.array([rank]), right),
            ]
            for work in works:
                work.wait()
            assert halo.tolist() == [rank - 1, rank + 1 if rank + 1 < size else -1]
            assert (works[1].source == dist.PROC_NULL) == (right == dist.PROC_NULL)

        self.run(check)
