"""What happens where ranks do not mean the same, or do not come."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.testing.contract.base import (
    Contract,
)

_ON_ARRAYS: list[tuple[str, Callable[[Any, Any], tuple[Any, ...]]]] = [
    ("barrier", lambda one, each: ()),
    ("all_reduce", lambda one, each: (one,)),
    ("all_reduce", lambda one, each: (one, dist.ReduceOp.MAX)),
    ("reduce", lambda one, each: (one, 0)),
    ("reduce_scatter", lambda one, each: (one, each)),
    ("scan", lambda one, each: (one,)),
    ("exscan", lambda one, each: (one,)),
    ("broadcast", lambda one, each: (one, 0)),
    ("broadcast", lambda one, each: (one, 1)),
    ("all_gather", lambda one, each: (each, one)),
    ("gather", lambda one, each: (one, each if dist.get_rank() == 0 else None, 0)),
    ("scatter", lambda one, each: (one, each if dist.get_rank() == 0 else None, 0)),
    ("alltoall", lambda one, each: (np.empty_like(each), each)),
]
"""Names of operations and their arguments, from an array and one with a row for each rank."""

_PLANS_BEHIND = len(_ON_ARRAYS)
_THOROUGHLY = pytest.param(range(0), marks=pytest.mark.thorough)
"""As distances of operations: all that there are."""

_ON_OBJECTS: list[Callable[[Any, list[Any]], Any]] = [
    lambda one, each: dist.broadcast_object_list([one], 0),
    lambda one, each: dist.all_gather_object([], one),
    lambda one, each: dist.gather_object(one, [] if dist.get_rank() == 0 else None, 0),
    lambda one, each: dist.scatter_object_list([], each if dist.get_rank() == 0 else None, 0),
    lambda one, each: dist.all_to_all_object([], each),
    lambda one, each: dist.together().share(lambda: one),
    lambda one, each: dist.together().lead(lambda: one),
    lambda one, each: dist.together().decide(lambda: one, list),
    lambda one, each: dist.checkpoint.latest("none", group=dist.get_group()),
    lambda one, each: dist.get_group().split(0),  # type: ignore[union-attr] # of the world
]


def _operations(count: int) -> list[Callable[[], Any]]:
    """Return calls of which no two agree, the makings of plans behind what they plan."""
    size = dist.get_world_size()

    def on_arrays(prefix: str, name: str, arguments: Any) -> Any:
        one, each = np.ones(count), np.ones((size, count))
        return getattr(dist, prefix + name)(*arguments(one, each))

    words = "o" * count
    return [
        *(partial(on_arrays, prefix, *row) for prefix in ("", "plan_") for row in _ON_ARRAYS),
        *(partial(call, words, [words] * size) for call in _ON_OBJECTS),
    ]


def _to_the_next(call: Callable[[], Any]) -> None:
    """Do an operation, and one in which a rank that only gives hears what it has not waited for."""
    call()
    dist.barrier()


class Agreement(Contract):
    """What happens where ranks do not mean the same, or do not come."""

    @pytest.mark.parametrize("count", [3, 40_000])
    @pytest.mark.parametrize("apart", [range(_PLANS_BEHIND, _PLANS_BEHIND + 2), _THOROUGHLY])
    def test_an_operation_agrees_with_no_other_one(self, count: int, apart: range) -> None:
        def check() -> None:
            if dist.get_world_size() == 1:
                return
            odd = dist.get_rank() == dist.get_world_size() - 1
            calls = _operations(count)
            for distance in apart or range(1, len(calls)):
                for place in range(len(calls)):
                    call = calls[(place + distance * odd) % len(calls)]
                    with pytest.raises(dist.MismatchError, match="rank"):
                        _to_the_next(call)
            x = np.array([1])
            dist.all_reduce(x)
            assert x[0] == dist.get_world_size()

        self.run(check)

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
                    _to_the_next(call)
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

            def call(group: dist.Group) -> None:
                if rank == 0:
                    dist.recv(np.empty(3), 1, group, tag=5)
                else:
                    dist.all_reduce(np.ones(4), group=group)

            def disagree(limit: float) -> str:
                group = dist.new_group(timeout=limit)
                dist.barrier()
                with pytest.raises(dist.CollectiveTimeout) as caught:
                    call(group)
                dist.barrier()
                return str(caught.value)

            told = disagree(2)
            came = np.array([all(re.search(words, told) for words in both)])
            dist.all_reduce(came, dist.ReduceOp.MIN)
            if not came[0]:  # a busy machine kept a rank longer than that from its call
                told = disagree(20)
            for words in both:
                assert re.search(words, told), told

        both = (
            r"recv(\(shape \(3,\), float64\))? from rank 1.* with tag 5",
            r"all_reduce\(shape \(4,\), float64.*SUM\), operation #\d",
            r"(?i)called at.*\n.*called at",
        )
        self.run(check)
