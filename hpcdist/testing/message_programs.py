"""Legal programs of messages, as checks: each has to end, whatever the size of its messages.

All of them need the promise that a send does not wait for a receive which comes later in the
receiver's program. They hold at any number of ranks: ranks work in pairs, one that sends first and
one that receives later; who has no partner only meets the others. `PROGRAMS` has them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import hpcdist as dist

SIZES = {"20 kB": 20_000, "8 MiB": 8 << 20}
"""Above the eager limit of every MPI on its way inside a node; and in many pieces."""

PROGRAMS: dict[str, Callable[[int], None]] = {}


def _program(function: Callable[[int], None]) -> Callable[[int], None]:
    PROGRAMS[function.__name__.replace("_", " ").strip()] = function
    return function


def _filled(nbytes: int, value: int, dtype: str = "f8") -> Any:
    return np.full(nbytes // np.dtype(dtype).itemsize, value, dtype)


def _take(nbytes: int, value: int, source: int | None, dtype: str = "f8", **options: Any) -> None:
    """Receive an array that holds `value`."""
    got = _filled(nbytes, -1, dtype)
    work = dist.recv(got, source, **options)
    assert (got == value).all()
    assert source is None or work.source == source


def _take_objects(nbytes: int, value: int, source: int | None, **options: Any) -> None:
    got: list[Any] = [None, None]
    dist.recv_object_list(got, source, **options)
    assert got[0] == value
    assert got[1].nbytes == nbytes // 8 * 8
    assert (got[1] == value).all()


def _pair() -> tuple[int | None, bool]:
    """Return this rank's partner, and whether this rank is the one that sends first."""
    rank = dist.get_rank()
    partner = rank ^ 1
    return (partner if partner < dist.get_world_size() else None), rank % 2 == 0


# ---- messages only


@_program
def _messages_received_in_another_order_of_tags(nbytes: int) -> None:
    partner, sends = _pair()
    if partner is None:
        return
    for tag in (1, 2, 3) if sends else (3, 1, 2):
        if sends:
            dist.send(_filled(nbytes, tag), partner, tag=tag)
        else:
            _take(nbytes, tag, partner, tag=tag)


@_program
def _messages_received_in_another_order_of_dtypes(nbytes: int) -> None:
    partner, sends = _pair()
    if partner is None:
        return
    for dtype in ("f8", "i4", "f4") if sends else ("i4", "f4", "f8"):
        if sends:
            dist.send(_filled(nbytes, 3, dtype), partner)
        else:
            _take(nbytes, 3, partner, dtype)


@_program
def _messages_received_in_another_order_of_groups(nbytes: int) -> None:
    partner, sends = _pair()
    groups = [dist.new_group() for _ in range(2)]
    for group in groups if sends else groups[::-1]:
        if partner is not None and sends:
            dist.send(_filled(nbytes, group.id), partner, group)
        elif partner is not None:
            _take(nbytes, group.id, partner, group=group)
    for group in groups:
        dist.destroy_process_group(group)


@_program
def _objects_received_in_another_order(nbytes: int) -> None:
    partner, sends = _pair()
    if partner is None:
        return
    for tag in (1, 2) if sends else (2, 1):
        if sends:
            dist.send_object_list([tag, _filled(nbytes, tag)], partner, tag=tag)
        else:
            _take_objects(nbytes, tag, partner, tag=tag)


@_program
def _objects_before_an_array_that_is_received_first(nbytes: int) -> None:
    partner, sends = _pair()
    if partner is None:
        return
    if sends:
        for value in (1, 2):
            dist.send_object_list([value, _filled(nbytes, value)], partner)
        dist.send(_filled(nbytes, 3), partner)
    else:
        _take(nbytes, 3, partner)
        for value in (1, 2):
            _take_objects(nbytes, value, partner)


@_program
def _messages_from_any_rank_in_another_order_of_tags(nbytes: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        for tag in (1, 2):
            dist.send(_filled(nbytes, tag), 0, tag=tag)
    else:
        for tag in (2, 1):
            for _ in range(1, size):
                _take(nbytes, tag, None, tag=tag)


@_program
def _both_directions_at_once(nbytes: int) -> None:
    partner, _ = _pair()
    if partner is None:
        return
    for tag in (1, 2):
        dist.send(_filled(nbytes, tag), partner, tag=tag)
    for tag in (2, 1):
        _take(nbytes, tag, partner, tag=tag)


@_program
def _a_ring_of_sends_that_are_received_in_another_order(nbytes: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for tag in (1, 2):
        dist.send(_filled(nbytes, tag), (rank + 1) % size, tag=tag)
    for tag in (2, 1):
        _take(nbytes, tag, (rank - 1) % size, tag=tag)


@_program
def _a_message_that_is_received_after_one_of_another_rank(nbytes: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    last = size - 1
    if size < 3:
        return
    if rank == 0:  # the last rank waits for all between, and each of them for this one
        dist.send(_filled(nbytes, 0), last)
        for other in range(1, last):
            dist.send(_filled(nbytes, 0), other)
    elif rank < last:
        _take(nbytes, 0, 0)
        dist.send(_filled(nbytes, rank), last)
    else:
        for source in (*range(1, last), 0):
            _take(nbytes, source, source)


@_program
def _a_message_to_oneself(nbytes: int) -> None:
    rank = dist.get_rank()
    for tag in (1, 2):
        dist.send(_filled(nbytes, tag), rank, tag=tag)
    for tag in (2, 1):
        _take(nbytes, tag, rank, tag=tag)


@_program
def _many_messages_before_the_first_is_received(nbytes: int) -> None:
    partner, sends = _pair()
    if partner is None:
        return
    count = max(4, 1_000_000 // nbytes)
    if sends:
        for value in range(count):
            dist.send(_filled(nbytes, value), partner, tag=1)
        dist.send(np.ones(1), partner, tag=2)
    else:
        _take(8, 1, partner, tag=2)
        for value in range(count):
            _take(nbytes, value, partner, tag=1)


@_program
def _a_receive_that_is_waited_for_while_others_are_sent(nbytes: int) -> None:
    partner, sends = _pair()
    if partner is None:
        return
    if sends:
        for tag in (1, 2, 3):
            dist.send(_filled(nbytes, tag), partner, tag=tag)
        return
    arrays = {tag: _filled(nbytes, -1) for tag in (3, 1)}
    works = [dist.irecv(x, partner, tag=tag) for tag, x in arrays.items()]
    for work in works:
        work.wait()
    assert all((x == tag).all() for tag, x in arrays.items())
    _take(nbytes, 2, partner, tag=2)


@_program
def _a_message_before_a_batch(nbytes: int) -> None:
    partner, sends = _pair()
    if partner is None:
        return
    if sends:
        dist.send(_filled(nbytes, 1), partner, tag=1)
    arrays = [_filled(nbytes, -1), _filled(nbytes, 2)]
    ops = [
        dist.P2POp(dist.irecv, arrays[0], partner, tag=2),
        dist.P2POp(dist.isend, arrays[1], partner, tag=2),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert (arrays[0] == 2).all()
    if not sends:
        _take(nbytes, 1, partner, tag=1)


# ---- a message, and then all ranks meet: its receiver receives it afterwards


def _meet_by_plan() -> None:
    x = np.ones(3)
    plan = dist.plan_all_reduce(x)
    plan.start().wait()
    assert (x == dist.get_world_size()).all()
    plan.free()


def _meet_by_new_group() -> None:
    group = dist.new_group()
    dist.barrier(group)
    dist.destroy_process_group(group)


def _meet_by_works() -> None:
    arrays = [np.ones(100) for _ in range(3)]
    works = [dist.all_reduce(x, sync_op=False) for x in arrays]
    for work in works:
        work.wait()
    dist.wait(arrays[0])
    assert all((x == dist.get_world_size()).all() for x in arrays)


def _meet_by_large_arrays() -> None:
    x = np.ones(100_000)
    dist.all_reduce(x)
    assert (x == dist.get_world_size()).all()


def _meet_by_arrays_in_shared_memory() -> None:
    x = dist.empty(100_000)
    x[...] = 1
    dist.all_reduce(x)
    assert (x == dist.get_world_size()).all()


def _meet_by_large_objects() -> None:
    gathered: list[Any] = []
    dist.all_gather_object(gathered, np.full(100_000, dist.get_rank()))
    assert [int(each[0]) for each in gathered] == list(range(dist.get_world_size()))


def _meet_by_split_sizes() -> None:
    size = dist.get_world_size()
    out = np.empty(size)
    dist.alltoall_single(out, np.ones(size), in_split_sizes=[1] * size, out_split_sizes=[1] * size)
    assert (out == 1).all()


MEETINGS: dict[str, Callable[[], Any]] = {
    "a barrier": dist.barrier,
    "an all reduce": lambda: dist.all_reduce(np.ones(1)),
    "an all reduce of a large array": _meet_by_large_arrays,
    "an all reduce in shared memory": _meet_by_arrays_in_shared_memory,
    "a scan and a broadcast": lambda: (dist.scan(np.ones(2)), dist.broadcast(np.ones(2), 0)),
    "a plan": _meet_by_plan,
    "works": _meet_by_works,
    "new group and its end": _meet_by_new_group,
    "objects": lambda: dist.all_gather_object([], "text"),
    "large objects": _meet_by_large_objects,
    "split sizes": _meet_by_split_sizes,
}


def _before_meeting(meet: Callable[[], Any]) -> Callable[[int], None]:
    def program(nbytes: int) -> None:
        partner, sends = _pair()
        dist.barrier()
        if partner is not None and sends:
            dist.send(_filled(nbytes, 7), partner)
        meet()
        if partner is not None and not sends:
            _take(nbytes, 7, partner)

    return program


for _name, _meet in MEETINGS.items():
    PROGRAMS[f"a message before {_name}"] = _before_meeting(_meet)


@_program
def _a_message_before_a_barrier_of_another_group(nbytes: int) -> None:
    partner, sends = _pair()
    messages, barriers = dist.new_group(), dist.new_group()
    if partner is not None and sends:
        dist.send(_filled(nbytes, 7), partner, messages)
    dist.barrier(barriers)
    if partner is not None and not sends:
        _take(nbytes, 7, partner, group=messages)
    for group in (messages, barriers):
        dist.destroy_process_group(group)


@_program
def _a_receive_that_is_posted_before_a_barrier(nbytes: int) -> None:
    partner, sends = _pair()
    got = _filled(nbytes, -1)
    if partner is None:
        dist.barrier()
    elif sends:
        dist.send(_filled(nbytes, 7), partner)
        dist.barrier()
    else:
        work = dist.irecv(got, partner)
        dist.barrier()
        work.wait()
        assert (got == 7).all()
