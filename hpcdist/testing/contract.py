"""What every transport must do, as tests.

A subclass implements `run`; every check is a function that runs on each rank, through the
public API. Checks hold at any number of ranks.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

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


class _Pair(NamedTuple):
    a: Any
    b: Any


def ragged(number: int, count: int, giver: int = 0) -> Any:
    """Return an array whose shape depends on `number`: 0-d, empty, or of one to three axes."""
    shape = [(), (0, 3), (count,), (2, count), (count, 1, 2)][number % 5]
    values = np.arange(int(np.prod(shape)), dtype=float) % 97 + number + 100 * giver
    return values.reshape(shape)


def assert_equal(found: Any, expected: Any) -> None:
    """Compare lists of arrays: shapes, dtypes and contents."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def as_pair(outs: Any, given: Any) -> tuple[Any, Any]:
    """Return what an alltoall takes: two lists or two arrays."""
    if isinstance(outs, list):
        return outs, given
    return outs.reshape(-1), given.reshape(-1)


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

    @pytest.mark.parametrize("dtype", ["bool", *NUMBERS])
    def test_bits_and_truth_are_combined_as_numpy_combines_them(self, dtype: str) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            inputs = [(contribution(each, "int64") % 5).astype(dtype) for each in range(size)]
            for op, ufunc in [
                (dist.ReduceOp.BAND, np.bitwise_and),
                (dist.ReduceOp.BOR, np.bitwise_or),
                (dist.ReduceOp.BXOR, np.bitwise_xor),
                (dist.ReduceOp.LAND, np.logical_and),
                (dist.ReduceOp.LOR, np.logical_or),
                (dist.ReduceOp.LXOR, np.logical_xor),
            ]:
                x = inputs[rank].copy()
                dist.all_reduce(x, op)
                expected = ufunc.reduce(np.stack(inputs), 0).astype(dtype)
                np.testing.assert_array_equal(x, expected, str(op))

        self.run(check)

    def test_long_doubles_times_and_pairs_are_reduced_without_a_loss(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            tiny = np.finfo("longdouble").eps
            x = np.full(3, 1 if rank == 0 else tiny, "longdouble")
            dist.all_reduce(x)
            assert (x == 1 + (size - 1) * tiny).all()
            dist.all_reduce(x, dist.ReduceOp.MIN)
            assert (x == 1 + (size - 1) * tiny).all()
            z = np.full(3, (rank + 1) * (1 + 1j), "clongdouble") * tiny
            dist.all_reduce(z, dist.ReduceOp.AVG)
            assert (z == (size + 1) / np.longdouble(2) * (1 + 1j) * tiny).all()
            day = np.array([rank, -rank, "NaT" if rank == size - 1 else 0], "M8[D]")
            for op, expected in [("MAX", [size - 1, 0, "NaT"]), ("MIN", [0, 1 - size, "NaT"])]:
                y = day.copy()
                dist.all_reduce(y, dist.ReduceOp[op])
                np.testing.assert_array_equal(y, np.array(expected, "M8[D]"))
            values = [rank, -rank, 7, np.nan if rank else 1]
            for op, value, index in [
                ("MAXLOC", [size - 1, 0, 7], [size - 1, 0, 0]),
                ("MINLOC", [0, 1 - size, 7], [0, size - 1, 0]),
            ]:
                pairs = np.zeros(4, [("value", "f8"), ("index", "i4")])
                pairs["value"], pairs["index"] = values, rank
                dist.all_reduce(pairs, dist.ReduceOp[op])
                assert (pairs["value"][:3].tolist(), pairs["index"][:3].tolist()) == (value, index)
                assert np.isnan(pairs["value"][3]) == (size > 1)
                assert pairs["index"][3] == min(1, size - 1)

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

    def test_numbers_and_trees_of_them_are_reduced_and_returned(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            total = size * (size + 1) // 2
            for value in (rank + 1, rank + 1.0, (rank + 1) * 1j, np.float32(rank + 1)):
                got = dist.all_reduced(value)
                assert type(got) is type(value)
                assert got == (total * 1j if isinstance(value, complex) else total)
            array = np.full((2, 3), rank + 1, "f2")
            tree = {
                "loss": 0.5 * (rank + 1),
                "samples": rank + 1,
                "best": [np.float32(rank), (array, array[:, 1])],
                "any": rank == 0,
                "pair": _Pair(np.int8(1), None),
                3: np.array(1j),
            }
            got = dist.all_reduced(tree)
            assert (got["loss"], got["samples"], got["any"]) == (0.5 * total, total, True)
            assert got["best"][0] == size * (size - 1) / 2
            assert (got["best"][1][0] == np.full((2, 3), total, "f2")).all()
            assert (got["best"][1][1] == np.full(2, total, "f2")).all()
            assert type(got["pair"]) is _Pair
            assert got["pair"].b is None
            assert (got["pair"].a, got["pair"].a.dtype, got[3]) == (size, np.int8, size * 1j)
            kinds = [type(got[key]) for key in ("loss", "samples", "any", 3)]
            assert kinds == [float, int, bool, np.ndarray]
            assert (array == rank + 1).all()  # what was given stays as it was
            assert tree["samples"] == rank + 1
            assert dist.all_reduced({}) == {}
            assert dist.all_reduced(None) is None

        self.run(check)

    def test_reductions_of_numbers_take_every_operator(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            op = dist.ReduceOp
            mean = (size - 1) / 2
            values = [rank, rank == 0, float(rank), np.int16(rank), np.array([rank, 0])]
            got = dist.all_reduced(values, op.AVG)
            assert got[:4] == [mean, 1 / size, mean, mean]
            assert [type(each) for each in got[:4]] == [float, float, float, np.float64]
            assert got[4].tolist() == [mean, 0]
            assert dist.all_reduced([rank, -float(rank)], op.MAX) == [size - 1, 0.0]
            assert dist.all_reduced([rank, rank == 0], op.MIN) == [0, size == 1]
            assert dist.all_reduced({"a": 1 << rank}, op.BOR) == {"a": (1 << size) - 1}
            assert dist.all_reduced(rank + 1, op.PROD) == math.factorial(size)
            place = np.array([(rank % 3, rank)], "f8,i8")
            assert tuple(dist.all_reduced(place, op.MAXLOC)[0]) == (min(size - 1, 2),) * 2

        self.run(check)

    def test_sums_of_ints_are_exact_and_products_too_large_are_refused(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            largest, least = (1 << 63) - 1, -(1 << 63)
            assert dist.all_reduced([largest, least, -1]) == [size * largest, size * least, -size]
            assert dist.all_reduced(largest, dist.ReduceOp.MIN) == largest
            assert dist.all_reduced(largest, dist.ReduceOp.AVG) == float(largest)
            factor = (1 << 62) if rank == 0 else 2
            if size > 1:
                with pytest.raises(dist.UsageError, match=r"tree\['n'\].*does not fit"):
                    dist.all_reduced({"n": factor}, dist.ReduceOp.PROD)
            bad = rank == size - 1
            with pytest.raises(dist.UsageError if bad else dist.RemoteError, match="64 bits"):
                dist.all_reduced({"n": 1 << 63 if bad else 1})

        self.run(check)

    def test_trees_that_differ_between_ranks_name_the_difference(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            if size == 1:
                return
            odd = rank == size - 1
            trees: list[tuple[Any, str]] = [
                ({"a": 1.0} | ({"b": 2.0} if odd else {}), r"rank 0 has no more.*tree\['b'\]"),
                ({"b" if odd else "a": 1.0}, r"tree\['a'\].*tree\['b'\]"),
                ([1 if odd else 1.0], r"tree\[0\].*float.*int"),
                (np.ones(3 if odd else 2), r"shape \(2,\).*shape \(3,\)"),
                ({} if odd else {"a": 1}, f"tree.*rank {size - 1} has no more"),
            ]
            for tree, words in trees:
                with pytest.raises(dist.MismatchError, match=words):
                    dist.all_reduced(tree)
            with pytest.raises(dist.UsageError if odd else dist.RemoteError, match="str is not"):
                dist.all_reduced({"a": "text" if odd else 1})
            assert dist.all_reduced(1) == size

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

    # ---- lists whose arrays differ in shape

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

    def test_a_receive_that_timed_out_says_so_each_time_and_takes_no_message(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            group = dist.new_group(timeout=0.5)
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

    # ---- groups

    def test_split_makes_a_group_for_each_color_in_the_order_of_the_keys(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            world = dist.get_group()
            assert world is not None
            for key, turned in ((None, False), (rank, False), (-rank, True), (7, False)):
                group = world.split(rank % 2, key)
                members = list(range(rank % 2, size, 2))
                assert group.ranks == (members[::-1] if turned else members)
                gathered: list[Any] = []
                dist.all_gather(gathered, np.array([rank]), group)
                assert [int(x[0]) for x in gathered] == group.ranks
                x = np.array([rank])
                dist.broadcast(x, group.ranks[-1], group)
                assert x[0] == group.ranks[-1]
                largest = members[-1]
                half = group.split(None if rank == largest else 0)
                if rank == largest:
                    assert (half.rank, half.ranks, half.is_member()) == (-1, [], False)
                    with self.warned():
                        dist.barrier(half)
                else:
                    assert half.ranks == [each for each in group.ranks if each != largest]
                    dist.barrier(half)
                    dist.destroy_process_group(half)
                dist.destroy_process_group(group)

        self.run(check)

    def test_a_color_that_is_none_is_refused_on_every_rank(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            world, bad = dist.get_group(), rank == size - 1
            assert world is not None
            wrong: list[tuple[Any, Any]] = [(-1, 0), ("red", 0), (1.5, 0), (True, 0), (0, "last")]
            for color, key in wrong:
                error = dist.UsageError if bad else dist.RemoteError
                with pytest.raises(error, match=f"rank {size - 1}.*(color|key) must be"):
                    world.split(*((color, key) if bad else (0, 0)))

        self.run(check)

    def test_neighbours_on_a_grid_exchange_the_edges_of_their_arrays(self) -> None:
        def check() -> None:
            size, world = dist.get_world_size(), dist.get_group()
            assert world is not None
            for dims in ([-1, -1], [0, 1], [1, -1]):
                for periodic in (False, True, (True, False)):
                    grid = world.grid(dims, periodic)
                    assert np.prod(grid.dims) == size
                    self.exchange_edges(grid)
                    self.tell_neighbours(grid)

        self.run(check)

    def exchange_edges(self, grid: dist.Grid) -> None:
        """Fill the halo of a block of a matrix whose numbers say where they are."""
        rows, columns = grid.dims
        height, width = 3, 4
        whole = np.arange(rows * height * columns * width).reshape(rows * height, columns * width)
        whole = np.pad(whole, 1, constant_values=-1)
        for axis, wraps in enumerate(grid.periodic):
            if wraps:
                near, far = (
                    np.moveaxis(whole, axis, 0)[at] for at in (slice(0, 1), slice(-1, None))
                )
                near[...], far[...] = (np.moveaxis(whole, axis, 0)[at].copy() for at in (-2, 1))
        top, left = grid.coords[0] * height, grid.coords[1] * width
        expected = whole[top : top + height + 2, left : left + width + 2].copy()
        x = np.full_like(expected, -1)
        x[1:-1, 1:-1] = expected[1:-1, 1:-1]
        halo = [x[0, 1:-1], x[-1, 1:-1], x[1:-1, 0], x[1:-1, -1]]
        grid.neighbor_alltoall(halo, [x[1, 1:-1], x[-2, 1:-1], x[1:-1, 1], x[1:-1, -2]])
        for corner in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
            expected[corner] = -1
        np.testing.assert_array_equal(x, expected)

    def tell_neighbours(self, grid: dist.Grid) -> None:
        """Compare what neighbours send with who they are."""
        rank = dist.get_rank()
        told: list[Any] = []
        grid.neighbor_all_gather(told, np.array([rank]), sync_op=False).wait()
        ranks = [dist.PROC_NULL if x is None else int(x[0]) for x in told]
        assert ranks == grid.neighbors
        assert ranks == [end for axis in (0, 1) for end in grid.shift(axis)]

    def test_an_axis_of_a_grid_has_a_group_of_its_own(self) -> None:
        def check() -> None:
            rank, size, world = dist.get_rank(), dist.get_world_size(), dist.get_group()
            assert world is not None
            grid = world.split(0, -rank).grid((-1, -1), periodic=True)
            assert grid.rank_of(grid.coords) == rank
            for axis in (0, 1):
                along = grid.sub(axis)
                assert along is grid.sub(axis)
                assert along.dims == (grid.dims[axis],)
                assert along.coords == (grid.coords[axis],)
                x = np.array([grid.coords[1 - axis]])
                dist.all_reduce(x, dist.ReduceOp.MAX, along.group)
                assert x[0] == grid.coords[1 - axis]  # all of them are on one line
                assert along.shift(0, 1) == grid.shift(axis, 1)
            assert grid.sub(1, 0).group.ranks == list(range(size))[::-1]

        self.run(check)

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
                with self.warned():
                    assert dist.all_reduced(7, group=group) == 7
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
                ) as caught:
                    call()
                if isinstance(caught.value, dist.RemoteError):
                    assert caught.value.in_step
                x = np.array([1])
                dist.all_reduce(x)
                assert x[0] == size

        self.run(check)

    def test_a_rank_that_does_not_come_is_named(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            if size == 1:
                return
            group = dist.new_group(timeout=1)
            over = np.zeros(1)
            if rank == size - 1:
                dist.recv(over, 0)  # it comes when the others have given up
            with pytest.raises(dist.CollectiveTimeout) as caught:
                dist.all_reduce(np.ones(1), group=group)
            if rank == 0:
                dist.send(over, size - 1)
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
                r"all_reduce\(shape \(4,\), float64.*SUM\), operation #\d",
                r"(?i)called at.*\n.*called at",
            ):
                assert re.search(words, told), told
            dist.barrier()

        self.run(check)
