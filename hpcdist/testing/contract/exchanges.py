"""Exchanges: any boxes of the arrays of all ranks go to any boxes of the array of each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.boxes import Slices, slices, whole
from hpcdist.comm.exchanges import exchange
from hpcdist.named_tuple import NamedTuple
from hpcdist.testing.contract.base import (
    COMPLEX,
    FLOATS,
    NUMBERS,
    OPS,
    Contract,
)
from hpcdist.transport.call.call import Give, Read

Shape = tuple[int, ...]


class Trade(NamedTuple):
    """Rank `reader` takes the box `source` of the array of `owner` into its own box `target`."""

    owner: int
    reader: int
    source: Slices
    target: Slices
    combine: bool = False


def box(*bounds: tuple[int, int]) -> Slices:
    """Return the box with these bounds along each axis."""
    return slices(bounds)


def all_of(shape: Shape) -> Slices:
    """Return the box that is a whole array."""
    return slices(whole(shape))


def trade(
    send: Any,
    recv: Any,
    trades: Sequence[Trade],
    shapes: Sequence[Shape],
    op: dist.ReduceOp | None = None,
    **options: Any,
) -> Any:
    """Exchange; `shapes` are those of the arrays of the ranks, `trades` are of all of them."""
    rank = dist.get_rank(options.get("group"))
    reads = tuple(
        Read(each.owner, shapes[each.owner], *each[2:]) for each in trades if each.reader == rank
    )
    gives = tuple(Give(each.reader, each.source) for each in trades if each.owner == rank)
    options = {"key": 7, "words": "trades", **options}
    return exchange(send, recv, reads, gives, rule_op=op, **options)


def traded(arrays: Sequence[Any], recv: Any, reader: int, trades: Sequence[Trade]) -> Any:
    """Return `recv` of rank `reader` after trades that combine nothing."""
    result = recv.copy()
    for each in trades:
        if each.reader == reader:
            result[each.target] = arrays[each.owner][each.source]
    return result


def array_of(rank: int, shape: Shape) -> Any:
    """Return an array no two elements of which, on all ranks, are alike."""
    return np.arange(np.prod(shape, dtype=int), dtype="i8").reshape(shape) + 100_000 * (rank + 1)


def some_trades(size: int, seed: int) -> tuple[list[Shape], list[Shape], list[Trade]]:
    """Return shapes of what is sent and of what is filled, and what goes where: by chance."""
    chance = np.random.default_rng(seed)
    axes = int(chance.integers(1, 4))

    def shape() -> Shape:
        return tuple(chance.integers(0, 9, axes).tolist())

    given, filled = [shape() for _ in range(size)], [shape() for _ in range(size)]
    trades = []
    for reader in range(size):
        cuts = [
            sorted({0, length, *chance.integers(0, length + 1, 2)}) for length in filled[reader]
        ]
        for target in itertools.product(*(itertools.pairwise(map(int, each)) for each in cuts)):
            owner = int(chance.integers(size))
            extents = [stop - start for start, stop in target]
            room = [n - extent for n, extent in zip(given[owner], extents, strict=True)]
            if min(room) >= 0 and chance.random() < 0.8:
                starts = [int(chance.integers(each + 1)) for each in room]
                source = [
                    (start, start + extent) for start, extent in zip(starts, extents, strict=True)
                ]
                trades.append(Trade(owner, reader, box(*source), box(*target)))
    return given, filled, trades


def whole_to_all(size: int, shape: Shape) -> list[Trade]:
    """Return trades by which every rank gets all arrays combined."""
    whole = all_of(shape)
    return [
        Trade(owner, reader, whole, whole, owner > 0)
        for reader in range(size)
        for owner in range(size)
    ]


def transposing(size: int, rows: int) -> tuple[Shape, Shape, list[Trade]]:
    """Return the shape of a run of rows and of columns, and what makes the one of the other."""
    most = rows * size
    trades = [
        Trade(
            owner,
            reader,
            box((0, rows), (reader * rows, reader * rows + rows)),
            box((owner * rows, owner * rows + rows), (0, rows)),
        )
        for owner in range(size)
        for reader in range(size)
    ]
    return (rows, most), (most, rows), trades


class Exchanges(Contract):
    """Exchanges: any boxes of the arrays of all ranks go to any boxes of the array of each."""

    @pytest.mark.parametrize("sync_op", [True, False])
    @pytest.mark.parametrize("first", [0, 100])
    def test_any_boxes_go_to_any_boxes(self, first: int, sync_op: bool) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            under_way = []
            for seed in range(first, first + 20):
                given, filled, trades = some_trades(size, seed)
                recv = np.full(filled[rank], -1, "i8")
                work = trade(array_of(rank, given[rank]), recv, trades, given, sync_op=sync_op)
                arrays = [array_of(each, shape) for each, shape in enumerate(given)]
                expected = traded(arrays, np.full(filled[rank], -1, "i8"), rank, trades)
                under_way.append((work, recv, expected))
            for work, recv, expected in under_way:
                work.wait()
                np.testing.assert_array_equal(recv, expected)

        self.run(check)

    @pytest.mark.parametrize("rows", [3, 40, 300], ids="{} rows".format)
    @pytest.mark.parametrize("make", [np.empty, lambda *args: dist.empty(*args)], ids=["", "heap"])
    def test_nobody_reads_what_comes_after_what_was_sent(
        self, make: Callable[..., Any], rows: int
    ) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            shape, turned, trades = transposing(size, rows)
            send, recv = make(shape, "i8"), make(turned, "i8")
            whole = np.arange(rows * size * rows * size).reshape(rows * size, -1)
            for number in range(5):
                send[...] = whole[rank * rows : (rank + 1) * rows] + number
                trade(send, recv, trades, [shape] * size)
                send[...] = -1
                columns = whole[:, rank * rows : (rank + 1) * rows] + number
                np.testing.assert_array_equal(recv, columns)
                dist.barrier()

        self.run(check)

    @pytest.mark.parametrize("dtype", ["int8", "int64", *FLOATS])
    @pytest.mark.parametrize("op", OPS)
    def test_boxes_of_one_target_are_combined(self, dtype: str, op: str) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            shape = 3, 5
            numbers = [np.arange(15).reshape(shape) % 3 + each + 1 for each in range(size)]
            recv = np.full(shape, 99, dtype)
            column = box((0, 3), (1, 4))
            for part in (all_of(shape), column):
                trades = [
                    each._replace(source=part, target=part) for each in whole_to_all(size, shape)
                ]
                trade(numbers[rank].astype(dtype), recv, trades, [shape] * size, dist.ReduceOp[op])
                with np.errstate(over="ignore"):
                    expected = OPS[op](np.stack(numbers).astype("i8"), axis=0).astype(dtype)
                np.testing.assert_array_equal(recv[part], expected[part])

        self.run(check)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_short_floats_are_added_in_the_order_of_the_ranks_and_rounded_once(
        self, dtype: str
    ) -> None:
        def check() -> None:
            import ml_dtypes

            rank, size = dist.get_rank(), dist.get_world_size()
            short = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
            shape = 4, 300, 50
            arrays = [
                np.random.default_rng(each).standard_normal(shape).astype(short)
                for each in range(size)
            ]
            total = arrays[0].astype("f4")
            for each in arrays[1:]:
                total += each.astype("f4")
            for part in (all_of(shape), box((0, 4), (100, 300), (1, 49))):
                recv = np.zeros(shape, short)
                trades = [
                    each._replace(source=part, target=part) for each in whole_to_all(size, shape)
                ]
                trade(arrays[rank], recv, trades, [shape] * size, dist.ReduceOp.SUM)
                expected = (total if size > 1 else arrays[0]).astype(short)
                np.testing.assert_array_equal(recv[part].view("u2"), expected[part].view("u2"))

        self.run(check)

    def test_a_mean_is_of_the_boxes_that_are_combined(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            send, recv = np.full((2, 3), rank + 1.0), np.zeros((2, 3))
            trade(send, recv, whole_to_all(size, (2, 3)), [(2, 3)] * size, dist.ReduceOp.AVG)
            assert (recv == (size + 1) / 2).all()

        self.run(check)

    def test_what_nobody_writes_stays_and_is_combined_with(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            other = (rank + 1) % size
            recv = np.full((4, 4), 10.0)
            part, inner = box((0, 2), (0, 4)), box((1, 2), (1, 3))
            trades = [
                each
                for reader in range(size)
                for each in (
                    Trade((reader + 1) % size, reader, part, part, True),
                    Trade(reader, reader, inner, inner, True),
                    Trade((reader + 1) % size, reader, inner, inner),
                    Trade(reader, reader, part, part, True),
                )
            ]
            trade(np.full((2, 4), rank + 1.0), recv, trades, [(2, 4)] * size, dist.ReduceOp.SUM)
            expected = np.full((4, 4), 10.0)
            expected[part] += other + 1
            expected[inner] = other + 1
            expected[part] += rank + 1
            np.testing.assert_array_equal(recv, expected)

        self.run(check)

    def test_numbers_of_every_dtype_are_exchanged(self) -> None:
        def check() -> None:
            import ml_dtypes

            rank, size = dist.get_rank(), dist.get_world_size()
            names: list[Any] = ["?", *NUMBERS, *FLOATS, *COMPLEX, "M8[ns]"]
            for dtype in [*map(np.dtype, names), np.dtype(ml_dtypes.bfloat16)]:
                most = 1 if dtype.kind == "b" else 255
                arrays = [
                    (np.arange(6 * dtype.itemsize) + each & most).astype("u1").view(dtype)
                    for each in range(size)
                ]
                recv = np.zeros((size, 2), dtype)
                trades = [
                    Trade(owner, reader, box((1, 2), (1, 3)), box((owner, owner + 1), (0, 2)))
                    for owner in range(size)
                    for reader in range(size)
                ]
                trade(arrays[rank].reshape(2, 3), recv, trades, [(2, 3)] * size)
                assert recv.tobytes() == b"".join(each[4:].tobytes() for each in arrays)

        self.run(check)

    def test_arrays_without_axes_or_elements_are_exchanged(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            recv = np.array(0.0)
            trades = [Trade(0, reader, (), ()) for reader in range(size)]
            trade(np.array(rank + 5.0), recv, trades, [()] * size)
            assert recv == 5
            trade(
                np.array(rank + 1.0), recv, whole_to_all(size, ()), [()] * size, dist.ReduceOp.MAX
            )
            assert recv == size
            nothing = np.zeros((0, 3))
            trades = [Trade(0, reader, box((0, 0), (0, 3)), box((0, 0), (0, 3))) for reader in [0]]
            trade(nothing, np.zeros((0, 3)), trades, [(0, 3)] * size)
            trade(nothing, np.zeros((0, 3)), [], [(0, 3)] * size)

        self.run(check)

    def test_what_is_sent_may_be_filled(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            for rows in (2, 300):
                shape, _, trades = transposing(size, rows)
                trades = [
                    each._replace(
                        target=box((0, rows), (each.owner * rows, (each.owner + 1) * rows))
                    )
                    for each in trades
                ]
                x = array_of(rank, shape)
                trade(x, x, trades, [shape] * size)
                arrays = [array_of(each, shape) for each in range(size)]
                np.testing.assert_array_equal(x, traded(arrays, arrays[rank], rank, trades))

        self.run(check)

    def test_a_subgroup_exchanges(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            group = dist.new_group(list(range(0, size, 2)))
            if group.is_member():
                shape, turned, trades = transposing(group.nranks, 2)
                send, recv = array_of(rank, shape), np.zeros(turned, "i8")
                trade(send, recv, trades, [shape] * group.nranks, group=group)
                arrays = [array_of(each, shape) for each in group.ranks]
                expected = traded(arrays, np.zeros(turned, "i8"), group.rank, trades)
                np.testing.assert_array_equal(recv, expected)

        self.run(check)

    def test_ranks_that_mean_different_exchanges_are_told_both(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            if size == 1:
                return
            odd = rank == size - 1
            words = "rows to columns" if odd else "columns to rows"
            recv = np.zeros(3)
            for key, dtype in ((int(odd), "f8"), (1, "f4" if odd else "f8")):
                own = np.ones(3, dtype)
                with pytest.raises(dist.MismatchError) as caught:
                    trade(own, own.copy(), [], [(3,)] * size, key=key, words=words)
                assert "rows to columns" in str(caught.value)
                assert "columns to rows" in str(caught.value)
            other = partial(dist.all_reduce, recv)
            with pytest.raises(dist.MismatchError, match="trades"):
                (partial(trade, recv, recv, [], [(3,)] * size) if odd else other)()
            x = np.array([1])
            dist.all_reduce(x)
            assert x[0] == size

        self.run(check)

    @pytest.mark.parametrize("sync_op", [True, False])
    def test_a_box_that_does_not_fit_is_an_error_on_every_rank(self, sync_op: bool) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            bad = rank == size - 1
            mistakes: list[dict[str, Any]] = [
                {"source": box((0, 4), (0, 2))},
                {"target": box((0, 1), (0, 2))},
                {"source": box((0, 2))},
                {"owner": size},
                {"combine": True},
            ]
            good = Trade(0, rank, box((0, 2), (0, 2)), box((1, 3), (0, 2)))
            for mistake in mistakes:
                read = good._replace(**mistake) if bad else good
                reads = (Read(read.owner, (3, 2), *read[2:]),)
                expected = dist.UsageError if bad else dist.RemoteError
                with pytest.raises(expected, match=f"rank {size - 1}"):
                    exchange(
                        np.ones((3, 2)),
                        np.zeros((3, 2)),
                        reads,
                        tuple(Give(each, good.source) for each in range(size) if rank == 0),
                        rule_op=None,
                        key=1,
                        words="a mistake",
                        sync_op=sync_op,
                    ).wait()

        self.run(check)

    def test_listeners_hear_of_an_exchange_by_its_name(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            heard: list[dist.Event] = []
            shape, turned, trades = transposing(size, 2)
            send, recv = array_of(rank, shape), np.zeros(turned, "i8")
            stop = dist.subscribe(heard.append)
            try:
                trade(send, recv, trades, [shape] * size, sync_op=False).wait()
            finally:
                stop()
            events = [each for each in heard if each.name == "exchange"]
            own = [each for each in events if each.shape == shape]
            assert {each.phase for each in own} == {"begin", "end"}
            assert len({each.sequence for each in own}) == 1
            assert all(each.nbytes == send.nbytes for each in own)

        self.run(check)
