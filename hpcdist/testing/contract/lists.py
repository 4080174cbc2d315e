"""Lists whose arrays differ in shape."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.testing.contract.base import (
    Contract,
    as_pair,
    assert_equal,
    ragged,
)


class Lists(Contract):
    """Lists whose arrays differ in shape."""

    @pytest.mark.parametrize("sync_op", [True, False])
    @pytest.mark.parametrize("count", [1, 20_000])
    def test_lists_may_hold_arrays_of_different_shapes(self, count: int, sync_op: bool) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            for root in range(size):
                mine = ragged(rank, count)
                outs = [np.zeros_like(ragged(each, count)) for each in range(size)]
                dist.all_gather(outs, mine, sync_op=sync_op).wait()
                assert_equal(outs, [ragged(each, count) for each in range(size)])
                outs = [np.zeros_like(out) for out in outs]
                dist.gather(mine, outs if rank == root else None, root, sync_op=sync_op).wait()
                if rank == root:
                    assert_equal(outs, [ragged(each, count) for each in range(size)])
                given = [ragged(each, count, root) for each in range(size)]
                out = np.zeros_like(ragged(rank, count))
                dist.scatter(out, given if rank == root else None, root, sync_op=sync_op).wait()
                assert_equal([out], [ragged(rank, count, root)])
            given = [ragged(each, count, rank) for each in range(size)]
            out = np.zeros_like(ragged(rank, count))
            dist.reduce_scatter(out, given, sync_op=sync_op).wait()
            assert_equal([out], [sum(ragged(rank, count, each) for each in range(size))])

        self.run(check)

    @pytest.mark.parametrize("sync_op", [True, False])
    @pytest.mark.parametrize("count", [1, 20_000])
    def test_an_alltoall_of_different_shapes_fills_lists_of_any_kind(
        self, count: int, sync_op: bool
    ) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            wanted = [ragged(each + rank, count, each) for each in range(size)]
            filled: list[Any] = []
            targets = [filled, [np.zeros_like(each) for each in wanted]]
            for target in (targets[0], targets[1], targets[rank % 2]):  # ranks may differ
                filled.clear()
                given = [ragged(rank + each, count, rank) for each in range(size)]
                dist.alltoall(target, given, sync_op=sync_op).wait()
                assert_equal(target, wanted)

        self.run(check)

    @pytest.mark.parametrize("count", [1, 20_000])
    def test_lists_in_a_group_of_some_ranks_may_be_ragged(self, count: int) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            group = dist.new_group(range(size // 2, size))
            if group.is_member():
                shapes = [ragged(each, count) for each in group.ranks]
                outs = [np.zeros_like(each) for each in shapes]
                dist.stream.all_gather(outs, shapes[group.rank], group)
                assert_equal(outs, shapes)
                filled: list[Any] = []
                given = [ragged(to, count, rank) for to in group.ranks]
                dist.stream.alltoall(filled, given, group, sync_op=False).wait()
                assert_equal(filled, [ragged(rank, count, each) for each in group.ranks])
            dist.destroy_process_group(group)

        self.run(check)

    def test_ragged_lists_have_any_layout_and_dtype(self) -> None:
        def check() -> None:
            import ml_dtypes

            rank, size = dist.get_rank(), dist.get_world_size()
            layouts: list[Callable[[Any], Any]] = [
                np.array,
                lambda x: x.copy(order="F"),
                lambda x: np.repeat(x, 2, -1)[..., ::2] if x.ndim else x,
                lambda x: x[::-1].copy()[::-1] if x.ndim else x,
            ]
            for number, dtype in enumerate(["f4", "?", "c16", "i2", ml_dtypes.bfloat16]):
                laid = layouts[number % len(layouts)]
                inputs = [ragged(each, 20_000).astype("i8").astype(dtype) for each in range(size)]
                outs = [laid(np.zeros_like(each)) for each in inputs]
                dist.all_gather(outs, laid(inputs[rank]))
                assert_equal(outs, inputs)
                out = laid(np.zeros_like(inputs[rank]))
                dist.scatter(out, [laid(x) for x in inputs] if rank == 0 else None)
                assert_equal([out], [inputs[rank]])

        self.run(check)

    @pytest.mark.parametrize("count", [2, 20_000])
    def test_what_does_not_fit_is_named_on_every_rank_and_nothing_is_written(
        self, count: int
    ) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            if size == 1:
                return
            last = rank == size - 1
            fitting = [np.full((count, each + 1), -1.0) for each in range(size)]
            spoilt = [np.full((count + 3, 1), -1.0), *fitting[1:]]  # the one for rank 0
            mine, x = (spoilt if last else fitting), np.ones((count, rank + 1))
            out = fitting[rank] if rank else spoilt[0]
            to_all = [np.ones((count, rank + 1))] * size
            calls: list[Callable[[], Any]] = [
                lambda: dist.all_gather(mine, x),
                lambda: dist.all_gather(mine, x, sync_op=False).wait(),
                lambda: dist.gather(x, mine if last else None, size - 1),
                lambda: dist.scatter(out, fitting if last else None, size - 1),
                lambda: dist.stream.scatter(out, fitting if last else None, size - 1),
                lambda: dist.reduce_scatter(fitting[rank], mine),
                lambda: dist.alltoall(mine, to_all),
                lambda: dist.alltoall(mine, to_all, sync_op=False).wait(),
            ]
            for call in calls:
                with pytest.raises(dist.MismatchError, match=f"rank.*{count}") as caught:
                    call()
                words = str(caught.value)
                assert "rank 0" in words or "ranks 0" in words
                assert f"{count + 3}" in words
                assert all((each == -1).all() for each in [*fitting, *spoilt])
                y = np.array([1])
                dist.all_reduce(y)
                assert y[0] == size

        self.run(check)

    def test_lists_of_another_length_are_refused_on_every_rank(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            bad = rank == size - 1
            given = [ragged(each, 1) for each in range(size + bad)]
            calls: list[Callable[[], Any]] = [
                lambda: dist.all_gather(given, ragged(rank, 1)),
                lambda: dist.reduce_scatter(ragged(rank, 1), given),
                lambda: dist.alltoall([], given),
                lambda: dist.scatter(ragged(rank, 1), given if bad else None, size - 1),
            ]
            for call in calls:
                with pytest.raises(
                    dist.UsageError if bad else dist.RemoteError, match=f"rank {size - 1}"
                ):
                    call()
                dist.barrier()

        self.run(check)

    def test_ranks_may_give_lists_of_any_making_for_the_same_operation(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            makers: list[Callable[[int], Any]] = [
                lambda count: [np.zeros(count) for _ in range(size)],
                lambda count: np.zeros((size, count)),
                lambda count: [dist.zeros(count) for _ in range(size)],
                lambda count: list(np.zeros((size, count))),
            ]
            for count, offset in itertools.product((3, 20_000), range(len(makers))):
                make, one = makers[(rank + offset) % len(makers)], np.zeros(count)
                outs = make(count)
                dist.all_gather(outs, np.full(count, float(rank)))
                assert all((outs[each] == each).all() for each in range(size))
                given, outs = make(count), make(count)
                for each in range(size):
                    given[each][...] = 10 * rank + each
                dist.alltoall(*as_pair(outs, given))
                assert all((outs[each] == 10 * each + rank).all() for each in range(size))
                dist.reduce_scatter(one, given)
                assert (one == sum(10 * each + rank for each in range(size))).all()
                dist.scatter(one, given if rank == size - 1 else None, size - 1)
                assert (one == 10 * (size - 1) + rank).all()

        self.run(check)

    @pytest.mark.parametrize("count", [2, 20_000])
    def test_lists_may_overlap_what_is_sent(self, count: int) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            outs = [np.zeros(count) for _ in range(size)]
            outs[rank][...] = rank
            dist.all_gather(outs, outs[rank])
            assert all((outs[each] == each).all() for each in range(size))
            outs[-1][...] = rank
            dist.all_gather(outs, outs[-1])
            assert all((outs[each] == each).all() for each in range(size))
            for each in range(size):
                outs[each][...] = 10 * rank + each
            dist.alltoall(outs, outs[::1])
            assert all((outs[each] == 10 * each + rank).all() for each in range(size))
            same = [np.zeros(count)] * size
            dist.all_gather(same, np.full(count, float(rank)))
            whole = np.zeros(count + size - 1)
            dist.all_gather(
                [whole[each : each + count] for each in range(size)], np.full(count, float(rank))
            )
            assert whole[:size].tolist() == list(range(size))

        self.run(check)
