"""hpcdist as a `Library`, and Paddle, whose API is the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hpcdist.bench.interleaved import Call
from hpcdist.bench.task import Array, Library, Maker, Messages, Task
from hpcdist.comm import collectives, groups, messages, objects
from hpcdist.comm.group import Group
from hpcdist.parallel.model import DataParallel
from hpcdist.transport.call.reduction import ReduceOp


def start_own(group: Group) -> Library:
    """Return hpcdist on the ranks of `group`. Local."""

    def make_group() -> None:
        groups.destroy_process_group(groups.new_group(group.ranks))

    ops = ReduceOp.__members__
    parallel: Any = DataParallel
    calls = {
        **array_calls(collectives, group, ops, lambda array: array),
        **own_array_calls(group, ops),
        **object_calls(objects, group),
        "new_group": lambda _: make_group,
    }

    def begin(task: Task) -> Call:
        op = ops[task.op]
        return partial(collectives.all_reduce, task.x, op, group, sync_op=False)

    return Library(
        "hpcdist",
        calls,
        message_calls(messages, group, lambda array: array),
        begin,
        partial(parallel, group=group),
        lambda: None,
    )


def array_calls(
    verbs: Any, group: Any, ops: Mapping[str, Any], tensor_of: Callable[[Array], Any]
) -> dict[str, Maker]:
    """Return the cases whose calls are spelled alike in hpcdist and in paddle.distributed.

    Args:
        verbs: what has the functions.
        group: theirs.
        ops: reductions by name.
        tensor_of: makes a tensor of an array.

    """

    def tensors(arrays: list[Array]) -> list[Any]:
        return [tensor_of(array) for array in arrays]

    def all_reduce(task: Task) -> Call:
        return partial(verbs.all_reduce, tensor_of(task.x), ops[task.op], group)

    def reduce(task: Task) -> Call:
        return partial(verbs.reduce, tensor_of(task.x), task.root, ops[task.op], group)

    def broadcast(task: Task) -> Call:
        return partial(verbs.broadcast, tensor_of(task.x), task.root, group)

    def all_gather_list(task: Task) -> Call:
        return partial(verbs.all_gather, tensors(task.parts), tensor_of(task.x), group)

    def scatter(task: Task) -> Call:
        parts = tensors(task.parts) if task.rank == 0 else None
        return partial(verbs.scatter, tensor_of(task.out), parts, task.root, group)

    def gather(task: Task) -> Call:
        parts = tensors(task.parts) if task.rank == 0 else None
        return partial(verbs.gather, tensor_of(task.x), parts, task.root, group)

    def alltoall(task: Task) -> Call:
        count = task.x.size // task.size
        given = [task.x[rank * count : (rank + 1) * count] for rank in range(task.size)]
        return partial(verbs.alltoall, tensors(task.parts), tensors(given), group)

    def alltoall_single(task: Task) -> Call:
        out, x = tensor_of(task.out), tensor_of(task.x)
        return partial(verbs.alltoall_single, out, x, group=group)

    def barrier(_: Task) -> Call:
        return partial(verbs.barrier, group)

    makers = (all_reduce, reduce, broadcast, all_gather_list, scatter, gather, alltoall)
    return {make.__name__: make for make in (*makers, alltoall_single, barrier)}


def own_array_calls(group: Group, ops: Mapping[str, Any]) -> dict[str, Maker]:
    """Return what hpcdist takes one array for and Paddle a list, or Paddle has not."""

    def all_gather(task: Task) -> Call:
        return partial(collectives.all_gather, task.out, task.x, group)

    def reduce_scatter(task: Task) -> Call:
        return partial(collectives.reduce_scatter, task.out, task.x, ops[task.op], group)

    def scan(task: Task) -> Call:
        return partial(collectives.scan, task.x, ops[task.op], group)

    return {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "scan": scan}


def object_calls(verbs: Any, group: Any) -> dict[str, Maker]:
    """Return the object collectives, spelled alike in hpcdist and in paddle.distributed."""

    def broadcast_object_list(task: Task) -> Call:
        things = [task.thing if task.rank == 0 else None]
        return lambda: verbs.broadcast_object_list(things, task.root, group)

    def all_gather_object(task: Task) -> Call:
        return lambda: verbs.all_gather_object([], task.thing, group)

    return {
        "broadcast_object_list": broadcast_object_list,
        "all_gather_object": all_gather_object,
    }


def message_calls(verbs: Any, group: Any, tensor_of: Callable[[Array], Any]) -> Messages:
    """Return the messages of hpcdist or of paddle.distributed; peers are ranks of the group."""
    ranks = group.ranks

    return Messages(
        tensor_of,
        lambda x, to: verbs.send(x, ranks[to], group),
        lambda x, source: verbs.recv(x, ranks[source], group),
        lambda x, to: verbs.isend(x, ranks[to], group),
        lambda x, source: verbs.irecv(x, ranks[source], group),
        wait_for_all,
    )


def wait_for_all(works: list[Any]) -> None:
    """Wait for each of the works."""
    for work in works:
        work.wait()
