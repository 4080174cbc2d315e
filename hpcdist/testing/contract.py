"""What every transport must do, as tests.

A subclass implements `run`; every check is a function that runs on each rank, through the
public API. Checks hold at any number of ranks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.testing.message_programs import PROGRAMS, SIZES

OPS: dict[str, Callable[..., Any]] = {
    "SUM": np.sum,
    "PROD": np.prod,
    "MAX": np.max,
    "MIN": np.min,
}
NUMBERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]


def contribution(rank: int, dtype: str, shape: tuple[int, ...] = (3, 4)) -> Any:
    """Return an array that differs between ranks and is exact in every dtype."""
    count = int(np.prod(shape))
    return (np.arange(count).reshape(shape) % 3 + rank + 1).astype(dtype)


class TransportContract:
    """Subclass this and implement `run`."""

    def run(self, check: Callable[[], Any]) -> list[Any]:
        """Call `check` once per rank and return the results this process can see."""
        raise NotImplementedError

    # ---- reductions

    @pytest.mark.parametrize("dtype", NUMBERS + FLOATS)
    @pytest.mark.parametrize("op", OPS)
    @pytest.mark.parametrize("sync_op", [True, False])
    def test_all_reduce_gives_what_numpy_gives(self, dtype: str, op: str, sync_op: bool) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            x = contribution(rank, dtype)
            work = dist.all_reduce(x, dist.ReduceOp[op], sync_op=sync_op)
            work.wait()
            exact = np.stack([contribution(each, "float64") for each in range(size)])
            with np.errstate(over="ignore"):
                expected = OPS[op](exact, axis=0)
                if dtype in NUMBERS:
                    expected = expected.astype("int64")
                np.testing.assert_array_equal(x, expected.astype(dtype))

        self.run(check)

    @pytest.mark.parametrize("dtype", COMPLEX)
    def test_complex_numbers_sum_multiply_and_average(self, dtype: str) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            inputs = [contribution(each, dtype) * (1 + 2j) for each in range(size)]
            for op, expected in [
                (dist.ReduceOp.SUM, sum(inputs)),
                (dist.ReduceOp.PROD, np.prod(inputs, axis=0)),
                (dist.ReduceOp.AVG, sum(inputs) / size),
            ]:
                x = inputs[rank].copy()
                dist.all_reduce(x, op)
                np.testing.assert_allclose(x, expected, rtol=1e-6)

        self.run(check)

    def test_bool_sum_is_or_and_product_is_and(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            for op, expected in [
                (dist.ReduceOp.SUM, [True, True, False]),
                (dist.ReduceOp.MAX, [True, True, False]),
                (dist.ReduceOp.PROD, [True, size == 1, False]),
                (dist.ReduceOp.MIN, [True, size == 1, False]),
            ]:
                x = np.array([True, rank == 0, False])
                dist.all_reduce(x, op)
                assert x.tolist() == expected, op

        self.run(check)

    def test_average_of_floats_is_their_mean(self) -> None:
        def check() -> None:
            size = dist.get_world_size()
            for dtype in FLOATS:
                x = contribution(dist.get_rank(), dtype)
                dist.all_reduce(x, dist.ReduceOp.AVG)
                inputs = [contribution(each, "float64") for each in range(size)]
                np.testing.assert_allclose(x, np.mean(inputs, axis=0), rtol=1e-3)

        self.run(check)

    def test_small_floats_are_accumulated_wide_and_rounded_once(self) -> None:
        def check() -> None:
            import ml_dtypes

            rank, size = dist.get_rank(), dist.get_world_size()
            for dtype in (np.float16, ml_dtypes.bfloat16):
                x = np.full(5, 1.0 if rank == 0 else 1 / 512, dtype)
                dist.all_reduce(x)
                expected = np.float32(1) + np.float32(size - 1) * np.float32(dtype(1 / 512))
                assert (x == np.array(expected).astype(dtype)).all()

        self.run(check)

    def test_extrema_propagate_nan_and_order_zeros(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            for dtype in FLOATS:
                x = np.array([np.nan if rank == size - 1 else 1, -0.0 if rank else 0.0, -rank])
                for op, zero_sign, least in [("MAX", False, 0), ("MIN", size > 1, 1 - size)]:
                    y = x.astype(dtype)
                    dist.all_reduce(y, dist.ReduceOp[op])
                    assert np.isnan(y[0])
                    assert np.signbit(y[1]) == zero_sign
                    assert y[2] == least

        self.run(check)

    def test_reduce_changes_only_the_destination(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            for dst in range(size):
                x = np.full(4, rank + 1.0)
                dist.reduce(x, dst)
                expected = size * (size + 1) / 2 if rank == dst else rank + 1.0
                assert x.tolist() == [expected] * 4

        self.run(check)

    def test_reduce_scatter_takes_a_list_or_an_array(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            blocks = [np.full((2, 2), 10 * rank + each, "f4") for each in range(size)]
            expected = sum(10 * each + rank for each in range(size))
            for given in (blocks, np.concatenate(blocks)):
                out = np.empty((2, 2), "f4")
                dist.reduce_scatter(out, given)
                assert (out == expected).all()

        self.run(check)

    def test_scans_reduce_over_the_ranks_before(self) -> None:
        def check() -> None:
            rank = dist.get_rank()
            x, y = np.array([rank + 1]), np.array([rank + 1])
            dist.scan(x)
            dist.exscan(y)
            assert x[0] == (rank + 1) * (rank + 2) // 2
            assert y[0] == (rank * (rank + 1) // 2 if rank else 1)

        self.run(check)

    # ---- moving data

    @pytest.mark.parametrize(
        "layout",
        [
            lambda: np.empty((4, 6), "f8"),
            lambda: np.empty((4, 6), "f8", order="F"),
            lambda: np.empty((8, 12), "f8")[::2, ::2],
            lambda: np.empty((6, 4), "f8").T,
            lambda: np.empty((), "f8"),
            lambda: np.empty((0, 3), "f8"),
            lambda: np.empty((4, 6), ">f8"),
            lambda: np.empty((4, 6), "f8")[::-1],
        ],
        ids=["C", "F", "strided", "transposed", "0-d", "empty", "big-endian", "reversed"],
    )
    def test_any_layout_is_broadcast_and_reduced(self, layout: Callable[[], Any]) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            x = layout()
            for src in range(size):
                x[...] = rank
                dist.broadcast(x, src)
                assert (x == src).all()
            x[...] = rank + 1
            dist.all_reduce(x)
            assert (x == size * (size + 1) // 2).all()

        self.run(check)

    def test_every_fixed_size_dtype_moves(self) -> None:
        def check() -> None:
            import ml_dtypes

            rank = dist.get_rank()
            record: Any = np.dtype([("id", "i4"), ("x", "f8", (2,))])
            names: list[Any] = ["?", *NUMBERS, *FLOATS, *COMPLEX, "M8[ns]", "S5", "U3", record]
            for dtype in [
                *[np.dtype(name) for name in names],
                ml_dtypes.bfloat16,
                ml_dtypes.float8_e4m3fn,
            ]:
                x = np.zeros(3, dtype)
                x.view("u1")[:] = 1 if x.dtype == bool else rank + 1
                gathered: list[Any] = []
                dist.all_gather(gathered, x)
                for each, got in enumerate(gathered):
                    assert got.dtype == x.dtype
                    assert (got.view("u1") == (1 if x.dtype == bool else each + 1)).all()

        self.run(check)

    def test_all_gather_fills_an_empty_list_with_any_shapes(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            for shape_of in (lambda each: (each, 2), lambda each: (2, 2), lambda each: ()):
                gathered: list[Any] = []
                dist.all_gather(gathered, np.full(shape_of(rank), rank))
                assert [x.shape for x in gathered] == [shape_of(each) for each in range(size)]
                assert all((x == each).all() for each, x in enumerate(gathered))

        self.run(check)

    def test_all_gather_writes_into_given_arrays(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            whole = np.empty((size, 3))
            for target in (
                [np.empty(3) for _ in range(size)],
                list(whole),
                [np.empty(6)[::2] for _ in range(size)],
            ):
                dist.all_gather(target, np.full(3, float(rank)))
                assert [x.tolist() for x in target] == [[float(each)] * 3 for each in range(size)]
            dist.all_gather_into_tensor(whole, whole[rank])
            assert whole[:, 0].tolist() == list(range(size))

        self.run(check)

    def test_gather_and_scatter_are_inverse(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            for root in range(size):
                gathered: Any = [] if rank == root else None
                dist.gather(np.full(rank + 1, rank), gathered, root)
                if rank == root:
                    assert [x.tolist() for x in gathered] == [[e] * (e + 1) for e in range(size)]
                out = np.empty(2)
                blocks = [np.full(2, 10.0 * each) for each in range(size)]
                dist.scatter(out, blocks if rank == root else None, root)
                assert out.tolist() == [10.0 * rank] * 2

        self.run(check)

    def test_alltoall_moves_blocks_of_any_shape(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            even: list[Any] = []
            dist.alltoall(even, [np.array([rank, each]) for each in range(size)])
            assert [x.tolist() for x in even] == [[each, rank] for each in range(size)]
            sent = [np.full((each + 1, rank + 1), rank) for each in range(size)]
            got = [np.empty((rank + 1, each + 1), int) for each in range(size)]
            dist.alltoall(got, sent)
            assert all((x == each).all() for each, x in enumerate(got))

        self.run(check)

    def test_alltoall_single_takes_split_sizes_by_keyword(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            given = np.repeat(np.arange(size), range(1, size + 1)) * 100 + rank
            out = np.empty(size * (rank + 1), int)
            dist.alltoall_single(
                out,
                given,
                in_split_sizes=list(range(1, size + 1)),
                out_split_sizes=[rank + 1] * size,
            )
            assert out.tolist() == [100 * rank + e for e in range(size) for _ in range(rank + 1)]

        self.run(check)

    # ---- messages

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

    @pytest.mark.parametrize("pause", [0, 1])
    def test_messages_match_by_their_dtype_whatever_the_timing(self, pause: int) -> None:
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
                dist.recv("no array", nobody)

        self.run(check)

    def test_ranks_at_the_ends_of_a_line_have_a_neighbour_that_is_no_rank(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            left = rank - 1 if rank > 0 else dist.PROC_NULL
            right = rank + 1 if rank + 1 < size else dist.PROC_NULL
            halo = np.full(2, -1)
            ops = [
                dist.P2POp(dist.irecv, halo[:1], left),
                dist.P2POp(dist.irecv, halo[1:], right),
                dist.P2POp(dist.isend, np.array([rank]), left),
                dist.P2POp(dist.isend, np.array([rank]), right),
            ]
            works = dist.batch_isend_irecv(ops)
            for work in works:
                work.wait()
            assert halo.tolist() == [rank - 1, rank + 1 if rank + 1 < size else -1]
            assert (works[1].source == dist.PROC_NULL) == (right == dist.PROC_NULL)

        self.run(check)

    # ---- objects

    def test_objects_of_any_size_are_gathered(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            for count in (3, 100_000):
                gathered: list[Any] = []
                dist.all_gather_object(gathered, {"rank": rank, "x": np.full(count, rank)})
                assert [each["rank"] for each in gathered] == list(range(size))
                assert all((each["x"] == r).all() for r, each in enumerate(gathered))
                gathered[rank]["x"][0] = -1  # what arrives is writable and nobody else's

        self.run(check)

    @pytest.mark.parametrize("count", [1, 50_000])
    def test_objects_go_from_and_to_one_rank(self, count: int) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            for root in range(size):
                shared: list[Any] = [None, None]
                if rank == root:
                    shared = [np.full(count, root), "text"]
                dist.broadcast_object_list(shared, root)
                assert (shared[0] == root).all()
                assert shared[1] == "text"
                out: list[Any] = ["anything", "longer"]
                given = [np.full(count, each) for each in range(size)]
                dist.scatter_object_list(out, given if rank == root else None, root)
                assert len(out) == 1
                assert (out[0] == rank).all()
                gathered: Any = [None] * size if rank == root else None
                dist.gather_object(np.full(count, rank), gathered, root)
                if rank == root:
                    assert all((x == each).all() for each, x in enumerate(gathered))

        self.run(check)

    @pytest.mark.parametrize("count", [1, 50_000])
    def test_objects_are_exchanged_between_all(self, count: int) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            out: list[Any] = []
            given = [(rank, each, np.full(count, each)) for each in range(size)]
            dist.all_to_all_object(out, given)
            assert [each[:2] for each in out] == [(each, rank) for each in range(size)]
            assert all((each[2] == rank).all() for each in out)
            work = dist.send_object_list([rank, np.full(count, rank)], (rank + 1) % size)
            got: list[Any] = [None, None]
            dist.recv_object_list(got, (rank - 1) % size)
            work.wait()
            assert got[0] == (rank - 1) % size

        self.run(check)

    # ---- asynchronous operations, plans

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

    # ---- groups

    def test_groups_overlap_and_agree_on_their_ids(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            parts = {range((size + 1) // 2), range(size // 2, size)}
            mine = [dist.new_group(part) for part in sorted(parts, key=min) if rank in part]
            ids: list[Any] = []
            dist.all_gather_object(ids, [(group.ranks, group.id) for group in mine])
            assert len({str(each) for pairs in ids for each in pairs}) == len(parts)
            for group in mine:
                x = np.array([1])
                dist.all_reduce(x, group=group)
                assert x[0] == group.nranks
                assert dist.get_rank(group) == group.ranks.index(rank)
                dist.destroy_process_group(group)
                with pytest.raises(dist.UsageError, match="destroyed"):
                    dist.all_reduce(x, group=group)

        self.run(check)

    def test_a_non_member_is_warned_and_nothing_happens(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            group = dist.new_group([0])
            if rank == 0:
                x = np.array([5.0])
                dist.all_reduce(x, group=group)
                assert x[0] == 5
            else:
                x = np.array([float(rank)])
                calls: list[Callable[[], Any]] = [
                    lambda: dist.all_reduce(x, group=group),
                    lambda: dist.all_gather([], x, group=group),
                    lambda: dist.barrier(group),
                    lambda: dist.broadcast_object_list([1], 0, group=group),
                    lambda: dist.isend(x, 0, group=group),
                ]
                for call in calls:
                    with self.warned():
                        assert call().is_completed()
                assert x[0] == rank
                assert dist.get_rank(group) == dist.get_world_size(group) == -1
            assert size == dist.get_world_size()

        self.run(check)

    def warned(self) -> Any:
        """Expect a warning; ranks that are threads share Python's warning filters."""
        return pytest.warns(dist.NotInGroupWarning)

    # ---- disagreement

    def test_ranks_that_disagree_all_get_an_error_and_go_on(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            if size == 1:
                return
            odd = rank == size - 1
            calls: list[Callable[[], Any]] = [
                lambda: dist.all_reduce(np.ones(4 if odd else 6)),
                lambda: dist.all_reduce(np.ones(4, "i4" if odd else "f4")),
                lambda: dist.all_reduce(np.ones(4), dist.ReduceOp(1 if odd else 0)),
                lambda: dist.broadcast(np.ones(4), 1 if odd else 0),
                lambda: dist.broadcast(np.ones(4), 0) if odd else dist.all_reduce(np.ones(4)),
                lambda: dist.all_gather([np.ones(rank + 1)] * size, np.ones(rank + 1)),
                lambda: dist.broadcast_object_list([1] * (1 + odd), 0),
            ]
            for call in calls:
                with pytest.raises(dist.MismatchError, match="rank"):
                    call()
                x = np.array([1])
                dist.all_reduce(x)
                assert x[0] == size

        self.run(check)

    def test_a_mistake_of_one_rank_is_raised_on_every_rank(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            bad = rank == size - 1
            calls: list[Callable[[], Any]] = [
                lambda: dist.all_gather_object([], (lambda: 0) if bad else 0),
                lambda: dist.all_gather_object([0] * (size + 1) if bad else [], 0),
                lambda: dist.scatter(
                    np.empty(1), [np.ones(1)] * (size + 1) if bad else None, size - 1
                ),
                lambda: dist.gather(np.ones(1), [np.ones(2)] * size if bad else None, size - 1),
                lambda: dist.scatter_object_list([], [0] * (size + 1) if bad else None, size - 1),
            ]
            for call in calls:
                with pytest.raises(
                    dist.UsageError if bad else dist.RemoteError, match=f"rank {size - 1}"
                ):
                    call()
                x = np.array([1])
                dist.all_reduce(x)
                assert x[0] == size

        self.run(check)

    def test_a_rank_that_does_not_come_is_named(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            if size == 1:
                return
            group = dist.new_group(timeout=0.3)
            if rank == size - 1:
                time.sleep(1.5)
            with pytest.raises(dist.CollectiveTimeout) as caught:
                dist.all_reduce(np.ones(1), group=group)
            if rank == 0:
                assert "all_reduce" in str(caught.value)
                assert caught.value.missing == (size - 1,)
            dist.barrier()
            x = np.array([1])
            dist.all_reduce(x, group=group)  # the group is not lost
            assert x[0] == size

        self.run(check)

    def test_a_message_against_a_collective_names_both_on_every_rank(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            if size == 1:
                return
            group = dist.new_group(timeout=2)

            def disagree() -> None:
                if rank == 0:
                    dist.recv(np.empty(3), 1, group, tag=5)
                else:
                    dist.all_reduce(np.ones(4), group=group)

            dist.barrier()
            with pytest.raises(dist.CollectiveTimeout) as caught:
                disagree()
            told = str(caught.value)
            for words in (
                r"recv(\(shape \(3,\), float64\))? from rank 1.* with tag 5",
                r"all_reduce\(shape \(4,\), float64, SUM\), operation #\d",
                r"(?i)called at.*\n.*called at",
            ):
                assert re.search(words, told), told
            dist.barrier()

        self.run(check)
