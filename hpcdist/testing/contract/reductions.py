"""Reductions: what they compute, of arrays and of trees of numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.named_tuple import NamedTuple
from hpcdist.testing.contract.base import (
    COMPLEX,
    FLOATS,
    NUMBERS,
    OPS,
    Contract,
    contribution,
)


class _Pair(NamedTuple):
    a: Any
    b: Any


class Reductions(Contract):
    """Reductions: what they compute, of arrays and of trees of numbers."""

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

    @pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
    def test_reproducible_sums_are_exact_whoever_gives_which_array(self, dtype: str) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            random, op = np.random.default_rng(5), dist.ReduceOp.REPRODUCIBLE_SUM
            sizes = np.ldexp(1.0, random.integers(-9, 9, (size, 700)))
            given = (random.standard_normal((size, 700)) * sizes).astype(dtype)
            given[:, :3] = [[np.inf, -0.0, -np.inf if each else np.nan] for each in range(size)]
            given[0, 3], given[-1, 3] = 1e4, -1e4
            parts = [given.real, given.imag] if dtype in COMPLEX else [given]
            sums = [[*map(math.fsum, part[:, 3:].T.tolist())] for part in parts]
            expected = sums[0] + 1j * np.array(sums[1]) if sums[1:] else np.array(sums[0])
            for turn in range(min(2, size)):
                mine = given[(rank + turn) % size]
                x, y, z = mine.copy(), mine.copy(), np.empty(700 // size, dtype)
                dist.all_reduce(x, op, sync_op=False).wait()
                dist.reduce(y, size - 1, op)
                dist.reduce_scatter(z, [*mine[: z.size * size].reshape(size, -1)], op)
                assert rank != size - 1 or y.tobytes() == x.tobytes()
                assert z.tobytes() == x[rank * z.size : (rank + 1) * z.size].tobytes()
                assert x[:2].real.tolist() == [np.inf, 0.0]
                assert np.signbit(x[1].real)
                assert np.isnan(x[2])
                assert x[3:].tolist() == expected.astype(dtype).tolist()

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
