"""What listeners hear, on any number of ranks, of MPI and simulated ones."""

import sys
from contextlib import contextmanager
from itertools import groupby

import numpy as np
import pytest
from checks import Checks

import hpcdist as dist

check = Checks()


class Timeline:
    """The operations of this rank: each is a begin and, once it has come, its end."""

    def __init__(self):
        self.under_way, self.spans, self._rank = {}, [], dist.get_rank()
        self._stop = dist.subscribe(self._hear)

    def _hear(self, event):
        if dist.get_rank() != self._rank:
            return  # simulated ranks are threads of one process
        if event.phase == "begin":
            assert event.error is None
            assert event.id not in self.under_way
            self.under_way[event.id] = event
        else:
            begin = self.under_way.pop(event.id)  # which fails at a second end
            assert event.time_ns >= begin.time_ns
            assert event._replace(phase="begin", time_ns=begin.time_ns, error=None) == begin
            self.spans.append((begin, event))

    def stop(self):
        """End the subscription; return what was heard to the end."""
        self._stop()
        return self.spans


@contextmanager
def timeline():
    """Record what the block calls; all of it has ended at its end."""
    recorder = Timeline()
    try:
        yield recorder
    finally:
        recorder.stop()
    assert not recorder.under_way


def told(spans):
    return [(begin.name, begin.sequence, type(end.error).__name__) for begin, end in spans]


def of_all_ranks(spans):
    """Gather the begins of collectives of all ranks, by group and number."""
    own = [begin._asdict() for begin, _ in spans if begin.sequence is not None]
    everyone = []
    dist.all_gather_object(everyone, own)
    key = lambda event: (event["ranks"], event["group_id"], event["sequence"])  # noqa: E731
    found = sorted((event for events in everyone for event in events), key=key)
    return {which: list(events) for which, events in groupby(found, key)}


def below():
    """Return the line below the one where this is called, as `Event.call_site` tells it."""
    frame = sys._getframe(1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno + 1}"


# ---- one operation


def _messages(tensors, send, recv):
    rank, size = dist.get_rank(), dist.get_world_size()
    work = send(tensors[0], (rank + 1) % size)
    recv(tensors[1], (rank - 1) % size)
    work.wait()


def _batch():
    rank, size = dist.get_rank(), dist.get_world_size()
    sent, received = np.ones(3, "f4"), np.empty(3, "f4")
    operations = [
        dist.P2POp(dist.isend, sent, (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    dist.wait_all(dist.batch_isend_irecv(operations))


def _planned(make):
    plan = make()
    for _ in range(2):
        plan.start().wait()
    plan.free()


def _one_each(*shape):
    return [np.ones(shape, "f4") for _ in range(dist.get_world_size())]


PROGRAMS = {
    # what is called: names, shape, dtype, whether there is a peer
    "barrier": (lambda: dist.barrier(), ["barrier"], (), None, False),
    "all_reduce": (
        lambda: dist.all_reduce(np.ones((2, 5), "f4")),
        ["all_reduce"],
        (2, 5),
        "float32",
        False,
    ),
    "asynchronous": (
        lambda: dist.all_reduce(np.ones(7), sync_op=False).wait(),
        ["all_reduce"],
        (7,),
        "float64",
        False,
    ),
    "reduce": (lambda: dist.reduce(np.ones(4, "i4"), 0), ["reduce"], (4,), "int32", True),
    "reduce_scatter": (
        lambda: dist.reduce_scatter(np.empty(3, "f4"), _one_each(3)),
        ["reduce_scatter"],
        (3,),
        "float32",
        False,
    ),
    "scan": (lambda: dist.scan(np.ones(4)), ["scan"], (4,), "float64", False),
    "exscan": (lambda: dist.exscan(np.ones(4)), ["exscan"], (4,), "float64", False),
    "broadcast": (lambda: dist.broadcast(np.ones(4), 0), ["broadcast"], (4,), "float64", True),
    "all_gather": (
        lambda: dist.all_gather([], np.ones((3, 1), "i8")),
        ["all_gather"],
        (3, 1),
        "int64",
        False,
    ),
    "gather": (lambda: dist.gather(np.ones(2), [], 0), ["gather"], (2,), "float64", True),
    "scatter": (
        lambda: dist.scatter(np.empty(2, "f4"), _one_each(2) if dist.get_rank() == 0 else None, 0),
        ["scatter"],
        (2,),
        "float32",
        True,
    ),
    "alltoall": (
        lambda: dist.alltoall([], _one_each(2)),
        ["alltoall"],
        None,
        "float32",
        False,
    ),
    "stream": (
        lambda: dist.stream.all_reduce(np.ones(3)),
        ["all_reduce"],
        (3,),
        "float64",
        False,
    ),
    "all_gather_object": (
        lambda: dist.all_gather_object([], "x"),
        ["all_gather_object"],
        (),
        None,
        False,
    ),
    "broadcast_object_list": (
        lambda: dist.broadcast_object_list(["x"], 0),
        ["broadcast_object_list"],
        (1,),
        None,
        True,
    ),
    "gather_object": (lambda: dist.gather_object(1, [], 0), ["gather_object"], (), None, True),
    "all_to_all_object": (
        lambda: dist.all_to_all_object([], [*range(dist.get_world_size())]),
        ["all_to_all_object"],
        (),
        None,
        False,
    ),
    "messages": (
        lambda: _messages(np.ones((2, 3), "f4"), dist.isend, dist.recv),
        ["recv", "send"],
        (3,),
        "float32",
        True,
    ),
    "object messages": (
        lambda: _messages(
            [["x"], [None]],
            lambda objects, to: dist.send_object_list(objects, to, sync_op=False),
            dist.recv_object_list,
        ),
        ["recv_object_list", "send_object_list"],
        (),
        None,
        True,
    ),
    "batch": (_batch, ["recv", "send"], (3,), "float32", True),
    "plan": (
        lambda: _planned(lambda: dist.plan_all_reduce(np.ones(6, "f4"))),
        ["all_reduce", "all_reduce"],
        (6,),
        "float32",
        False,
    ),
    "plan without a persistent form": (
        lambda: _planned(lambda: dist.plan_all_gather([], np.ones(6, "f4"))),
        ["all_gather", "all_gather"],
        (6,),
        "float32",
        False,
    ),
}


@check
def every_operation_has_one_begin_and_one_end_with_what_it_works_on():
    rank, size = dist.get_rank(), dist.get_world_size()
    for program, names, shape, dtype, has_peer in PROGRAMS.values():
        with timeline() as recorder:
            program()
        begins = [begin for begin, _ in recorder.spans]
        assert sorted(begin.name for begin in begins) == names
        assert len({begin.id for begin in begins}) == len(names)
        for begin in begins:
            assert begin.ranks == tuple(range(size))
            assert begin.group_id == 0
            assert shape is None or begin.shape == shape
            assert begin.dtype == dtype
            neighbors = {"send": (rank + 1) % size, "recv": (rank - 1) % size}
            wanted = neighbors.get(begin.name.partition("_")[0], 0) if has_peer else None
            assert begin.peer == wanted
            assert begin.call_site.startswith(__file__)
            is_message = begin.name.startswith(("send", "recv"))
            assert (begin.sequence is None) == is_message


@check
def asynchronous_operations_under_way_together_can_be_paired():
    arrays = [np.ones(length) for length in (2, 3, 5)]
    with timeline() as recorder:
        works = [dist.all_reduce(x, sync_op=False) for x in arrays]
        dist.wait_all(works)
    spans = sorted(recorder.spans, key=lambda span: span[0].sequence)
    assert [(begin.shape, end.shape) for begin, end in spans] == [((n,), (n,)) for n in (2, 3, 5)]
    first = spans[0][0].sequence
    assert [begin.sequence for begin, _ in spans] == [first, first + 1, first + 2]


@check
def an_event_names_the_line_of_the_program():
    with timeline() as recorder:
        here = below()
        dist.all_reduce(np.ones(1))
        there = below()
        work = dist.all_reduce(np.ones(1), sync_op=False)
        work.wait()
    assert [begin.call_site for begin, _ in recorder.spans] == [here, there]


# ---- several ranks


@check
def the_events_of_all_ranks_pair_by_group_and_number():
    rank, size = dist.get_rank(), dist.get_world_size()
    half = dist.get_group().split(rank % 2)
    backwards = dist.get_group().split(0, -rank)
    recorder = Timeline()
    dist.all_reduce(np.ones(3))
    dist.broadcast(np.ones(4, "f4"), size - 1)
    dist.all_reduce(np.ones(1 + rank % 2), group=half)
    dist.barrier(half)
    work = dist.all_gather([], np.ones(1 + rank), group=backwards, sync_op=False)
    if rank == 0:  # a message in between, of this rank alone
        dist.wait_all([dist.isend(np.ones(1), 0), dist.irecv(np.ones(1), 0)])
    dist.reduce(np.ones(2), size - 1, group=backwards)
    work.wait()
    found = of_all_ranks(recorder.stop())
    assert not recorder.under_way
    for (ranks, _, _), events in found.items():
        assert len(events) == len(ranks)
        for field in ("name", "dtype", "peer"):
            assert len({event[field] for event in events}) == 1
    names = [events[0]["name"] for (ranks, _, _), events in found.items() if len(ranks) == size]
    assert names.count("all_gather") == names.count("reduce") == 1


@check
def numbers_go_on_while_nobody_listens():
    rank = dist.get_rank()
    recorder = Timeline() if rank == 0 else None
    dist.all_reduce(np.ones(1))
    plan = dist.plan_barrier()
    plan.start().wait()
    dist.barrier(sync_op=False).wait()
    recorder = recorder or Timeline()
    dist.all_reduce(np.ones(2))
    plan.start().wait()
    dist.scan(np.ones(3))
    spans = recorder.stop()[-3:]
    plan.free()
    everyone = []
    dist.all_gather_object(everyone, told(spans))
    assert [name for name, _, _ in everyone[0]] == ["all_reduce", "barrier", "scan"]
    assert everyone == [everyone[0]] * len(everyone)
    first = everyone[0][0][1]
    assert [number for _, number, _ in everyone[0]] == [first, first + 1, first + 2]


@check
def what_a_listener_issues_at_the_end_of_an_asynchronous_operation_has_no_number():
    rank = dist.get_rank()

    def communicates(event):
        if (event.phase, event.name, dist.get_rank()) == ("end", "all_reduce", rank):
            dist.barrier()

    stop = dist.subscribe(communicates)
    try:
        with timeline() as recorder:
            dist.all_reduce(np.ones(1), sync_op=False).wait()
            dist.all_reduce(np.ones(1))
            dist.scan(np.ones(1))
    finally:
        stop()
    spans = sorted(recorder.spans, key=lambda span: span[0].id)
    numbers = [(begin.name, begin.sequence) for begin, _ in spans]
    first = numbers[0][1]
    assert numbers == [
        ("all_reduce", first),
        ("barrier", None),
        ("all_reduce", first + 1),
        ("barrier", first + 2),
        ("scan", first + 3),
    ]


# ---- what goes wrong


@check
def operations_that_fail_end_once_with_what_they_raise():
    rank, size = dist.get_rank(), dist.get_world_size()
    with timeline() as recorder:
        for sync_op in (True, False):
            if size > 1:
                with pytest.raises(dist.MismatchError):
                    dist.all_reduce(np.ones(1 + rank), sync_op=sync_op).wait()
            with pytest.raises((dist.UsageError, dist.RemoteError)):
                dist.broadcast(np.ones(2) if rank else ["no"], 0, sync_op=sync_op).wait()
            with pytest.raises((dist.UsageError, dist.RemoteError)):
                dist.all_gather_object([None] * 9, 1, sync_op=sync_op).wait()
        with pytest.raises(dist.UsageError):
            dist.all_reduce(np.ones(1), op="no operator")
    names = [name for name, _, _ in told(recorder.spans)]
    each = ["all_reduce"] * (size > 1) + ["broadcast", "all_gather_object"]
    assert names == [*2 * each, "all_reduce"]
    assert all(end.error is not None for _, end in recorder.spans)


@check
def a_listener_that_fails_is_told_the_end_and_so_are_the_others():
    rank, heard = dist.get_rank(), []

    def fails(event):
        if dist.get_rank() == rank:
            heard.append(event.phase)
            if event.phase == "begin":
                raise KeyError("no such key")

    with timeline() as before:
        stop = dist.subscribe(fails)
        try:
            with timeline() as behind, pytest.raises((dist.UsageError, dist.RemoteError)):
                dist.all_reduce(np.ones(3))
        finally:
            stop()
    for recorder in (before, behind):
        assert [name for name, _, _ in told(recorder.spans)] == ["all_reduce"]
        assert recorder.spans[0][1].error is not None
    assert heard == ["begin", "end"]


@check
def a_listener_that_fails_at_the_end_keeps_no_other_from_hearing_it():
    rank = dist.get_rank()

    def fails(event):
        if (event.phase, dist.get_rank()) == ("end", rank):
            raise KeyError("no such key")

    stop = dist.subscribe(fails)
    try:
        with timeline() as recorder, pytest.raises(KeyError, match="no such key"):
            dist.all_reduce(np.ones(3))
    finally:
        stop()
    assert [type(end.error) for _, end in recorder.spans] == [type(None)]


@check
def a_message_that_a_listener_refuses_ends_at_once():
    rank = dist.get_rank()

    def fails(event):
        if (event.phase, dist.get_rank()) == ("begin", rank):
            raise KeyError("no such key")

    with timeline() as recorder:
        stop = dist.subscribe(fails)
        try:
            with pytest.raises(KeyError):
                dist.isend(np.ones(1), rank)
            with pytest.raises(KeyError):
                dist.batch_isend_irecv([dist.P2POp(dist.irecv, np.ones(1), rank)])
        finally:
            stop()
    assert told(recorder.spans) == [("send", None, "KeyError"), ("recv", None, "KeyError")]


@check
def an_operation_that_times_out_has_ended():
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(timeout=0.2)
    with timeline() as recorder:
        with pytest.raises(dist.CollectiveTimeout):
            dist.recv(np.ones(1), rank, group)
        if size > 1 and rank == 0:
            with pytest.raises(dist.CollectiveTimeout):
                dist.barrier(group)
    dist.barrier()
    names = ["recv", "barrier"] if size > 1 and rank == 0 else ["recv"]
    assert told(recorder.spans)[0] == ("recv", None, "CollectiveTimeout")
    assert [name for name, _, _ in told(recorder.spans)] == names
    if size > 1 and rank > 0:
        with pytest.raises(dist.CollectiveTimeout):
            dist.barrier(group)


@check
def what_never_ends_is_told_to_have_ended_when_its_group_is_closed():
    group = dist.new_group()
    recorder = Timeline()
    work = dist.irecv(np.ones(1), dist.get_rank(), group)
    assert [begin.name for begin in recorder.under_way.values()] == ["recv"]
    dist.barrier()
    dist.destroy_process_group(group)
    assert told(recorder.stop()) == [
        ("barrier", *told(recorder.spans)[0][1:]),
        ("recv", None, "UsageError"),
    ]
    del work


@check
def what_is_called_on_a_closed_group_ends_at_once():
    group = dist.new_group()
    dist.destroy_process_group(group)
    with timeline() as recorder:
        for sync_op in (True, False):
            with pytest.raises(dist.UsageError, match="destroyed"):
                dist.all_reduce(np.ones(1), group=group, sync_op=sync_op)
    assert [type(end.error) for _, end in recorder.spans] == [dist.UsageError] * 2


def _meet_again():
    dist.barrier()


class _Meets:
    """Its unpickling calls an operation of the group in whose operation it travels."""

    def __reduce__(self):
        return _meet_again, ()


@check
def an_operation_that_is_left_by_a_refusal_inside_it_keeps_its_number():
    group, got = dist.get_group(), []
    try:
        dist.gather_object(_Meets(), got if group.rank == 0 else None, dst=0)
    except dist.UsageError as error:
        assert error.nested  # noqa: PT017 (only the rank that unpickles is refused)
    dist.barrier()
    numbers = []
    dist.all_gather_object(numbers, group.issued)
    assert len(set(numbers)) == 1, numbers


@check
def a_plan_that_is_freed_has_ended_for_who_listens():
    x = np.ones(3)
    plan = dist.plan_all_reduce(x)
    with timeline() as recorder:
        plan.start()
        plan.free()
    assert [type(end.error) for _, end in recorder.spans] == [type(None)]
