"""Data that are moved from rank to rank, of any layout and dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.testing.contract.base import (
    COMPLEX,
    FLOATS,
    NUMBERS,
    Contract,
)


class Movement(Contract):
    """Data that are moved from rank to rank, of any layout and dtype."""

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
