"""Mistakes that a type checker must see: an unused `ignore` is an error of its own."""
# pyright: standard

import numpy as np

import hpcdist as dist
from hpcdist import checkpoint, fleet


def misspelt() -> None:
    dist.all_reduse(1)  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue]
    checkpoint.laod(1)  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue]
    fleet.worker_nums()  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue]
    dist.optim.Adam2([])  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue]


def wrong_arguments() -> object:
    dist.new_group("all")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    fleet.init(mp="2")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    dist.barrier(0)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    dist.all_reduce()  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
    dist.all_reduce(np.ones(1), async_op=True)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
    return dist.get_rank().nranks  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue]


def no_arrays() -> None:
    dist.all_reduce([1.0])  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    dist.broadcast(1.0, 0)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    dist.recv("text")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    dist.all_gather([], {"a": 1})  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    dist.scatter(np.ones(1), [[1.0]])  # type: ignore[list-item] # pyright: ignore[reportArgumentType]
    dist.stream.all_reduce([1.0])  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    dist.plan_all_reduce([1.0])  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
